"""A forward pass in which every operation is seen and the rows of the examples are followed (`examples`).

Also: the names of operations, and which of them lie behind a tensor in autograd's graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .examples import SHARED, UNKNOWN, Examples, Routed, State, argument, replaced, tensors_in
from .indexing import place_after
from .placements import reshapes, state_after
from .rules import in_steps, multi_head_attention, supports

__all__ = [
    "NEEDING_NO_VALUES",
    "Following",
    "Watch",
    "hooks",
    "in_place",
    "is_custom",
    "is_random",
    "leaves_behind",
    "looks_only",
    "name_of",
    "nodes_behind",
    "version_of",
]

# -- names: one for the function, the method, the operator and the in-place form ---------------------------------------------

_OPERATORS = {
    **{f"{form}{name}": name for name in ("add", "sub", "mul", "pow", "and", "or", "xor") for form in "ir"},
    **{f"{form}{name}": "div" for name in ("truediv", "div", "floordiv") for form in ("", "i", "r")},
    **{f"{form}mod": "remainder" for form in ("", "i", "r")},
}
_names: dict[Any, str] = {}


def name_of(func: Any) -> str:
    """Return the name that `add`, `add_`, `__iadd__` and `__radd__` have in common; "get.shape" for attributes."""
    name = _names.get(func)
    if name is None:
        name = _names[func] = _name(func)
    return name


def _name(func: Any) -> str:
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name.strip('_')}.{getattr(func.__self__, '__name__', '')}"
    if name.startswith("__") and name.endswith("__"):
        inside = name.strip("_")
        return _OPERATORS.get(
            inside, inside if inside in ("getitem", "setitem", "matmul", "rmatmul") else f"op.{inside}"
        )
    return name.rstrip("_") if not name.startswith("_") else name


# -- what they are ---------------------------------------------------------------------------------------------------------------

# What only looks at a tensor's form, or at no tensor.
_FORM = """
    size dim stride numel nelement ndimension element_size storage_offset data_ptr get_device is_contiguous is_floating_point
    is_complex is_tensor register_hook retain_grad is_same_size untyped_storage storage result_type broadcast_shapes is_signed
    is_pinned is_shared is_inference _set_grad_enabled op.len op.hash op.repr op.format op.dir has_names is_set_to set.requires_grad set.grad
"""
# What draws random numbers.
_RANDOM = """
    rand randn randint rand_like randn_like randint_like bernoulli multinomial normal uniform poisson randperm exponential
    geometric cauchy log_normal gumbel_softmax rrelu
"""
_LOOKING, _DRAWING = frozenset(_FORM.split()), frozenset(_RANDOM.split())
_VIEWS = {"get.T", "get.mT", "get.H", "get.mH", "get.data", "get.real", "get.imag"}


def looks_only(name: str) -> bool:
    """Return whether an operation only looks at a tensor's form; `name` from `name_of`."""
    return name in _LOOKING or (name.startswith("get.") and name not in _VIEWS)


def is_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers."""
    if "dropout" in name:
        return bool(argument(args, kwargs, 2, ("training", "train"), True)) and bool(
            argument(args, kwargs, 1, "p", 0.5)
        )
    if name == "scaled_dot_product_attention":
        return bool(argument(args, kwargs, 4, "dropout_p", 0.0))
    return name in _DRAWING


class Following:
    """Where the examples of a batch are in every tensor of a forward pass.

    Args:
        examples: how many there are.
        known: the model's own tensors, which belong to no example.

    Attributes:
        random: whether random numbers were drawn.
        escaped: whether something may depend on the examples in a way that is not followed.
        told: examples that Python might have treated differently alone, because a number it took from the batch would have been
            different for them.
        doubted: whether something was computed from the examples where it cannot be seen (a scripted function, an array), so that any
            example might have been treated differently alone.
        hooked: whether the model registers hooks on its gradients.
        numbers: what Python gave to operations beside tensors. It may have computed them from the number of examples, or from how many of
            them were picked, which nothing here sees.
        types: of the gradients that arrived, and single precision if they came through it: models in double precision compute parts of
            themselves, or their loss, in it.
    """

    _state_after = staticmethod(state_after)  # overridden by the pass of a training step
    _compares = True  # what Python sees with what it would see of each example

    def __init__(self, examples: int, known: Iterable[Tensor]):
        self.examples = examples
        self.random = self.escaped = self.hooked = self.doubted = False
        self.told: list[int] = []
        self._known = {id(t) for t in known}
        self._marks: dict[int, tuple[Any, int, State, str]] = {}
        self._apart: dict[int, tuple[Any, int, list[Any]]] = {}
        self._trace: list[Any] = []
        self.types: set[torch.dtype] = set()
        self.numbers: list[Any] = []
        self._sizes: dict[int, str] = {}

    @property
    def program(self) -> tuple[Any, ...]:
        """What was called on what: the same for batches that differ in their sizes only."""
        return tuple(self._trace)

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and mark its output with where the examples are."""
        raise NotImplementedError

    def carry(self, before: Tensor, after: Tensor) -> None:
        """Note that another tensor replaces this one: its rows belong to the same examples."""
        mark = self._marks.get(id(before))
        if mark is not None and mark[0]() is before:
            self._mark(after, *mark[2:])

    def convert(self, before: Tensor, after: Tensor, placements: Any) -> None:
        """Note that one tensor was made of another, which is its shard, or of which it is one, under these placements."""
        state = self._state(before)
        if isinstance(state, Examples) and any(getattr(p, "dim", None) == state.dim for p in placements):
            self._mark(after, UNKNOWN, "the rows of examples are sharded over processes")
        else:
            self._mark(after, state, self._why(before) if state is UNKNOWN else "")

    def _state(self, t: Tensor) -> State:
        mark = self._marks.get(id(t))
        if mark is not None and mark[0]() is t:
            return mark[2] if mark[1] == version_of(t) else UNKNOWN
        if id(t) in self._known:
            return SHARED
        if not t.requires_grad:
            self.escaped = True  # a constant, or something computed where it is not followed
            if _CONSTANTS.get(t) != version_of(t):  # a constant would have been there in an earlier pass
                _CONSTANTS[t] = version_of(t)
                self.doubted = True
            return SHARED
        return UNKNOWN

    def _why(self, t: Tensor) -> str:
        mark = self._marks.get(id(t))
        reason = mark[3] if mark is not None and mark[0]() is t else ""
        node = t.grad_fn
        if not reason and node is not None and is_custom(node):
            return f"{node.name()} is written in Python: its forward pass is not seen"
        return reason or "which rows of the outputs belong to which example is not known"

    def _mark(self, t: Tensor, state: State, reason: str = "") -> None:
        if state is SHARED and id(t) in self._known:
            self._marks.pop(id(t), None)
        else:
            self._marks[id(t)] = (weakref.ref(t), version_of(t), state, reason)

    def _finish(self, output: Any, name: str, states: State | list[State], reason: str = "") -> Any:
        """Mark what an operation returned: all of it alike, or each tensor with its state; `reason` says why one is unknown."""
        results = tensors_in(output)
        each = states if isinstance(states, list) else [states] * len(results)
        for t, state in zip(results, each, strict=True):
            self._mark(t, state, reason if state is UNKNOWN else "")
            if t.dtype is torch.float32 and t.requires_grad:
                self.types.add(t.dtype)
        self._trace.append((name, *(s.dim if isinstance(s, Examples) else None for s in each)))
        return output

    # -- what Python sees ------------------------------------------------------------------------------------------------

    def _python_saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], states: dict[int, State], out: Any
    ) -> None:
        """Compare what an operation on the batch returned with what it returns for each example alone.

        A number that Python gets (`item`, `bool`, `tolist`) may decide about all examples. Examples for which it would have been
        different are noted in `told`. Small tensors may become such numbers, so their values for each example are kept.
        """
        if isinstance(out, Tensor) and out.numel() > _SMALL:
            return
        results = tensors_in(out)
        small = len(results) == 1 and results[0] is out and out.numel() <= _SMALL and self._state(out) is UNKNOWN
        if not self._compares or out is None or not (small or not results) or set(states.values()) <= {SHARED}:
            return
        each = self._for_each(func, args, kwargs, states)
        if small:
            if each is not None:
                self._apart[id(out)] = (weakref.ref(out), version_of(out), each)
            return
        others = [] if each is None else [n for n, e in enumerate(each) if not _same(e, out)]
        if each is not None and not others:
            return
        self.escaped = True
        if each is None or not isinstance(out, (int, float)):
            self.doubted = True
        elif len(self.told) < _MOST_TOLD:
            # What a threshold decides is decided otherwise for one of the extremes, if it is for any; two thresholds, between them.
            others.sort(key=lambda n: (each[n] == each[n], each[n]))
            found = dict.fromkeys(others[k * (len(others) - 1) // 4] for k in (0, 4, 2, 1, 3))
            self.told += [n for n in found if n not in self.told]

    def ran_script(self, *given: Any) -> None:
        """Note that a scripted function was given something."""
        self.doubted = self.doubted or any(self._state(t) is not SHARED for t in tensors_in(given))

    def _for_each(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], states: dict[int, State]
    ) -> list[Any] | None:
        """Return what an operation returns for each example on its own; None if that is not known."""
        if in_place(func):
            return None
        own: list[tuple[int, Any]] = []
        for t in tensors_in((args, kwargs)):
            state = states[id(t)]
            if isinstance(state, Examples):
                own.append((id(t), t.detach().split(state.inner, state.dim)))
            elif state is not SHARED:
                known = self._apart.get(id(t))
                if known is None or known[0]() is not t or known[1] != version_of(t):
                    return None
                own.append((id(t), known[2]))
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                parts = [{key: values[n] for key, values in own} for n in range(self.examples)]
                return [func(*replaced(args, part), **replaced(kwargs, part)) for part in parts]
        except Exception:  # whatever the operation says to a single example
            return None

    def _note_numbers(self, name: str, given: Any) -> None:
        """Note the numbers among the arguments of an operation; an example alone has the sizes of the inputs too, so these may differ."""
        if not self._compares or reshapes(name):
            return
        left = [given]
        while left:
            item = left.pop()
            kind = type(item)
            if kind is int or kind is float:
                self.numbers.append(self._sizes.get(item, item))
            elif kind is tuple or kind is list:
                left.extend(item)
            elif kind is dict:
                left.extend(item.values())
            elif kind is slice:
                left += (item.start, item.stop, item.step)

    def _python_saw_ends(self, index: Any) -> None:
        """Compare the ends of slices that are tensors, which Python turns into numbers."""
        for part in index if isinstance(index, tuple) else (index,):
            for end in (part.start, part.stop, part.step) if isinstance(part, slice) else ():
                if isinstance(end, Tensor):
                    self._python_saw(Tensor.__index__, (end,), {}, {id(end): self._state(end)}, int(end))

    def _base_before(self, args: tuple[Any, ...], states: dict[int, State]) -> tuple[Tensor, State, State, bool] | None:
        """Return the tensor that the first argument is a view of, with what is known of both before the view is changed in place."""
        base = args[0]._base if args and isinstance(args[0], Tensor) else None
        state = UNKNOWN if base is None else self._state(base)
        if base is None or state is UNKNOWN:
            return None
        return base, states[id(args[0])], state, base.requires_grad

    def _mark_base(self, view: Tensor, base: Tensor, before: State, state: State, required: bool) -> None:
        """Note where the examples are in a tensor of which a view was changed in place."""
        after = self._state(view)
        if after == before:
            self._mark(base, state)
        elif isinstance(after, Examples) and state is SHARED and not required:  # filled slice by slice
            for dim, (size, stride) in enumerate(zip(base.shape, base.stride(), strict=True)):
                if (size, stride) == (view.shape[after.dim], view.stride(after.dim)):
                    self._mark(base, Examples(dim, after.inner))

    def _set_item(self, func: Any, args: tuple[Any, ...], states: dict[int, State]) -> None:
        target, index, value = args
        before, given = states[id(target)], states.get(id(value), SHARED) if isinstance(value, Tensor) else SHARED
        base = self._base_before(args, states)
        state: State = UNKNOWN
        parts = index if isinstance(index, tuple) else (index,)
        known = not any(s is UNKNOWN or isinstance(s, Routed) for s in states.values())
        if known and not (isinstance(value, Tensor) and given is SHARED and value.requires_grad):
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


_SMALL = 64
"""Elements of a tensor that may be on its way to a number in Python."""
_MOST_TOLD = 8
"""Examples to run alone, after which further numbers add none."""
_CONSTANTS = WeakTensorKeyDictionary()
"""Tensors that an earlier pass got from outside of what is followed, with their version: they are older than the batch of this pass."""


def version_of(t: Tensor) -> int:
    """Return how often a tensor was changed in place; tensors made in inference mode do not count it."""
    return 0 if t.is_inference() else t._version


def in_place(func: Any) -> bool:
    """Return whether a function changes its first argument."""
    name = str(getattr(func, "__name__", ""))
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name not in _NOT_IN_PLACE)


_NOT_IN_PLACE = ("__index__", "__int__", "__invert__")


def _same(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other or (one != one and other != other))
    except (ValueError, RuntimeError):  # arrays
        return False


_SCRIPTED = (torch._C.ScriptFunction, torch._C.ScriptMethod)


class Watch(TorchFunctionMode):
    """A function mode that hands every operation of the model to the pass."""

    def __init__(self, one: Following):
        super().__init__()
        self.one = one
        self._before: list[Any] = []

    def __enter__(self) -> Watch:
        self._before.append([kind.__call__ for kind in _SCRIPTED])
        for kind in _SCRIPTED:
            kind.__call__ = self._noting(kind.__call__)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for kind, run in zip(_SCRIPTED, self._before.pop(), strict=True):
            kind.__call__ = run  # type: ignore[method-assign]
        super().__exit__(*error)

    def _noting(self, run: Any) -> Any:
        """Return a scripted function that is noted: what it does is not seen here, nor what it decides."""

        def noted(script: Any, *args: Any, **kwargs: Any) -> Any:
            self.one.ran_script(args, kwargs)
            return run(script, *args, **kwargs)

        return noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if looks_only(name):
            self.one.hooked = self.one.hooked or hooks(name, args, kwargs)
            return func(*args, **kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            return func(*args, **kwargs)  # inside vmap: what comes out is not followed
        if func is F.multi_head_attention_forward:
            arguments = {**dict(zip(func.__code__.co_varnames, args, strict=False)), **kwargs}
            if supports(arguments):
                with self:  # inside a mode's own handler it is off
                    return multi_head_attention(**arguments)
        steps = in_steps(name, args, kwargs)
        if steps is not None:
            with self:
                return steps()
        return self.one.call(func, name, args, kwargs)


# -- the graph: which leaves a gradient would reach, and through which operations ------------------------------------------

_FORM_ONLY = """
    Add Alias Cat Chunk Clone Embedding Expand Flip Index IndexSelect Narrow Neg Permute Repeat Reshape ReshapeAlias Roll Select Slice Split
    SplitWithSizes Squeeze Stack Sub T ToCopy Transpose Unbind UnsafeView Unsqueeze View
"""
NEEDING_NO_VALUES = {f"{name}Backward{n}" for name in _FORM_ONLY.split() for n in range(3)} | {"_ToTorchTensorBackward"}
"""Steps between a parameter and what is made of it whose gradient needs shapes and indices only."""


def leaves_behind(t: Tensor, seen: set[Any] | None = None) -> Iterator[tuple[Tensor, str]]:
    """Yield the leaves that a gradient of this tensor would reach, each with the operation that it would come from.

    Args:
        t: where to begin.
        seen: gets the operations behind it.
    """
    if t.grad_fn is None:
        if t.requires_grad:
            yield t, "itself"
        return
    seen = set() if seen is None else seen
    seen.add(t.grad_fn)
    stack = [t.grad_fn]
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


def nodes_behind(t: Tensor) -> set[Any]:
    """Return the operations behind a tensor."""
    seen: set[Any] = set()
    for _ in leaves_behind(t, seen):
        pass
    return seen


def is_custom(node: Any) -> bool:
    """Return whether the backward pass of an operation is written in Python, and not by torch: it may do anything."""
    function = getattr(node, "_forward_cls", None)
    if function is None:
        return False
    return not _is_known(function) or function.__name__ == "BackwardHookFunction"


def hooks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation registers a hook on a gradient; torch's own (`fully_shard`) only watch."""
    hook = argument(args, kwargs, 1, "hook", None) if name == "register_hook" else None
    while isinstance(hook, partial):
        hook = hook.func
    return hook is not None and not _is_known(hook)


def _is_known(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(("torch.", f"{__package__}."))
