"""Single weights set to zero: on a module in place, or on any mapping, lazily."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from ..errors import SquisherError, near
from ..importance import Importance
from ..names import align, live_parameters
from ..order import Source, choose, per_source
from ..storage.tensors import CHUNK, Computed, chunks_of, dtype_of, numel_of, shape_of, tied_names
from .pattern import fits, keep_pattern, parse_pattern
from .scoring import Scores, check_score, scores

__all__ = ["Pruned", "weights"]

SCOPES = ("global", "tensor")
Progress = Callable[[int, int], None]
"""Called with what is done and what there is in all."""


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
) -> Any:
    """Set the least important weights to zero: exactly ⌊sparsity · total⌋ of them.

    Candidates are the entries of every tensor that has an importance; without one (magnitude, random), of every
    floating-point tensor with two or more dimensions.

    Args:
        model_or_weights: A module, which is pruned in place with `torch.nn.utils.prune` (`weight_orig`, `weight_mask`; its
            `prune.remove` makes the zeros permanent), or any mapping of weights, which gives a lazy mapping.
        importance: Of the same names and shapes; read in pieces.
        sparsity: The fraction of candidates to set to zero, from 0 to 1.
        scope: `"global"` ranks all candidates together, `"tensor"` each tensor by itself.
        score: `"fisher"` (½θ²F), `"magnitude"` (|θ|), `"importance"` (F) or `"random"`.
        nm: Instead of a sparsity, a pattern such as `"2:4"`: of every 4 inputs in a row the best 2 stay. Vectors are left.
        exclude: A regular expression: tensors whose name it finds something in are left as they are.
        minimum: The fraction of every tensor that stays at least, for the global scope.
        seed: Of random scores.
        progress: Called with the entries read so far and those that will probably be read in all.

    Returns:
        The module itself, or the pruned weights as a lazy mapping.

    Raises:
        NamingError: Names or shapes of importance and weights do not fit.
        SquisherError: The wish is impossible, or scores cannot be ranked.
    """
    check_score(score, importance)
    if scope not in SCOPES:
        raise SquisherError(f"scope is global or tensor, not {scope!r}.{near(str(scope), SCOPES)}")
    if (sparsity is None) == (nm is None):
        raise SquisherError("Give either a sparsity (0.75) or a pattern (nm='2:4'), not both and not neither.")
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise SquisherError(f"sparsity is the fraction of weights to set to zero, from 0 to 1, not {sparsity}.")
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    stored: Mapping[str, Tensor]
    if isinstance(model_or_weights, nn.Module):
        stored, owners, aliases = _of_module(model_or_weights)
    else:
        stored = model_or_weights
        aliases = tied_names(stored)
    fitted = _fitted(stored, importance, aliases, exclude, set(owners) or None)
    scored = (
        scores(stored, fitted, score, seed=seed)
        if importance is not None
        else Scores(stored, None, score, seed, list(fitted))
    )
    if nm is not None:
        marks = _by_pattern(scored, *parse_pattern(nm))
    else:
        marks = _by_rank(scored, cast(float, sparsity), scope, minimum, progress)
    pruned = Pruned(stored, marks, aliases)
    if not isinstance(model_or_weights, nn.Module):
        return pruned
    for name in marks:
        mask = pruned.mask(name)
        for module, attribute in owners[name]:
            tensor = getattr(module, attribute)
            torch_prune.custom_from_mask(module, attribute, mask.to(tensor.device))
    return model_or_weights


class Pruned(Computed):
    """Weights of which some are zero, computed when asked for."""

    def __init__(
        self, stored: Mapping[str, Tensor], marks: Mapping[str, Source], aliases: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(stored)
        self._stored = stored
        self._marks = dict(marks)
        self._aliases = {a: name for a, name in (aliases or {}).items() if name in marks}

    def __getitem__(self, name: str) -> Tensor:
        weight = self._stored[name]
        if self._target(name) not in self._marks:
            return weight
        return torch.where(self.mask(name).to(weight.device), weight, torch.zeros((), dtype=weight.dtype))

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """One tensor in flat pieces, in order."""
        target = self._target(name)
        if target not in self._marks:
            yield from chunks_of(self._stored, name, size)
            return
        kept = _recut(self._marks[target](), size)
        for piece, mark in zip(chunks_of(self._stored, name, size), kept, strict=True):
            yield torch.where(mark, piece, torch.zeros((), dtype=piece.dtype))

    def mask(self, name: str) -> Tensor:
        """Return True where a weight of one tensor stays."""
        marks = self._marks.get(self._target(name))
        if marks is None:
            return torch.ones(self.shape(name), dtype=torch.bool)
        return torch.cat([*marks(), torch.zeros(0, dtype=torch.bool)]).view(self.shape(name))

    def counts(self, progress: Progress | None = None) -> dict[str, tuple[int, int]]:
        """For each candidate tensor: how many of its entries stay, and how many there are; one pass."""
        sizes = {name: numel_of(self._stored, name) for name in self._marks}
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
    sources = {name: _source(scored, name) for name in scored}
    sizes = {name: numel_of(scored, name) for name in scored}
    if scope == "tensor":
        ks = {name: size - math.floor(sparsity * size) for name, size in sizes.items()}
        choice = per_source(sources, ks, sizes, progress)
    else:
        total = sum(sizes.values())
        least = {name: math.ceil(minimum * size) for name, size in sizes.items()} if minimum else None
        k = total - math.floor(sparsity * total)
        choice = choose(sources, k, sizes, minimum=least, progress=progress)
    return {name: _marks_of(choice.chunks, name) for name in scored}


def _by_pattern(scored: Scores, keep: int, of: int) -> dict[str, Source]:
    names = [name for name in scored if fits(name, scored.shape(name), of)]
    if not names:
        raise SquisherError("No tensor takes part in the pattern: all candidates are vectors.")
    return {name: _marks_of(lambda n: iter([keep_pattern(scored[n], keep, of).flatten()]), name) for name in names}


def _source(scored: Scores, name: str) -> Source:
    return lambda: scored.chunks(name)


def _marks_of(pieces: Callable[[str], Iterator[Tensor]], name: str) -> Source:
    return lambda: pieces(name)


def _recut(pieces: Any, size: int) -> Iterator[Tensor]:
    """Return the same entries in pieces of another size."""
    held = torch.zeros(0, dtype=torch.bool)
    for piece in pieces:
        held = torch.cat([held, piece]) if held.numel() else piece
        while held.numel() >= size:
            yield held[:size]
            held = held[size:]
    if held.numel():
        yield held


def _fitted(
    stored: Mapping[str, Tensor],
    importance: Mapping[str, Tensor] | None,
    aliases: Mapping[str, str],
    exclude: str | None,
    parameters: set[str] | None,
) -> Mapping[str, Tensor]:
    """Return the importance under the names of the weights, without what is excluded; without one, the weights themselves."""
    try:
        left_out = re.compile(exclude) if exclude is not None else None
    except re.error as error:
        raise SquisherError(f"exclude={exclude!r} is not a regular expression: {error}.") from error
    names: dict[str, str] = {}
    if importance is None:
        for name in stored:
            if name not in aliases and dtype_of(stored, name).is_floating_point and len(shape_of(stored, name)) > 1:
                names[name] = name
    else:
        tied = importance.provenance.tied if isinstance(importance, Importance) else {}
        for found, name in align(
            importance, stored, ("the importance", "the model"), tied=tied, exclude=exclude
        ).items():
            names[aliases.get(found, found)] = name
    if parameters is not None:
        names = {name: own for name, own in names.items() if name in parameters}
    kept = {name: own for name, own in names.items() if left_out is None or not left_out.search(name)}
    if not kept:
        why = f"exclude={exclude!r} leaves nothing" if names else "there is no tensor to prune"
        raise SquisherError(f"Nothing can be pruned: {why}. There are {', '.join(list(stored)[:4])}, ….")
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
        held = holders[id(live.parameter)]
        module, attribute = held[0]
        plain = attribute.removesuffix("_orig")
        mask = getattr(module, f"{plain}_mask", None) if plain != attribute else None
        if isinstance(mask, Tensor):  # pruned before: what is zero already has the lowest score
            tensor = tensor * mask
            name = name.removesuffix("_orig")
            held = [(m, a.removesuffix("_orig")) for m, a in held]
            aliases[live.name] = name
        stored[name] = tensor
        owners[name] = held
        for other in (*live.aliases, live.live_name):
            if other != name:
                aliases[other] = name
    stored |= {alias: stored[name] for alias, name in aliases.items()}
    return stored, owners, aliases
