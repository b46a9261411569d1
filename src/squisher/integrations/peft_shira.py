"""PEFT's SHiRA with an importance: its adapters train the entries of each layer that matter most.

    config = peft.ShiraConfig(r=8, mask_type="squisher")
    config.mask_fn = shira_mask_fn(importance, model)
    model = peft.get_peft_model(model, config)

SHiRA fixes the budget of a layer at r · (inputs + outputs) and works on linear layers; `squisher.mask` has one budget for all
parameters instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NamingError, SquisherError, near
from ..names import live_parameters
from ..order import per_source
from ..storage.tensors import chunks_of, shape_of

__all__ = ["shira_mask_fn"]


def shira_mask_fn(importance: Mapping[str, Tensor], model: nn.Module) -> Callable[..., Tensor]:
    """Return a `mask_fn` for `peft.ShiraConfig`: the r · (inputs + outputs) most important entries of each layer.

    Args:
        importance: By parameter name; only the layers that SHiRA asks for are read.
        model: The model that `get_peft_model` is called with, before it is: the function is only told the layer, and
            finds its name here.

    Returns:
        A function of a linear layer and r. It cannot be saved with the adapter; the indices that it leads to are.
    """
    names = {id(p.parameter): (p.name, p.live_name, *p.aliases) for p in live_parameters(model)}

    def mask_fn(base_layer: nn.Module, r: int, **_: Any) -> Tensor:
        weight = base_layer.weight
        if not isinstance(weight, Tensor) or id(weight) not in names:
            raise NamingError(
                "SHiRA asks for a layer that is not in the model that shira_mask_fn was made with; make it with the very "
                "model that get_peft_model is called with."
            )
        name = next((n for n in names[id(weight)] if n in importance), None)
        if name is None:
            wanted = names[id(weight)][0]
            raise NamingError(
                f"There is no importance for {wanted!r}, which SHiRA is to train.{near(wanted, importance)}"
            )
        if shape_of(importance, name) != weight.shape:
            raise NamingError(
                f"{name!r} has the shape {tuple(weight.shape)}, but its importance {tuple(shape_of(importance, name))}."
            )
        budget = r * sum(weight.shape)
        if budget > weight.numel():
            raise SquisherError(
                f"r={r} asks for {budget:,} entries of {name!r}, which has {weight.numel():,}. Choose a smaller r."
            )
        choice = per_source({name: lambda: chunks_of(importance, name)}, {name: budget})
        return torch.cat(list(choice.chunks(name))).view(weight.shape).to(weight)

    return mask_fn
