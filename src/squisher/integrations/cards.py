"""Model cards: what was done to a model, with which importance; no path, host or date, so that the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..importance import FILE_NAME, Importance

__all__ = ["described", "pruning_card", "short_paths"]

_MOST_ROWS = 200


def pruning_card(
    model: str, settings: Mapping[str, Any], importance: str | None, counts: Mapping[str, tuple[int, int]]
) -> str:
    """Return the README.md of a pruned model.

    Args:
        model: What the model before is called.
        settings: How it was pruned: sparsity or pattern, scope, score.
        importance: What the weights were ranked by, in words; None if by no importance.
        counts: For each pruned tensor, how many entries stay and how many there are.
    """
    kept, total = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    share = (total - kept) / total if total else 0.0
    lines = ["---", "tags:", "- pruned", "- squisher", "---", "", "# Pruned model", ""]
    lines += [
        f"`{model}`, pruned with torch-squisher {__version__}: {total - kept:,} of {total:,} weights are zero ({share:.2%}).",
        "",
    ]
    lines += ["Settings: " + ", ".join(f"{key} {value}" for key, value in settings.items()) + "."]
    if importance:
        lines += ["", f"Ranked by: {importance}."]
    lines += ["", "The zeros make the model neither smaller nor faster by themselves.", ""]
    lines += ["| tensor | zero | entries |", "|---|---|---|"]
    for name, (stays, size) in list(counts.items())[:_MOST_ROWS]:
        lines.append(f"| `{name}` | {(size - stays) / size if size else 0.0:.1%} | {size:,} |")
    if len(counts) > _MOST_ROWS:
        lines += ["", f"{len(counts) - _MOST_ROWS} more tensors are not listed."]
    return "\n".join(lines) + "\n"


def described(imp: Importance) -> str:
    """Return what an importance is, in a few words."""
    p = imp.provenance
    if p.kind == "fisher":
        labels = (p.estimator or {}).get("labels")
        parts = ["Fisher", f"{labels} labels" if labels else "", f"{p.examples} examples" if p.examples else ""]
    else:
        steps = (p.steps or {}).get("max")
        name = (p.optimizer or {}).get("class")
        parts = [f"Squisher{f' of {name}' if name else ''}", f"{steps} steps" if steps else ""]
        parts.append(f"batch size {p.batch_size:g}" if p.batch_size else "")
    return ", ".join(part for part in parts if part)


def short_paths(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that tell them apart: run-a/final and run-b/final, not final twice.

    A file called squisher.safetensors is named by its folder. A path that is given twice has one name.
    """
    parts = []
    for path in paths:
        own = [part for part in path.parts if part not in (".", "..", path.anchor)] or [path.resolve().name]
        own[-1] = own[-1] if path.is_dir() else Path(own[-1]).stem
        parts.append(own[:-1] if path.name == FILE_NAME and len(own) > 1 else own)
    different = len({tuple(own) for own in parts})
    for depth in range(1, 1 + max(map(len, parts))):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == different:
            break
    return names
