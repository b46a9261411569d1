"""The parameters of a module, running or on the meta device, under the names that its weight file has, or that are given."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import FileError, NamingError, SquisherWarning
from ...names import LiveParameter, adapter_file_name, live_parameters
from ...storage.folders import Weights
from ...storage.json_files import parse_json
from ...storage.tensors import CHUNK, TensorSource
from ..states import Candidate, FusedSlice

__all__ = [
    "GIVE_OTHERS",
    "Candidates",
    "by_evidence",
    "candidates_of_module",
    "check_known",
    "clean_names",
    "distinct_names",
    "given_names",
    "is_buffer",
    "loose",
    "matching",
    "no_duplicates",
    "recorded_name",
    "surplus",
    "with_earlier",
    "with_live_weights",
]

GIVE_OTHERS = "Give the names in the optimizer's order, which is that of its groups."


class Candidates(NamedTuple):
    """The parameters of a module in registration order, and the other names of tied ones.

    Attributes:
        parameters: Each parameter once.
        tied: Alias to name.
        note: What the naming should say about them; often empty.
    """

    parameters: list[Candidate]
    tied: dict[str, str]
    note: str = ""


def candidates_of_module(model: nn.Module, weights: Weights | None = None, *, frozen_too: bool = False) -> Candidates:
    """Return the parameters of a module, checked against its weight file where one is at hand.

    Args:
        model: Its parameters may be on the meta device.
        weights: The weight file. Every parameter must be there with its shape, as it is, under a tied name, or in slices.
        frozen_too: Also those with `requires_grad` False.

    Raises:
        NamingError: The weight file lacks a parameter, or has it in another shape.
    """
    owners = dict(model.named_modules())
    parameters = [p for p in live_parameters(model) if frozen_too or p.parameter.requires_grad]
    stored = _stored_slices(model)
    out, tied, kept = [], {}, 0
    for p in parameters:
        shape = tuple(p.parameter.shape)
        owner = type(owners[p.live_name.rpartition(".")[0]])
        classes = tuple(f"{base.__module__}.{base.__qualname__}" for base in owner.__mro__[:-1])
        name, slices = _in_file(p, shape, stored, weights)
        kept += p.live_name in stored and not stored[p.live_name]
        weight = weights.tensors.get(name) if weights is not None else None
        out.append(Candidate(name, shape, classes, p.live_name, slices=slices, weight=weight))
        if p.aliases and not slices:
            tied.update({alias: name for alias in (p.name, *p.aliases) if alias != name})
    note = f"{kept} parameters under their running names, since the weight file stores them rearranged" if kept else ""
    return Candidates(out, tied, note)


def with_live_weights(candidates: Sequence[Candidate], model: nn.Module) -> list[Candidate]:
    """Return the candidates with the weights of the running model, where this process has them whole.

    Args:
        candidates: Its parameters.
        model: The running model.
    """
    whole = {n: p for n, p in model.named_parameters() if type(p) is nn.Parameter and not p.is_meta}
    live: dict[str, Any] = {name: p.detach() for name, p in whole.items()}
    return [c if c.slices else replace(c, weight=live.get(c.live_name or c.name)) for c in candidates]


def surplus(model: nn.Module, candidates: Candidates, weights: Weights | None) -> list[Candidate]:
    """Return the tensors of a weight file that the model lacks and that may be parameters: another class was trained then.

    Args:
        model: What config.json describes.
        candidates: All its parameters.
        weights: The weight file.
    """
    if weights is None:
        return []
    own = {name for name, _ in model.named_buffers()} | set(candidates.tied)
    own |= {
        name for c in candidates.parameters for name in (c.name, c.live_name or c.name, *(p.name for p in c.slices))
    }
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    left = {n: t for n, t in weights.tensors.items() if n not in own and t.dtype.is_floating_point}
    known = [name for name in left if _BUFFER.search(name) or any(re.search(pattern, name) for pattern in ignored)]
    return loose({name: t for name, t in left.items() if name not in known})


def loose(tensors: Mapping[str, TensorSource], prefix: str = "") -> list[Candidate]:
    """Return the tensors of a file that no model describes as parameters, each module's weight before its bias.

    Args:
        tensors: Often sorted by name, which puts a bias first.
        prefix: What to put before their names.
    """
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    names = sorted(tensors, key=lambda n: (modules.index(n.rpartition(".")[0]), not n.endswith("weight")))
    return [Candidate(prefix + n, tuple(tensors[n].shape), live_name=prefix + n, weight=tensors[n]) for n in names]


# What torch's own modules keep beside their parameters.
_KEPT = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked|parametrizations\.\w+\.\d+\.(_u|_v|base))$")

# And beside which parameter: of a spectral norm, of pruning, of a noisy network's layers.
_BESIDE = (("_u", "_orig"), ("_v", "_orig"), ("_mask", "_orig"), ("_epsilon", "_sigma"))


def is_buffer(name: str, names: Collection[str]) -> bool:
    """Return whether a tensor among saved ones is surely no parameter: statistics of a norm, a mask, the vectors of a spectral norm.

    Args:
        name: Of the tensor.
        names: Of all that were saved with it: `weight_v` is a parameter of a weight norm, a buffer beside `weight_orig`.
    """
    beside = [(end, other) for end, other in _BESIDE if name.endswith(end)]
    return bool(_KEPT.search(name)) or any(name.removesuffix(end) + other in names for end, other in beside)


# What versions of transformers have saved as buffers and no longer do.
_BUFFER = re.compile(r"(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids|running_\w+|\.weights)$")


def _in_file(
    p: LiveParameter, shape: tuple[int, ...], stored: dict[str, tuple[FusedSlice, ...]], weights: Weights | None
) -> tuple[str, tuple[FusedSlice, ...]]:
    """Return the name of a parameter in its weight file, and the slices that it is stored in, if several."""
    slices = stored.get(p.live_name)
    if weights is not None:
        for name in (p.name, *p.aliases):
            if weights.has(name, shape):
                return name, ()
        as_saved = slices is not None and all(weights.has(fused.name, fused.shape) for fused in slices)
        whole = slices is None or [fused.shape for fused in slices] == [shape]
        renamed = _without_models(p.live_name, weights) if whole and not as_saved else None
        if renamed is not None and weights.has(renamed, shape):
            return renamed, ()
        if slices and not as_saved:
            raise NamingError(_missing(slices[0].name, slices[0].shape, weights))
        if (
            slices is None and p.parameter.requires_grad
        ):  # what is never trained (sinusoidal positions) may not be saved
            raise NamingError(_missing(p.name, shape, weights))
    if not slices:
        return p.name, ()
    return (slices[0].name, ()) if len(slices) == 1 and slices[0].shape == shape else (p.name, slices)


_MODEL = re.compile(r"(?:\w+_)?model\.")


def _without_models(name: str, weights: Weights) -> str | None:
    """Return the one tensor of a file that differs from a name in parts like `model.` and `vision_model.` only.

    transformers has moved these about (LLaVA) and translates when it loads.
    """
    plain = _MODEL.sub("", name)
    found = [
        other for other in weights.tensors if other.endswith(name.rpartition(".")[2]) and _MODEL.sub("", other) == plain
    ]
    return found[0] if len(found) == 1 else None


def _missing(name: str, shape: tuple[int, ...], weights: Weights) -> str:
    there = weights.tensors.get(name)
    found = f"has it as {tuple(there.shape)}" if there is not None else "has no such tensor"
    return (
        f"The model has the parameter {name!r} of shape {shape}, but {weights.label} {found}: model and weights do not belong "
        "together. Give the model that was trained with --model, or the names in the optimizer's order with --names."
    )


# -- transformers >= 5 keeps some parameters in another form than their files do (experts fused into one) -----------------


def _stored_slices(model: nn.Module) -> dict[str, tuple[FusedSlice, ...]]:
    """Return the slices in which `save_pretrained` stores what it does not store as it is; none where it rearranges values.

    transformers undoes its own conversions on tensors without values. Those that only cut leave views behind, which tell
    what was cut out where.
    """
    if "peft" in sys.modules:
        from peft import PeftModel, get_peft_model_state_dict

        if isinstance(model, PeftModel):
            return _stored_adapter(model, get_peft_model_state_dict(model, save_embedding_layers=False))
    if "transformers" not in sys.modules:  # then this is none of its models
        return {}
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5, files hold what the running model holds
        return {}
    if not isinstance(model, PreTrainedModel):
        return {}
    live = {name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()}
    try:
        with _ViewsOnly(), torch.no_grad():
            saved = revert_weight_conversion(model, dict(live))
    except Exception as error:
        raise NamingError(f"transformers cannot say how it stores this model: {error}.") from error
    by_storage = {tensor.untyped_storage()._cdata: name for name, tensor in live.items()}
    cut: dict[str, list[FusedSlice]] = {}
    for name, tensor in saved.items():
        source = by_storage.get(tensor.untyped_storage()._cdata)
        if source is not None and tensor.is_contiguous():
            cut.setdefault(source, []).append(FusedSlice(name, tensor.storage_offset(), tuple(tensor.shape)))
    slices = {name: _complete(cut.get(name, []), live[name].numel()) for name in live}
    return {name: p for name, p in slices.items() if p != (FusedSlice(name, 0, tuple(live[name].shape)),)}


def _stored_adapter(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> dict[str, tuple[FusedSlice, ...]]:
    """Return the names that peft gives an adapter's parameters in its file."""
    names = {tensor.untyped_storage()._cdata: name for name, tensor in saved.items()}
    live = {name: p for name, p in model.named_parameters() if p.untyped_storage()._cdata in names}
    return {name: (FusedSlice(names[p.untyped_storage()._cdata], 0, tuple(p.shape)),) for name, p in live.items()}


def _complete(slices: Sequence[FusedSlice], numel: int) -> tuple[FusedSlice, ...]:
    """Return the slices in order, or nothing unless they cover the parameter exactly once."""
    ordered = sorted(slices, key=lambda fused: fused.start)
    end = 0
    for fused in ordered:
        if fused.start != end:
            return ()
        end += torch.Size(fused.shape).numel()
    return tuple(ordered) if end == numel else ()


class _ViewsOnly(TorchDispatchMode):
    """Copies of a view are the view itself, so that `contiguous()` does not hide where a tensor comes from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


# -- other weights of the model: what differs was trained, what is bit-equal was frozen ---------------------------------------


def with_earlier(candidates: Sequence[Candidate], before: Weights) -> list[Candidate]:
    """Return the candidates with their values at an earlier moment, unread.

    Args:
        candidates: The model's parameters in registration order.
        before: Weights of the same model from that moment.
    """
    bare = _without_prefix(before.tensors)
    known = [c.slices or c.before is not None for c in candidates]
    return [
        c if there else replace(c, before=_earlier(c.name, c.shape, before, bare))
        for c, there in zip(candidates, known, strict=True)
    ]


def by_evidence(candidates: Sequence[Candidate], after: Weights, before: Weights) -> list[list[Candidate]]:
    """Return the candidates of a model of which some parameters were frozen: first the likely ones, then all.

    What differs between the two sets of weights is required. What is bit-equal is left out at first; it comes back in the
    second list, since a trained parameter stays as it was if no gradient reached it or its steps were too small to count.

    Args:
        candidates: The model's parameters in registration order.
        after: The checkpoint's own weights.
        before: Weights of the same model from another moment.
    """
    bare = _without_prefix(before.tensors)
    marked = []
    for c in candidates:
        names = [fused.name for fused in c.slices] or [c.name]
        verdicts = [_changed(name, after, before, bare) for name in names]
        changed = True if True in verdicts else None if None in verdicts else False
        earlier = None if c.slices else _earlier(c.name, c.shape, before, bare)
        marked.append((replace(c, required=changed is True, before=c.before or earlier), changed))
    likely = [c for c, changed in marked if changed is not False]
    return [likely, [c for c, _ in marked]]


def _without_prefix(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors under their names without the first part, where that leaves every name its own."""
    known = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if "." in name}
    return known if len(known) == sum("." in name for name in tensors) else {}


def _earlier(
    name: str, shape: tuple[int, ...], before: Weights, bare: Mapping[str, TensorSource]
) -> TensorSource | None:
    """Return the tensor of the other weights; a bare encoder's names lack the prefix that a model with a head gives them."""
    old = before.tensors.get(name) or before.tensors.get(name.partition(".")[2]) or bare.get(name)
    return old if old is not None and tuple(old.shape) == shape else None


def _changed(name: str, after: Weights, before: Weights, bare: Mapping[str, TensorSource]) -> bool | None:
    """Return whether a tensor differs; None where it is not in both with the same shape."""
    new = after.tensors.get(name)
    old = None if new is None else _earlier(name, tuple(new.shape), before, bare)
    if new is None or old is None:
        return None
    numel = math.prod(new.shape)
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        if not torch.equal(new.read_flat(start, stop), old.read_flat(start, stop).to(new.dtype)):
            return True
    return False


# -- names that a user or a file gives -----------------------------------------------------------------------------------------


def given_names(names: Sequence[str] | str | os.PathLike[str]) -> list[str]:
    """Return the names that the user gave: a sequence, or a file with one name a line or a JSON list.

    Raises:
        FileError: The file cannot be read or holds something else.
    """
    if not isinstance(names, (str, os.PathLike)):
        return list(names)
    path = Path(names)
    try:
        text = path.read_text("utf-8-sig")  # editors on Windows write a mark in front
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise FileError(f"Cannot read the names in {path}: {reason}.") from error
    if not text.lstrip().startswith("["):
        return [line.strip() for line in text.splitlines() if line.strip()]
    listed = parse_json(text, f"{path}, which starts like a JSON list of names,")
    if not all(isinstance(name, str) for name in listed):
        raise FileError(f"{path} must be a JSON list of strings: the names in the optimizer's order.")
    return listed


def matching(candidates: Sequence[Candidate], pattern: str) -> list[Candidate]:
    """Return the candidates whose name, in the weight file or in the running model, a regular expression finds."""
    search = re.compile(pattern).search
    return [c for c in candidates if any(map(search, (c.name, c.live_name or c.name, *(p.name for p in c.slices))))]


_ANYWHERE = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def clean_names(names: Sequence[str]) -> list[str]:
    """Return names without what wrappers add: `_orig_mod.` and others anywhere, `module.` where every name begins with it.

    Raises:
        NamingError: Two names become the same.
    """
    clean = [_ANYWHERE.sub("", name) for name in names]
    while clean and all(name.startswith("module.") for name in clean):
        clean = [name.removeprefix("module.") for name in clean]
    no_duplicates(clean, "after the names of wrappers are removed")
    return clean


def distinct_names(names: Sequence[str], otherwise: Sequence[str] | None = None) -> list[str]:
    """Return clean names; where two would become the same (two wrappings of one model), the names as they are, or others.

    Args:
        names: Of the tensors of one dictionary.
        otherwise: What to return instead of the names as they are.
    """
    try:
        return clean_names(names)
    except NamingError:
        return list(names if otherwise is None else otherwise)


_ADAPTER = re.compile(r"\.(?:lora_\w+\.[^.]+\.weight$|lora_embedding_[AB]\.[^.]+$|modules_to_save\.)")


def recorded_name(live_name: str) -> str:
    """Return the name in the weight file of a parameter that was recorded in the running model: PEFT drops the adapter's own name."""
    return adapter_file_name(live_name) if _ADAPTER.search(live_name) else live_name


def no_duplicates(names: Sequence[str], when: str) -> None:
    """Refuse a name that stands for two parameters.

    Raises:
        NamingError: One does.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise NamingError(
                f"The parameter name {name!r} appears twice {when}; every parameter needs a name of its own."
            )
        seen.add(name)


def check_known(given: Sequence[str], known: Collection[str]) -> None:
    """Refuse names of which some are parameters of the source and others are not; warn where none is.

    Raises:
        NamingError: Some are unknown.
    """
    unknown = [name for name in given if name not in known]
    if not known or not unknown:
        return
    if len(unknown) < len(given):
        near = get_close_matches(unknown[0], known, 1)
        raise NamingError(
            f"{len(unknown)} of the {len(given)} given names are no parameters of the source, for example {unknown[0]!r}"
            f"{f'; it has {near[0]!r}' if near else ''}. {GIVE_OTHERS}"
        )
    warnings.warn(
        f"None of the given names ({given[0]!r}, …) is a parameter of the source, which has {min(known)!r}: neither "
        "shapes nor values could be checked.",
        SquisherWarning,
        stacklevel=2,
    )
