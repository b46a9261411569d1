"""Model folders in Python, as the commands use them: open, find the importance, prune, write.

    model = open_model("my-model")                            # lazy: nothing is read until it is asked for
    importance = open_importance("my-model")                  # squisher.safetensors beside it, or its optimizer's
    merged = squisher.merge.fisher([model.weights, other.weights], [importance, other_importance])
    write_model("merged", merged, like=model.path)            # whole or not at all, with config and tokenizer

`merge_folders` and `prune_folder` do what `squisher merge` and `squisher prune` do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..importance import FILE_NAME, Importance
from ..importance.weights import check_weights
from ..prune import weights as prune_weights
from ..storage import hub, safetensors
from ..storage.folders import Model, open_model, write_model
from ..storage.tensors import tied_names
from .cards import described, pruning_card
from .merging import merge_folders, open_importance

__all__ = ["Model", "Pruning", "merge_folders", "open_importance", "open_model", "prune_folder", "write_model"]


@dataclass(frozen=True)
class Pruning:
    """What `prune_folder` did.

    Attributes:
        counts: For each pruned tensor, how many entries stay and how many there are.
        settings: How it was pruned.
    """

    counts: dict[str, tuple[int, int]]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def zeros(self) -> int:
        """Entries that are zero now."""
        return self.total - sum(stays for stays, _ in self.counts.values())

    @property
    def total(self) -> int:
        """Entries of all pruned tensors."""
        return sum(size for _, size in self.counts.values())


def prune_folder(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    importance: Importance | str | os.PathLike[str] | None = None,
    *,
    sparsity: float | None = None,
    nm: str | None = None,
    scope: str = "global",
    score: str = "fisher",
    exclude: str | None = None,
    seed: int = 0,
    any_weights: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Pruning:
    """Set the least important weights of a model on disk to zero, and write it with a card; it need not fit into memory.

    Args:
        model: A model folder or weight file.
        out: The folder to make, or a `.safetensors` file.
        importance: An importance, or where one is; by default the one beside the model.
        sparsity: The fraction of weights to set to zero.
        nm: A pattern such as `"2:4"` instead.
        scope: `global` or `tensor`.
        score: `fisher`, `magnitude`, `importance` or `random`.
        exclude: A regular expression: tensors to leave as they are.
        seed: Of random scores.
        any_weights: Accept an importance that was made with other weights.
        progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        SquisherError: With one sentence on what is wrong; nothing is then left behind.
    """

    def told(what: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, of: progress(what, done, of)

    opened = open_model(model)
    beside = opened.path.is_dir() and safetensors.exists(opened.path / FILE_NAME)
    if importance is None and (beside or score in ("fisher", "importance")):
        importance = model
    if importance is not None and not isinstance(importance, Importance):
        importance = open_importance(Path(importance))
    label = hub.Address.read(model).repo if hub.is_hub_id(model) else opened.name
    check_weights([importance], [opened.weights], [label], any_weights)
    options: dict[str, Any] = {"sparsity": sparsity, "nm": nm, "scope": scope, "score": score, "exclude": exclude}
    pruned = prune_weights(opened.weights, importance, **options, seed=seed, progress=told("ranking"))
    settings = {key: value for key, value in options.items() if value is not None}
    settings |= {"seed": seed} if score == "random" else {}
    done = Pruning(pruned.counts(told("counting")), settings)
    card = pruning_card(label, settings, None if importance is None else described(importance), done.counts)
    like = opened.path if opened.path.is_dir() else None
    write_model(out, pruned, like, card=card, leave_out=tied_names(opened.weights), progress=told("writing"))
    return done
