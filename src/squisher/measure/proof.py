"""Proof on two examples: what the fast engine computes is what the loop computes.

The gradients that are sent back are drawn at random instead of following from the likelihood: those of a network that is sure of
its answer are too small for their squares to be compared, or zero, and would prove nothing. Where both sides are zero nothing is
proven: `Proof.evident` lists the parameters for which something was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import SquisherError
from ..guard import only_requiring, same_random_numbers
from ..ranks import local_of
from .batches import Batch, filled
from .capture import Obstacle
from .likelihood import IGNORED, Objective, Outputs
from .loop import each_gradient
from .rules import Gradients, examples_of
from .sampling import normals
from .squaring import Pass, forward_pass
from .sums import Sums

__all__ = [
    "Difference",
    "Known",
    "Probe",
    "Proof",
    "check_alone",
    "check_repeats",
    "compare",
    "difference_of",
    "differing",
    "distance",
    "doubts_of",
    "interaction",
    "prove",
    "recall",
    "tolerance_of",
    "total_of",
    "two_of",
]

# How far the square roots may differ, relative to the root of the sum of the squares of what is added up in a gradient.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
_COARSEST = max(_TOLERANCE.values())
# How far the outputs of an example alone may be from those in its batch, relative to the largest.
_SAME = {torch.float64: 1e-6, torch.float32: 1e-3}  # doubles may have gone through single precision inside
_NEARLY_SAME = 5e-2
_SOME = 8  # examples whose losses are compared
_SAMPLED = 1 << 14


@dataclass(frozen=True)
class Proof:
    """What was proven on two examples.

    Attributes:
        program: the sequence of operations.
        evident: the parameters with a gradient that is not zero.
        alone: the outputs of each of the examples on its own.
    """

    program: Any
    evident: set[str]
    alone: dict[int, Tensor]


@dataclass
class Known:
    """What was proven of a model so far, in this call and in earlier ones.

    Attributes:
        state: of the model, the settings and the form of the batches; None if it is not to be remembered.
        batches: how many there were.
        programs: for every sequence of operations, the parameters for which the rules were seen to be right.
        numbers: which the operations were given, in batches of which some examples were run alone; see `doubts_of`.
    """

    state: Any = None
    batches: int = 0
    programs: dict[Any, set[str]] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)

    def begin(self, model: nn.Module) -> None:
        """Count a batch. Until it is done nothing is remembered: what fails is forgotten."""
        self.batches += 1
        _REMEMBERED.pop(model, None)

    def remember(self, model: nn.Module) -> None:
        """Keep this for later calls on the same model."""
        if self.state is not None:
            _REMEMBERED[model] = self


_REMEMBERED: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()


def recall(model: nn.Module, objective: Objective, batch: Batch, parameters: Mapping[str, Tensor]) -> Known:
    """Return what an earlier call proved; nothing, unless the model, its weights, the settings and the form of the batches are the same."""
    if callable(objective.likelihood):  # it may hold the model, which would then be kept for ever
        return Known()
    tensors = [*parameters.values(), *model.buffers()]
    state = (
        {f.name: getattr(objective, f.name) for f in fields(objective) if f.name != "seed"},
        [(id(t), 0 if t.is_inference() else local_of(t)._version, t.dtype, t.device) for t in tensors],
        list(parameters),
        [(id(m), m.training) for m in model.modules()],
        [(name, t.shape[1:], t.dtype) for name, t in batch.named_tensors()],
        [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in {t.device.type for t in tensors}],
    )
    known = _REMEMBERED.get(model)
    return known if known is not None and known.state == state else Known(state)


def prove(
    sums: Sums,
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    index: Tensor,
    parameters: Mapping[str, Tensor],
) -> Proof | None:
    """Compare the fast engine with the loop on two examples, parameter by parameter.

    Args:
        sums: used as scratch memory while it is empty.
        model: in the mode and on the device that are wanted.
        objective: which Fisher.
        batch: where the examples are taken from.
        index: where its examples are in the stream.
        parameters: what is to be computed, by name.

    Returns:
        What was proven, or None if no label counts.

    Raises:
        Obstacle: something differs, or cannot be done at once.
    """
    if not callable(objective.likelihood):
        objective = Probe.of(objective)
    chosen = two_of(batch)
    if chosen is None or len(chosen) < 2:
        return None
    two, index = batch.select(chosen), index[chosen]
    scratch = sums if not sums else Sums(sums.parameters, sums.dtype)
    try:
        return _proven(scratch, model, objective, two, index, parameters, chosen)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # if it is the model's own, the loop will raise it
        said = str(error).strip().splitlines()
        raise Obstacle(
            {"": f"an operation fails when it is followed: {said[0] if said else type(error).__name__}"}
        ) from error
    finally:
        with torch.no_grad():
            for total in scratch.values():  # in place: its memory is used again at once
                total.zero_()


def _proven(
    scratch: Sums,
    model: nn.Module,
    objective: Objective,
    two: Batch,
    index: Tensor,
    parameters: Mapping[str, Tensor],
    chosen: list[int],
) -> Proof:
    bounds: dict[str, list[Gradients]] = {}
    with only_requiring(model, parameters.values()):
        one, outputs = forward_pass(model, objective, two, parameters)
        program, captured, one.bounds = one.program, one.captured, bounds
        one.backward(outputs, index, scratch)
    differences = {name: Difference(scratch[name]) for name in captured}
    unseen: dict[str, str] = {}

    def receive(name: str, gradient: Tensor) -> None:
        if name in differences:
            differences[name].subtract(gradient)
        elif bool(gradient.any()):
            unseen[name] = "it is used in an operation without a rule"

    alone: list[Tensor] = []
    each_gradient(receive, model, two, index, objective, parameters, on_arrival=not one.reentrant, seen=alone)
    wrong = dict(unseen)
    for name, difference in differences.items():
        wrong |= _differing(name, difference.error, bounds.pop(name, []), scratch[name], one.types)
    if wrong:
        raise Obstacle(wrong)
    evident = {name for name, difference in differences.items() if difference.largest}
    return Proof(program, evident, dict(zip(chosen, alone, strict=True)))


def compare(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    bounds: Mapping[str, list[Gradients]],
    types: Iterable[torch.dtype],
) -> dict[str, str]:
    """Return what differs between sums of squares and the loop's, and how.

    Args:
        found: the sums, by name.
        expected: the loop's.
        bounds: the squares of everything that was added up in the gradients, where they are known.
        types: of the gradients.
    """
    wrong: dict[str, str] = {}
    for name, theirs in expected.items():
        error = partial(_relative, found[name], theirs)
        wrong |= _differing(name, error, bounds.get(name, []), theirs, types)
    return wrong


def _differing(
    name: str,
    error: Callable[[Tensor | None], float],
    bounds: list[Gradients],
    like: Tensor,
    types: Iterable[torch.dtype],
) -> dict[str, str]:
    """Return how a parameter differs from the loop; nothing if it does not.

    Rounding is measured by the gradients themselves. Only where that is not enough, because large terms cancel in them, is the size
    of what was added up worked out.
    """
    tolerance = tolerance_of(types)
    found = error(None)
    if not found <= tolerance and bounds:
        found = error(total_of(bounds, like))
    return {} if found <= tolerance else {name: differing(found, tolerance)}


def differing(error: float, tolerance: float) -> str:
    """Return the reason why a parameter is left to the loop."""
    return f"it differs from the loop (by {error:.1e}, allowed {tolerance:.0e})"


@torch.no_grad()
def total_of(bounds: Iterable[Gradients], like: Tensor) -> Tensor:
    """Return the sum over all examples of summands, in the shape of `like`."""
    whole = torch.zeros_like(like)
    for summand in bounds:
        for n in range(examples_of(summand)):
            whole += summand.example(n, whole.shape).to(whole.dtype)
    return whole


@torch.no_grad()
def distance(ours: Tensor, theirs: Tensor, bound: Tensor) -> float:
    """Return the largest difference, each relative to the root of its bound, or of a typical one."""
    if not ours.numel():
        return 0.0
    root = bound.sqrt()
    # The mean of what anything was added to: an embedding's other rows say nothing about the size of its gradient.
    typical = root.sum() / (root > 0).sum().clamp(min=1)
    least = torch.finfo(root.dtype).tiny
    return float(((ours - theirs).abs() / torch.maximum(root, typical).clamp(min=least)).max())


@torch.no_grad()
def _relative(ours: Tensor, theirs: Tensor, bound: Tensor | None = None) -> float:
    """Return the largest difference of the square roots; without a bound the gradients themselves are the measure."""
    return distance(ours.sqrt(), theirs.sqrt(), theirs if bound is None else bound)


def check_alone(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    values: Tensor,
    alone: Mapping[int, Tensor] | None = None,
    also: Sequence[int] = (),
    interacting: bool = True,
) -> None:
    """Check that some examples have the same outputs alone as in the batch.

    Args:
        model: what they are outputs of.
        objective: which Fisher.
        batch: all examples.
        values: what came out for them, `Outputs.values`.
        alone: the outputs of some examples on their own, if they are known; these are compared, and no others.
        also: more examples to compare, for which a number that Python saw would have been another one.
        interacting: whether to refuse examples that influence each other, and not only a shared input that was cut.

    Raises:
        SquisherError: they differ, so examples influence each other, or share an input that was cut.
    """
    if alone is not None:
        chosen = list(dict.fromkeys([*alone, *also]))
    elif callable(objective.likelihood):  # a loss is one number, which may agree by chance
        chosen = list(range(min(batch.size, _SOME)))
    else:
        chosen = two_of(batch) or []
    for n in chosen:
        taken = batch.take(n, n + 1)
        try:
            # With gradients: re-entrant checkpointing warns without.
            own = alone[n] if alone and n in alone else objective.outputs(model, taken).values[0].detach()
            found = difference_of(model, own, values, n)
        except (RuntimeError, ValueError, IndexError) as error:
            found = f"cannot be computed ({error}), unlike"
        if not found:
            continue
        if n not in also or n in (alone or {}):
            _refuse_cut_input(model, objective, batch, taken, values, n)
        if not interacting:
            return
        with suppress(RuntimeError, ValueError, IndexError):  # it may not run at all
            check_repeats(model, objective, taken)
        raise interaction(n, found, batch.size)


def check_repeats(model: nn.Module, objective: Objective, batch: Batch) -> None:
    """Check that two passes over the same examples, with the same random numbers, give the same outputs.

    Raises:
        SquisherError: they differ, so something outlives a pass that `begin_pass` does not bring back.
    """
    with same_random_numbers(model) as begin_again:
        one = objective.outputs(model, batch).values.detach()
        begin_again()
        two = objective.outputs(model, batch).values.detach()
    for n in range(len(one)):
        found = difference_of(model, two[n], one, n)
        if found:
            raise SquisherError(
                f"Two passes over the same example do not agree: the second outputs {found} from the first. The model, or a function that "
                "it calls, keeps something from pass to pass outside of its buffers and attributes (a counter in an object or a closure, "
                "an iterator, a generator of random numbers), so what is measured would depend on what ran before. Keep it in a buffer "
                "or an attribute of a module, where it is brought back before every pass, or switch it off."
            )


def interaction(n: int, found: str, size: int) -> SquisherError:
    """Return the error for examples that influence each other."""
    return SquisherError(
        f"Examples influence each other: the outputs of example {n} on its own {found} from those in its batch of {size}, so it has no "
        "gradient of its own in the batch. A batch statistic in the forward pass or the loss, a contrastive loss, or a number that is "
        "taken from the size of the batch can be the reason. Use method='loop' for every example on its own, or per='batch' for whole batches."
    )


def _refuse_cut_input(
    model: nn.Module, objective: Objective, batch: Batch, taken: Batch, values: Tensor, n: int
) -> None:
    for name in dict.fromkeys(batch.cut_inputs()):
        if _fits(model, objective, batch.with_whole(name, taken), values, n):
            raise SquisherError(
                f"The input {name} has as many rows as the batch has examples ({batch.size}), but it is used whole for every "
                "example. Give it a leading dimension of 1 (a tuple instead of a list), batches of another size, or bind it to the model."
            )


def difference_of(model: nn.Module, own: Tensor, values: Tensor, n: int) -> str:
    """Return how the outputs of an example alone differ from its row in the batch; "" if they do not."""
    row = values[n]
    if own.shape != row.shape:
        return f"have the shape {tuple(own.shape)} instead of {tuple(row.shape)}"
    coarse = any(t.dtype in (torch.bfloat16, torch.float16) for t in (*model.parameters(), values))
    tolerance = _NEARLY_SAME if coarse or torch.is_autocast_enabled(values.device.type) else _SAME[values.dtype]
    finite = row.isfinite() & own.isfinite()
    if not bool(finite.any()):
        return ""
    off, size = float((own - row)[finite].abs().max()), _largest_finite(values)
    return f"differ by {off:.1e} (the largest output is {size:.1e})" if off > tolerance * max(size, 1e-6) else ""


def _largest_finite(values: Tensor) -> float:
    """Return the largest finite magnitude, without a copy: logits may be most of the memory."""
    low, high = torch.aminmax(values)
    if bool((high - low).isfinite()):
        return max(-float(low), float(high))
    return max(float(row.nan_to_num(0.0, 0.0, 0.0).abs().max()) for row in values)


def _fits(model: nn.Module, objective: Objective, batch: Batch, values: Tensor, n: int) -> bool:
    try:
        return not difference_of(model, objective.outputs(model, batch).values[0].detach(), values, n)
    except (RuntimeError, ValueError, IndexError, SquisherError):
        return False


def two_of(batch: Batch) -> list[int] | None:
    """Return two examples whose labels count: the fullest and the emptiest, as padding may change what a model does.

    Examples that are all zero (black images) prove little and are taken last.
    """
    counts = torch.zeros(batch.size, dtype=torch.long)
    for t, apart in batch.tensors():
        if apart and t is not batch.labels:
            counts += filled(t)
    allowed = torch.ones(batch.size, dtype=torch.bool)
    if batch.labels is not None and not batch.labels.is_floating_point():
        allowed = (batch.labels != IGNORED).reshape(batch.size, -1).any(1).cpu()
    entries = counts.tolist()
    order = sorted(allowed.nonzero().flatten().tolist(), key=lambda n: (entries[n] == 0, entries[n]))
    most = [n for n in order if entries[n]] or order
    chosen = list(dict.fromkeys([most[0], most[-1], *order])) if order else []
    return sorted(chosen[:2]) or None


def doubts_of(one: Pass, numbers: set[int]) -> list[int]:
    """Return the examples of a pass that may have got something else on their own.

    Where any of them may have, these are the fullest and the emptiest, and those with the largest and the smallest inputs. A batch of
    another size, or in which Python gave other numbers to operations, has the first two.

    Args:
        one: after its forward pass.
        numbers: of earlier passes, hashed; gets those of this one.
    """
    batch = one.batch
    given = hash((batch.size, one.guess, *one.numbers))
    new = given not in numbers
    numbers.add(given)
    if not one.doubted:
        return list(dict.fromkeys([*one.told, *((two_of(batch) or []) if new else [])]))
    sums = torch.zeros(batch.size, dtype=torch.float64)
    for t, apart in batch.tensors():
        if apart and t is not batch.labels and t.layout is torch.strided and not t.is_complex():
            sums += t.detach().reshape(batch.size, -1).sum(1, dtype=torch.float64).cpu()
    extremes = [int(sums.argmin()), int(sums.argmax())]
    return list(dict.fromkeys([*one.told, *(two_of(batch) or []), *extremes]))


def tolerance_of(types: Iterable[torch.dtype]) -> float:
    """Return how far square roots may differ, where gradients of these types arrived."""
    # One coarse type anywhere (autocast) makes every gradient after it coarse.
    return max((_TOLERANCE.get(t, _COARSEST) for t in types), default=0.0)


class Probe(Objective):
    """Random gradients with respect to the outputs, the same for an example wherever it is: r(example, position) · r(class)."""

    @classmethod
    def of(cls, objective: Objective) -> Probe:
        """Return a probe for an objective; with two draws if the objective has several columns, which the fast way adds up differently."""
        given = {f.name: getattr(objective, f.name) for f in fields(objective)}
        given["draws"] = 2 if objective.several and not objective.each_position else 1
        return cls(**{**given, **({"unit": "sequence", "signs": 0} if objective.signs else {})})

    def terms(self, outputs: Outputs, index: Tensor) -> Iterator[Tensor]:
        """Yield scalars whose gradients with respect to the outputs are the random ones."""
        for draw in range(self.draws):
            products = outputs.values * self._random(outputs, index, draw)
            by_position = products.sum(2) if products.dim() == 3 else products
            if self.each_position:
                yield from by_position.unbind(1)
            else:
                yield by_position.sum(1)

    @torch.no_grad()
    def columns(self, outputs: Outputs, index: Tensor) -> Iterator[Tensor]:
        """Return the random gradients."""
        for draw in range(self.draws):
            yield from self._per_unit(self._random(outputs, index, draw), index)

    @torch.no_grad()
    def _random(self, outputs: Outputs, index: Tensor, draw: int) -> Tensor:
        values = outputs.values
        r = normals(self.seed, index, draw, values.shape[1]).to(values.device, values.dtype) * outputs.mask
        if values.dim() == 2:
            return r
        classes = normals(self.seed, torch.zeros(1, dtype=torch.long), draw, values.shape[2])
        return r[:, :, None] * classes[0].to(values.device, values.dtype)


class Difference:
    """What we found for one parameter; the loop's squares are subtracted from it in place.

    Args:
        found: our sum of squares.

    Attributes:
        largest: of our squares.
    """

    def __init__(self, found: Tensor):
        self.rest = found
        self.step = max(1, found.numel() // _SAMPLED) | 1
        self.ours = self._some(found).clone()
        self.largest = float(found.max()) if found.numel() else 0.0

    def _some(self, t: Tensor) -> Tensor:
        return t.reshape(-1)[:: self.step]

    def subtract(self, gradient: Tensor) -> None:
        """Subtract the square of a gradient of the loop."""
        gradient = gradient.to(self.rest.dtype)
        self.rest.addcmul_(gradient, gradient, value=-1)

    @torch.no_grad()
    def error(self, bound: Tensor | None = None) -> float:
        """Return the largest difference of the square roots, relative to the root of the bound.

        Every entry counts relative to the largest bound of the tensor; entries at regular distances, some ten thousand of them,
        also relative to their own. Without a bound the gradients themselves are the measure.
        """
        if not self.rest.numel():
            return 0.0
        theirs = (self.ours - self._some(self.rest)).clamp_(min=0)
        own = _relative(self.ours, theirs, None if bound is None else self._some(bound))
        largest = max(self.largest, float(theirs.max())) if bound is None else float(bound.max())
        low, high = torch.aminmax(self.rest)
        difference = max(-float(low), float(high))
        # |√f − √e| ≥ |f − e| / (√f + √e), without a square root of every entry
        roots = self.largest**0.5 + (self.largest + difference) ** 0.5
        # A difference that is not a number comes first, so that it is what is returned.
        return max(difference / max(roots * largest**0.5, torch.finfo(self.rest.dtype).tiny), own)
