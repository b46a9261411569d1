"""What p(y | x) is: categorical, tokens, Bernoulli, Gaussian. Signs, sums and scales live only here.

An `Objective` turns the outputs of a model into what the two engines need. The loop squares the gradients of its `terms`,
scalars written down as the definition has them. The fast engine starts backward passes from its `columns`, gradients with
respect to the outputs in closed form. Both describe the same quantity, one example at a time:

    Fisher of example n = Σ over terms of (∇ term_n)² = Σ over columns of (Jᵀ column_n)².

The loss that a Hugging Face model computes itself is compared with ours on the first batch: above all, how labels are shifted.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SquisherError
from ..guard import begin_pass
from ..ranks import whole
from .batches import Batch
from .sampling import categories, normals, uniforms

__all__ = ["IGNORED", "KINDS", "LABELS", "Objective", "Outputs", "compared_with_own"]

KINDS = ("categorical", "tokens", "bernoulli", "gaussian")
LABELS = ("data", "sampled", "exact")
IGNORED = -100
MOST_COLUMNS = 1000
_SIGNS = 1 << 32  # where the draws of signs begin, after those of labels


@dataclass(frozen=True)
class Outputs:
    """What a model said about a batch, in one layout.

    Attributes:
        values: (examples, positions, classes) for categorical and tokens, (examples, positions) for bernoulli and
            gaussian, (examples,) losses for a function; attached to the graph.
        targets: (examples, positions), or None where there are no labels.
        mask: (examples, positions), True where a position counts.
    """

    values: Tensor
    targets: Tensor | None
    mask: Tensor


@dataclass(frozen=True)
class Objective:
    """Which Fisher: the likelihood, where labels come from, and what is squared."""

    likelihood: str | Callable[[nn.Module, Any], Tensor]
    labels: str = "data"
    unit: str = "example"
    draws: int = 1
    seed: int = 0
    shift: int | None = 0
    classes_last: bool = False
    """Whether outputs with several positions are known to have their classes last, as the text models of Hugging Face do."""
    per: str = "example"
    shift_given: bool = False
    signs: int = 0
    """Of unit "token": how many sums of tokens with random signs stand for squaring every token; 0 squares every token."""

    @property
    def each_position(self) -> bool:
        """Whether every position has a backward pass of its own."""
        return self.unit == "token" and not self.signs

    @property
    def several(self) -> bool:
        """Whether an example may have several columns."""
        return self.labels == "exact" or self.draws > 1 or self.signs > 1 or self.each_position

    # -- from a batch to outputs ---------------------------------------------------------------------------------------

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Run the model on a copy of the batch, and bring outputs and labels into one layout."""
        return self.arranged(self.raw(model, batch.copy()), batch)

    def raw(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the model on a batch, which it may change; return its logits, or the losses of a function."""
        begin_pass(model)
        if callable(self.likelihood):
            losses = self.likelihood(model, batch.raw)
            if not isinstance(losses, Tensor) or losses.shape != (batch.size,):
                found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
                raise SquisherError(
                    f"The likelihood function returned {found} for a batch of {batch.size} examples. Expected one loss per "
                    f"example, of shape ({batch.size},): do not reduce over the batch."
                )
            return losses
        try:
            output = model(*batch.args, **batch.kwargs)
        except TypeError as error:
            _refuse_arguments(model, batch, error)
            raise  # of the model itself
        logits = whole(_logits(output))
        if logits.dim() == 0 or logits.shape[0] != batch.size:
            raise SquisherError(
                f"The model returned outputs of shape {tuple(logits.shape)} for a batch of {batch.size} examples; the first "
                "dimension must be the example."
            )
        return logits

    def arranged(self, raw: Tensor, batch: Batch) -> Outputs:
        """Bring what `raw` returned and the labels into one layout."""
        # A sum is several times quicker than a search, and finite if there is nothing to find.
        total = raw.detach().sum(dtype=torch.promote_types(raw.dtype, torch.float32))
        if not bool(total.isfinite()) and bool(raw.isnan().any()):
            bad = [k for k, t in batch.named_tensors() if t.is_floating_point() and bool(t.isnan().any())]
            where = f"its input {bad[0]} holds such values too" if bad else "its inputs do not"
            raise SquisherError(
                f"The model's outputs for a batch of {batch.size} examples hold values that are not numbers (NaN); {where}. A Fisher "
                "of them would be NaN everywhere."
            )
        if callable(self.likelihood):
            return Outputs(raw, None, torch.ones(batch.size, 1, dtype=torch.bool, device=raw.device))
        # Half-precision logits are turned into probabilities in single precision.
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.labels == "data" and batch.labels is None:
            raise SquisherError(
                "labels='data' needs labels, and a batch has none. Give (inputs, labels) or a mapping with 'labels', or "
                "use labels='sampled' or 'exact'."
            )
        arrange = self._classes if self.likelihood in ("categorical", "tokens") else self._reals
        return arrange(logits, batch)

    def _classes(self, logits: Tensor, batch: Batch) -> Outputs:
        labels = batch.labels
        if logits.dim() < 2:
            raise SquisherError(
                f"The likelihood '{self.likelihood}' needs one output per class, and the model returned the shape "
                f"{tuple(logits.shape)}. For one output per example use 'bernoulli' or 'gaussian'."
            )
        if labels is not None:
            if labels.is_floating_point():
                raise SquisherError(
                    f"The likelihood '{self.likelihood}' needs class indices as labels, and they are {labels.dtype}. Use "
                    "likelihood='gaussian' for regression, 'bernoulli' for several yes/no outputs."
                )
            if labels.dim() == logits.dim() == 2 and labels.shape[1] == 1:
                labels = labels[:, 0]
        logits = self._with_classes_last(logits, labels)
        if labels is not None:
            if labels.shape != logits.shape[:-1]:
                raise SquisherError(
                    f"Labels of shape {tuple(labels.shape)} do not fit outputs of shape {tuple(logits.shape)}: expected "
                    f"{tuple(logits.shape[:-1])}, one class index for each row of outputs."
                )
            labels = labels.long()
        values = logits.reshape(logits.shape[0], -1, logits.shape[-1])
        if labels is not None:
            targets = labels.reshape(labels.shape[0], -1)
            mask = targets != IGNORED
            low, high = _range(targets)
            if low < 0:  # perhaps only what is to be ignored
                low, high = _range(targets[mask])
            if low < 0 or high >= values.shape[2]:
                raise SquisherError(
                    f"Labels lie between {low} and {high}, and the model has {values.shape[2]} classes: expected 0 to "
                    f"{values.shape[2] - 1}, or {IGNORED} for 'ignore'."
                )
        else:
            targets = None
            decoder = any(name.startswith("decoder_") for name in batch.kwargs)  # the plain mask is the encoder's then
            name = "decoder_attention_mask" if decoder else "attention_mask"
            given = batch.kwargs.get(name) if self.likelihood == "tokens" else None
            if isinstance(given, Tensor) and given.shape == values.shape[:2]:
                mask = given.bool()
            else:
                mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        shift = min(self._shift(batch), values.shape[1])
        if shift:
            # Output t is about label t + 1. Padding the labels rather than slicing the outputs saves a copy of the outputs.
            mask = F.pad(mask[:, shift:], (0, shift), value=False)
            targets = None if targets is None else F.pad(targets[:, shift:], (0, shift), value=IGNORED)
        return Outputs(values, targets, mask)

    def _with_classes_last(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        """Return outputs with their classes last, wherever labels say that they are: second is torch's layout for images."""
        if logits.dim() == 2:
            return logits
        last = labels is None or labels.shape == logits.shape[:-1]
        second = labels is None or labels.shape == (logits.shape[0], *logits.shape[2:])
        if last and second and self.likelihood != "tokens" and not (self.classes_last and logits.dim() == 3):
            why = (
                "a batch has no labels to tell by"
                if labels is None
                else f"labels of shape {tuple(labels.shape)} fit both"
            )
            raise SquisherError(
                f"Outputs of shape {tuple(logits.shape)} may have their classes second, as torch has them for images, or last, and "
                f"{why}. "
                + ("Give labels, one for each position; or use " if labels is None else "Use ")
                + "likelihood='tokens' for classes that are last, or a function as likelihood."
            )
        return logits.movedim(1, -1) if second and not last else logits

    def _shift(self, batch: Batch) -> int:
        if self.likelihood != "tokens":
            return 0
        if self.shift is not None:
            return self.shift
        ids = batch.kwargs.get("input_ids")
        same = isinstance(ids, Tensor) and batch.labels is not None and ids.shape == batch.labels.shape
        if same and bool(((ids == batch.labels) | (batch.labels == IGNORED)).all()):  # type: ignore[union-attr]
            raise SquisherError(
                "The labels of a batch equal its input_ids, and nothing says whether this model predicts the next token. "
                "Give shift=1 (a causal language model: output t is about label t + 1) or shift=0 (labels lie where outputs do)."
            )
        return 0

    def _reals(self, outputs: Tensor, batch: Batch) -> Outputs:
        values = outputs.reshape(outputs.shape[0], -1)
        if batch.labels is None:
            return Outputs(values, None, torch.ones_like(values, dtype=torch.bool))
        sizes = [[t.shape[0], *(n for n in t.shape[1:] if n != 1)] for t in (batch.labels, outputs) if t.dim()]
        if len(sizes) < 2 or sizes[0] != sizes[1]:
            raise SquisherError(
                f"Labels of shape {tuple(batch.labels.shape)} do not fit outputs of shape {tuple(outputs.shape)}: the "
                f"likelihood '{self.likelihood}' needs one number for each output, in the same order of dimensions."
            )
        targets = batch.labels.reshape(values.shape).to(values.dtype)
        if not bool(targets.isfinite().all()):
            raise SquisherError(
                f"The labels of a batch of {batch.size} examples hold values that are not finite (NaN, infinity). Leave such examples out."
            )
        if self.likelihood == "gaussian":
            return Outputs(values, targets, torch.ones_like(values, dtype=torch.bool))
        mask = targets != IGNORED
        if bool((mask & ((targets < 0) | (targets > 1))).any()):
            raise SquisherError("The likelihood 'bernoulli' needs labels between 0 and 1 (or -100 for 'ignore').")
        return Outputs(values, targets, mask)

    def units(self, outputs: Outputs) -> int:
        """Return how many things the mean is over: tokens that count, or examples in which anything counts."""
        return int((outputs.mask if self.unit == "token" else outputs.mask.any(1)).sum())

    # -- the definition ------------------------------------------------------------------------------------------------

    def terms(self, outputs: Outputs, index: Tensor) -> Iterator[Tensor]:
        """Scalars of shape (examples,) whose squared gradients sum to the Fisher of each example.

        Args:
            outputs: of `outputs`.
            index: where each example is in the stream; sampled labels depend on it.
        """
        if callable(self.likelihood):
            yield outputs.values
        elif self.labels == "exact":
            yield from self._exact_terms(outputs)
        else:
            for draw in range(self.draws if self.labels == "sampled" else 1):
                targets = outputs.targets if self.labels == "data" else self.sample(outputs, index, draw)
                losses = self._losses(outputs, targets) * self.draws**-0.5
                if self.each_position:
                    yield from losses.unbind(1)
                elif self.signs:
                    yield from ((losses * signs).sum(1) for signs in self._drawn_signs(losses, index, draw))
                else:
                    yield losses.sum(1)

    def _losses(self, outputs: Outputs, targets: Tensor | None) -> Tensor:
        """Return the negative log-likelihood of every position, 0 where it does not count."""
        values = outputs.values
        if targets is None:
            raise SquisherError("There are no labels.")
        if self.likelihood == "gaussian":
            return 0.5 * (values - targets) ** 2
        if self.likelihood == "bernoulli":
            losses = F.binary_cross_entropy_with_logits(values, targets.clamp(0, 1), reduction="none")
            return losses * outputs.mask
        losses = F.cross_entropy(values.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view(values.shape[:2])

    def _exact_terms(self, outputs: Outputs) -> Iterator[Tensor]:
        values = outputs.values
        self._refuse_many(outputs)
        # Outputs and positions are independent given x, so the square of their sum has no cross terms in expectation.
        for position in range(values.shape[1]):
            counts = outputs.mask[:, position]
            if self.likelihood == "gaussian":
                yield values[:, position] * counts
                continue
            if self.likelihood == "bernoulli":
                logs = torch.stack([F.logsigmoid(values[:, position]), F.logsigmoid(-values[:, position])], 1)
            else:
                logs = values[:, position].log_softmax(1)
            weights = logs.detach().exp().sqrt()
            for label in range(logs.shape[1]):
                yield weights[:, label] * logs[:, label] * counts

    # -- closed forms --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def columns(self, outputs: Outputs, index: Tensor) -> Iterator[Tensor]:
        """Yield gradients with respect to `outputs.values` that are equivalent to the terms; they may share memory."""
        if callable(self.likelihood):
            yield torch.ones_like(outputs.values)
        elif self.labels == "exact":
            yield from self._exact_columns(outputs)
        elif self.labels == "data":
            yield from self._per_unit(self._gradient(outputs, outputs.targets), index)
        else:
            for draw in range(self.draws):
                column = self._sampled_gradient(outputs, index, draw)
                yield from self._per_unit(column.mul_(self.draws**-0.5) if self.draws > 1 else column, index, draw)

    def _per_unit(self, column: Tensor, index: Tensor, draw: int = 0) -> Iterator[Tensor]:
        if self.signs:
            yield from (column * signs[:, :, None] for signs in self._drawn_signs(column, index, draw))
            return
        if self.unit != "token":
            yield column
            return
        for position in range(column.shape[1]):
            if column[:, position].any():
                one = torch.zeros_like(column)
                one[:, position] = column[:, position]
                yield one

    def _gradient(self, outputs: Outputs, targets: Tensor | None) -> Tensor:
        if targets is None:
            raise SquisherError("There are no labels.")
        values = outputs.values
        if self.likelihood == "gaussian":
            return values - targets
        if self.likelihood == "bernoulli":
            return (values.sigmoid() - targets).masked_fill_(~outputs.mask, 0.0)
        return _minus_one_hot(values.softmax(2), targets, outputs.mask)

    def _sampled_gradient(self, outputs: Outputs, index: Tensor, draw: int) -> Tensor:
        if self.likelihood not in ("categorical", "tokens"):
            return self._gradient(outputs, self.sample(outputs, index, draw))
        # The probabilities that labels are drawn from become the gradient: one tensor of the size of the outputs.
        p = outputs.values.softmax(2)
        return _minus_one_hot(p, self._draw_classes(p, outputs, index, draw), outputs.mask)

    def _exact_columns(self, outputs: Outputs) -> Iterator[Tensor]:
        values = outputs.values
        self._refuse_many(outputs)
        column = torch.zeros_like(values)
        if self.likelihood in ("gaussian", "bernoulli"):
            p = values.sigmoid()
            sizes = torch.ones_like(values) if self.likelihood == "gaussian" else (p * (-values).sigmoid()).sqrt()
            sizes = sizes * outputs.mask
            for position in range(values.shape[1]):
                yield column.zero_().index_copy_(
                    1, torch.tensor([position], device=column.device), sizes[:, position, None]
                )
            return
        # Cholesky factor of diag(p) − ppᵀ, in closed form from the tail sums of p; its last column is zero. Nothing is
        # subtracted from 1, so it is accurate where a class has nearly all the probability.
        p = values.softmax(2) * outputs.mask[:, :, None]
        tail = p.flip(2).cumsum(2).flip(2)
        tiny = torch.finfo(p.dtype).tiny
        for position in range(values.shape[1]):
            for k in range(values.shape[2] - 1):
                here, rest, pk = tail[:, position, k], tail[:, position, k + 1], p[:, position, k]
                ratio = (pk / (here * rest).clamp(min=tiny)).sqrt() * (rest > 0)
                column.zero_()
                column[:, position, k + 1 :] = -p[:, position, k + 1 :] * ratio[:, None]
                column[:, position, k] = rest * ratio
                yield column

    def _drawn_signs(self, like: Tensor, index: Tensor, draw: int) -> Iterator[Tensor]:
        """Yield ±1/√signs for every position: products of two positions' gradients then vanish in expectation, squares stay."""
        for k in range(self.signs):
            drawn = uniforms(self.seed, index, _SIGNS + draw * self.signs + k, like.shape[1])
            yield ((drawn < 0.5).to(like) * 2 - 1) * self.signs**-0.5

    # -- labels from the model -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, outputs: Outputs, index: Tensor, draw: int) -> Tensor:
        """Return labels drawn from the model, in the layout of targets."""
        values = outputs.values.detach()
        if self.likelihood in ("categorical", "tokens"):
            return self._draw_classes(values.softmax(2), outputs, index, draw)
        if self.likelihood == "gaussian":
            noise = normals(self.seed, index, draw, values.shape[1])
            return values + noise.to(values.device, values.dtype)
        drawn = uniforms(self.seed, index, draw, values.shape[1]).to(values.device) < values.double().sigmoid()
        return torch.where(outputs.mask, drawn.to(values.dtype), float(IGNORED))

    def _draw_classes(self, p: Tensor, outputs: Outputs, index: Tensor, draw: int) -> Tensor:
        uniform = uniforms(self.seed, index, draw, p.shape[1])
        drawn = categories(p.flatten(0, 1), uniform.flatten()).view(p.shape[:2])
        return torch.where(outputs.mask, drawn, IGNORED)

    def _refuse_many(self, outputs: Outputs) -> None:
        columns = outputs.values[0].numel()
        if columns > MOST_COLUMNS:
            raise SquisherError(
                f"labels='exact' needs one backward pass per class and output, and this model has {columns} of them (at "
                f"most {MOST_COLUMNS} are done). Use labels='sampled': it estimates the same Fisher without bias."
            )


def _range(labels: Tensor) -> tuple[int, int]:
    if not labels.numel():
        return 0, 0
    low, high = labels.aminmax()
    return int(low), int(high)


def _minus_one_hot(p: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Subtract the one-hot targets from p, in place; zero where the mask is False."""
    index = targets.clamp(min=0)[:, :, None]
    p.scatter_add_(2, index, torch.full_like(index, -1, dtype=p.dtype))
    if not bool(mask.all()):
        p.masked_fill_(~mask[:, :, None], 0.0)
    return p


def _refuse_arguments(model: nn.Module, batch: Batch, error: TypeError) -> None:
    """Raise a SquisherError if the model does not take what the batch holds."""
    taken = inspect.signature(model.forward)
    try:
        taken.bind(*batch.args, **batch.kwargs)
    except TypeError as reason:
        raise SquisherError(
            f"{type(model).__name__} cannot be called with what a batch holds: {reason}. Its forward takes "
            f"{', '.join(taken.parameters)}: give a mapping with these names (and 'labels'), or a function (model, batch) -> losses, one "
            "per example, as likelihood."
        ) from error


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise SquisherError(
            f"The model returned a {type(output).__name__} without logits. Expected a tensor, a tuple that starts with one, "
            "or something with `.logits`; otherwise give a function (model, batch) -> losses, one per example, as likelihood."
        )
    return found


_TOLERANCE = 1e-2  # of the loss: half precision, and sums in another order
_COMPARED = 8  # examples: a forward pass of a whole batch would cost more than the proof


def compared_with_own(model: nn.Module, objective: Objective, batch: Batch) -> tuple[Objective, dict[str, Any]]:
    """Compare the mean loss of some examples with what the model returns as its own.

    Args:
        model: as it will be measured.
        objective: with the shift that was given or guessed.
        batch: the first one.

    Returns:
        The objective, with another shift if that is what the model does and no shift was given; and what to record.
    """
    batch = batch.take(0, min(batch.size, _COMPARED))
    own = _own_loss(model, objective, batch)
    if own is None:
        return objective, {}
    logits, loss = own
    # A model that does not say whether it shifts is asked here.
    found = {
        shift: _mean(logits, batch.labels, shift) for shift in ((0, 1) if objective.likelihood == "tokens" else (0,))
    }
    near = [s for s, ours in found.items() if math.isclose(ours, loss, rel_tol=_TOLERANCE, abs_tol=1e-3 * _TOLERANCE)]
    shift = objective.shift or 0
    if shift in near:
        return objective, {}
    name = type(model).__name__
    if near and not objective.shift_given:
        warnings.warn(
            f"{name} computes its own loss with labels that lie {near[0]} behind the outputs, where {shift} was expected of its name: "
            f"shift={near[0]} is used.",
            stacklevel=7,
        )
        return dataclasses.replace(objective, shift=near[0]), {"shift": near[0]}
    reason = (
        f"it is {loss:.4g} with shift={near[0]}, and shift={shift} was asked for"
        if near
        else "router or auxiliary losses, label smoothing, class weights or another loss can be the reason"
    )
    warnings.warn(
        f"{name} returns the loss {loss:.4g} for the first examples, and the likelihood '{objective.likelihood}' that is measured gives "
        f"{found.get(shift, float('nan')):.4g}: {reason}.",
        stacklevel=7,
    )
    return objective, {"own_loss": loss if math.isfinite(loss) else None, "measured_loss": found.get(shift)}


@torch.no_grad()
def _own_loss(model: nn.Module, objective: Objective, batch: Batch) -> tuple[Tensor, float] | None:
    config = getattr(model, "config", None)
    if objective.likelihood not in ("tokens", "categorical") or batch.labels is None or not hasattr(config, "to_dict"):
        return None
    if batch.args or batch.labels.is_floating_point() or any(m.training for m in model.modules()):
        return None
    try:
        output = model(**{**batch.kwargs, "labels": batch.labels})
    except Exception:  # it takes no labels, or computes no loss: then there is nothing to compare with
        return None
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if (
        not isinstance(loss, Tensor)
        or not isinstance(logits, Tensor)
        or loss.dim()
        or logits.shape[:-1] != batch.labels.shape
    ):
        return None
    return logits, float(loss)


def _mean(logits: Tensor, labels: Tensor | None, shift: int) -> float:
    if labels is None:
        return float("nan")
    if shift:
        logits, labels = logits[:, :-shift], labels[:, shift:]
    return float(F.cross_entropy(logits.float().flatten(0, -2), labels.flatten().long(), ignore_index=IGNORED))
