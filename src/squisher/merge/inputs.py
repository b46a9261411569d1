"""Decide what is merged: which tensors of models and importances belong together by name and shape, and on which scale.

Tensors that cannot be merged are kept as each model has them (heads that differ, excluded names) or copied (buffers). A tensor
with two names is merged once.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NamingError, ScaleError, SquisherError, SquisherWarning, check_choice, near
from ..importance import Importance, checked, on_common_scale, tied_in
from ..names import FLOATS, check_like, check_unquantized, equal, excluded, find, pattern_of, shared
from ..order import TINY
from ..storage.safetensors import sums_of
from ..storage.tensors import CHUNK, Computed, chunks_of, dtype_of, name_pattern, numel_of, shape_of, tied_names

__all__ = ["Graded", "Plan", "also_tied", "graded", "matched", "plan", "prepared"]


class Graded(Computed):
    """One importance under the names of the weights; `factor` converts its stored values to the common scale."""

    def __init__(self, stored: Mapping[str, Tensor], names: Mapping[str, str], factor: float, who: str):
        super().__init__(stored, dict(names))
        self._who = who
        self._stored = checked(stored)
        self.factor = factor
        self._sums: dict[str, tuple[float, float]] = {}

    def __getitem__(self, name: str) -> Tensor:
        with self._named():
            return self._stored[self._name_there(name)]

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Return the stored values in flat chunks, each checked."""
        with self._named():
            yield from chunks_of(self._stored, self._name_there(name), size)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the importance in errors about its values; errors of files name the file already."""
        try:
            yield
        except SquisherError as error:
            raise (SquisherError(f"In {self._who}: {error}") if type(error) is SquisherError else error) from None

    def sums(self, name: str) -> tuple[float, float]:
        """Return sum and sum of squares on the common scale: those in the file, or else from one pass."""
        if name not in self._sums:
            p = self._stored.provenance if isinstance(self._stored, Importance) else None
            stored_name = self._name_there(name)
            if p is not None and stored_name in p.sum and stored_name in p.sum_of_squares:
                total, squares = p.sum[stored_name], p.sum_of_squares[stored_name]
            else:
                total, squares = (
                    math.fsum(parts) for parts in zip((0.0, 0.0), *map(sums_of, self.chunks(name)), strict=True)
                )
            self._sums[name] = (total * self.factor, squares * self.factor * self.factor)
        return self._sums[name]

    def norm(self, names: Sequence[str], kind: str) -> float:
        """Return the mean or the L2 norm over several tensors.

        Raises:
            SquisherError: It is 0, so that nothing can be divided by it.
        """
        if kind == "mean":
            count = sum(math.prod(self.shape(name)) for name in names)
            value = math.fsum(self.sums(name)[0] for name in names) / max(count, 1)
        else:
            value = math.sqrt(math.fsum(self.sums(name)[1] for name in names))
        if not TINY * self.factor <= value < math.inf:  # denormals count as 0
            what = "0 everywhere" if value < 1 else "too large"
            raise SquisherError(
                f"{self._who[:1].upper()}{self._who[1:]} is {what} and has no {kind} to be normalized by."
            )
        return value


def prepared(
    everyone: Sequence[Mapping[str, Tensor]],
    used: Sequence[int],
    exclude: str | None,
    importances: Sequence[Mapping[str, Tensor]] = (),
    missing: str = "error",
    scale: str = "stored",
    dropped: bool = False,
) -> tuple[Plan, dict[str, str], list[Graded]]:
    """Return the plan, the merged weights without an importance (with the reason), and the importances on one scale.

    Args:
        everyone: The models that take part, followed by the base of methods with a base.
        used: The numbers of these models among the user's, from 0.
        exclude: A regular expression; names that it matches are kept as each model has them.
        importances: One per model, followed by the base's; empty for methods without importances.
        missing: `error` or `average`.
        scale: `auto`, `as_fisher` or `stored`.
        dropped: Whether the user gave more models than these.
    """
    layout = plan(everyone, exclude, numbers=used, tied=tied_in(importances))
    if not importances:
        return layout, {}, []
    who = [f"the importance of {one}" for one in _called(used)][: len(importances)]
    names, averaged = matched(everyone[0], layout.merged, layout.tied, importances, missing, who)
    return layout, averaged, graded(importances, names, scale, who, dropped)


def graded(
    importances: Sequence[Mapping[str, Tensor]],
    names: Sequence[Mapping[str, str]],
    scale: str,
    who: Sequence[str],
    dropped: bool = False,
) -> list[Graded]:
    """Return importances on one common scale.

    The factor of the scale is kept apart from the values, so that it costs nothing to apply.

    Args:
        importances: The importances that take part.
        names: The names of each one's tensors, by weight name.
        scale: `auto`, `as_fisher` or `stored`.
        who: What the importances are called in messages.
        dropped: Whether the user gave more importances than these.

    Raises:
        ScaleError: They have no common scale.
    """
    try:
        common = on_common_scale(importances, scale)
    except ScaleError as error:
        raise (ScaleError(f"{error} (Models with a coefficient of 0 are not counted.)") if dropped else error) from None
    out = []
    for stored, converted, table, called in zip(importances, common, names, who, strict=True):
        factor = 1.0
        if isinstance(stored, Importance) and isinstance(converted, Importance):
            factor = converted.provenance.scale / stored.provenance.scale
        out.append(Graded(stored, table, factor, called))
    return out


def matched(
    weights: Mapping[str, Tensor],
    merged: Sequence[str],
    tied: Mapping[str, str],
    importances: Sequence[Mapping[str, Tensor]],
    missing: str,
    who: Sequence[str],
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the tensor names of every importance by weight name; and the weights without an importance, with the reason.

    Args:
        weights: A model, for shapes.
        merged: Names of the weights to be merged.
        tied: Other names of the same tensors: alias to name.
        importances: One per model.
        missing: `error` or `average`.
        who: What the importances are called in messages.

    Raises:
        NamingError: A weight has no importance, a shape differs, or most weights have none.
    """
    check_choice("missing", missing, ("error", "average"))
    found: list[dict[str, str]] = [{} for _ in importances]
    averaged: dict[str, str] = {}
    unexplained: list[str] = []
    for name in merged:
        matches = [_name_in(imp, name, tied) for imp in importances]
        reasons = [imp.provenance.absent.get(name) if isinstance(imp, Importance) else None for imp in importances]
        if None not in matches:
            for match, imp, called, table in zip(matches, importances, who, found, strict=True):
                if match is not None:
                    check_like(weights, name, imp, match, ("the models", called))
                    table[name] = match
        elif None not in reasons:
            averaged[name] = str(reasons[0])
        else:
            unexplained.append(name)
            averaged[name] = "no importance"
    _check_coverage(weights, merged, averaged, unexplained, importances, missing, who)
    return found, averaged


def _check_coverage(
    weights: Mapping[str, Tensor],
    merged: Sequence[str],
    averaged: Mapping[str, str],
    unexplained: Sequence[str],
    importances: Sequence[Mapping[str, Tensor]],
    missing: str,
    who: Sequence[str],
) -> None:
    total = sum(numel_of(weights, name) for name in merged)
    without = sum(numel_of(weights, name) for name in averaged)
    lost = sum(numel_of(weights, name) for name in unexplained)
    if unexplained:
        name = unexplained[0]
        k = next(k for k, imp in enumerate(importances) if _name_in(imp, name, {}) is None)
        example = f"{name!r}, for example, is not in {who[k]}.{near(name, importances[k])}"
        if without == total or 2 * lost > total:
            raise NamingError(
                f"Only {total - without:,} of {total:,} values have an importance in every model: these importances belong "
                f"to other models, or their names differ. {example}"
            )
        if missing == "error":
            raise NamingError(
                f"{len(unexplained)} of {len(merged)} weights have no importance: {example} Average these with --missing average "
                "(missing='average'), or exclude them by a pattern."
            )
    elif without == total:
        raise NamingError(
            "The importances list every weight as absent, so nothing says how to weight the models: use the average, or an "
            "importance of what was trained."
        )
    if 2 * without > total:
        warnings.warn(
            f"{without:,} of {total:,} values have no importance and are averaged; {len(averaged)} tensors, for example "
            f"{next(iter(averaged))!r} ({next(iter(averaged.values()))}).",
            SquisherWarning,
            stacklevel=5,
        )


def _name_in(imp: Mapping[str, Tensor], name: str, tied: Mapping[str, str]) -> str | None:
    return find(name, imp, {**tied, **tied_in([imp])})


_MARKS = (torch.bool, torch.int64)  # masks, indices and counters: never weights
_BUFFER = re.compile(
    r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq|position_ids|masked_bias|causal_mask)$"
)
_VOCABULARY = re.compile(r"embed|wte|lm_head|vocab|shared\.weight|predictions\.(bias|decoder)", re.IGNORECASE)


@dataclass(frozen=True)
class Plan:
    """What to do with every name of the first model.

    Attributes:
        merged: Names that all models have with one shape, in the first model's order.
        kept: Names that stay as each model has them, and why.
        copied: Buffers, taken from the first model.
        tied: Other names of tensors that are in `merged` or `kept` already: alias to name.
        numbers: The numbers of the models that take part among the user's, from 0.
    """

    merged: tuple[str, ...]
    kept: dict[str, str]
    copied: tuple[str, ...]
    tied: dict[str, str]
    numbers: tuple[int, ...]

    def who(self, k: int) -> str:
        """Return the name of participant `k` for messages."""
        return _called(self.numbers)[k]


def _called(numbers: Sequence[int]) -> list[str]:
    """Return the names of the models with these numbers, and of a base behind them, for messages."""
    return [*(f"model {number + 1}" for number in numbers), "the base"]


def plan(
    models: Sequence[Mapping[str, Tensor]],
    exclude: str | None = None,
    *,
    numbers: Sequence[int],
    tied: Mapping[str, str] | None = None,
) -> Plan:
    """Sort the names of the first model into merged, kept, copied and tied.

    Args:
        models: All that take part; the base, if there is one, comes last.
        exclude: A regular expression; names that it matches are kept as each model has them.
        numbers: The numbers of these models among the user's, from 0; a base has none.
        tied: Tied names that an importance knows: alias to name.

    Raises:
        NamingError: The models do not belong together.
    """
    pattern = name_pattern(exclude)
    first, called = models[0], _called(numbers)
    aliases = _tied_in_all(models, _aliases(models, tied or {}))
    left_out = excluded(exclude, [name for model in models for name in model], aliases)
    same = set(shared(models))
    merged, copied, kept, unasked = [], [], {}, []
    for name in first:
        if name in aliases:
            continue
        if name in left_out:
            kept[name] = "excluded"
        elif dtype_of(first, name) not in FLOATS or _BUFFER.search(name):
            if dtype_of(first, name).is_floating_point and not _BUFFER.search(name):
                check_unquantized(first, [name], called[0])
            copied.append(name)
        elif name in same:
            merged.append(name)
        else:
            kept[name] = _why_not(models, name, called)
            unasked.append(name)
    weights = [n for n in (*merged, *kept, *copied) if kept.get(n) != "excluded" and dtype_of(first, n) not in _MARKS]
    for k, other in enumerate(models[1:], 1):
        pair = called[0], called[k]
        check_unquantized(other, merged, pair[1])
        _check_packed(first, other, copied, pair)
        _check_overlap(first, other, weights, pair)
        lost = _only_there(first, other, pattern, pair)
        if lost and k < len(numbers):  # a base may have a head of its own
            warnings.warn(
                f"{_list(lost)} of {pair[1]}, which {pair[0]} does not have, {'is' if len(lost) == 1 else 'are'} left out: the result has "
                f"the names of {pair[0]}. Exclude them by a pattern if this is intended.",
                SquisherWarning,
                stacklevel=4,
            )
    total, together = (sum(numel_of(first, name) for name in names) for names in (weights, merged))
    if 2 * together < total or (weights and not merged):
        raise NamingError(
            f"Only {together:,} of {total:,} values are in all models with one shape; {_list(unasked or weights)}, for example, not. Merge "
            "models of one network, or exclude what does not belong."
        )
    if not merged:
        raise NamingError(f"No tensor is left to merge: {exclude!r} excludes all of them.")
    if unasked:
        warnings.warn(
            f"{len(unasked)} of {len(first)} tensors are not merged but kept as each model has them, because not all models "
            f"have them with one shape: {_list(unasked)}. Exclude them by a pattern if this is intended.",
            SquisherWarning,
            stacklevel=4,
        )
    return Plan(tuple(merged), kept, tuple(copied), aliases, tuple(numbers))


def _check_packed(
    first: Mapping[str, Tensor], other: Mapping[str, Tensor], copied: Sequence[str], pair: tuple[str, str]
) -> None:
    """Refuse copied buffers that differ between models: they are weights, packed, quantised or complex."""
    for name in copied:
        dtype = dtype_of(first, name)
        if dtype in (*FLOATS, *_MARKS) or name not in other or _BUFFER.search(name) or equal(first, name, name, other):
            continue
        if dtype.is_complex:
            check_unquantized(first, [name], pair[0])
        raise SquisherError(
            f"{name!r} has the type {str(dtype).removeprefix('torch.')} in {pair[0]} and other values in {pair[1]}, so it is no buffer but "
            "quantised weights, whose numbers cannot be merged: merge the models before they are quantised, or keep it as it is: exclude it "
            f"by the pattern {pattern_of(name)!r}."
        )


def _why_not(models: Sequence[Mapping[str, Tensor]], name: str, called: Sequence[str]) -> str:
    """Return why a tensor is kept that not all models have with one shape.

    Heads may differ in their number of rows, or be missing. Any other difference of shapes means that these are different
    networks; another number of embedding rows means that the vocabularies differ.

    Raises:
        NamingError: It is not a head.
    """
    shape, first, why = tuple(shape_of(models[0], name)), called[0], ""
    for who, other in zip(called[1:], models[1:], strict=False):  # the base may not take part
        if name not in other:
            why = why or f"{who} does not have it"
            continue
        found = tuple(shape_of(other, name))
        if found == shape:
            continue
        if _VOCABULARY.search(name) and found[1:] == shape[1:]:
            raise NamingError(
                f"The vocabularies differ: {name!r} has {shape[0]:,} rows in {first} and {found[0]:,} in {who}. Bring the models "
                f"to one vocabulary first, or keep the one of {first}: exclude it by the pattern {pattern_of(name)!r}."
            )
        if len(found) != len(shape) or not shape or found[1:] != shape[1:]:
            raise NamingError(
                f"{name!r} has the shape {shape} in {first} and {found} in {who}: these are different networks. If only this "
                f"part differs, exclude it by the pattern {pattern_of(name)!r}."
            )
        why = why or f"{found[0]} rows in {who}, {shape[0]} in {first}"
    return why


def _check_overlap(
    first: Mapping[str, Tensor], other: Mapping[str, Tensor], weights: Sequence[str], pair: tuple[str, str]
) -> None:
    """Refuse a model with less than half of the first one's weights, whose other names would pass as heads."""
    total = sum(numel_of(first, name) for name in weights)
    alike = set(shared([first, other])).intersection(weights)
    found = sum(numel_of(first, name) for name in alike if dtype_of(first, name) in FLOATS)
    if 2 * found >= total and (found or not weights):
        return
    who, partner = pair
    lost = next((name for name in weights if name not in other), None)
    if lost is None:
        raise NamingError(
            f"Only {found:,} of {total:,} values of {who} can be merged with {partner}; the others have a type that no weights "
            "have, or another shape. Quantised and complex weights cannot be merged."
        )
    raise NamingError(
        f"Only {found:,} of {total:,} values of {who} have a partner of the same name in {partner}: {lost!r}, for example, is "
        f"not there.{near(lost, other)} Models are merged by name; rename the tensors, or exclude what does not belong."
    )


def _only_there(
    first: Mapping[str, Tensor], other: Mapping[str, Tensor], pattern: re.Pattern[str] | None, pair: tuple[str, str]
) -> list[str]:
    """Return the weights that the first model does not have; refuse a model that mostly consists of them."""
    new = [name for name in other if name not in first and not (pattern is not None and pattern.search(name))]
    new = [name for name in new if dtype_of(other, name) in FLOATS and not _BUFFER.search(name)]
    if new:
        tied = also_tied(other, first, first)
        new = [name for name in new if name not in tied]
    lost, total = (sum(numel_of(other, name) for name in names) for names in (new, other))
    if 2 * lost > total:
        raise NamingError(
            f"{lost:,} of {total:,} values of {pair[1]} are in tensors that {pair[0]} does not have, {new[0]!r} for example: these are "
            f"different networks. If they are meant to be left out, exclude them by a pattern."
        )
    return new


def _list(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", …" if len(names) > 3 else "")


def _aliases(models: Sequence[Mapping[str, Tensor]], known: Mapping[str, str]) -> dict[str, str]:
    """Return the tied names of the first model: alias to name.

    They share memory or bytes; or they are equal, and an importance says that they are one parameter or another model has only one
    of them (a file can hold a tied tensor twice).
    """
    first = models[0]
    aliases = tied_names(first)
    for alias, name in known.items():
        if alias in first and name in first and alias not in aliases and equal(first, alias, name):
            aliases[alias] = name
    for name in first:
        if name in aliases or all(name in other for other in models[1:]) or len(shape_of(first, name)) != 2:
            continue
        for twin in first:
            if twin != name and twin not in aliases and _VOCABULARY.search(twin) and equal(first, name, twin):
                aliases[name] = twin
                break
    return aliases


def _tied_in_all(models: Sequence[Mapping[str, Tensor]], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the aliases that are tied in all models; warn of those that have values of their own in one."""
    found = dict(aliases)
    for other in models[1:]:
        ties = tied_names(other) if found else {}
        for alias, name in list(found.items()):
            one = ties.get(alias, alias) == ties.get(name, name)
            if alias in other and name in other and not one and not equal(other, alias, name):
                del found[alias]
    if lost := [alias for alias in aliases if alias not in found]:
        warnings.warn(
            f"{_list(lost)} {'is' if len(lost) == 1 else 'are'} tied to {aliases[lost[0]]!r} in the first model and not in another, so that "
            "they are merged separately. A config that ties them (tie_word_embeddings) does not fit the result.",
            SquisherWarning,
            stacklevel=5,
        )
    return found


def also_tied(model: Mapping[str, Tensor], first: Mapping[str, Tensor], names: Collection[str]) -> dict[str, str]:
    """Return the names of a model that are tied there to one of `names`: alias to name."""
    aliases = _aliases([model, first], {})
    found = {alias: find(alias, names, aliases) for alias in model if alias not in names}
    return {alias: name for alias, name in found.items() if name is not None}
