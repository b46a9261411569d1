"""What autograd's graph says: which leaves a gradient would reach, and through which operations."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

__all__ = ["NEEDING_NO_VALUES", "leaves_behind", "operations_behind"]

NEEDING_NO_VALUES = {
    f"{name}Backward{n}"
    for name in [
        "Embedding",
        "Slice",
        "Select",
        "View",
        "UnsafeView",
        "Reshape",
        "ReshapeAlias",
        "Unsqueeze",
        "Squeeze",
        "Expand",
        "Transpose",
        "Permute",
        "T",
        "Alias",
        "Clone",
        "ToCopy",
        "Index",
        "IndexSelect",
        "Split",
        "SplitWithSizes",
        "Unbind",
        "Narrow",
        "Chunk",
        "Add",
        "Sub",
        "Neg",
        "Cat",
        "Stack",
        "Flip",
        "Roll",
        "Repeat",
    ]
    for n in range(3)
}
"""Steps between a parameter and what is made of it whose gradient needs shapes and indices only."""


def leaves_behind(t: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yield the leaves that a gradient of this tensor would reach, each with the operation that it would come from."""
    if t.grad_fn is None:
        if t.requires_grad:
            yield t, "itself"
        return
    seen, stack = {t.grad_fn}, [t.grad_fn]
    while stack:
        node = stack.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if hasattr(child, "variable"):
                yield child.variable, node.name()
            elif child not in seen:
                seen.add(child)
                stack.append(child)


def operations_behind(t: Tensor) -> set[str]:
    """Return the names of the operations behind a tensor."""
    seen, stack = set(), [t.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen and not hasattr(node, "variable"):
            seen.add(node)
            stack += [child for child, _ in node.next_functions]
    return {node.name() for node in seen}
