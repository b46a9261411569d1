"""Remove whole channels, neurons and attention heads: shapes shrink, and so do the layers that depend on them.

Torch-Pruning finds which layers depend on which (norms, next layers, residual sums, grouped convolutions); the scores are ours.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, SquisherError, check_choice, check_fraction, require
from ..importance import checked
from ..names import align, check_known, excluded, live_tensors
from ..storage.tensors import check_finite
from .hugging_face import heads_of
from .unstructured import SCOPES, check_score

__all__ = ["channels"]

_BROKEN = (
    "The pruned model does not run any more: {} Attention needs heads=, the number of heads of its query, key and value layers "
    "({{'encoder.query': 12, ...}}); what else does not follow can be excluded by a pattern."
)
_GUARDED = 1e30  # above every score: such a channel is never among the smallest


def channels(
    model: nn.Module,
    importance: Mapping[str, Tensor] | None,
    example_input: Any,
    sparsity: float = 0.5,
    *,
    scope: str = "global",
    score: str = "fisher",
    gradients: Mapping[str, Tensor] | None = None,
    heads: Mapping[str, int] | None = None,
    exclude: str | None = None,
    minimum: float = 0.05,
    round_to: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """Return a smaller copy of a model without its least important channels, neurons and heads.

    The score of a channel is the sum over the weights and the bias that produce it (the rows of its layer, of all layers
    whose outputs are added). The layer that gives the model's output is left alone.

    Args:
        model: A module that can be traced with `example_input`; it is not changed.
        importance: Importance by parameter name; not needed for magnitude, random and orthoreg.
        example_input: A tensor, or a tuple or dictionary of arguments, as the model takes them.
        sparsity: The fraction of channels to remove, from 0 to below 1.
        scope: `"global"` ranks all channels together, `"tensor"` each layer by itself.
        score: `"fisher"` Σ½θ²F; `"sqrt"` ½(Σθ√F)²; `"magnitude"` Σθ²; `"importance"` ΣF; `"random"`;
            `"orthoreg"` (Σθĝ)² with the mean gradient ĝ, as OrthoReg scores filters.
        gradients: The mean gradient by parameter name, for orthoreg.
        heads: For attention: the number of heads of each query, key and value layer, by module name. Whole heads are then
            removed there. By default what the config of a Hugging Face model says (`heads_of`); {} for none.
        exclude: A regular expression: modules whose names it matches keep their channels.
        minimum: The fraction of every layer that stays at least (and always one channel or head), best first.
        round_to: Widths are multiples of this.
        seed: The seed of random scores.

    Returns:
        The smaller copy.

    Raises:
        SquisherError: torch-pruning is missing, the model cannot be traced, or the request is impossible.
        NamingError: Names or shapes of importance and model do not fit.
    """
    check_score(score, importance, ("sqrt", "orthoreg"))
    check_fraction("sparsity", sparsity, "of channels to remove")
    if sparsity == 1:
        raise ArgumentError("A sparsity of 1 would remove every channel: it must be below 1.")
    check_choice("scope", scope, SCOPES)
    check_fraction("minimum", minimum, "of each layer that stays at least")
    if round_to is not None and not (isinstance(round_to, int) and round_to > 0):
        raise ArgumentError(f"round_to is what widths are multiples of, 1 or more, not {round_to!r}.")
    if score == "orthoreg" and gradients is None:
        raise ArgumentError("The score orthoreg needs gradients=, the mean gradient of the loss by parameter name.")
    left_out = excluded(exclude, [name for name, _ in model.named_modules() if name])
    for name, parameter in model.named_parameters():
        check_finite(parameter, name)
    for name, gradient in (gradients or {}).items():
        check_finite(gradient, name, "the gradients")
    torch_pruning = require("torch_pruning", "prune", "prune.channels")
    smaller = copy.deepcopy(model)
    values = gradients if score == "orthoreg" else None if importance is None else checked(importance)
    modules = dict(smaller.named_modules())
    if heads is None:
        heads = heads_of(model)
        if len(set(heads.values())) > 1:  # Torch-Pruning's search for dependencies would not end
            raise SquisherError(
                "Torch-Pruning cannot follow grouped keys and values (num_key_value_heads below num_attention_heads): prune single "
                "weights with prune.weights instead."
            )
    check_known(heads, modules, ("heads=", "the model"))
    head_counts = {modules[name]: count for name, count in heads.items()}
    scorer = _Scorer(smaller, values, score, minimum, seed, head_counts, torch_pruning)
    before, last = _outputs(smaller, example_input, "The model does not run on the example input: {}")
    ignored = [*last, *(modules[name] for name in modules if name in left_out)]
    try:
        pruner = torch_pruning.pruner.BasePruner(
            smaller,
            example_input,
            importance=scorer,
            global_pruning=scope == "global",
            pruning_ratio=sparsity,
            ignored_layers=ignored,
            round_to=round_to,
            in_channel_groups={},
            out_channel_groups={},
            num_heads=dict(head_counts),
            prune_num_heads=bool(heads),
            prune_head_dims=not heads,
            head_pruning_ratio=sparsity if heads else 0.0,
        )
        if sparsity:
            pruner.step()
    except SquisherError:
        raise
    except Exception as error:
        raise SquisherError(
            f"Torch-Pruning cannot prune this model: {error}. Exclude what it does not follow."
        ) from error
    gone = [name for name, module in modules.items() if pruner.num_heads.get(module, 1) < 1]
    if gone:
        raise SquisherError(
            f"A sparsity of {sparsity} would remove every head of {gone[0]!r}, but each layer keeps at least one. Lower it, or "
            'rank each layer by itself with scope="tensor".'
        )
    _tell_attention(smaller, pruner.num_heads)
    if sparsity and all(p.shape == q.shape for p, q in zip(model.parameters(), smaller.parameters(), strict=True)):
        raise SquisherError(f"A sparsity of {sparsity} removes no channel of this model: nothing is left that may go.")
    after = _outputs(smaller, example_input, _BROKEN)[0]
    if before != after:
        raise SquisherError(
            f"The model's output would change its shape, from {before} to {after}. Name the layer that gives it in exclude."
        )
    return smaller


class _Scorer:
    """The score that Torch-Pruning asks for: one number per channel, for a group of layers that lose the same channels."""

    def __init__(
        self,
        model: nn.Module,
        values: Mapping[str, Tensor] | None,
        score: str,
        minimum: float,
        seed: int,
        heads: Mapping[nn.Module, int],
        library: Any,
    ) -> None:
        self._values, self._score, self._heads = values, score, heads
        self._minimum, self._seed, self._calls = minimum, seed, 0
        self._outputs = (
            library.prune_conv_out_channels,
            library.prune_linear_out_channels,
            library.prune_depthwise_conv_out_channels,
        )
        parameters, tied = live_tensors(model)
        called = ("the gradients" if score == "orthoreg" else "the importance", "the model")
        matches = {} if values is None else align(values, parameters, called, tied=tied)
        self._names = {id(parameters[name]): importance_name for name, importance_name in matches.items()}

    @torch.no_grad()
    def __call__(self, group: Any) -> Tensor | None:
        parts: list[tuple[Tensor, list[int]]] = []
        heads = max((self._heads.get(item[0].target.module, 1) for item in group), default=1)
        for item in group:
            dep, indices = item[0], list(item[1])
            roots = list(item.root_idxs)
            if dep.handler not in self._outputs or any(root is None for root in roots):
                continue
            found = self._of_layer(dep.target.module)
            if found is not None:
                parts.append((found[indices], roots))
        if not parts:
            return None
        width = max(max(roots) for _, roots in parts) + 1
        total = torch.zeros(width, dtype=torch.float64)
        for values, roots in parts:
            total.scatter_add_(0, torch.tensor(roots), values)
        self._calls += 1
        if self._score == "random":
            digest = hashlib.sha256(f"{self._seed} {self._calls}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
            total = torch.rand(width, generator=generator).double()
        total = total.clamp_max(_GUARDED / 2)  # Torch-Pruning ranks in float32; the guard stays above everything
        # Where heads are removed whole, they are ranked by the mean of their channels, and guarded whole.
        units = total.view(heads, -1) if heads > 1 and width % heads == 0 else total.view(-1, 1)
        kept = max(1, math.ceil(self._minimum * len(units)))
        units[units.mean(1).topk(kept).indices] += _GUARDED
        return total

    def _of_layer(self, layer: nn.Module) -> Tensor | None:
        """Return the score of each output channel of one layer."""
        terms = []
        for attribute in ("weight", "bias"):
            parameter = getattr(layer, attribute, None)
            if not isinstance(parameter, Tensor):
                continue
            theta = _by_output(layer, attribute, parameter.detach().double().cpu())
            if self._score in ("magnitude", "random"):
                terms.append(theta.square().sum(1))
                continue
            name = self._names.get(id(parameter))
            if name is None or self._values is None:
                continue
            value = _by_output(layer, attribute, self._values[name].detach().cpu().double())
            if self._score == "importance":
                terms.append(value.sum(1))
            elif self._score == "fisher":
                terms.append(0.5 * (theta.square() * value).sum(1))
            else:  # a sum first, squared below
                terms.append((theta * (value.sqrt() if self._score == "sqrt" else value)).sum(1))
        if not terms:
            return None
        total = torch.stack(terms).sum(0)
        if self._score == "sqrt":
            return 0.5 * total.square()
        return total.square() if self._score == "orthoreg" else total


def _by_output(layer: nn.Module, attribute: str, values: Tensor) -> Tensor:
    """Return values with one row for each output channel."""
    if attribute == "bias":
        return values.view(-1, 1)
    return values.transpose(0, 1).flatten(1) if getattr(layer, "transposed", False) else values.flatten(1)


def _outputs(model: nn.Module, example: Any, refusal: str) -> tuple[list[tuple[int, ...]], list[nn.Module]]:
    """Return the shapes of the model's outputs, and the layers that compute them."""
    given: dict[int, nn.Module] = {}
    seen: list[Tensor] = []  # kept alive, so that no address is used twice

    def remember(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and isinstance(getattr(module, "weight", None), Tensor):
            given[output.data_ptr()] = module
            seen.append(output)

    hooks = [module.register_forward_hook(remember) for module in model.modules()]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(example, dict):
                output = model(**example)
            else:
                output = model(*example) if isinstance(example, (tuple, list)) else model(example)
    except Exception as error:
        raise SquisherError(refusal.format(error)) from error
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    tensors = list(_tensors(output))
    return [tuple(t.shape) for t in tensors], [given[t.data_ptr()] for t in tensors if t.data_ptr() in given]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _tell_attention(model: nn.Module, heads: Mapping[nn.Module, int]) -> None:
    """Set the number of heads of attention modules, which they keep as an attribute."""
    for module in model.modules():
        inside = [child for child in module.children() if child in heads]
        if not inside:
            continue
        count = max(heads[child] for child in inside)
        width = max(cast(int, child.out_features) // heads[child] for child in inside)
        facts = {"num_heads": count, "n_heads": count, "num_attention_heads": count, "n_head": count}
        facts |= {"all_head_size": count * width, "dim": count * width, "attention_head_size": width, "head_dim": width}
        for attribute, value in facts.items():
            if isinstance(getattr(module, attribute, None), int):
                setattr(module, attribute, value)
