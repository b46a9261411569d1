"""Files of format version 1, which said in sentences what is a code now: the sentences that version wrote, and their codes."""

from __future__ import annotations

__all__ = ["absence", "pollution"]

_ABSENT = {
    "no gradient ever reached it": "no_gradient",
    "never had a gradient": "no_gradient",
    "not in the optimizer": "not_in_optimizer",
    "not in the optimizer: frozen, or never given to it": "not_in_optimizer",
    "frozen (requires_grad is False)": "frozen",
    "not asked for": "not_requested",
}
_POLLUTION = {
    "It holds the L2 weight decay": "l2",
    "It may hold (Adam and AdamW cannot be told apart in this file) the L2 weight decay": "l2",
    "Gradients were clipped": "clipping",
    "The gradients were clipped": "clipping",
    "The optimizer itself clips": "clipping",
    "AMSGrad": "amsgrad",
    "The gradient of an EWC penalty": "penalty",
    "The loss smooths its labels": "label_smoothing",
    "A step is made of": "added_batches",
    "Each step squares the mean gradient": "accumulated",
    "The optimizer counts": "steps_disagree",
    "It is factored": "factored",
    "It averages g² + eps": "epsilon",
    "The optimizer squares d·g": "step_size",
    "Its average started at one": "start",
    "Rows without a gradient": "sparse",
    "Its gradients are taken at": "other_weights",
    "Another transformation comes before it": "uncertain",
}


def absence(sentence: str) -> dict[str, str]:
    """Return an absence that was written as a sentence."""
    code = "not_floating" if sentence.startswith("not a floating-point tensor") else "other"
    return {"reason": _ABSENT.get(sentence, code), "note": sentence}


def pollution(sentence: str) -> dict[str, str]:
    """Return a pollution that was written as a sentence; its numbers stay in the sentence."""
    found = (code for start, code in _POLLUTION.items() if sentence.startswith(start))
    return {"code": next(found, "other"), "note": sentence}
