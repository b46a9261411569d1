"""Exact top-k over any number of tensors, in bounded memory.

Non-negative floats are ordered as the integers that their bits spell; the k-th largest is found by passes over chunks of
them (`narrow` for one k in one process, `radix` for several k or several processes). Equal scores are taken in order,
the first source and its lowest flat index first, so that exactly k are chosen and the same k every time.

    sources = {"a": lambda: iter([a.flatten()]), "b": lambda: chunks_of(file, "b")}
    kth = threshold(sources, k)
    chosen = Selection(kth)
    masks = {name: torch.cat([chosen(chunk) for chunk in chunks()]) for name, chunks in sources.items()}

`choose` does the same with budgets: sources that are always kept, and a minimum for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from .choice import Choice, choose, per_source
from .keys import Source, reverse
from .narrow import narrow
from .radix import thresholds
from .selection import Selection, Threshold

__all__ = ["Choice", "Selection", "Source", "Threshold", "choose", "per_source", "reverse", "threshold", "thresholds"]


def threshold(sources: Mapping[str, Source], k: int, reduce: Callable[[Tensor], Tensor] | None = None) -> Threshold:
    """Return the k-th largest of all scores, exactly.

    Args:
        sources: For each name, a callable that gives the scores as flat chunks. Order decides between equal scores.
        k: How many to choose, from 0 to the number of all scores.
        reduce: Sums an int64 vector over processes, where each holds some of the sources; called once a pass.

    Returns:
        The threshold, from which `Selection` marks exactly k scores.

    Raises:
        SquisherError: For NaN or negative scores (the message names the source), scores that are not floats, and a k
            that is negative or larger than the number of scores.
    """
    return narrow(sources, k) if reduce is None else thresholds(sources, [k], reduce)[0]
