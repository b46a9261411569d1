"""Set single weights to zero by their scores (½θ²F, or one to compare it with): in a module in place, in any mapping lazily.

N:M patterns keep the best N of every M neighbouring weights along the inputs; some processors multiply 2:4 faster.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from ..errors import ArgumentError, SquisherError, check_choice, check_fraction
from ..importance import checked, tied_in
from ..names import align, align_tied, check_named, check_unquantized, excluded, live_parameters
from ..order import Source, choose, per_source
from ..storage.tensors import (
    CHUNK,
    Computed,
    Progress,
    check_finite,
    chunks_of,
    dtype_of,
    filled,
    is_finite,
    numel_of,
    recut,
    shape_of,
    tied_names,
)

__all__ = ["Pruned", "Scores", "check_score", "keep_pattern", "parse_pattern", "scores", "weights"]

SCOPES = ("global", "tensor")


def weights(
    model_or_weights: nn.Module | Mapping[str, Tensor],
    importance: Mapping[str, Tensor] | None = None,
    sparsity: float | None = None,
    scope: str = "global",
    score: str = "fisher",
    *,
    nm: str | None = None,
    exclude: str | None = None,
    minimum: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Pruned:
    """Set the least important weights to zero: exactly ⌊sparsity · total⌋ of them.

    Candidates are the entries of every tensor that has an importance; without one (magnitude, random), of every
    floating-point tensor with two or more dimensions.

    Args:
        model_or_weights: A module, pruned in place with `torch.nn.utils.prune` (`weight_orig`, `weight_mask`; its
            `prune.remove` makes the zeros permanent), or any mapping of weights, which is not changed.
        importance: A mapping with the names and shapes of the weights; read in chunks.
        sparsity: The fraction of candidates to set to zero, from 0 to 1.
        scope: `"global"` ranks all candidates together, `"tensor"` each tensor by itself.
        score: `"fisher"` (½θ²F), `"magnitude"` (|θ|), `"importance"` (F) or `"random"`.
        nm: Instead of a sparsity, a pattern such as `"2:4"`: of every 4 inputs in a row the best 2 stay. Vectors are not pruned.
        exclude: A regular expression: tensors whose names it matches are left as they are.
        minimum: The fraction of every tensor that stays at least, for the global scope.
        seed: The seed of random scores.
        progress: Called with the entries read so far and those that will probably be read in all.

    Returns:
        The pruned weights as a lazy mapping, with the mask of each tensor and how much of it stays; a module's weights are under
        the names of its weight file.

    Raises:
        NamingError: Names or shapes of importance and weights do not fit.
        SquisherError: The request is impossible, or scores cannot be ranked.
    """
    check_score(score, importance)
    check_choice("scope", scope, SCOPES)
    if (sparsity is None) == (nm is None):
        raise ArgumentError("Give either a sparsity (0.75) or a pattern (nm, such as 2:4), not both and not neither.")
    if sparsity is not None:
        check_fraction("sparsity", sparsity, "of weights to set to zero")
    check_fraction("minimum", minimum, "of each tensor that stays at least")
    if minimum and (nm is not None or scope == "tensor"):
        raise ArgumentError(
            "is for the global scope: a pattern, or a sparsity of each tensor, says how much stays.", "minimum"
        )
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    stored: Mapping[str, Tensor]
    if isinstance(model_or_weights, nn.Module):
        stored, owners, aliases = _of_module(model_or_weights)
    else:
        check_named(model_or_weights, "the model")
        stored = model_or_weights
        aliases = tied_names(stored)
    fitted = _fitted(stored, importance, aliases, exclude, set(owners) or None)
    scored = Scores(stored, None if importance is None else checked(fitted), score, seed, list(fitted))
    if nm is not None:
        marks = _by_pattern(scored, *parse_pattern(nm))
    else:
        marks = _by_rank(scored, cast(float, sparsity), scope, minimum, progress)
    pruned = Pruned(stored, marks, aliases)
    if not isinstance(model_or_weights, nn.Module):
        return pruned
    masks = {name: pruned.mask(name) for name in marks}
    for name, mask in masks.items():
        check_finite(stored[name], name)
        for module, attribute in owners[name]:
            tensor = getattr(module, attribute)
            torch_prune.custom_from_mask(module, attribute, mask.to(tensor.device))
    # The module's weights may change from now on, and their scores with them; the masks do not.
    return Pruned(stored, {name: partial(lambda n: iter([masks[n].flatten()]), name) for name in masks}, aliases)


class Pruned(Computed):
    """Pruned weights, computed when asked for."""

    def __init__(
        self, stored: Mapping[str, Tensor], marks: Mapping[str, Source], aliases: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(stored)
        self._marks = dict(marks)
        self._aliases = {a: name for a, name in (aliases or {}).items() if name in marks}

    def __getitem__(self, name: str) -> Tensor:
        weight = self._like[name]
        if self._target(name) not in self._marks:
            return weight
        check_finite(weight, name)
        return torch.where(self.mask(name).to(weight.device), weight, torch.zeros((), dtype=weight.dtype))

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks, in order."""
        target = self._target(name)
        if target not in self._marks:
            yield from chunks_of(self._like, name, size)
            return
        kept = recut(self._marks[target](), size)
        for chunk, mark in zip(chunks_of(self._like, name, size), kept, strict=True):
            check_finite(chunk, name)
            yield torch.where(mark, chunk, torch.zeros((), dtype=chunk.dtype))

    def mask(self, name: str) -> Tensor:
        """Return the mask of one tensor: True where a weight stays."""
        marks = self._marks.get(self._target(name))
        if marks is None:
            return torch.ones(self.shape(name), dtype=torch.bool)
        return filled(marks(), self.shape(name), torch.bool)

    def counts(self, progress: Progress | None = None) -> dict[str, tuple[int, int]]:
        """Return how many entries of each candidate tensor stay, and how many there are; one pass."""
        sizes = {name: numel_of(self._like, name) for name in self._marks}
        counts, done = {}, 0
        for name, marks in self._marks.items():
            counts[name] = (sum(int(np.count_nonzero(mark.numpy())) for mark in marks()), sizes[name])
            done += sizes[name]
            if progress is not None:
                progress(done, sum(sizes.values()))
        return counts

    def _target(self, name: str) -> str:
        return self._aliases.get(name, name)


def _by_rank(
    scored: Scores, sparsity: float, scope: str, minimum: float, progress: Progress | None
) -> dict[str, Source]:
    sources = {name: partial(scored.chunks, name) for name in scored}
    sizes = {name: numel_of(scored, name) for name in scored}
    if scope == "tensor":
        ks = {name: size - math.floor(sparsity * size) for name, size in sizes.items()}
        choice = per_source(sources, ks, sizes, progress)
    else:
        total = sum(sizes.values())
        least = {name: math.ceil(minimum * size) for name, size in sizes.items()} if minimum else None
        k = total - math.floor(sparsity * total)
        choice = choose(sources, k, sizes, minimum=least, progress=progress)
    return {name: partial(choice.chunks, name) for name in scored}


def _by_pattern(scored: Scores, keep: int, of: int) -> dict[str, Source]:
    shapes = {name: scored.shape(name) for name in scored}
    names = [name for name, shape in shapes.items() if len(shape) > 1 and shape.numel()]  # vectors do not take part
    wrong = [name for name in names if shapes[name][1] % of]
    if wrong:
        name, more = wrong[0], ", ".join(map(repr, wrong[1:4])) + (", …" if len(wrong) > 4 else "")
        raise SquisherError(
            f"{name!r} of the shape {tuple(shapes[name])} has {shapes[name][1]} inputs, which groups of {of} do not divide"
            f"{f'; so have {more}' if more else ''}. Leave {'them' if more else 'it'} out with exclude."
        )
    if not names:
        raise SquisherError("No tensor takes part in the pattern: all candidates are vectors.")
    return {name: partial(_pattern_chunks, scored, name, keep, of) for name in names}


def _pattern_chunks(scored: Scores, name: str, keep: int, of: int) -> Iterator[Tensor]:
    """Yield the mask of one tensor in flat chunks of whole rows."""
    rest = scored.shape(name)[1:]
    for chunk in scored.chunks(name, rest.numel() * max(1, CHUNK // rest.numel())):
        yield keep_pattern(chunk.view(-1, *rest), keep, of, repr(name)).flatten()


def _fitted(
    stored: Mapping[str, Tensor],
    importance: Mapping[str, Tensor] | None,
    aliases: Mapping[str, str],
    exclude: str | None,
    parameters: set[str] | None,
) -> Mapping[str, Tensor]:
    """Return the candidates: the importance under the names of the weights, or the weights themselves without one."""
    if importance is None:
        matrices = (n for n in stored if dtype_of(stored, n).is_floating_point and len(shape_of(stored, n)) > 1)
        names = {name: name for name in matrices if name not in aliases}
        left_out = excluded(exclude, stored, aliases)
    else:
        called = ("the importance", "the model")
        names, _ = align_tied(importance, stored, called, tied=tied_in([importance]), exclude=exclude, aliases=aliases)
        left_out = set()
    if parameters is not None:
        left_out |= names.keys() - parameters
    kept = {name: importance_name for name, importance_name in names.items() if name not in left_out}
    if not kept:
        why = f"the pattern {exclude!r} excludes everything" if names else "there is no tensor to prune"
        raise SquisherError(f"Nothing can be pruned: {why}. There are {', '.join(list(stored)[:4])}, ….")
    check_unquantized(stored, kept)
    return Computed(stored if importance is None else importance, kept)


def _of_module(
    model: nn.Module,
) -> tuple[dict[str, Tensor], dict[str, list[tuple[nn.Module, str]]], dict[str, str]]:
    """Return the weights of a module by name, the modules that hold each, and other names of tied ones."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((module, attribute))
    stored: dict[str, Tensor] = {}
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    aliases: dict[str, str] = {}
    for live in live_parameters(model):
        name, tensor = live.name, live.parameter.detach()
        places = holders[id(live.parameter)]
        module, attribute = places[0]
        plain = attribute.removesuffix("_orig")
        mask = getattr(module, f"{plain}_mask", None) if plain != attribute else None
        if isinstance(mask, Tensor):  # pruned before: its zeros have the lowest score
            tensor = tensor * mask
            name = name.removesuffix("_orig")
            places = [(m, a.removesuffix("_orig")) for m, a in places]
            aliases[live.name] = name
        stored[name] = tensor
        owners[name] = places
        for other in (*live.aliases, live.live_name):
            if other != name:
                aliases[other] = name
    stored |= {alias: stored[name] for alias, name in aliases.items()}
    return stored, owners, aliases


SCORES = ("fisher", "magnitude", "importance", "random")


def scores(
    weights: Mapping[str, Tensor],
    importance: Mapping[str, Tensor] | None = None,
    score: str = "fisher",
    *,
    seed: int = 0,
) -> Scores:
    """Return by how much the loss grows if a weight is set to zero, to second order: ½θ²F; a lazy mapping.

    Args:
        weights: Any mapping, in memory or in files; read in chunks.
        importance: A mapping with the names and shapes of the weights, for the scores fisher and importance.
        score: `"fisher"` is ½θ²F, `"magnitude"` |θ|, `"importance"` F alone, `"random"` uniform noise.
        seed: The seed of random scores, which depend on it and on the parameter's name alone.

    Returns:
        A score for each entry of the tensors that have an importance; of all tensors, if none is given.

    Raises:
        NamingError: The importance has a name or a shape that the weights do not have.
        SquisherError: The score does not exist or needs an importance; on reading: ½θ²F is more than the type holds.
    """
    check_score(score, importance)
    check_named(weights, "the model")
    if importance is None:
        return Scores(weights, None, score, seed, list(weights))
    align(importance, weights, ("the importance", "the model"))
    check_unquantized(weights, importance)
    return Scores(weights, checked(importance), score, seed, list(importance))


def check_score(score: str, importance: object, more: tuple[str, ...] = ()) -> None:
    """Refuse a score that does not exist, or that needs an importance where none is given."""
    check_choice("score", score, (*SCORES, *more))
    if importance is None and score not in ("magnitude", "random", "orthoreg"):
        raise ArgumentError(f"The score {score} needs an importance; only magnitude and random do without one.")


class Scores(Computed):
    """Scores by name, computed when asked for: one chunk of weights and importance in memory at a time."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        importance: Mapping[str, Tensor] | None,
        score: str,
        seed: int,
        names: list[str],
    ) -> None:
        super().__init__(weights, {name: name for name in names})
        self._importance, self._score, self._seed = importance, score, seed

    def dtype(self, name: str) -> torch.dtype:
        """Return float32, or float64 where weights or importance are."""
        read = [self._like] if self._importance is None else [self._like, self._importance]
        wide = self._score != "random" and any(dtype_of(r, self._name_there(name)) == torch.float64 for r in read)
        return torch.float64 if wide else torch.float32

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor's scores in flat chunks, in order."""
        if self._score == "random":
            yield from self._noise(name, size)
            return
        kind = self.dtype(name)
        weights = chunks_of(self._like, name, size)
        if self._importance is None or self._score == "magnitude":
            for chunk in weights:
                yield torch.from_numpy(np.abs(_array(chunk, kind)))
            return
        importances = chunks_of(self._importance, name, size)
        if self._score == "importance":
            for chunk in importances:
                yield torch.from_numpy(_array(chunk, kind))
            return
        for weight, fisher in zip(weights, importances, strict=True):
            theta = _array(weight, kind)
            with np.errstate(over="ignore", invalid="ignore"):
                loss = theta * theta
                loss *= 0.5
                loss *= _array(fisher, kind)
            if np.isinf(loss.max(initial=0)) and is_finite(weight):
                raise SquisherError(
                    f"½θ²F of {name!r} is more than {str(kind).removeprefix('torch.')} holds: scale the importance down (importance * "
                    "1e-20; the ranking stays the same), or give it in float64."
                )
            yield torch.from_numpy(loss)

    def _noise(self, name: str, size: int) -> Iterator[Tensor]:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:16], "big"))
        numel = numel_of(self, name)
        for start in range(0, numel, size):
            yield torch.from_numpy(random.random(min(size, numel - start), dtype=np.float32))


def _array(chunk: Tensor, kind: torch.dtype) -> np.ndarray[Any, np.dtype[Any]]:
    return chunk.detach().to(kind).numpy()


def parse_pattern(pattern: str) -> tuple[int, int]:
    """Return `"2:4"` as (2, 4).

    Raises:
        SquisherError: It is not of that form.
    """
    found = re.fullmatch(r"(\d+):(\d+)", str(pattern).strip())
    if found is None or not 0 < int(found[1]) < int(found[2]) <= 64:
        raise ArgumentError(f"A pattern is written N:M with 0 < N < M ≤ 64, such as 2:4, not {pattern!r}.")
    return int(found[1]), int(found[2])


def keep_pattern(scores: Tensor, keep: int, of: int, called: str = "a tensor") -> Tensor:
    """Return True for the `keep` best of every `of` neighbours along the inputs (dimension 1); the first of equal ones stay."""
    grouped = scores.movedim(1, -1).reshape(-1, of)
    columns: list[Any] = [np.ascontiguousarray(grouped[:, k].numpy()) for k in range(of)]
    if any(bool(np.isnan(column).any()) for column in columns):
        raise SquisherError(
            f"The scores of {called} hold NaN, which has no rank: so do its weights or its importance. Take an earlier checkpoint, or "
            "leave the tensor out with exclude."
        )
    kept = np.empty(grouped.shape, dtype=bool)
    for k, column in enumerate(columns):
        better = np.zeros(column.shape, dtype=np.uint8)
        for other, rival in enumerate(columns):
            if other != k:
                better += rival >= column if other < k else rival > column
        kept[:, k] = better < keep
    moved = scores.movedim(1, -1)
    return torch.from_numpy(kept).view(moved.shape).movedim(-1, 1).contiguous()
