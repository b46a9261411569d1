"""`nn.MultiheadAttention` in single steps.

`F.multi_head_attention_forward` uses four parameters inside one call. The same function written as separate projections lets each
of them be seen. Settings that are rare (added key biases, zero attention, static keys, separate projection sizes) stay with torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["multi_head_attention", "supports"]


def supports(arguments: dict[str, Any]) -> bool:
    """Return whether `multi_head_attention` does what torch would do with these arguments."""
    rare = ("bias_k", "bias_v", "static_k", "static_v", "use_separate_proj_weight", "add_zero_attn")
    return not any(arguments.get(name) is not None and arguments[name] is not False for name in rare) and (
        arguments["query"].dim() == 3 and arguments["in_proj_weight"] is not None
    )


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    bias_k: None,
    bias_v: None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the function of the same name does in torch, for (positions, examples, features); arguments as there."""
    targets, examples, width = query.shape
    if query is key and key is value:
        q, k, v = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        # Each input goes through the whole projection and keeps its third, so that the weight is used as it is.
        given = {id(t): t for t in (query, key, value)}
        projected = {name: F.linear(t, in_proj_weight, in_proj_bias).chunk(3, -1) for name, t in given.items()}
        q, k, v = (projected[id(t)][i] for i, t in enumerate((query, key, value)))
    q, k, v = (t.unflatten(-1, (num_heads, width // num_heads)).permute(1, 2, 0, 3) for t in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, examples, num_heads, query.dtype)
    dropout_p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.mT * (width // num_heads) ** -0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        out = (F.dropout(weights, dropout_p) if dropout_p else weights) @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
    out = out.permute(2, 0, 1, 3).reshape(targets, examples, width)
    return F.linear(out, out_proj_weight, out_proj_bias), weights


def _mask(
    attention: Tensor | None, padding: Tensor | None, examples: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """One additive mask that broadcasts against (examples, heads, targets, sources)."""
    mask = None
    if attention is not None:
        mask = _additive(attention, dtype)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (examples, heads))
    if padding is not None:
        padding = _additive(padding, dtype)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
