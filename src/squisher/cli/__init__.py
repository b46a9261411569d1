"""The command `squisher`: one file per command, and the only place that draws progress bars.

`shell` has what all commands share. Modules of ours are imported inside each command, so that `squisher --help` does not wait for
torch.
"""

from __future__ import annotations

# Each module adds its command to the application; `squisher --help` shows them in this order.
# isort: off
from . import extract, fisher, compress, push
from . import inspect, compare, similarity, report
from . import merge, mergekit, prune, shrink, mask, patch, embed, quantize, unlearn, export

# isort: on
from .shell import app, main

__all__ = [
    "app", "compare", "compress", "embed", "export", "extract", "fisher", "inspect", "main", "mask", "merge", "mergekit", "patch", "prune", "push", "quantize", "report",
    "shrink", "similarity", "unlearn",
]  # fmt: skip
