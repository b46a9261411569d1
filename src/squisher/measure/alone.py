"""Whether an example has the same outputs on its own as in its batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import SquisherError

__all__ = ["check_alone"]

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_COARSE = 5e-2


def check_alone(model: nn.Module, values: Tensor, alone: Mapping[int, Tensor]) -> None:
    """Compare the outputs of some examples alone with those of the batch.

    Args:
        model: what they are outputs of.
        values: of the whole batch, `Outputs.values`.
        alone: of some of its examples.

    Raises:
        SquisherError: they differ, so examples influence each other.
    """
    coarse = any(t.dtype in (torch.bfloat16, torch.float16) for t in (*model.parameters(), values))
    tolerance = _COARSE if coarse or torch.is_autocast_enabled(values.device.type) else _TOLERANCE[values.dtype]
    for n, own in alone.items():
        row = values[n]
        if own.shape == row.shape:
            finite = row.isfinite() & own.isfinite()
            off = float((own - row)[finite].abs().max()) if bool(finite.any()) else 0.0
            size = float(values[values.isfinite()].abs().max()) if bool(finite.any()) else 1.0
            if off <= tolerance * max(size, 1e-6):
                continue
            found = f"differ by {off:.1e} (the largest output is {size:.1e})"
        else:
            found = f"have the shape {tuple(own.shape)} instead of {tuple(row.shape)}"
        raise SquisherError(
            f"Examples influence each other: the outputs of example {n} on its own {found} from those in its batch of {len(values)}, "
            "so it has no gradient of its own in the batch. A batch statistic in the forward pass or the loss, a contrastive loss, or "
            "an input that all examples share and whose first size equals the batch size can be the reason. Use method='loop' for "
            "every example on its own, or per='batch' for whole batches."
        )
