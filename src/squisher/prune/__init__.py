"""Pruning by importance: single weights, patterns, or whole channels.

    pruned = squisher.prune.weights(weights, importance, sparsity=0.75)       # a mapping; a module is pruned in place
    smaller = squisher.prune.channels(model, importance, example_input, sparsity=0.5)  # shapes shrink; needs torch-pruning
    squisher.prune.save(smaller, "smaller")                                   # a Hugging Face folder; prune.load opens it

Zeros alone make a model neither smaller nor faster; removed channels do. `unstructured` has scores and zeros, `structured` has
channels and heads, `hugging_face` keeps smaller models in folders.
"""

from __future__ import annotations

from .hugging_face import example_input, heads_of, load, save
from .structured import channels
from .unstructured import Pruned, Scores, scores, weights

__all__ = ["Pruned", "Scores", "channels", "example_input", "heads_of", "load", "save", "scores", "weights"]
