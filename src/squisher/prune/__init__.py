"""Pruning by importance: single weights, patterns, or whole channels.

    pruned = squisher.prune.weights(weights, importance, sparsity=0.75)       # a mapping; a module is pruned in place
    smaller = squisher.prune.channels(model, importance, example_input, ratio=0.5)  # shapes shrink; needs torch-pruning

Zeros alone make a model neither smaller nor faster; removed channels do.
"""

from __future__ import annotations

from .scoring import Scores, scores
from .structured import channels
from .unstructured import Pruned, weights

__all__ = ["Pruned", "Scores", "channels", "scores", "weights"]
