"""The class `Importance`, and how one is loaded."""

from __future__ import annotations

import html
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import __version__, ranks
from ..errors import ArgumentError, FileError, NamingError, SquisherError, SquisherWarning, check_choice, near
from ..order import TINY, spearman, top_overlap
from ..storage import hub, safetensors
from ..storage.codecs import CODECS, Encoded, decoded
from ..storage.tensors import CHUNK, Progress, chunks_of, dtype_of, is_finite, name_pattern, numel_of, shape_of
from .checks import check_all, check_values, checked_dtype, short, tensors_only
from .provenance import KINDS, Codec, Provenance, fisher_factor

__all__ = ["FILE_NAME", "Importance", "load"]

FILE_NAME = "squisher.safetensors"
"""The file name of an importance beside a model."""

_ORDINARY = 2.0**-64
"""No batch size or loss scale gives a smaller factor. Above it, values that become denormal are too few for a refusal."""

ACCUMULATOR_NAME = "exp_avg_sq.safetensors"
"""The file of accumulators that OTA merging publishes; it has no metadata."""


class Share(NamedTuple):
    """How much of an importance one parameter holds."""

    name: str
    shape: tuple[int, ...]
    entries: int
    total: float
    """The sum of its entries."""
    mean: float
    share: float
    """Its part of the sum over all parameters; 0 where that is 0."""


class Importance(Mapping[str, Tensor]):
    """An immutable mapping from parameter name to a non-negative tensor of the parameter's shape, with provenance.

    Values in files are read, scaled and checked when they are asked for, so files may be larger than memory. Values in memory are
    checked at once.

    Tensors may be sharded over processes (DTensor). All processes must then make, read and save the importance together.

    Args:
        tensors: Any `Mapping[str, Tensor]`; a plain dict or a lazy one.
        kind: `"squisher"` (an optimizer's accumulator) or `"fisher"` (measured on data).
        **provenance: Fields of `Provenance`; unknown ones are kept as they are.

    Raises:
        SquisherError: NaN, infinite or negative values, or no tensors at all.
    """

    def __init__(self, tensors: Mapping[str, Tensor], kind: str = "fisher", **provenance: Any):
        if not isinstance(tensors, Mapping) or not tensors:
            raise SquisherError(f"An importance needs at least one named tensor, but got {short(tensors)}.")
        check_choice("kind", kind, KINDS)
        if isinstance(tensors, dict):
            tensors = {name: tensor.detach() for name, tensor in tensors_only(tensors)}
            check_all(tensors)
        self._tensors = tensors
        self._names = dict.fromkeys(tensors)  # an ordered set
        self._factor = 1.0
        # The sums of another importance's provenance are not the sums of these values.
        self.provenance = Provenance.from_dict({**provenance, "kind": kind, "sum": {}, "sum_of_squares": {}})

    def _derive(self, names: Sequence[str] | None = None, factor: float = 1.0, **changes: Any) -> Importance:
        new = object.__new__(Importance)
        new._tensors = self._tensors
        new._names = self._names if names is None else dict.fromkeys(names)
        new._factor = self._factor * factor
        kept = new._names
        p = self.provenance
        sums = {n: s * factor for n, s in p.sum.items() if n in kept}
        squares = {n: s * factor * factor for n, s in p.sum_of_squares.items() if n in kept}
        new.provenance = replace(p, sum=sums, sum_of_squares=squares, scale=p.scale * factor, **changes)
        return new

    # -- a mapping -----------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[self._known(name)]
        if not isinstance(self._tensors, dict):
            check_all({name: tensor})  # of a sharded one each process sees its shard, and all refuse together
        return self._scaled(name, tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        p = self.provenance
        total = sum(numel_of(self, name) for name in self)
        what = p.kind if p.kind == "fisher" else f"squisher of {(p.optimizer or {}).get('class', 'an optimizer')}"
        return f"Importance({what}: {len(self)} tensors, {total:,} values)"

    def top(self, n: int | None = 10, by: str = "share") -> list[Share]:
        """Return the parameters that hold the most of the importance, largest first.

        Args:
            n: How many at most; None for all.
            by: `"share"` of the sum over all parameters, or `"mean"` of a parameter's entries.

        Raises:
            SquisherError: `by` is neither.
        """
        check_choice("by", by, ("share", "mean"))
        totals = {name: self.total(name) for name in self}
        whole = math.fsum(totals.values())
        rows = []
        for name, total in totals.items():
            shape = tuple(self.shape(name))
            entries = math.prod(shape)
            rows.append(Share(name, shape, entries, total, total / max(entries, 1), total / whole if whole else 0.0))
        return sorted(rows, key=lambda row: (-getattr(row, by), row.name))[:n]

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row for each parameter, in order: shape, entries, total, mean, share.

        For a Fisher with standard errors, they are one more column.

        Raises:
            SquisherError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise SquisherError(
                "to_frame needs pandas: pip install pandas. Without it: importance.top(None)."
            ) from error
        rows = {row.name: row for row in self.top(None)}
        frame = pandas.DataFrame([rows[name] for name in self], columns=list(Share._fields)).set_index("name")
        if self.provenance.standard_error is not None:
            frame["standard_error"] = [self.provenance.standard_error.get(name) for name in self]
        return frame

    def _repr_html_(self) -> str:
        cells = [
            f"<tr><td>{html.escape(row.name)}</td><td>{'×'.join(map(str, row.shape))}</td>"
            f"<td>{row.mean:.3g}</td><td>{row.share:.1%}</td></tr>"
            for row in self.top(10)
        ]
        head = "<tr><th>parameter</th><th>shape</th><th>mean</th><th>share</th></tr>"
        more = f"<p>… and {len(self) - 10} more parameters</p>" if len(self) > 10 else ""
        return f"<p>{html.escape(repr(self))}</p><table>{head}{''.join(cells)}</table>{more}"

    def total(self, name: str) -> float:
        """Return the sum of one tensor: from the provenance where that has it, otherwise by one pass."""
        known = self.provenance.sum.get(name)
        return known if known is not None else math.fsum(float(chunk.double().sum()) for chunk in self.chunks(name))

    def to(self, device: torch.device | str) -> Importance:
        """Return the importance with all its tensors read into the memory of a device."""
        new = self._derive()
        new._tensors = {name: self[name].to(device) for name in self}
        new._factor = 1.0
        return new

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor, without reading it."""
        return shape_of(self._tensors, self._known(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of one tensor, without reading it."""
        stored = dtype_of(self._tensors, self._known(name))
        return stored if self._factor == 1.0 else torch.promote_types(stored, torch.float32)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks on the CPU, in order; every chunk is checked."""
        for chunk in chunks_of(self._tensors, self._known(name), size):
            check_values(name, chunk)
            yield self._scaled(name, chunk)

    def _scaled(self, name: str, values: Tensor) -> Tensor:
        if self._factor == 1.0:
            return values
        scaled = values.to(torch.promote_types(values.dtype, torch.float32)) * self._factor
        if _ORDINARY < self._factor <= 1.0:
            return scaled
        failure, mine = None, ranks.local_of(scaled)
        if self._factor > 1.0 and not is_finite(mine):
            failure = SquisherError(
                f"The importance of {name!r} times {self._factor:g} is more than {str(scaled.dtype).removeprefix('torch.')} holds: scale it "
                "down, or make it from float64 tensors."
            )
        if self._factor < 1.0 and bool(((mine < TINY) & (ranks.local_of(values) >= TINY)).any()):
            failure = SquisherError(
                f"The importance of {name!r} times {self._factor:g} has values below {TINY:g}, which count as 0: use a larger factor."
            )
        ranks.agree_on(failure, [values])
        return scaled

    def _known(self, name: str) -> str:
        if name not in self:
            raise KeyError(f"no importance for {name!r}.{near(name, self._names)}")
        return name

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def __mul__(self, factor: float) -> Importance:
        """Return the importance times a positive number; reading refuses values that become infinite or denormal."""
        if isinstance(factor, bool) or not isinstance(factor, Real):
            return NotImplemented
        if not (math.isfinite(factor) and factor > 0):
            raise ArgumentError(f"An importance can be multiplied by a positive number, not by {factor}.")
        return self._derive(factor=float(factor))

    __rmul__ = __mul__
    __array_ufunc__ = None  # a numpy number on the left leaves the product to us

    def __truediv__(self, divisor: float) -> Importance:
        if isinstance(divisor, bool) or not isinstance(divisor, Real):
            return NotImplemented
        if not (math.isfinite(divisor) and divisor > 0 and math.isfinite(1.0 / float(divisor))):
            raise ArgumentError(f"An importance can be divided by a positive number, not by {divisor}.")
        return self._derive(factor=1.0 / float(divisor))

    def restrict(self, pattern: str | re.Pattern[str] | Callable[[str], bool]) -> Importance:
        """Return only the parameters whose names the regular expression matches (or the function accepts).

        Raises:
            ArgumentError: The pattern is not a regular expression.
            NamingError: No name is left.
        """
        if callable(pattern):
            names = [name for name in self if pattern(name)]
        else:
            wanted = pattern if isinstance(pattern, re.Pattern) else name_pattern(pattern)
            names = [name for name in self if wanted is None or wanted.search(name)]
        if not names:
            raise NamingError(
                f"No parameter name matches {pattern!r}; there are {', '.join(list(self._names)[:4])}, …."
            )
        kept = set(names)
        p = self.provenance
        return self._derive(
            names,
            tied={alias: name for alias, name in p.tied.items() if name in kept},
            live_names={name: live for name, live in p.live_names.items() if name in kept},
        )

    def with_provenance(self, **changes: Any) -> Importance:
        """Return the same values with changes to the provenance: facts that the source could not prove (`batch_size=32`)."""
        new, p = self._derive(), self.provenance
        new.provenance = Provenance.from_dict({**{f.name: getattr(p, f.name) for f in fields(p)}, **changes})
        return new

    @staticmethod
    def combine(importances: Sequence[Importance], weights: str | Sequence[float] = "examples") -> Importance:
        """Return the weighted mean of importances of the same kind, for example from parts of a data set.

        Its provenance has what is true of all of them; hashes of weights that differ, for example, are left out.

        Args:
            importances: At least one; the same names, shapes and scale.
            weights: `"examples"` (the number of examples that each is a mean over, or of tokens if that is its unit),
                `"equal"`, or one positive number each.

        Raises:
            SquisherError: Names, shapes, kinds or scales differ, or a number of examples is not known.
        """
        from .combining import Mean, known_of_all, with_shares  # imports this module

        mean = Mean(with_shares(importances, weights))
        return _described(mean, known_of_all([imp.provenance for imp in importances]))

    @staticmethod
    def standard_errors(
        importances: Sequence[Importance], weights: str | Sequence[float] = "examples"
    ) -> Mapping[str, Tensor]:
        """Return the standard error of every entry of `combine(importances, weights)`, as a lazy mapping.

        With means m_k of K parts of the data, their weights w_k (which add up to 1) and F = Σ w_k·m_k, it is
        √(K/(K−1)·Σ w_k²·(m_k − F)²): with ten parts it is known to about a quarter. Parts of the same data measured in
        one call give the error of each parameter's total: `fisher(..., standard_error=True)`.

        Args:
            importances: Two or more, each measured on another part of the data.
            weights: As for `combine`.

        Raises:
            SquisherError: There are fewer than two, or `combine` refuses them.
        """
        from .combining import Spread, with_shares

        if len(importances) < 2:
            raise SquisherError("Standard errors need two parts of the data or more: measure the parts one by one.")
        return Spread(with_shares(importances, weights))

    # -- scale ---------------------------------------------------------------------------------------------------------

    def as_fisher(self, unit: str | None = None) -> Importance:
        """Return the per-unit mean, which is what a Fisher diagonal is.

        A Squisher holds v̂, the mean squared gradient of a mini-batch loss. With B examples and T loss-bearing tokens a
        step this is B·v̂ for a loss that is a mean over examples, v̂/B for a sum, T·v̂ (unit token) or T²/B·v̂ (unit
        sequence) for a mean over tokens. A Fisher, and what `as_fisher` returned, stay as they are.

        Args:
            unit: `"example"`, `"sequence"` or `"token"`; by default the unit of the loss.

        Raises:
            ScaleError: What the factor needs is not known; the message names it.
        """
        p = self.provenance
        factor, target = fisher_factor(p, unit)
        if p.kind == "squisher" and p.low_precision:
            warnings.warn(
                f"This Squisher comes from a {p.dtype_of_source} optimizer state, whose scale is biased: a bfloat16 average ends "
                "at about 0.4 of the true value for constant gradients and at 1.8 of it for noisy ones. Use it to rank, not "
                "as a Fisher.",
                SquisherWarning,
                stacklevel=2,
            )
        return self._derive(factor=factor, unit=target, per_unit=p.per_unit or p.kind == "squisher")

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        codec: str = "exact",
        dtype: torch.dtype | str | None = None,
        shard_bytes: int = safetensors.SHARD_BYTES,
        progress: Progress | None = None,
    ) -> None:
        """Write the importance as safetensors, whole or not at all; memory is bounded by one chunk.

        Sharded tensors are gathered one by one, and the first process writes; all processes must call this. To write in
        parallel, give `dict(importance)` to `torch.distributed.checkpoint.save`.

        Args:
            path: A `.safetensors` file, or a folder, which gets `squisher.safetensors`.
            codec: `exact`; `log8`, a byte per entry, to within 1 to 2% where values in a row differ by a few powers of ten; or
                `rank1`, two vectors per matrix, which preserves the sums of rows and columns. The file records the codec's error.
            dtype: float32, bfloat16 or float64; by default the present type. float16 is refused: squared gradients underflow.
            shard_bytes: A larger file becomes shards with an index.
            progress: Called with the bytes written so far and in all.

        Raises:
            SquisherError: NaN, infinite or negative values, or a type that would lose the values.
        """
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        target = checked_dtype(dtype)
        check_choice("codec", codec, CODECS)
        if codec != "exact" and target is not None:
            raise ArgumentError(f"The codec {codec} has a type of its own: leave the type out, or save exactly.")
        for name in self if target is None else ():
            checked_dtype(self.dtype(name))
        metadata = {**self.provenance.to_dict(), "created_with": f"torch-squisher {__version__}"}
        for measured_anew in ("sum", "sum_of_squares", "codec"):
            metadata.pop(measured_anew, None)
        kept = (self.provenance.codec or Codec("exact")).then(codec)
        if kept is not None:
            metadata["codec"] = kept.plain()

        def write(tensors: Mapping[str, Tensor]) -> None:
            measured = None
            if kept is not None and codec != "exact":
                tensors = encoded = Encoded(tensors, codec)
                measured = _longest_error(kept, encoded), partial(_error_of, kept, encoded)
            safetensors.save(
                path,
                tensors,
                metadata,
                dtype=target,
                statistics=measured is None,
                measured=measured,
                shard_bytes=shard_bytes,
                progress=progress,
            )

        in_memory = {name: self._tensors[name] for name in self} if isinstance(self._tensors, dict) else {}
        if any(map(ranks.is_sharded, in_memory.values())):
            ranks.write_once(ranks.Gathered(self, in_memory), write)
        else:
            write(self)


def load(path: str | os.PathLike[str]) -> Importance:
    """Open an importance file, lazily: tensors are read when asked for.

    Args:
        path: What `Importance.save` wrote: a file, an index of shards, or a folder that holds one of them; also on the Hub:
            `hf://owner/name[@revision][/file or folder]`. Or the file `exp_avg_sq.safetensors` that OTA merging publishes:
            Adam's accumulator without metadata.

    Raises:
        FileError: Nothing is there, it is damaged, or it says nothing about itself.
    """
    if hub.is_hub_id(path):
        fetched = hub.fetch_file(path, FILE_NAME)
        if fetched is None:
            raise FileError(
                f"{hub.Address.read(path)} holds no {FILE_NAME}: ask its authors to publish one with squisher push."
            )
        path = fetched
    path = Path(path)
    if os.path.isdir(path):
        if not safetensors.exists(path / FILE_NAME):
            raise FileError(f"The folder {path} holds no {FILE_NAME}; make one with: squisher extract {path} --out …")
        path = path / FILE_NAME
    tensors, metadata = safetensors.open_archive(path)
    if metadata is None and path.name == ACCUMULATOR_NAME:
        return Importance(tensors, kind="squisher", optimizer={"key": "exp_avg_sq"})
    if metadata is None:
        raise FileError(
            f"{path} is a safetensors file without Squisher's metadata, so what its numbers mean is not known. If you "
            "know it, wrap it: squisher.Importance(safetensors.torch.load_file(path), kind='fisher', ...)."
        )
    if metadata.get("kind") not in KINDS:
        raise FileError(f"{path} holds a {str(metadata.get('kind'))[:80]!r}, not an importance ({' or '.join(KINDS)}).")
    try:
        provenance = Provenance.from_dict(metadata)
    except ArgumentError as error:
        raise FileError(f"The metadata of {path} cannot be right: {error}") from error
    codec = (provenance.codec or Codec("exact")).name
    if codec not in CODECS:
        raise FileError(
            f"{path} is kept with the codec {codec!r}, and this version of squisher reads {', '.join(CODECS)}: update torch-squisher."
        )
    return _described(decoded(tensors, codec), provenance)


def _described(tensors: Mapping[str, Tensor], provenance: Provenance) -> Importance:
    importance = Importance(tensors)
    importance.provenance = provenance  # not as keywords: its unknown keys may have the names of our arguments
    return importance


_OVERLAPS = (0.005, 0.1, 0.5)


def _longest_error(codec: Codec, encoded: Encoded) -> dict[str, Any]:
    """Return metadata whose JSON is at least as long as the JSON of `_error_of`."""
    error = {
        "spearman": safetensors.WIDEST,
        "overlap": {str(size): safetensors.WIDEST for size in _OVERLAPS},
        "scale": safetensors.WIDEST,
        "entries": 10**18,
    }
    each = dict.fromkeys(encoded.sources, safetensors.WIDEST)
    return {"codec": {**codec.plain(), **error}, "sum": each, "sum_of_squares": each}


def _error_of(codec: Codec, encoded: Encoded) -> dict[str, Any]:
    """Return the codec's error and the sums of the decoded tensors, once they are written, as metadata."""
    before, after = encoded.sample()
    total = math.fsum(encoded.totals.values())
    error = {
        "spearman": _digits(spearman(before, after)),
        "overlap": {
            str(size): _digits(top_overlap(before, after, max(1, math.floor(size * before.numel()))))
            for size in _OVERLAPS
        },
        "scale": _digits(math.fsum(both[0] for both in encoded.sums.values()) / total) if total else None,
        "entries": before.numel(),
    }
    found = {key: one for key, one in error.items() if one is not None}
    sums = [{name: safetensors.rounded(name, [both[k]]) for name, both in encoded.sums.items()} for k in (0, 1)]
    return {"codec": {**codec.plain(), **found}, "sum": sums[0], "sum_of_squares": sums[1]}


def _digits(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
