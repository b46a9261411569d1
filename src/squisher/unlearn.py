"""Selective synaptic dampening: forget some training data by shrinking the weights that matter to it far more than to all data.

Foster, Schoepf and Brintrup, AAAI 2024. Where F_forget > select·F, a weight θ becomes min(strength·F/F_forget, 1)·θ. It needs no
training, and with a Squisher as F it needs a Fisher of the data to forget alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from .errors import SquisherWarning, check_positive
from .importance import Importance, on_common_scale, tied_in
from .importance.provenance import scale_differences
from .names import align, align_tied, check_unquantized
from .order import TINY
from .storage.tensors import CHUNK, Computed, check_finite, chunks_of, dtype_of, one_thread

__all__ = ["Dampened", "dampen"]


def dampen(
    weights: Mapping[str, Tensor],
    importance: Mapping[str, Tensor],
    forget_importance: Mapping[str, Tensor],
    select: float = 10.0,
    strength: float = 1.0,
    scale: str = "auto",
    *,
    exclude: str | None = None,
) -> Dampened:
    """Return the weights after forgetting, as a lazy mapping: min(strength·F/F_forget, 1)·θ where F_forget > select·F.

    Where both importances are 0 nothing changes.

    Args:
        weights: Any mapping, in memory or in files.
        importance: F, a Fisher or a Squisher of all training data.
        forget_importance: F_forget, a Fisher of the data to forget. Weights without one stay as they are.
        select: α, on which everything depends; a larger one dampens fewer weights. All data contain those to forget, so F_forget/F
            is at most 1 over their share: for one class of ten, a `select` of 10 dampens nothing.
        strength: λ; a smaller one dampens more.
        scale: How the two are brought to one scale, which `select` needs: `auto`, `as_fisher` or `stored`. `stored` warns if the
            two are known to be of different kinds.
        exclude: A regular expression: tensors that stay as they are.

    Raises:
        NamingError: Names or shapes do not fit.
        ScaleError: The two importances have no common scale.
        SquisherError: A number is not positive.
    """
    for what, number in (("select", select), ("strength", strength)):
        check_positive(what, number)
    whole, forget = on_common_scale([importance, forget_importance], scale)
    known = [imp.provenance for imp in (importance, forget_importance) if isinstance(imp, Importance)]
    if scale == "stored" and len({(p.kind, p.unit, p.per_unit) for p in known}) > 1:
        warnings.warn(
            f"The importances differ in {', '.join(scale_differences(known))}, and scale='stored' compares their numbers as they are: "
            f"select={select:g} then does not say how much more a weight matters to the data to forget. Use scale='auto'.",
            SquisherWarning,
            stacklevel=2,
        )
    names, aliases = _matched(weights, whole, forget, exclude)
    return Dampened(weights, whole, forget, names, aliases, float(select), float(strength))


class Dampened(Computed):
    """Dampened weights, computed when asked for.

    Attributes:
        dampened: Names of the tensors that take part, a tied one under its first name; others stay as they are.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        importance: Mapping[str, Tensor],
        forget: Mapping[str, Tensor],
        names: Mapping[str, tuple[str, str]],
        aliases: Mapping[str, str],
        select: float,
        strength: float,
    ) -> None:
        super().__init__(weights)
        self._importance, self._forget = importance, forget
        self._pairs, self._select, self._strength = dict(names), select, strength
        self._aliases = aliases
        self.dampened = tuple(names)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks, in order."""
        target = self._aliases.get(name, name)
        if target not in self._pairs:
            yield from chunks_of(self._like, name, size)
            return
        for weight, factor in zip(chunks_of(self._like, name, size), self._factors(target, size), strict=True):
            check_finite(weight, name)
            yield torch.where(factor == 1, weight, (weight * factor).to(weight.dtype))  # other weights stay to the bit

    @one_thread()
    def counts(self) -> dict[str, tuple[int, int]]:
        """Return how many entries of each tensor shrink, and how many there are; one pass."""
        out = {}
        for name in self._pairs:
            shrinks = sum(int(np.count_nonzero((factor != 1).numpy())) for factor in self._factors(name))
            out[name] = (shrinks, math.prod(self.shape(name)))
        return out

    def _factors(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield the factors of the entries in flat chunks."""
        importances = tuple(zip((self._importance, self._forget), self._pairs[name], strict=True))
        wide = torch.float64 in [dtype_of(*one) for one in ((self._like, name), *importances)]
        work = torch.float64 if wide else torch.float32
        for f, g in zip(*(chunks_of(*one, size) for one in importances), strict=True):
            f, g = (torch.where(values < TINY, 0, values.to(work)) for values in (f, g))
            shrunk = (self._strength * f / torch.where(g > 0, g, 1)).clamp_max_(1)
            yield torch.where(g > self._select * f, shrunk, 1)


def _matched(
    weights: Mapping[str, Tensor], importance: Mapping[str, Tensor], forget: Mapping[str, Tensor], exclude: str | None
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Return the names of both importances by weight name, and the other names of tied weights."""
    tied = tied_in([importance, forget])
    names, aliases = align_tied(forget, weights, ("the forget importance", "the model"), tied=tied, exclude=exclude)
    tied |= aliases
    check_unquantized(weights, names)
    asked = Computed(forget, {forget_name: forget_name for forget_name in names.values()})
    partners = align(asked, importance, ("the forget importance", "the importance of all data"), tied=tied)
    partner = {forget_name: name for name, forget_name in partners.items()}
    return {name: (partner[forget_name], forget_name) for name, forget_name in names.items()}, aliases
