"""Every value is read once, in pieces; memory does not grow with the file.

What the provenance says (steps, decay, pollution, precision) and what the values show (zeros, denormals, NaN) end up in one list
of diagnoses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ...errors import FileError, SquisherError
from ...importance import Importance
from ...storage.tensors import one_thread
from ..distribution import Distribution, Tally
from .diagnoses import SEVERITIES, Diagnosis, Row, of_provenance, of_values

__all__ = ["Health", "diagnose", "examine"]

Progress = Callable[[int, int], None]
"""Called with the entries done and the entries in all."""


@dataclass(frozen=True)
class Health:
    """What `examine` found: one row per parameter, all values together, and the diagnoses, the worst first."""

    rows: list[Row]
    totals: Distribution
    diagnoses: list[Diagnosis]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "tensors": len(self.rows),
            **self.totals.to_dict(),
            "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
            "rows": [
                {"name": row.name, "shape": list(row.shape), **row.values.to_dict(), "invalid": row.invalid or None}
                for row in self.rows
            ],
        }


@one_thread()
def examine(importance: Mapping[str, Tensor], progress: Progress | None = None) -> Health:
    """Read every value once and say what is wrong, or worth knowing, about an importance.

    Args:
        importance: An importance, or a mapping of tensors (which has no provenance to diagnose).
        progress: Called with the entries done and the entries in all.

    Returns:
        Statistics per parameter and overall, and the diagnoses.

    Raises:
        FileError: A file cannot be read. Invalid values raise nothing: they are a diagnosis.
    """
    known = importance if isinstance(importance, Importance) else Importance(importance)
    work = sum(math.prod(known.shape(name)) for name in known)
    done = 0
    overall, rows = Tally(), []
    for name in known:
        own, invalid = Tally(), ""
        try:
            for piece in known.chunks(name):
                own.add(piece)
                done += piece.numel()
                if progress:
                    progress(done, work)
        except FileError:
            raise
        except SquisherError as error:
            invalid = str(error)
        overall.include(own)
        rows.append(Row(name, tuple(known.shape(name)), own.distribution(), invalid))
    if progress and done < work:
        progress(work, work)
    totals = overall.distribution()
    found = [*of_values(rows, totals)]
    if isinstance(importance, Importance):
        found += [*of_provenance(importance)]
    return Health(rows, totals, sorted(found, key=lambda diagnosis: SEVERITIES.index(diagnosis.severity)))


def diagnose(importance: Mapping[str, Tensor], progress: Progress | None = None) -> list[Diagnosis]:
    """Return the diagnoses of `examine` alone."""
    return examine(importance, progress).diagnoses
