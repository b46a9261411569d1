"""Importance: named, non-negative tensors that say what they are.

It is the only thing that crosses from what makes importances (recycle, measure) to what uses them (merge, prune, mask, …).
Read `facts` (what is known about a run), `provenance` (what a file says, and which scale follows from it), `core` (the class,
`load` and `save`), `combining` (the scale rule for several importances, and their mean) and `weights` (which model one belongs
to) in this order. `checks` refuses values that no importance can have.
"""

from __future__ import annotations

from .checks import check_values
from .combining import checked, on_common_scale, tied_in, without
from .core import FILE_NAME, Importance, load
from .facts import Absence, Level, Naming, Pollution, Reason, RunFacts, Spoiler
from .provenance import Provenance
from .weights import structure_hash

__all__ = [
    "FILE_NAME", "Absence", "Importance", "Level", "Naming", "Pollution", "Provenance", "Reason", "RunFacts", "Spoiler", "check_values",
    "checked", "load", "on_common_scale", "structure_hash", "tied_in", "without",
]  # fmt: skip
