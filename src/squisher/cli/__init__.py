"""The command `squisher`: a thin shell over the library, and the only place that draws progress bars.

Modules of ours are imported inside each command, so that `squisher --help` does not wait for torch.
"""

from __future__ import annotations

from . import importances, merging, report, sparsity, tasks  # noqa: F401  (each module adds its commands to the application)
from .app import app, main

__all__ = ["app", "main"]
