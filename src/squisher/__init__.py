"""Which parameters of a trained network matter: measured, or recycled from the optimizer.

    optimizer state ─┐
                     ├─►  Importance  ─►  merge · prune · mask · patch · embed · consolidate · quantize · unlearn
    model + data  ───┘

Names are resolved on first use, so that `squisher --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    # what makes an importance
    "extract": "recycle",
    "Tracker": "tracker",
    "fisher": "measure",
    # the importance itself
    "Importance": "importance",
    "load": "importance",
    # what is learnt from it
    "compare": "analysis.agreement",
    "examine": "analysis.health",
    # what is done with it
    "merge": "merge",
    "prune": "prune",
    "mask": "mask",
    "embed": "embed",
    "patch": "patch",
    "EWC": "consolidate",
    "quantize": "quantize",
    "unlearn": "unlearn",
    # when something is wrong
    "SquisherError": "errors",
    "SquisherWarning": "errors",
}

__all__ = [
    "EWC", "Importance", "SquisherError", "SquisherWarning", "Tracker", "__version__", "compare", "embed", "examine", "extract", "fisher", "load",
    "mask", "merge", "patch", "prune", "quantize", "unlearn",
]  # fmt: skip

if TYPE_CHECKING:
    from . import embed, mask, merge, patch, prune, quantize, unlearn
    from .analysis.agreement import compare
    from .analysis.health import examine
    from .consolidate import EWC
    from .errors import SquisherError, SquisherWarning
    from .importance import Importance, load
    from .measure import fisher
    from .recycle import extract
    from .tracker import Tracker


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'squisher' has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    value = module if name == _HOMES[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
