"""One forward pass in which every use of a parameter is seen.

A function mode sees every operation of the forward pass and follows where the examples are (`examples`). An operation with a rule
(`rules`) is given a detached copy of the parameter, and a hook on its output receives the gradient from which the rule computes each
example's gradient. So if autograd's graph still leads to the parameter itself, some use of it was not seen, and that is noticed before
anything is added. A tensor made of parameters alone (a normalised weight, positions that are looked up once) is a source like a
parameter: its per-example gradients are sent on to the parameters through its own small graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..guard import begin_pass, random_states
from ..ranks import is_sharded
from .batches import Batch
from .examples import SHARED, UNKNOWN, Call, Examples, Look, Routed, State, replaced, tensors_in
from .following import (
    NEEDING_NO_VALUES,
    Following,
    Watch,
    in_place,
    is_custom,
    is_random,
    leaves_behind,
    name_of,
    nodes_behind,
    version_of,
)
from .indexing import GROUPED, Routes, behind_transpose, ends_of
from .likelihood import Objective, Outputs
from .placements import broadcasts, routed_state_after, why_unknown
from .rules import OPERATIONS, Broadcast, Einsum, Grouped, RoutedLookup, Rule
from .sharded.parallel import can_localise

__all__ = ["Capture", "Obstacle", "Use"]

MOST_COPIES = 1 << 24
"""Elements of the copies, one for each example, that a shared tensor may be given."""


class Obstacle(Exception):  # noqa: N818 (not an error: the loop takes over)
    """The reasons why a batch cannot be measured the fast way, by parameter; under "" the reason for all parameters."""

    def __init__(self, reasons: Mapping[str, str], random: bool = False):
        super().__init__(next(iter(reasons.values()), ""))
        self.reasons, self.random = dict(reasons), random


@dataclass
class Use:
    """One use of a source (a parameter, or what was made of parameters alone) in an operation with a rule."""

    source: Tensor
    rule: Rule
    dim: int
    held: list[tuple[Tensor, int]]

    def intact(self) -> bool:
        """Return whether nothing that the rule needs was changed since."""
        return all(version_of(t) == version for t, version in self.held)


_EXPANDING = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}


class _Anchor(torch.autograd.Function):
    """A copy that requires a gradient although nothing before it does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, leaf: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class Capture(Following):
    """One forward pass over the examples of a batch; see `squaring.Pass` for the gradients that come back.

    Args:
        model: in the mode and on the device that are wanted. The parameters require gradients, no others do.
        objective: which Fisher.
        batch: two examples or more.
        parameters: those to capture, by name.
        guess: whether a shared tensor with as many rows as there are examples is tried as one row per example.
        gathered: for a sharded model, its gathered parameters; they are there only while their layer is at work.

    Attributes:
        guessed: whether one was.
        reentrant: whether a parameter was used without gradients, perhaps to be used again in the backward pass (checkpointing).
        custom: whether a step of the backward pass is written in Python by the user, and may mix examples.
    """

    _makes_copies = True  # for each example, of what they share

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        batch: Batch,
        parameters: Mapping[str, Tensor],
        guess: bool = True,
        gathered: Iterable[Tensor] | None = None,
    ):
        begin_pass(model)  # what it keeps is what the pass will find
        super().__init__(batch.size, (*model.parameters(), *model.buffers(), *(gathered or ())))
        self.model, self.objective, self.batch, self.parameters = model, objective, batch, parameters
        self.guess, self.guessed = guess, False
        self.reentrant = self.custom = False
        self._names = {id(p): name for name, p in parameters.items()}
        self._sharded = gathered is not None
        self._detached: dict[int, tuple[Tensor, Tensor]] = {}
        self._uses: list[Use] = []
        self._expected: dict[int, int] = {}
        self._behind: dict[int, tuple[Tensor, set[str]]] = {}
        self._parts: set[str] = set()
        self._refused: dict[str, str] = {}
        self._in_backward = False
        self._leaf = torch.zeros((), requires_grad=True)
        self._watch = Watch(self)
        self._routes = Routes(batch.size)
        for size in (n for tensor, apart in batch.tensors() if apart for n in tensor.shape[1:]):
            self._sizes.setdefault(size, f"size {len(self._sizes)}")

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self) -> Outputs:
        """Run the model, following the examples.

        Raises:
            Obstacle: this batch cannot be done at once.
        """
        batch = self.batch.copy()  # the model may change it
        for tensor, apart in batch.tensors():
            if tensor.layout is not torch.strided:
                raise Obstacle({"": "an input is sparse"})
            self._mark(tensor, Examples(0) if apart else SHARED)
        before = random_states(self.model)
        with self._watch:
            raw = self.objective.raw(self.model, batch)
        self.random = self.random or before != random_states(self.model)
        state = self._state(raw)
        outputs = self.objective.arranged(raw, self.batch)
        values = outputs.values
        if self.random:
            raise Obstacle({"": "random numbers are drawn in the forward pass"}, random=True)
        if not values.requires_grad:
            return outputs
        if self.hooked:
            raise Obstacle({"": "the model registers hooks on the gradients of its tensors"})
        if state != Examples(0):
            raise Obstacle({"": self._why(raw)})
        unseen, nodes = dict(self._refused), set[Any]()
        unseen |= {
            self._names[id(leaf)]: f"it is used in an operation without a rule ({node})"
            for leaf, node in leaves_behind(values, nodes)
            if id(leaf) in self._names
        }
        self.custom = any(map(is_custom, nodes))
        if self._sharded:
            unseen |= {
                name: f"its gradient comes through {node}, for which it would have to be gathered again"
                for source, names in self._behind.values()
                for node in {n.name() for n in nodes_behind(source)} - NEEDING_NO_VALUES
                for name in names
            }
        unseen.update(
            (name, "its input is changed in place after use")
            for use in self._uses
            if not use.intact()
            for name in self._names_behind(use.source)
        )
        if unseen:
            raise Obstacle(unseen)
        return outputs

    @property
    def used_again(self) -> set[str]:
        """Return the parameters whose gradient is complete only when several uses are through."""
        return {self._names[key] for key, n in self._expected.items() if n > 1 and key in self._names} | self._parts

    @property
    def captured(self) -> set[str]:
        """The parameters that were used so far."""
        return {self._names[key] for key in self._expected if key in self._names} | self._parts

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation. Its output is marked with where the examples are, and captured if it uses a parameter."""
        tensors = tensors_in((args, kwargs))
        states = {id(t): self._state(t) for t in tensors}
        self.random = self.random or is_random(name, args, kwargs)
        self._note_numbers(name, (args, kwargs))
        if name in ("getitem", "setitem"):
            self._python_saw_ends(args[1])
        if name == "setitem":
            return self._set_item(func, args, states)
        kinds = states.values()
        if name in ("getitem", "sort") or any(isinstance(s, Routed) for s in kinds):
            routed = self._routed(func, name, args, kwargs, states)
            if routed is not None:
                return routed
        if UNKNOWN in kinds:
            reason = next((self._why(t) for t in tensors if states[id(t)] is UNKNOWN), "")
            output = self._finish(func(*args, **kwargs), name, UNKNOWN, reason)
            self._python_saw(func, args, kwargs, states, output)
            return output
        look = Look(states, self.examples)
        sources = [t for t in tensors if t.requires_grad and states[id(t)] is SHARED]
        if not torch.is_grad_enabled():
            self._without_gradient(tensors)
            sources = []
        apart = any(isinstance(s, Examples) for s in kinds)
        if sources and not apart:
            if name in _EXPANDING:
                return self._expanded(func, name, args, kwargs)
            apart = self._as_if_apart(func, tensors, look)
        base, given = self._base_before(args, states) if in_place(func) else None, (args, kwargs)
        if not apart:
            output = func(*args, **kwargs)
            for t in tensors_in(output):
                self._mark(t, SHARED)
            if base is not None and output is args[0]:
                self._mark_base(output, *base)
            return output
        uses: list[tuple[Tensor, Rule]] = []
        if sources:
            args, kwargs, uses = self._replaced(func, name, args, kwargs, sources, look)
            tensors = tensors_in((args, kwargs))
        output = func(*args, **kwargs)
        after = [self._state_after(Call(name, args, kwargs, tensors, look, t)) for t in tensors_in(output)]
        if uses and isinstance(output, Tensor) and isinstance(after[0], Examples):
            output = self._captured(output, uses, after[0])
        output = self._finish(output, name, after, why_unknown(name))
        self._python_saw(func, *given, states, output)
        if base is not None and output is args[0]:
            self._mark_base(output, *base)
        return output

    def _routed(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], states: dict[int, State]
    ) -> Any:
        """Run an operation that puts rows into another order, or works on such rows; None if it is neither."""
        rows = states.get(id(args[0])) if args else None
        if name == "getitem" and rows is not None:
            state = self._routes.taken(args[0], rows, args[1])
            if state is not None:
                return self._finish(func(*args), name, state)
        if name == "sort" and isinstance(rows, Examples) and args[0].dim() == 1:
            output = func(*args, **kwargs)
            state = self._routes.taken(args[0], rows, output[1]) or UNKNOWN  # values are args[0][order]
            return self._finish(output, name, [state, UNKNOWN], why_unknown(name))
        if not any(isinstance(s, Routed) for s in states.values()):
            return None
        ends = ends_of(args, kwargs) if name in GROUPED and isinstance(rows, Routed) and not rows.dim else None
        weight = args[1] if ends is not None and torch.is_grad_enabled() and args[1].requires_grad else None
        ids = states.get(id(args[1])) if name == "getitem" and rows is SHARED and args[0].requires_grad else None
        if isinstance(ids, Routed) and torch.is_grad_enabled() and args[0].dim() == 2 and args[1].dim() == 1:
            weight = args[0]
            looked_up = RoutedLookup(args[1] % len(weight), self._routes.owners[ids.owner])
            output = func(self._detach(weight), args[1])
            output = self._captured(output, [(weight, looked_up)], Examples(0))
        elif weight is not None and isinstance(rows, Routed) and ends is not None:
            leaf, transposed = behind_transpose(weight)
            rule = Grouped(args[0].detach(), ends, self._routes.owners[rows.owner], transposed)
            output = func(args[0], self._detach(weight), *args[2:], **kwargs)
            output = self._captured(output, [(leaf, rule)], Examples(0))
        else:
            output = func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if weight is None and any(t.requires_grad for t in tensors if states[id(t)] is SHARED):
            return self._finish(output, name, UNKNOWN, why_unknown(name))
        look, owners = Look(states, self.examples), self._routes.owners
        calls = [Call(name, args, kwargs, tensors, look, t) for t in tensors_in(output)]
        return self._finish(output, name, [routed_state_after(call, owners) for call in calls], why_unknown(name))

    # -- uses of parameters --------------------------------------------------------------------------------------------

    def _without_gradient(self, tensors: list[Tensor]) -> None:
        for t in tensors:
            if id(t) in self._names and t.requires_grad:
                self.reentrant = True
                self._expected[id(t)] = self._expected.get(id(t), 0) + 1

    def _as_if_apart(self, func: Any, tensors: list[Tensor], look: Look) -> bool:
        """Return whether to treat an operation on shared tensors as one on examples, because a tensor has one row for each example.

        A wrong guess does no harm: rows that are not examples meet rows of examples in another dimension later, and the result of
        that is UNKNOWN.
        """
        others = [t for t in tensors if not t.requires_grad]
        if (
            not self.guess
            or func not in OPERATIONS
            or not others
            or any(t.dim() < 2 or t.shape[0] % self.examples for t in others)
            # Several rows each only where matrices are added: the masks of an example's windows, not those of a pruned weight.
            or any(t.shape[0] != self.examples and (t.dim() < 4 or name_of(func) != "add") for t in others)
            or not all(t.shape[0] for t in others)
        ):
            return False
        look.states.update((id(t), Examples(0, t.shape[0] // self.examples)) for t in others)
        self.guessed = True
        return True

    def _expanded(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return copies of a shared tensor, one for each example; see `_as_if_apart`."""
        source = args[0]
        output = func(self._detach(source), *args[1:], **kwargs)
        padded = (1,) * (output.dim() - source.dim()) + tuple(source.shape)
        one_each = output.dim() > 0 and output.shape[0] == self.examples and padded[0] == 1
        times = self.examples * padded[0]
        if (
            self._makes_copies
            and name in ("repeat", "tile")
            and output.dim()
            and tuple(output.shape) == (times, *padded[1:])
            and padded[0] > 1
        ):
            # All of it for each example, one after the other.
            copies = self._detach(source).expand(self.examples, *padded)
            copies = self._captured(copies, [(source, Broadcast.of(source))], Examples(0))
            return self._finish(copies.flatten(0, 1), name, Examples(0, padded[0]))
        if not one_each or (name in ("repeat", "tile") and tuple(output.shape[1:]) != padded[1:]):
            output = func(*args, **kwargs)
            self._mark(output, SHARED)
            return output
        output = self._captured(output, [(source, Broadcast.of(source))], Examples(0))
        return self._finish(output, name, Examples(0))

    def _replaced(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], sources: list[Tensor], look: Look
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, Rule]]]:
        """Return the arguments with a detached copy for each source that has a rule, and with copies for each example otherwise."""
        uses: list[tuple[Tensor, Rule]] = []
        instead: dict[int, Tensor] = {}
        shape, state = broadcasts(name, args, kwargs, look)
        changed = args[0] if args and isinstance(args[0], Tensor) and in_place(func) else None
        inside = changed is not None and not changed.requires_grad
        # The gradient of a view that is changed in place goes through its base, past a hook on the view.
        rule = None if inside or (changed is not None and changed._base is not None) else OPERATIONS.get(func)
        if rule is not None:
            wanted = {id(t) for t in sources}
            try:
                uses = [(p, r) for p, r in rule(*args, **kwargs) if isinstance(p, Tensor) and id(p) in wanted]
            except TypeError:  # an overload that the table does not know
                uses = []
            if isinstance(state, Examples) and shape is not None:
                uses = [(p, r) for p, r in uses if _apart(r, state.dim, len(shape))]
            instead = {id(p): self._detach(p) for p, _ in uses}
        for t in sources:
            if id(t) not in instead and isinstance(state, Examples) and shape is not None and not inside:
                copies = self._copies(t, shape, state, look)
                if copies is not None:
                    instead[id(t)] = copies
        return replaced(args, instead), replaced(kwargs, instead), uses

    def _detach(self, t: Tensor) -> Tensor:
        held = self._detached.get(id(t))
        if held is None or held[0] is not t:
            held = self._detached[id(t)] = (t, t.detach())
        return held[1]

    def _copies(self, t: Tensor, shape: tuple[int, ...], state: Examples, look: Look) -> Tensor | None:
        """Return a copy of a shared tensor for each example, where it has size 1 or no dimension at their place."""
        padded = (1,) * (len(shape) - t.dim()) + tuple(t.shape)
        if not self._makes_copies or len(padded) != len(shape) or padded[state.dim] != 1:
            return None
        wide = list(padded)
        wide[state.dim] = self.examples * state.inner
        wide = wide[min(state.dim, len(shape) - t.dim()) :]  # no more dimensions than needed
        if t.numel() * self.examples * state.inner > max(MOST_COPIES, 2 * t.numel()):
            return None
        here = Examples(state.dim - (len(shape) - len(wide)), state.inner)
        copies = self._captured(self._detach(t).expand(wide), [(t, Broadcast.of(t))], here)
        look.states[id(copies)] = here
        self._mark(copies, here)
        return copies

    def _captured(self, output: Tensor, uses: list[tuple[Tensor, Rule]], state: Examples) -> Tensor:
        """Square the gradient of this output for these sources when it arrives; return the tensor to use in its place."""
        for source, rule in uses:
            if output.is_complex() or (is_sharded(output) and not can_localise(source, rule)):
                what = "complex numbers" if output.is_complex() else "shards"
                why = f"it is used in an operation without a rule for {what}"
                self._refused.update(dict.fromkeys(self._names_of(source), why))
                return output
            if not _apart(rule, state.dim, output.dim()):
                self._refused.update(dict.fromkeys(self._names_of(source), "it has an entry for each example"))
                return output
        if not output.requires_grad:
            output = _Anchor.apply(output, self._leaf)
        found = []
        for source, rule in uses:
            use = Use(source, rule, state.dim, [(t, version_of(t)) for t in rule.saved()])
            found.append(use)
            if id(source) not in self._names and id(source) not in self._behind:
                self._behind[id(source)] = (source, self._names_of(source))
                self._parts |= self._behind[id(source)][1]
            if not self._in_backward:
                self._uses.append(use)
                self._expected[id(source)] = self._expected.get(id(source), 0) + 1
        self._trace.append(tuple(sorted(n for s, _ in uses for n in self._names_behind(s))))
        # What is changed in place later must not be a view (as a linear layer returns for sequences): its gradient would go to its base,
        # past a hook on it.
        base, shape = output._base, output.shape
        if base is None or base.is_leaf or is_sharded(output):
            base = output
        elif base.numel() != output.numel() or not (base.is_contiguous() and output.is_contiguous()):
            base = output = output.clone()
        base.register_hook(lambda g: self._arrived(g.reshape(shape), found))
        return output

    def _arrived(self, g: Tensor, uses: list[Use]) -> None:
        """Take the gradient of an output that uses parameters."""
        raise NotImplementedError

    def _names_of(self, source: Tensor) -> set[str]:
        return {self._names[id(leaf)] for leaf, _ in leaves_behind(source) if id(leaf) in self._names}

    def _names_behind(self, source: Tensor) -> set[str]:
        name = self._names.get(id(source))
        return {name} if name is not None else self._behind[id(source)][1]


def _apart(rule: Rule, dim: int, dims: int) -> bool:
    """Return whether all examples share the entries of a parameter: it has size 1 where the output has the examples."""
    return not isinstance(rule, (Broadcast, Einsum)) or rule.apart_from(dim, dims)
