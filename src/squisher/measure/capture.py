"""One forward and backward pass in which every use of a parameter is seen and its gradients are squared for each example.

A function mode sees every operation of the forward pass and follows where the examples are (`examples`). An operation with a rule
(`rules`) is given a detached copy of the parameter, and a hook on its output receives the gradient from which the rule finds each
example's share. So a gradient that could still reach the parameter itself comes from a use that nobody saw, and the graph shows it
before anything is added. What is made of parameters alone (a weight that is normalised, positions that are looked up once) is a
source like a parameter: its per-example gradients are sent on through its own small graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .batches import Batch
from .examples import (
    SHARED,
    UNKNOWN,
    Examples,
    Look,
    State,
    broadcasts,
    is_random,
    name_of,
    place_after,
    state_after,
    tensors_in,
)
from .likelihood import Objective, Outputs
from .rules import (
    OPERATIONS,
    Broadcast,
    Dense,
    Outer,
    Piece,
    Rule,
    Squares,
    add_squares,
    multi_head_attention,
    supports,
)

__all__ = ["Obstacle", "Pass", "forward_pass", "looks_only"]

MOST_COPIES = 1 << 24
"""Elements of the copies, one for each example, that a shared tensor may be given."""


class Obstacle(Exception):  # noqa: N818 (not an error: the loop takes over)
    """Why a batch cannot be done at once: by parameter, or "" for all of them."""

    def __init__(self, reasons: Mapping[str, str], random: bool = False):
        super().__init__(next(iter(reasons.values()), ""))
        self.reasons, self.random = dict(reasons), random


@dataclass
class _Use:
    """One use of a source (a parameter, or what was made of parameters alone) in an operation with a rule."""

    source: Tensor
    rule: Rule
    dim: int
    held: list[tuple[Tensor, int]]

    def intact(self) -> bool:
        return all(t._version == version for t, version in self.held)


# What only looks at a tensor's form.
_FORM = {
    *(
        "size",
        "dim",
        "stride",
        "numel",
        "nelement",
        "ndimension",
        "element_size",
        "storage_offset",
        "data_ptr",
        "get_device",
    ),
    *("is_contiguous", "is_floating_point", "is_complex", "is_tensor", "register_hook", "retain_grad", "is_same_size"),
    *(
        "untyped_storage",
        "storage",
        "result_type",
        "broadcast_shapes",
        "is_signed",
        "is_pinned",
        "is_shared",
        "is_inference",
    ),
    *("op.len", "op.hash", "op.repr", "op.format", "op.dir", "has_names", "is_set_to", "set.requires_grad", "set.grad"),
}
_VIEWS = {"get.T", "get.mT", "get.H", "get.mH", "get.data", "get.real", "get.imag"}
_EXPANDING = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}


# Steps between a parameter and what is made of it whose gradient needs shapes and indices only.
_NEEDING_NO_VALUES = {
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


def looks_only(name: str) -> bool:
    """Whether an operation only looks at a tensor's form; `name` as of `name_of`."""
    return name in _FORM or (name.startswith("get.") and name not in _VIEWS)


class _Watch(TorchFunctionMode):
    """Hands every operation of the model to the pass."""

    def __init__(self, one: Pass):
        super().__init__()
        self.one = one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if looks_only(name):
            return func(*args, **kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            return func(*args, **kwargs)  # inside vmap: what comes out is not followed
        if func is F.multi_head_attention_forward:
            arguments = {**dict(zip(func.__code__.co_varnames, args, strict=False)), **kwargs}
            if supports(arguments):
                with self:  # inside a mode's own handler it is off
                    return multi_head_attention(**arguments)
        return self.one.call(func, name, args, kwargs)


def forward_pass(*args: Any, **kwargs: Any) -> tuple[Pass, Outputs]:
    """Run a forward pass, if need be a second time without guesses; arguments as of `Pass`.

    Raises:
        Obstacle: this batch cannot be done at once.
    """
    one = Pass(*args, **kwargs)
    try:
        return one, one.forward()
    except Obstacle:
        if not one.guessed:
            raise
    one = Pass(*args, **{**kwargs, "guess": False})
    return one, one.forward()


class _Anchor(torch.autograd.Function):
    """A copy that requires a gradient although nothing before it does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, leaf: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class Pass:
    """One forward pass over the examples of a batch and its backward passes.

    Args:
        model: in the mode and on the device that are wanted. The parameters require gradients, no others do.
        objective: which Fisher.
        batch: two examples or more.
        parameters: those to capture, by name.
        bounds: gets what the rounding of each parameter's gradient is measured by, if wanted.
        guess: whether a shared tensor with as many rows as there are examples is taken for rows of theirs, to see if it fits.
        gathered: for a sharded model, its gathered parameters; they are there only while their layer is at work.

    Attributes:
        guessed: whether one was.
        random: whether random numbers were drawn.
        escaped: whether something may depend on the examples in a way that is not followed (a number that Python saw).
        reentrant: whether a parameter was used without gradients, perhaps to be used again in the backward pass (checkpointing).
        types: of the gradients that arrived.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        batch: Batch,
        parameters: Mapping[str, Tensor],
        bounds: dict[str, list[Piece]] | None = None,
        guess: bool = True,
        gathered: Iterable[Tensor] | None = None,
    ):
        self.model, self.objective, self.batch, self.parameters = model, objective, batch, parameters
        self.examples, self.bounds = batch.size, bounds
        self.many = objective.labels == "exact" or objective.draws > 1 or objective.unit == "token"
        self.guess, self.guessed = guess, False
        self.random = self.escaped = self.reentrant = False
        self.types: set[torch.dtype] = set()
        self._names = {id(p): name for name, p in parameters.items()}
        self._sharded = gathered is not None
        self._known = {id(t) for t in (*model.parameters(), *model.buffers(), *(gathered or ()))}
        self._marks: dict[int, tuple[Any, int, State, str]] = {}
        self._detached: dict[int, tuple[Tensor, Tensor]] = {}
        self._trace: list[Any] = []
        self._uses: list[_Use] = []
        self._expected: dict[int, int] = {}
        self._behind: dict[int, tuple[Tensor, set[str]]] = {}
        self._parts: set[str] = set()
        self._refused: dict[str, str] = {}
        self._done: set[str] = set()
        self._in_backward = False
        self._arrivals: dict[int, int] = {}
        self._pending: dict[int, list[Piece]] = {}
        self._squares: dict[str, tuple[Outer, Tensor]] = {}
        self._leaf = torch.zeros((), requires_grad=True)
        self._watch = _Watch(self)

    @property
    def program(self) -> tuple[Any, ...]:
        """What was called on what: the same for batches that differ in their sizes only."""
        return tuple(self._trace)

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self) -> Outputs:
        """Run the model, following the examples.

        Raises:
            Obstacle: this batch cannot be done at once.
        """
        for tensor, apart in self.batch.tensors():
            self._mark(tensor, Examples(0) if apart else SHARED)
        with self._watch:
            raw = self.objective.raw(self.model, self.batch)
        state = self._state(raw)
        outputs = self.objective.arranged(raw, self.batch)
        values = outputs.values
        if self.random:
            raise Obstacle({"": "random numbers are drawn in the forward pass"}, random=True)
        if not values.requires_grad:
            return outputs
        if state != Examples(0):
            raise Obstacle({"": self._why(raw)})
        unseen = dict(self._refused)
        unseen |= {
            self._names[id(leaf)]: f"it is used in an operation without a rule ({node})"
            for leaf, node in _leaves(values)
            if id(leaf) in self._names
        }
        if self._sharded:
            unseen |= {
                name: f"its gradient comes through {node}, for which it would have to be gathered again"
                for source, names in self._behind.values()
                for node in _nodes(source) - _NEEDING_NO_VALUES
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

    def carry(self, before: Tensor, after: Tensor) -> None:
        """Note that another tensor stands for this one: its rows belong to the same examples."""
        mark = self._marks.get(id(before))
        if mark is not None and mark[0]() is before:
            self._mark(after, *mark[2:])

    @property
    def captured(self) -> set[str]:
        """The parameters that were used so far."""
        return {self._names[key] for key in self._expected if key in self._names} | self._parts

    # -- states --------------------------------------------------------------------------------------------------------

    def _state(self, t: Tensor) -> State:
        mark = self._marks.get(id(t))
        if mark is not None and mark[0]() is t:
            return mark[2] if mark[1] == t._version else UNKNOWN
        if id(t) in self._known:
            return SHARED
        if not t.requires_grad:
            self.escaped = True  # a constant, or something computed where it is not followed
            return SHARED
        return UNKNOWN

    def _why(self, t: Tensor) -> str:
        mark = self._marks.get(id(t))
        reason = mark[3] if mark is not None and mark[0]() is t else ""
        return reason or "which rows of the outputs belong to which example is not known"

    def _mark(self, t: Tensor, state: State, reason: str = "") -> None:
        if id(t) not in self._known:
            self._marks[id(t)] = (weakref.ref(t), t._version, state, reason)

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation. Its output is marked with where the examples are, and captured if it uses a parameter."""
        tensors = list(tensors_in((args, kwargs)))
        states = {id(t): self._state(t) for t in tensors}
        self.random = self.random or is_random(name, args, kwargs)
        if name == "setitem":
            return self._set_item(func, args, states)
        kinds = states.values()
        if UNKNOWN in kinds:
            reason = next((self._why(t) for t in tensors if states[id(t)] is UNKNOWN), "")
            return self._finish(func(*args, **kwargs), name, lambda _: (UNKNOWN, reason))
        look = Look(states, self.examples)
        sources = [t for t in tensors if t.requires_grad and states[id(t)] is SHARED]
        if not torch.is_grad_enabled():
            self._without_gradient(tensors, states)
            sources = []
        apart = any(isinstance(s, Examples) for s in kinds)
        if sources and not apart:
            if name in _EXPANDING:
                return self._expanded(func, name, args, kwargs, look)
            apart = self._as_if_apart(func, tensors, look)
        if not apart:
            output = func(*args, **kwargs)
            for t in tensors_in(output):
                self._mark(t, SHARED)
            return output
        base = self._base_before(args, states)
        uses: list[tuple[Tensor, Rule]] = []
        if sources:
            args, kwargs, uses = self._replaced(func, name, args, kwargs, sources, look)
        output = func(*args, **kwargs)

        def after(t: Tensor) -> tuple[State, str]:
            state = self._state_after(name, args, kwargs, t, look)
            return state, f"{name} moves or mixes the rows of examples" if state is UNKNOWN else ""

        if uses:
            output = self._captured(output, uses, after)
        output = self._finish(output, name, after)
        if base is not None and output is args[0] and self._state(output) == base[1]:
            self._mark(base[0], base[2])
        return output

    def _state_after(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, look: Look
    ) -> State:
        return state_after(name, args, kwargs, output, look)

    def _finish(self, output: Any, name: str, after: Any) -> Any:
        results = list(tensors_in(output))
        if (
            not results and output is not None and name != "op.bool"
        ):  # which only chooses between operations that are seen
            self.escaped = True  # a number that Python sees
        found = []
        for t in results:
            state, reason = after(t)
            self._mark(t, state, reason)
            found.append(state.dim if isinstance(state, Examples) else None)
        self._trace.append((name, *found))
        return output

    def _base_before(self, args: tuple[Any, ...], states: dict[int, State]) -> tuple[Tensor, State, State] | None:
        """Return the tensor that the first argument is a view of: changed in place, it keeps its state if the view does."""
        base = args[0]._base if args and isinstance(args[0], Tensor) else None
        state = None if base is None else self._state(base)
        return None if base is None or state is UNKNOWN else (base, states[id(args[0])], state)  # type: ignore[return-value]

    def _set_item(self, func: Any, args: tuple[Any, ...], states: dict[int, State]) -> None:
        target, index, value = args
        before, given = states[id(target)], states.get(id(value), SHARED) if isinstance(value, Tensor) else SHARED
        base = self._base_before(args, states)
        state: State = UNKNOWN
        parts = index if isinstance(index, tuple) else (index,)
        if UNKNOWN not in states.values() and not (
            isinstance(value, Tensor) and given is SHARED and value.requires_grad
        ):
            state = self._state_of_target(target, before, parts, value, given, states)
        func(*args)
        self._mark(target, state, "rows of examples are written into another tensor" if state is UNKNOWN else "")
        self._trace.append(("setitem", state if state is UNKNOWN else None))
        if base is not None and state == before:
            self._mark(base[0], base[2])

    def _state_of_target(
        self, t: Tensor, before: State, parts: Any, value: Any, given: State, states: dict[int, State]
    ) -> State:
        if any(isinstance(p, (Tensor, list)) for p in parts):
            mask = parts[0] if len(parts) == 1 and isinstance(parts[0], Tensor) else None
            plain = not isinstance(value, Tensor) or (given is SHARED and value.dim() == 0)
            if mask is None or mask.dtype != torch.bool or not plain or (t.requires_grad and before is SHARED):
                return UNKNOWN
            # A mask covers the leading dimensions.
            return (
                before if states[id(mask)] in (before, SHARED) else (states[id(mask)] if before is SHARED else UNKNOWN)
            )
        if not isinstance(given, Examples):
            kept = (
                not isinstance(before, Examples) or place_after(t, before.dim, parts, t.shape[before.dim]) is not None
            )
            return before if kept else UNKNOWN
        region = t.detach()[tuple(parts)]
        wanted = given.dim + region.dim() - value.dim()
        for dim in range(t.dim()) if before is SHARED and not t.requires_grad else [getattr(before, "dim", -1)]:
            if (
                dim >= 0
                and t.shape[dim] == self.examples * given.inner
                and wanted == place_after(t, dim, parts, t.shape[dim])
            ):
                return Examples(dim, given.inner)
        return UNKNOWN

    # -- uses of parameters --------------------------------------------------------------------------------------------

    def _without_gradient(self, tensors: list[Tensor], states: dict[int, State]) -> None:
        for t in tensors:
            if id(t) in self._names and t.requires_grad:
                self.reentrant = True
                self._expected[id(t)] = self._expected.get(id(t), 0) + 1

    def _as_if_apart(self, func: Any, tensors: list[Tensor], look: Look) -> bool:
        """Whether to take an operation on shared tensors for one on examples, because it has a row for each of them.

        Nothing is believed by it: if the rows are used otherwise later, they meet rows of examples in another place, and what
        comes of that is UNKNOWN.
        """
        others = [t for t in tensors if not t.requires_grad]
        if (
            not self.guess
            or func not in OPERATIONS
            or not others
            or any(t.dim() < 2 or t.shape[0] != self.examples for t in others)
        ):
            return False
        look.states.update((id(t), Examples(0)) for t in others)
        self.guessed = True
        return True

    def _expanded(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], look: Look) -> Any:
        """Return copies of a shared tensor, one for each example; see `_as_if_apart`."""
        source = args[0]
        output = func(self._detach(source), *args[1:], **kwargs)
        padded = (1,) * (output.dim() - source.dim()) + tuple(source.shape)
        one_each = output.dim() > 0 and output.shape[0] == self.examples and padded[0] == 1
        times = self.examples * padded[0]
        if (
            name in ("repeat", "tile")
            and output.dim()
            and tuple(output.shape) == (times, *padded[1:])
            and padded[0] > 1
        ):
            # All of it for each example, one after the other.
            copies = self._detach(source).expand(self.examples, *padded)
            copies = self._captured(copies, [(source, Broadcast.of(source))], lambda _: (Examples(0), ""))
            return self._finish(copies.flatten(0, 1), name, lambda _: (Examples(0, padded[0]), ""))
        if not one_each or (name in ("repeat", "tile") and tuple(output.shape[1:]) != padded[1:]):
            output = func(*args, **kwargs)
            self._mark(output, SHARED)
            return output
        output = self._captured(output, [(source, Broadcast.of(source))], lambda _: (Examples(0), ""))
        return self._finish(output, name, lambda _: (Examples(0), ""))

    def _replaced(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], sources: list[Tensor], look: Look
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, Rule]]]:
        """Return the arguments with a detached copy for each source that has a rule, and with copies for each example otherwise."""
        uses: list[tuple[Tensor, Rule]] = []
        instead: dict[int, Tensor] = {}
        shape, state = broadcasts(name, args, kwargs, look)
        in_place = bool(args) and isinstance(args[0], Tensor) and _in_place(func) and not args[0].requires_grad
        rule = None if in_place else OPERATIONS.get(func)
        if rule is not None:
            wanted = {id(t) for t in sources}
            try:
                uses = [(p, r) for p, r in rule(*args, **kwargs) if isinstance(p, Tensor) and id(p) in wanted]
            except TypeError:  # an overload that the table does not know
                uses = []
            if isinstance(state, Examples) and shape is not None:
                uses = [(p, r) for p, r in uses if not isinstance(r, Broadcast) or r.apart_from(state.dim, len(shape))]
            instead = {id(p): self._detach(p) for p, _ in uses}
        for t in sources:
            if id(t) not in instead and isinstance(state, Examples) and shape is not None and not in_place:
                copies = self._copies(t, shape, state, look)
                if copies is not None:
                    instead[id(t)] = copies
        return _swap(args, instead), _swap(kwargs, instead), uses

    def _detach(self, t: Tensor) -> Tensor:
        held = self._detached.get(id(t))
        if held is None or held[0] is not t:
            held = self._detached[id(t)] = (t, t.detach())
        return held[1]

    def _copies(self, t: Tensor, shape: tuple[int, ...], state: Examples, look: Look) -> Tensor | None:
        """Return a copy of a shared tensor for each example, where it has size 1 or no dimension at their place."""
        padded = (1,) * (len(shape) - t.dim()) + tuple(t.shape)
        if len(padded) != len(shape) or padded[state.dim] != 1:
            return None
        wide = list(padded)
        wide[state.dim] = self.examples * state.inner
        wide = wide[min(state.dim, len(shape) - t.dim()) :]  # no more dimensions than needed
        if t.numel() * self.examples * state.inner > max(MOST_COPIES, 2 * t.numel()):
            return None
        here = Examples(state.dim - (len(shape) - len(wide)), state.inner)
        copies = self._captured(self._detach(t).expand(wide), [(t, Broadcast.of(t))], lambda _: (here, ""))
        look.states[id(copies)] = here
        self._mark(copies, here)
        return copies

    def _captured(self, output: Any, uses: list[tuple[Tensor, Rule]], after: Any) -> Any:
        """Have the gradient of this output squared for these sources; returns what is to stand for it."""
        if not isinstance(output, Tensor):
            return output
        state = after(output)[0]
        if not isinstance(state, Examples):
            return output
        for source, rule in uses:
            if isinstance(rule, Broadcast) and not rule.apart_from(state.dim, output.dim()):
                self._refused.update(dict.fromkeys(self._names_of(source), "it has an entry for each example"))
                return output
        if not output.requires_grad:
            output = _Anchor.apply(output, self._leaf)
        found = []
        for source, rule in uses:
            use = _Use(source, rule, state.dim, [(t, t._version) for t in rule.saved()])
            found.append(use)
            if id(source) not in self._names and id(source) not in self._behind:
                self._behind[id(source)] = (source, self._names_of(source))
                self._parts |= self._behind[id(source)][1]
            if not self._in_backward:
                self._uses.append(use)
                self._expected[id(source)] = self._expected.get(id(source), 0) + 1
        self._trace.append(tuple(sorted(n for s, _ in uses for n in self._names_behind(s))))
        output.register_hook(lambda g: self._arrived(g, found))
        return output

    def _names_of(self, source: Tensor) -> set[str]:
        return {self._names[id(leaf)] for leaf, _ in _leaves(source) if id(leaf) in self._names}

    def _names_behind(self, source: Tensor) -> set[str]:
        name = self._names.get(id(source))
        return {name} if name is not None else self._behind[id(source)][1]

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, outputs: Outputs, index: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Send every column back and add the squares of what arrives.

        Args:
            outputs: of `forward`.
            index: where each example is in the stream.
            sums: what to add to, by name.

        Raises:
            Obstacle: something arrived where it should not have (only under re-entrant checkpointing); the sums are spoiled.
        """
        self.sums = sums
        self._uses.clear()  # the hooks hold what is needed, and let go of it as soon as it is not
        if not outputs.values.requires_grad:
            return
        self._in_backward = True
        engine = torch.autograd.Variable._execution_engine
        with self._watch:  # checkpointing runs parts of the forward pass again
            for column in self._columns(outputs, index):
                self._arrivals.clear()
                self._done.clear()
                # Not `backward`, which switches the mode off, nor `grad`, which re-entrant checkpointing refuses.
                engine.run_backward(
                    (outputs.values,), (column,), self.many, False, (), allow_unreachable=True, accumulate_grad=True
                )
                self._end_column()
        self._end()
        self.sums = {}  # hooks and this pass hold each other; the sums must not wait for the garbage collector
        leaked = [name for name, p in self.parameters.items() if p.grad is not None]
        for name in leaked:
            self.parameters[name].grad = None
        if leaked:
            raise Obstacle(dict.fromkeys(leaked, "it is used in an operation without a rule, under checkpointing"))

    def _columns(self, outputs: Outputs, index: Tensor) -> Iterator[Tensor]:
        columns = iter(self.objective.columns(outputs, index))
        while True:
            with torch._C.DisableTorchFunction():
                column = next(columns, None)
            if column is None:
                return
            yield column

    @torch.no_grad()
    def _arrived(self, g: Tensor, uses: list[_Use]) -> None:
        if not self._in_backward:  # the model itself takes gradients in its forward pass
            return
        self.types.add(g.dtype)
        with _full_precision(g.device.type), torch._C.DisableTorchFunction():
            squares = Squares(g)  # a bias and its weight need the same ones
            for use in uses:
                if self.bounds is not None:
                    for name in self._names_behind(use.source) if id(use.source) in self._names else ():
                        bound = use.rule.piece(g.square(), use.dim, self.examples, squared=True)
                        self.bounds.setdefault(name, []).append(bound)
                self._take(use.source, use.rule.piece(g, use.dim, self.examples), squares)
        if not self.many:
            uses.clear()  # no other column comes: the inputs that the rules hold are free

    def _take(self, source: Tensor, piece: Piece, squares: Squares) -> None:
        key = id(source)
        name = self._names.get(key)
        self._arrivals[key] = self._arrivals.get(key, 0) + 1
        if name is None or name in self._parts or self._expected.get(key, 0) > 1:
            if name in self._done or any(n in self._done for n in self._names_behind(source)):
                raise Obstacle({n: "its uses come in several parts" for n in self._names_behind(source)})
            self._pending.setdefault(key, []).append(piece)
            if (
                name is not None
                and name not in self._parts
                and self._arrivals[key] == self._expected[key]
                and not self.reentrant
            ):
                add_squares(self.sums[name], self._pending.pop(key))
            return
        if name in self._done:
            raise Obstacle({name: "it is used more often in the backward pass than in the forward pass"})
        self._done.add(name)
        # The squares of a sharded layer do not wait for the last column: they would be whole in all layers.
        if self.many and not self._sharded and isinstance(piece, Outer) and piece.left.shape[1] == 1:
            self._aggregate(name, piece)
        else:
            piece.add_squares(self.sums[name], squares)

    def _aggregate(self, name: str, piece: Outer) -> None:
        """Σ_columns (g²)ᵀ(a²) = (Σ_columns g²)ᵀ(a²): one matrix product for all columns."""
        g = (piece.left if piece.gradient_on_left else piece.right)[:, 0].to(self.sums[name].dtype)
        if name in self._squares:
            self._squares[name][1].addcmul_(g, g)
        else:
            self._squares[name] = (piece, g.square())

    @torch.no_grad()
    def _end_column(self) -> None:
        """Finish a backward pass: what waits for a use whose output did not matter is complete."""
        with torch._C.DisableTorchFunction():
            waiting, self._pending = self._pending, {}
            behind: set[str] = set()
            sources = []
            for key, (source, names) in self._behind.items():
                if key in waiting:
                    sources.append((source, waiting.pop(key)))
                    behind |= names
            if sources:
                direct = {name: waiting.pop(id(self.parameters[name]), []) for name in behind}
                self._through(sources, direct)
            for key, pieces in waiting.items():
                add_squares(self.sums[self._names[key]], pieces)

    def _through(self, sources: list[tuple[Tensor, list[Piece]]], direct: dict[str, list[Piece]]) -> None:
        """Send each example's gradient of what was made of parameters on to the parameters, and square it with their own uses."""
        parameters = [self.parameters[name] for name in direct]
        tensors = [source for source, _ in sources]
        for n in range(self.examples):
            arriving = [sum(p.example(n, s.shape) for p in pieces).to(s.dtype) for s, pieces in sources]  # type: ignore[union-attr]
            if self.bounds is not None:
                self._bound_through(self.bounds, direct, arriving)
            found = torch.autograd.grad(tensors, parameters, arriving, retain_graph=True, allow_unused=True)
            for (name, pieces), gradient in zip(direct.items(), found, strict=True):
                total = self.sums[name]
                whole = torch.zeros_like(total) if gradient is None else gradient.to(total.dtype)
                for piece in pieces:
                    whole = whole + piece.example(n, total.shape).to(total.dtype)
                total.addcmul_(whole, whole)

    def _bound_through(self, bounds: dict[str, list[Piece]], names: Iterable[str], arriving: list[Tensor]) -> None:
        """Note what rounding is measured by where a gradient comes through others: all that arrives, as if spread evenly."""
        for name in names:
            total = sum(float(g.square().sum()) for g in arriving) / max(1, self.parameters[name].numel())
            value = torch.full((1,) * (self.parameters[name].dim() + 1), total, device=self.parameters[name].device)
            bounds.setdefault(name, []).append(Dense(value.expand(1, *self.parameters[name].shape)))

    @torch.no_grad()
    def _end(self) -> None:
        """All columns are through."""
        with torch._C.DisableTorchFunction():
            for name, (piece, squares) in self._squares.items():
                total = self.sums[name].view(self.sums[name].shape[0], -1)
                if piece.gradient_on_left:
                    total.addmm_(squares.T, piece.right[:, 0].to(total.dtype).square())
                else:
                    total.addmm_(piece.left[:, 0].to(total.dtype).square().T, squares)
            self._squares.clear()


def _in_place(func: Any) -> bool:
    name = str(getattr(func, "__name__", ""))
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _swap(value: Any, instead: Mapping[int, Tensor]) -> Any:
    if not instead:
        return value
    if isinstance(value, Tensor):
        return instead.get(id(value), value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_swap(v, instead) for v in value)
    if isinstance(value, dict):
        return {k: _swap(v, instead) for k, v in value.items()}
    return value


def _leaves(t: Tensor) -> Iterator[tuple[Tensor, str]]:
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


def _nodes(t: Tensor) -> set[str]:
    """Return the names of the operations behind a tensor."""
    seen, stack = set(), [t.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen and not hasattr(node, "variable"):
            seen.add(node)
            stack += [child for child, _ in node.next_functions]
    return {node.name() for node in seen}


def _full_precision(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
