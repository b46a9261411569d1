"""Mixed-precision quantisation: the loss of every tensor at every width, and the widths of least total loss under a budget.

    found = squisher.quantize.sensitivity(weights, importance, bits=(2, 3, 4, 8), group=64)
    plan = squisher.quantize.allocate(found, bits_per_weight=4.5)

The loss of a tensor is ½ Σ F·(w − Q(w))², the second-order increase of the training loss when its weights are rounded. (The
importance matrix of llama.cpp is something else: the mean square of a layer's inputs, which steers the rounding inside a tensor.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import ArgumentError, SquisherError, check_choice, check_positive
from .importance import checked, tied_in
from .names import align_tied, check_known, check_named, check_unquantized, excluded
from .storage.tensors import (
    CHUNK,
    Computed,
    Progress,
    check_finite,
    chunks_of,
    dtype_of,
    not_finite,
    numel_of,
    one_thread,
    recut,
    shape_of,
    tied_names,
)

__all__ = ["SCHEMES", "Plan", "Quantizer", "Sensitivity", "allocate", "sensitivity", "simulate"]

SCHEMES = ("affine", "symmetric", "llama.cpp")
_STATES = 20_000  # the most partial assignments that the search keeps


@dataclass(frozen=True)
class Quantizer:
    """Rounding to the nearest of 2^bits evenly spaced values, with a scale (and an offset) for every group of a row.

    Attributes:
        name: A ggml type, or scheme and width.
        bits: The width of a value.
        group: How many values share a scale; the last group of a row may be shorter.
        affine: Whether the values range from the group's smallest to its largest; otherwise they are symmetric around 0.
        overhead: The bits of a group's scale and offset.
    """

    name: str
    bits: int
    group: int
    affine: bool
    overhead: int

    def size(self, shape: Sequence[int]) -> int:
        """Return the bits that a tensor takes, scales and offsets included."""
        row, numel = math.prod(shape[1:]), math.prod(shape)
        return numel * self.bits + numel // max(row, 1) * -(-row // self.group) * self.overhead

    def rounded(self, rows: Tensor) -> Tensor:
        """Round a matrix whose rows consist of groups; the last group of a row may be shorter."""
        width = rows.shape[1]
        group = min(self.group, width)
        # The last value of a row completes its last group, and changes neither that group's limits nor its rounding.
        missing = -width % group
        rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], 1) if missing else rows
        groups = rows.unflatten(1, (-1, group))
        if self.affine:
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            step = (high - low) / (2**self.bits - 1)
            level = ((groups - low) / torch.where(step > 0, step, 1)).round_().clamp_(0, 2**self.bits - 1)
            out = level.mul_(step).add_(low)
        else:
            most = 2 ** (self.bits - 1) - 1
            step = groups.abs().amax(-1, keepdim=True) / most
            out = (groups / torch.where(step > 0, step, 1)).round_().clamp_(-most, most).mul_(step)
        return out.flatten(1)[:, :width]


# The overhead is such that 256 values take the bytes of ggml's super-blocks.
_GGML = {
    2: Quantizer("q2_K", 2, 16, True, 10),
    3: Quantizer("q3_K", 3, 16, False, 7),
    4: Quantizer("q4_K", 4, 32, True, 16),
    5: Quantizer("q5_K", 5, 32, True, 16),
    6: Quantizer("q6_K", 6, 16, False, 9),
    8: Quantizer("q8_0", 8, 32, False, 16),
}


@dataclass(frozen=True)
class Sensitivity:
    """The loss and the size of each tensor at each width.

    Attributes:
        losses: ½ Σ F·(w − Q(w))² by tensor and width.
        sizes: Bits, scales and offsets included, by tensor and width.
        numel: Number of weights by tensor.
        quantizers: The quantiser of each width.
        kept: Tensors that are not quantised, and why.
    """

    losses: dict[str, dict[int, float]]
    sizes: dict[str, dict[int, int]]
    numel: dict[str, int]
    quantizers: dict[int, Quantizer] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        widths = sorted({bits for losses in self.losses.values() for bits in losses})
        return f"Sensitivity({len(self.losses)} tensors, {sum(self.numel.values()):,} weights, at {widths} bits; {len(self.kept)} kept)"

    def uniform(self, bits: int) -> Plan:
        """Return the plan that gives every tensor the same width, which must have been measured."""
        if any(bits not in losses for losses in self.losses.values()):
            raise ArgumentError(f"is a width that was measured, and {bits!r} was not.", "bits")
        return _plan(self, dict.fromkeys(self.losses, bits), 0.0)


@dataclass(frozen=True)
class Plan:
    """A width for every tensor.

    Attributes:
        bits: Width by tensor.
        loss: The total loss.
        bits_per_weight: The mean over the weights of these tensors, scales and offsets included.
        gap: The largest fraction of `loss` by which another assignment could be better; 0 if none can be.
        sensitivity: The measurement behind the plan.
    """

    bits: dict[str, int]
    loss: float
    bits_per_weight: float
    gap: float
    sensitivity: Sensitivity

    def __repr__(self) -> str:
        counts = {width: list(self.bits.values()).count(width) for width in sorted(set(self.bits.values()))}
        return f"Plan({self.bits_per_weight:.3g} bits per weight, loss {self.loss:.3g}; tensors by width {counts})"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain types, for JSON."""
        found = self.sensitivity
        quantizers = {str(b): vars(q) for b, q in found.quantizers.items()}
        return {
            "bits_per_weight": self.bits_per_weight,
            "loss": self.loss,
            "gap": self.gap,
            "quantizers": quantizers,
            "tensors": {
                name: {"bits": b, "numel": found.numel[name], "loss": found.losses[name][b]}
                for name, b in self.bits.items()
            },
            "kept": dict(found.kept),
        }


def quantizers_of(bits: Sequence[int], group: int, scheme: str) -> dict[int, Quantizer]:
    """Return the quantiser of each width.

    Raises:
        SquisherError: The scheme, a width or the group does not exist.
    """
    check_choice("scheme", scheme, SCHEMES)
    if not isinstance(bits, Sequence):
        raise ArgumentError(f"are the widths to choose from, such as (2, 3, 4, 8), not {bits!r}.", "bits")
    known = list(_GGML) if scheme == "llama.cpp" else list(range(2, 9))
    if not bits or not all(isinstance(b, Integral) and b in known for b in bits):
        raise ArgumentError(f"for {scheme} are some of {', '.join(map(str, known))}, not {list(bits)}.", "bits")
    widths = sorted(set(map(int, bits)))
    if scheme == "llama.cpp":
        return {b: _GGML[b] for b in widths}
    if not (isinstance(group, int) and group > 0):
        raise ArgumentError(f"is the number of weights that share a scale, 1 or more, not {group!r}.", "group")
    affine = scheme == "affine"
    return {b: Quantizer(f"{scheme}-{b}", b, group, affine, 32 if affine else 16) for b in widths}


def sensitivity(
    weights: Mapping[str, Tensor],
    importance: Mapping[str, Tensor],
    bits: Sequence[int] = (2, 3, 4, 8),
    group: int = 64,
    *,
    scheme: str = "affine",
    exclude: str | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure the loss of every tensor at every width: ½ Σ F·(w − Q(w))², streamed.

    Tensors with two or more dimensions take part. A row is everything under one index of the first dimension; groups never
    cross rows. Memory is bounded by a chunk, or by one row where the group does not divide it.

    Args:
        weights: Any mapping, in memory or in files.
        importance: A mapping with names and shapes of the weights. Weights without an importance are listed in `kept`.
        bits: The widths to choose from: 2 to 8.
        group: How many weights share a scale; not for llama.cpp, whose types fix it.
        scheme: `"affine"` (16-bit scale and offset per group, as MLX), `"symmetric"` (16-bit scale), or `"llama.cpp"` (q2_K, q3_K,
            q4_K, q5_K, q6_K and q8_0 with their block sizes; llama.cpp itself searches and rounds the scales of k-quants).
        exclude: A regular expression: tensors that are not quantised.
        progress: Called with the weights read so far and in all.

    Raises:
        NamingError: Names or shapes of importance and weights do not fit.
        SquisherError: A width, group or scheme does not exist, or weights are not finite.
    """
    quantizers = quantizers_of(bits, group, scheme)
    names, kept = _candidates(weights, importance, exclude)
    total, done = sum(numel_of(weights, name) for name in names), 0
    losses: dict[str, dict[int, float]] = {}
    with one_thread():  # sums that do not depend on the number of threads
        for name, importance_name in names.items():
            sums = dict.fromkeys(quantizers, 0.0)
            for w, f in _runs(weights, name, importance, importance_name, quantizers):
                for b, quantizer in quantizers.items():
                    error = (quantizer.rounded(w) - w).double()
                    sums[b] += 0.5 * float((error * error * f).sum())
                done += w.numel()
                if progress is not None:
                    progress(done, total)
            if not all(map(math.isfinite, sums.values())):
                raise not_finite(name)
            losses[name] = sums
    shapes = {name: tuple(shape_of(weights, name)) for name in names}
    sizes = {name: {b: q.size(shape) for b, q in quantizers.items()} for name, shape in shapes.items()}
    return Sensitivity(losses, sizes, {name: math.prod(s) for name, s in shapes.items()}, quantizers, kept)


def simulate(
    weights: Mapping[str, Tensor], bits: Mapping[str, int], group: int = 64, *, scheme: str = "affine"
) -> Mapping[str, Tensor]:
    """Return the weights of a quantised model: rounded and converted back to their type, lazily.

    Args:
        weights: Any mapping.
        bits: Width by tensor, such as `plan.bits`; other tensors stay as they are.
        group: As in `sensitivity`.
        scheme: As in `sensitivity`.

    Raises:
        NamingError: A tensor does not exist.
        SquisherError: A width, group or scheme does not exist, a tensor is a vector, or weights are quantised already or not finite.
    """
    if not isinstance(bits, Mapping):
        raise ArgumentError(f"are widths by tensor, such as plan.bits, not {bits!r}.", "bits")
    check_named(weights, "the model")
    check_known(bits, weights, ("the plan", "the model"))
    check_unquantized(weights, bits)
    for name in bits:
        if len(shape_of(weights, name)) < 2:
            raise SquisherError(
                f"{name!r} has the shape {tuple(shape_of(weights, name))}: only tensors of two dimensions or more are quantised."
            )
    return _Rounded(weights, bits, quantizers_of(list(bits.values()), group, scheme))


def allocate(sensitivity: Sensitivity, bits_per_weight: float) -> Plan:
    """Return the assignment of least total loss whose mean width, scales and offsets included, is within a budget.

    This is a multiple-choice knapsack, solved by branch and bound over partial assignments with the Lagrangian relaxation as the
    bound. Of more than 20,000 partial assignments the least promising are dropped; `plan.gap` bounds how much better another
    assignment could be.

    Args:
        sensitivity: What `sensitivity` measured.
        bits_per_weight: The budget, a mean over all weights of these tensors.

    Raises:
        SquisherError: Nothing fits the budget.
    """
    names = list(sensitivity.losses)
    if not names:
        raise SquisherError("There is no tensor to quantise: none with two dimensions has an importance.")
    widths = sorted(sensitivity.losses[names[0]])
    sizes = np.array([[sensitivity.sizes[name][b] for b in widths] for name in names], np.int64)
    losses = np.array([[sensitivity.losses[name][b] for b in widths] for name in names])
    numel, least = sum(sensitivity.numel.values()), int(sizes.min(1).sum())
    check_positive("bits_per_weight", bits_per_weight)
    if math.floor(bits_per_weight * numel + 1e-6) < least:
        raise SquisherError(
            f"bits_per_weight is {bits_per_weight}, but the smallest widths take {least / numel:.4g} already, scales included. Give a "
            "larger budget, or smaller bits."
        )
    chosen, gap = _search(sizes, losses, math.floor(bits_per_weight * numel + 1e-6))
    return _plan(sensitivity, {name: widths[k] for name, k in zip(names, chosen, strict=True)}, gap)


# -- inside ------------------------------------------------------------------------------------------------------------


def _plan(found: Sensitivity, bits: dict[str, int], gap: float) -> Plan:
    loss = math.fsum(found.losses[name][b] for name, b in bits.items())
    size = sum(found.sizes[name][b] for name, b in bits.items())
    return Plan(bits, loss, size / max(sum(found.numel.values()), 1), gap, found)


def _candidates(
    weights: Mapping[str, Tensor], importance: Mapping[str, Tensor], exclude: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the importance's name for each tensor to quantise; and why other matrices are kept."""
    matches, aliases = align_tied(importance, weights, ("the importance", "the model"), tied=tied_in([importance]))
    left_out = excluded(exclude, weights, aliases)
    names, kept = {}, {}
    for name in weights:
        if len(shape_of(weights, name)) < 2 or name in aliases:
            continue
        if name not in matches:
            if dtype_of(weights, name).is_floating_point:
                kept[name] = "no importance"
        elif name in left_out:
            kept[name] = "excluded"
        elif numel_of(weights, name):
            names[name] = matches[name]
    check_unquantized(weights, names)
    return names, kept


def _runs(
    weights: Mapping[str, Tensor],
    name: str,
    importance: Mapping[str, Tensor],
    importance_name: str,
    quantizers: Mapping[int, Quantizer],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights (in the type to compute in) and importances (as float64), as matrices of whole groups."""
    length, width = _run(shape_of(weights, name)[1:].numel(), math.lcm(*(q.group for q in quantizers.values())))
    work = torch.promote_types(dtype_of(weights, name), torch.float32)  # as `simulate` rounds
    pairs = zip(chunks_of(weights, name, length), chunks_of(checked(importance), importance_name, length), strict=True)
    for w, f in pairs:
        yield w.to(work).view(-1, width), f.double().view(-1, width)


def _run(row: int, group: int) -> tuple[int, int]:
    """Return how many values are read at once, and the width of the matrix that they form."""
    if row % group == 0:  # then groups are whole, wherever a chunk begins
        return max(CHUNK // group, 1) * group, group
    return max(CHUNK // row, 1) * row, row


class _Rounded(Computed):
    """Weights after rounding, computed when asked for."""

    def __init__(self, weights: Mapping[str, Tensor], bits: Mapping[str, int], quantizers: Mapping[int, Quantizer]):
        super().__init__(weights)
        self._quantizers, self._aliases = quantizers, tied_names(weights)
        self._bits = {self._aliases.get(name, name): b for name, b in bits.items()}

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks, in order."""
        bits = self._bits.get(self._aliases.get(name, name))
        if bits is None:
            yield from chunks_of(self._like, name, size)
            return
        quantizer, dtype = self._quantizers[bits], self.dtype(name)
        length, width = _run(self.shape(name)[1:].numel(), quantizer.group)

        def rounded(chunk: Tensor) -> Tensor:
            check_finite(chunk, name)
            work = chunk.to(torch.promote_types(dtype, torch.float32)).view(-1, width)
            return quantizer.rounded(work).reshape(-1).to(dtype)

        yield from recut(map(rounded, chunks_of(self._like, name, length)), size)


def _search(sizes: np.ndarray, losses: np.ndarray, budget: int) -> tuple[list[int], float]:
    """Return each tensor's choice, and the largest fraction of the loss by which another assignment could be better."""
    price, chosen = _relaxed(sizes, losses, budget)
    best = float(np.take_along_axis(losses, chosen[:, None], 1).sum())
    # `above` is how much more a choice costs than the cheapest one, at this price of a bit: an assignment exceeds the bound by its sum.
    above = losses + price * sizes
    bound = float(above.min(1).sum()) - price * budget
    above -= above.min(1, keepdims=True)
    rest = np.append(np.cumsum(sizes.min(1)[::-1])[::-1], 0)  # the fewest bits that the tensors from here on take
    cap = min(_STATES, 20_000_000 // len(sizes) + 1)
    size, loss, extra = np.zeros(1, np.int64), np.zeros(1), np.zeros(1)
    steps: list[np.ndarray] = []
    complete = True
    for k in range(len(sizes)):
        size, loss, extra = (np.add.outer(a, b[k]).ravel() for a, b in ((size, sizes), (loss, losses), (extra, above)))
        kept = np.flatnonzero((size + rest[k + 1] <= budget) & (bound + extra < best))
        kept = kept[np.lexsort((loss[kept], size[kept]))]
        lowest = np.minimum.accumulate(np.append(np.inf, loss[kept]))[:-1]
        kept = kept[loss[kept] < lowest]  # the others are dominated by one that is neither larger nor worse
        if len(kept) > cap:
            complete = False
            kept = kept[np.sort(np.argpartition(extra[kept], cap)[:cap])]
        steps.append(kept)
        size, loss, extra = size[kept], loss[kept], extra[kept]
    if len(loss) and loss.min() < best:
        place, best = int(loss.argmin()), float(loss.min())
        for k in reversed(range(len(sizes))):
            place, chosen[k] = divmod(int(steps[k][place]), sizes.shape[1])
    return chosen.tolist(), 0.0 if complete or best <= 0 else max(best - bound, 0.0) / best


def _relaxed(sizes: np.ndarray, losses: np.ndarray, budget: int) -> tuple[float, np.ndarray]:
    """Return the lowest price of a bit at which the cheapest choices fit the budget, and these choices."""

    def at(price: float) -> np.ndarray:
        return (losses + price * sizes).argmin(1)

    low, high = 0.0, float(losses.max() - losses.min()) + 1e-300  # at this price no bit is worth its loss
    if np.take_along_axis(sizes, at(low)[:, None], 1).sum() <= budget:
        return low, at(low)
    for _ in range(200):
        middle = (low + high) / 2
        fits = np.take_along_axis(sizes, at(middle)[:, None], 1).sum() <= budget
        low, high = (low, middle) if fits else (middle, high)
    return high, at(high)
