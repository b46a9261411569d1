"""Which tensors of two mappings belong together: those of one name, or of tied names, and of one shape.

Everything that takes two mappings asks `align`, so that a wrong name gets the same message everywhere: which mapping has it,
which has not, and which names are near. `live_parameters` gives the parameters of a module under the names of its weight file.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import NamingError, SquisherError, SquisherWarning, near
from .storage.tensors import Computed, chunks_of, dtype_of, name_pattern, shape_of, tied_names

__all__ = [
    "LiveParameter", "adapter_file_name", "align", "align_mask", "align_tied", "check_boolean", "check_known", "check_like", "check_named", "check_unquantized", "equal", "excluded", "find",
    "live_parameters", "live_tensors", "pattern_of", "shared",
]  # fmt: skip

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types whose numbers are the weights themselves; all others need scales that lie elsewhere."""

Names = tuple[str, str]
"""What the two mappings are called in messages, such as ("the importance", "the model")."""


def align(
    tensors: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    called: Names,
    *,
    tied: Mapping[str, str] | None = None,
    exclude: str | None = None,
    both: bool = False,
    partial: bool = False,
    dtypes: bool = False,
    advice: str = "",
) -> dict[str, str]:
    """Match the tensors of two mappings: return the name in `tensors` for each name in `others` that has one.

    Args:
        tensors: Every name must be in `others`.
        others: The other mapping; it may have more names.
        called: What the two are called in messages.
        tied: Other names of the same tensors: alias to name.
        exclude: A regular expression: names that it matches are left out of both; a tied tensor if it matches any of its names.
        both: Whether every name in `others` must be in `tensors`, too.
        partial: Whether names that are not in `others` are left out instead of refused.
        dtypes: Whether data types must agree as shapes must.
        advice: A sentence for the end of an error: what to do.

    Raises:
        NamingError: A name, a shape or a type does not fit, two names are one tensor, or nothing is left.
    """
    check_named(tensors, called[0])
    check_named(others, called[1])
    left_out = excluded(exclude, [*tensors, *others], tied)
    names, other_names = ([name for name in m if name not in left_out] for m in (tensors, others))
    known = set(other_names)
    found: dict[str, str] = {}
    for name in names:
        match = find(name, known, tied)
        if match is None:
            if partial:
                continue
            raise _stranger(name, others, called, advice)
        if match in found:
            raise NamingError(
                f"{_first(called[0])} has {found[match]!r} and {name!r}, which are one tensor of {called[1]}. Remove one."
            )
        check_like(tensors, name, others, match, called, dtypes=dtypes, advice=advice)
        found[match] = name
    if both:
        check_known(other_names, set(names), (called[1], called[0]), advice)
    if not found:
        example = next(iter(names), "")
        why = f"no name is in both, {example!r} for example"
        if not names:
            why = f"{exclude!r} excludes all of it" if left_out else "it holds no tensors"
        raise NamingError(_sentences(f"Nothing of {called[0]} fits {called[1]}: {why}.{near(example, others)}", advice))
    return found


def align_tied(
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    called: Names,
    *,
    tied: Mapping[str, str] | None = None,
    exclude: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], dict[str, str]]:
    """Match tensors with weights that may be tied: return what `align` returns, by first names, and alias to first name.

    Args:
        tensors: Every name must be in `weights`.
        weights: A tied tensor is in them under all its names.
        called: What the two are called in messages.
        tied: Other names that are known: alias to name.
        exclude: As for `align`.
        aliases: The other names of tied weights, alias to first name, where they are known.

    Raises:
        NamingError: As for `align`; or two names of one tensor have different values.
    """
    check_named(weights, called[1])
    aliases = tied_names(weights) if aliases is None else aliases
    found: dict[str, str] = {}
    for match, name in align(tensors, weights, called, tied={**(tied or {}), **aliases}, exclude=exclude).items():
        first = aliases.get(match, match)
        if not equal(tensors, found.setdefault(first, name), name):
            raise NamingError(
                f"{_first(called[0])} has other values for {name!r} than for {found[first]!r}, which are one tensor of {called[1]}. "
                "Remove one."
            )
    return found, {alias: first for alias, first in aliases.items() if first in found}


def align_mask(mask: Mapping[str, Tensor], weights: Mapping[str, Tensor], called: str) -> Mapping[str, Tensor]:
    """Return a mask under the names that the weights have; a tied tensor is in it under all its names.

    Raises:
        NamingError: A name or a shape does not fit.
        SquisherError: It is not made of boolean tensors.
    """
    check_boolean(mask)
    names, aliases = align_tied(mask, weights, ("the mask", called)) if mask else ({}, {})
    return Computed(mask, names | {alias: names[first] for alias, first in aliases.items()})


def check_named(tensors: object, called: str) -> None:
    """Refuse what is no mapping from names to tensors; reads no data.

    Raises:
        SquisherError: It is something else, such as a module or a list.
    """
    found = f"is a {type(tensors).__name__}"
    if isinstance(tensors, Mapping):
        found = next((f"has the key {key!r}" for key in tensors if not isinstance(key, str)), "")
    if found:
        raise SquisherError(
            f"{_first(called)} {found}; a mapping from names to tensors is expected, such as model.state_dict()."
        )


def check_boolean(mask: Mapping[str, Tensor]) -> None:
    """Refuse a mask that is not made of boolean tensors; reads no data."""
    for name in mask:
        if dtype_of(mask, name) != torch.bool:
            raise SquisherError(
                f"The mask of {name!r} has the type {dtype_of(mask, name)}; a mask is made of boolean tensors."
            )


def excluded(exclude: str | None, names: Iterable[str], tied: Mapping[str, str] | None = None) -> set[str]:
    """Return the names that a regular expression matches, and those tied to them; warn if it matches none.

    Raises:
        ArgumentError: It is not a regular expression.
    """
    pattern, edges = name_pattern(exclude), (tied or {}).items()
    if pattern is None:
        return set()
    known = dict.fromkeys((*names, *(name for edge in edges for name in edge)))
    found = {name for name in known if pattern.search(name)}
    if known and not found:
        some = ", ".join(list(known)[:4])
        warnings.warn(
            f"The pattern {exclude!r} to exclude matches no name, so nothing is left out; there are {some}, ….",
            SquisherWarning,
            stacklevel=5,
        )
    while more := {name for edge in edges if not found.isdisjoint(edge) for name in edge} - found:
        found |= more
    return found


def equal(tensors: Mapping[str, Tensor], a: str, b: str, others: Mapping[str, Tensor] | None = None) -> bool:
    """Return whether two tensors of a mapping (or `b` of others) have the same shape, type and values, read in chunks."""
    others = tensors if others is None else others
    if a == b and others is tensors:
        return True
    if shape_of(tensors, a) != shape_of(others, b) or dtype_of(tensors, a) != dtype_of(others, b):
        return False
    chunks = zip(chunks_of(tensors, a, 1 << 15), chunks_of(others, b, 1 << 15), strict=True)
    return all(torch.equal(x, y) for x, y in chunks)


def find(name: str, others: Collection[str], tied: Mapping[str, str] | None = None) -> str | None:
    """Return the name that a tensor has in another mapping, itself or one that it is tied to; None if it has none."""
    if name in others or not tied:
        return name if name in others else None
    same, waiting = {name}, [name]
    while waiting:
        one = waiting.pop()
        for alias, of in tied.items():
            for new in {alias, of} - same if one in (alias, of) else ():
                if new in others:
                    return new
                same.add(new)
                waiting.append(new)
    return None


def shared(mappings: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Return the names that all mappings have with one shape, in the order of the first; reads no data."""
    first, *others = mappings
    return [
        name
        for name in first
        if all(name in other and shape_of(other, name) == shape_of(first, name) for other in others)
    ]


def check_known(names: Iterable[str], others: Collection[str], called: Names, advice: str = "") -> None:
    """Refuse names that a mapping does not have; the message lists near ones.

    Args:
        names: What is looked for.
        others: Where it must be.
        called: What has the names and what should have them, in messages.
        advice: A sentence for the end of the error.

    Raises:
        NamingError: One of them is not there.
    """
    for name in names:
        if name not in others:
            raise _stranger(name, others, called, advice)


def check_like(
    tensors: Mapping[str, Tensor],
    name: str,
    others: Mapping[str, Tensor],
    match: str,
    called: Names,
    *,
    dtypes: bool = False,
    advice: str = "",
) -> None:
    """Refuse two tensors of different shapes or, if asked to, types; reads no data.

    Raises:
        NamingError: They differ.
    """
    shapes = tuple(shape_of(tensors, name)), tuple(shape_of(others, match))
    if shapes[0] != shapes[1]:
        text = f"{name!r} has the shape {shapes[0]} in {called[0]} and {shapes[1]} in {called[1]}."
        raise NamingError(_sentences(text, advice))
    types = [str(dtype_of(*one)).removeprefix("torch.") for one in ((tensors, name), (others, match))] if dtypes else []
    if len(set(types)) > 1:
        text = f"{name!r} is {types[0]} in {called[0]} and {types[1]} in {called[1]}; convert one of them first."
        raise NamingError(_sentences(text, advice))


def check_unquantized(weights: Mapping[str, Tensor], names: Iterable[str], called: str = "the model") -> None:
    """Refuse complex weights, and weights that mean nothing without the scales of a quantised model; reads no data.

    Raises:
        SquisherError: A tensor is complex, or has a type that only quantised weights have.
    """
    for name in names:
        dtype = dtype_of(weights, name)
        if dtype.is_complex:
            raise SquisherError(
                f"{name!r} of {called} is complex ({str(dtype).removeprefix('torch.')}): importances and what is done with them are for real "
                "weights. Exclude it, or take its real view (torch.view_as_real)."
            )
        if dtype not in FLOATS:
            raise SquisherError(
                f"{name!r} of {called} has the type {str(dtype).removeprefix('torch.')}, a quantised one whose scales lie elsewhere: "
                "take the weights as they were before they were quantised."
            )


def pattern_of(name: str) -> str:
    """Return a regular expression for one name that can be copied from a message into Python or a shell."""
    return "^" + re.sub(r"[\\^$*+?{}\[\]|()]", r"\\\g<0>", name) + "$"  # a dot is left as it is: it matches itself


def live_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the parameters of a module under the names of its weight file, and their other names: alias to name."""
    live = live_parameters(model)
    tied = {other: p.name for p in live for other in (p.live_name, *p.aliases) if other != p.name}
    return {p.name: p.parameter for p in live}, tied


def _stranger(name: str, others: Iterable[str], called: Names, advice: str) -> NamingError:
    some = ", ".join(repr(other) for other in islice(others, 3))
    text = f"{_first(called[0])} has {name!r}, which {called[1]} does not have."
    return NamingError(_sentences(text + (near(name, others) or f" It has {some}, …."), advice))


def _first(called: str) -> str:
    return called[:1].upper() + called[1:]


def _sentences(*texts: str) -> str:
    return " ".join(text for text in texts if text)


_WRAPPERS = {  # class name: the attribute that holds what it wraps
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


class LiveParameter(NamedTuple):
    """One parameter of a module: once, however many names it has."""

    name: str
    """Its name in a weight file: without wrappers."""
    live_name: str
    """Its first name in `module.named_parameters()`."""
    aliases: tuple[str, ...]
    """Its other names, if it is tied."""
    parameter: Tensor


def live_parameters(model: torch.nn.Module) -> list[LiveParameter]:
    """Return the parameters of a module in registration order, each once, named as its weight file names them.

    Wrappers (DDP, DataParallel, compiled, FSDP, checkpointed, averaged) are recognised by their type, so that a user's own
    submodule called `module` keeps its name.

    Raises:
        NamingError: Two parameters would get the same name.
        SquisherError: A parameter has no shape yet (lazy modules).
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for live_name, parameter in model.named_parameters(remove_duplicate=False):
        if nn.parameter.is_lazy(parameter):
            raise SquisherError(
                f"{live_name!r} has no shape yet, as in a lazy module: call the model once on a batch first."
            )
        names.setdefault(id(parameter), []).append(live_name)
        parameters[id(parameter)] = parameter
    out = []
    seen: dict[str, str] = {}
    for key, live in names.items():
        clean = list(dict.fromkeys(_without_wrappers(model, name) for name in live))
        if clean[0] in seen:
            raise NamingError(
                f"{live[0]!r} and {seen[clean[0]]!r} are different parameters with one name, {clean[0]!r}."
            )
        seen[clean[0]] = live[0]
        out.append(LiveParameter(clean[0], live[0], tuple(clean[1:]), parameters[key]))
    return out


def _without_wrappers(model: torch.nn.Module, live_name: str) -> str:
    module: Any = model
    kept = []
    for part in live_name.split("."):
        if _WRAPPERS.get(type(module).__name__) != part:
            kept.append(part)
        module = getattr(module, part, None)
    name = ".".join(kept)
    return adapter_file_name(name) if "lora_" in name or "modules_to_save" in name else name


_ADAPTER = (
    r"(?P<kind>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector|bias)|modules_to_save)\.(?P<adapter>[^.]+)(?=\.|$)"
)


def adapter_file_name(live_name: str) -> str:
    """Return the name that PEFT writes for a live adapter parameter: without the adapter's own name (`.default`)."""
    # `lora_A.default.weight` is written as `lora_A.weight`, `modules_to_save.default.weight` as `weight`.
    name = re.sub(_ADAPTER, lambda match: match["kind"].replace("modules_to_save", ""), live_name)
    return name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector").replace("..", ".")
