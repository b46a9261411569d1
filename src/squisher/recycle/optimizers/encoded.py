"""Optimizer states that are not yet a tensor of the parameter's shape: in eight or four bits, or cut into blocks. Read without the libraries.

bitsandbytes, torchao and FlashAdamW keep codes, a small table that a code is looked up in, and one scale per block of elements in
flat order: `value = table[code] · scale[block]`; FlashAdamW's is the square root of the second moment. Distributed Shampoo keeps its
average in blocks. Each becomes an ordinary state: a lazy tensor under the usual key, read in chunks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...errors import FileError, NoAccumulatorError
from ...storage.tensors import CHUNK, Block, Blocks, Joined, Slice, TensorSource
from ...storage.torch_files import Record, StoredTensor, Verified
from ..states import Entry
from . import is_tensor

__all__ = ["Quantized", "check_precision", "decoded", "unblocked"]

NESTED = "__bnb_optimizer_quant_state__"
# The first function of a chain has the gradient itself; SOAP's average, for one, is in another basis.
_HEAVYBALL = re.compile(r"(?P<by>update_by_adam)_(?P<key>exp_avg(?:_sq)?)_0")


@dataclass(frozen=True, eq=False)
class Quantized:
    """A block-wise quantised tensor that is decoded when asked for.

    Attributes:
        codes: One code per element, or two to a byte with the first in the high half.
        scale: One per block of elements in flat order.
        table: What a code stands for; None where the codes are numbers themselves.
        block: Elements per block; the last one may be shorter.
        shape: Shape of the decoded tensor.
        stored_as: What to call it in a provenance.
        root: Whether the decoded value is to be squared.
    """

    codes: Tensor | TensorSource
    scale: Tensor | TensorSource
    table: Tensor | TensorSource | None
    block: int
    shape: tuple[int, ...]
    stored_as: str
    root: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the decoded values."""
        return torch.float32

    @property
    def packed(self) -> bool:
        """Return whether a byte holds two codes."""
        return self.stored_as.endswith("4bit")

    def load(self) -> Tensor:
        """Read the whole tensor, decoded."""
        numel = math.prod(self.shape)
        chunks = [self.read_flat(k, min(k + CHUNK, numel)) for k in range(0, numel, CHUNK)]
        return torch.cat(chunks or [torch.empty(0)]).reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop` in flat order, decoded."""
        first, last = start // self.block, -(-stop // self.block)
        scale = _flat(self.scale, first, last).float()
        offset = first * self.block
        scale = scale[torch.arange(start - offset, stop - offset, device=scale.device) // self.block]
        codes = self._codes(start, stop)
        if self.table is None:
            values = codes.float().mul_(scale)
        else:
            values = _flat(self.table, 0, _numel(self.table)).float()[codes.int()].mul_(scale)
        return values.square_() if self.root else values

    def _codes(self, start: int, stop: int) -> Tensor:
        if not self.packed:
            return _flat(self.codes, start, stop)
        pairs = _flat(self.codes, start // 2, -(-stop // 2))
        return torch.stack([pairs >> 4, pairs & 15], dim=-1).reshape(-1)[start % 2 :][: stop - start]


def decoded(entries: Sequence[Entry], class_name: str | None = None) -> list[Entry]:
    """Return the same entries with every quantised squared-gradient average as a lazy tensor under its usual key.

    bitsandbytes: `state2` of its two-state optimizers becomes `exp_avg_sq` (and stays as `state2`, by which the table
    knows the optimizer). For its one-state optimizers see `_one_state`.

    Args:
        entries: One optimizer's, live or from a file.
        class_name: Of the optimizer, where it is known.

    Raises:
        FileError: A quantised state that is incomplete or does not fit together.
        NoAccumulatorError: A bitsandbytes state that may be of several optimizers.
    """
    entries = [replace(entry, state=_one_view(entry.state)) for entry in entries]
    # Recent bitsandbytes nests its tensors, so that torch leaves their dtypes alone.
    nested = [(entry, entry.state.get(NESTED)) for entry in entries]
    entries = [replace(e, state={**e.state, **inner}) if isinstance(inner, dict) else e for e, inner in nested]
    alone = [e for e in entries if "state1" in e.state and "state2" not in e.state]
    key = _one_state(alone, class_name or "") if alone else ""
    return [replace(entry, state=_decoded_state(entry.state, key)) for entry in entries]


def _one_view(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return a state of heavyball under the usual keys, and the function that steps under its own.

    It keeps a state for every view of a parameter (of one view, a reshaped parameter's among them, that one is returned), with the
    function in the keys: `update_by_adam_exp_avg_sq_0`.
    """
    view = state.get(0) if len(state) == 1 else None
    if not isinstance(view, dict):
        return state
    found: dict[str, Any] = {}
    for key, value in view.items():
        match = _HEAVYBALL.fullmatch(str(key))
        found |= {match["key"]: value, match["by"]: True} if match else {str(key): value}
    return found


def check_precision(entries: Iterable[Entry], allow_coarse: bool) -> None:
    """Refuse states of four bits unless they were asked for.

    Raises:
        NoAccumulatorError: Some entry has only four bits.
    """
    if allow_coarse:
        return
    if any(isinstance(value, Quantized) and value.packed for entry in entries for value in entry.state.values()):
        raise NoAccumulatorError(
            "The optimizer keeps its state in four bits: a typical entry is 20% off, one in ten is two or three times too "
            "large, and zeros come out as a sixteenth of the largest in their block. If the order of magnitude is enough, "
            "pass --allow-coarse (allow_coarse=True)."
        )


def _decoded_state(state: Mapping[str, Any], alone: str) -> Mapping[str, Any]:
    """Return one parameter's state, decoded; `alone` is the usual key of a bitsandbytes state that is the only one."""
    out = {key: _torchao(key, value) for key, value in state.items() if key != NESTED}
    if "exp_avg_sq::quantized" in state:
        out["exp_avg_sq"] = _flash(state)
    if "state1" in state and "state2" in state:
        out["exp_avg_sq"] = out["state2"] = _bitsandbytes(state, "2")
    elif "state1" in state and alone:
        out[alone] = out["state1"] = _bitsandbytes(state, "1")
    return out


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def _bitsandbytes(state: Mapping[str, Any], number: str) -> Any:
    """Return one state: codes with their table and the largest magnitude of each block, or, for small parameters, plain floats."""
    codes = state[f"state{number}"]
    contiguous = getattr(codes, "is_contiguous", True)
    if not (contiguous() if callable(contiguous) else contiguous):
        # Its kernels take memory as it lies: in the parameter's order since they copy that first, in the strides' before.
        return "in an order that is not recorded: the parameter was not contiguous (channels_last?), which bitsandbytes does not keep"
    if not is_tensor(codes) or codes.dtype != torch.uint8:
        return codes
    table: Any = state.get(f"qmap{number}")
    scale: Any = state.get(f"absmax{number}")
    if not is_tensor(table) or not is_tensor(scale):
        raise FileError(
            f"A bitsandbytes state has eight-bit codes (state{number}) but not both of qmap{number} and absmax{number}, so it "
            "cannot be decoded: it was written with block_wise=False, by an unknown version, or is incomplete."
        )
    numel, blocks = _numel(codes), _numel(scale)
    # Versions differ in the block size (2048, then 256); of several blocks, only one power of two gives so many.
    block = next((size for size in _BLOCK_SIZES if -(-numel // size) == blocks), None)
    if block is None or _numel(table) != 256:
        raise FileError(
            f"A bitsandbytes state of {numel} codes has {blocks} block scales and a table of {_numel(table)}: they do not fit "
            "together, so the file is damaged or of an unknown version."
        )
    return Quantized(codes, scale, table, block, tuple(codes.shape), "bnb 8bit")


_BLOCK_SIZES = [2**k for k in range(5, 17)]
_MEANT = {"rmsprop": "square_avg", "adagrad": "sum", "lion": "", "sgd": "", "lars": ""}
_ENOUGH = 64  # a momentum without a single negative entry among so many has a chance of 2⁻⁶⁴ or a strange model


def _one_state(entries: Sequence[Entry], class_name: str) -> str:
    """Return what bitsandbytes keeps in `state1` where there is no `state2`: the key that torch's optimizer would use.

    RMSprop (betas α, momentum), Adagrad (0, 0), SGD and LARS (momentum, dampening) and Lion (β₁, β₂) look alike. A negative
    entry is a momentum's. Zero betas are Adagrad's: RMSprop and SGD refuse a first beta of zero.

    Returns:
        `square_avg`, `sum`, or nothing for a momentum.

    Raises:
        NoAccumulatorError: It may be several.
    """
    for name, key in _MEANT.items():
        if class_name.lower().removeprefix("paged").startswith(name):
            return key
    seen = 0
    for entry in entries:
        source = _bitsandbytes(entry.state, "1")
        if not is_tensor(entry.state["state1"]):
            raise FileError("A bitsandbytes state holds what is no tensor: the file is damaged. Get it again.")
        for start in range(0, _numel(source) if is_tensor(source) else 0, CHUNK):
            chunk = _flat(source, start, min(start + CHUNK, _numel(source)))
            if (chunk < 0).any():
                return ""
            seen += int((chunk > 0).sum())
    first = {float(entry.group["betas"][0]) for entry in entries if entry.group.get("betas")}
    if seen >= _ENOUGH and first:
        if first == {0.0}:
            return "sum"
        if 0.0 not in first:
            return "square_avg"
    raise NoAccumulatorError(
        "This bitsandbytes state has one state per parameter, which may be RMSprop's or Adagrad's squared gradient or a "
        f"momentum, and its {seen} non-zero entries do not tell which. Extract from the live optimizer instead."
    )


# -- FlashAdamW --------------------------------------------------------------------------------------------------------

_FLASH_BLOCK = 32


def _flash(state: Mapping[str, Any]) -> Quantized:
    """Decode FlashAdamW's compressed second moment: (code / 255 · scale)², one scale for 32 elements.

    Raises:
        FileError: It is incomplete or does not fit together.
    """
    codes: Any = state["exp_avg_sq::quantized"]
    scale: Any = state.get("exp_avg_sq::scales")
    fits = is_tensor(codes) and is_tensor(scale) and codes.dtype == torch.uint8
    if not fits or _numel(scale) != -(-_numel(codes) // _FLASH_BLOCK):
        raise FileError(
            "A compressed FlashAdamW state does not fit together: it needs one scale for 32 codes of eight bits. The file is damaged "
            "or of an unknown version."
        )
    return Quantized(codes, scale, torch.arange(256) / 255, _FLASH_BLOCK, tuple(codes.shape), "flash 8bit", root=True)


# -- torchao -----------------------------------------------------------------------------------------------------------


def _torchao(key: str, value: Any) -> Any:
    """Decode a torchao tensor subclass (pickled or live); return anything else as it is."""
    name = value.name.rsplit(".", 1)[-1] if isinstance(value, Record) else type(value).__name__
    if name not in _TORCHAO:
        return value
    stored_as, table_size, per_byte = _TORCHAO[name]
    codes, scale, table, shape = (_attribute(value, key) for key in ("codes", "scale", "qmap", "shape"))
    sizes = [_numel(one) if is_tensor(one) else 0 for one in (codes, scale, table)]
    shape = tuple(shape) if isinstance(shape, tuple) else ()
    numel = math.prod(shape)
    if sizes[0] * per_byte != numel or not sizes[1] or numel % sizes[1] or sizes[2] != table_size:
        raise FileError(
            f"The torchao state {key} ({name} of shape {shape}) is incomplete or does not fit together: it has {sizes[0]} codes, "
            f"{sizes[1]} scales and a table of {sizes[2]}. The file is damaged or of an unknown version."
        )
    return Quantized(codes, scale, table if table_size else None, numel // sizes[1], shape, stored_as)


_TORCHAO = {  # class: what to call it, size of its table, codes per byte
    "OptimState8bit": ("torchao 8bit", 256, 1),
    "OptimState4bit": ("torchao 4bit", 16, 2),
    "OptimStateFp8": ("torchao fp8", 0, 1),
}


def _attribute(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Record) else getattr(value, name, None)


# -- Distributed Shampoo -----------------------------------------------------------------------------------------------
#
# Its grafting keeps the average of squared gradients that Adam, RMSprop or Adagrad would keep. Shampoo views a parameter with small
# neighbouring dimensions merged, and cuts that view along every dimension into blocks of at most `max_preconditioner_dim`; each block
# has a state. Which shape the parameter has is not in them (four blocks of 16 × 16 may be 32 × 32 or 16 × 64), so it must be known;
# every block must then have the size that it implies.

_GRAFTED = {  # of the class of its settings: the key of the table
    "AdamPreconditionerConfig": "grafted_average",
    "RMSpropPreconditionerConfig": "grafted_average",
    "AdaGradPreconditionerConfig": "grafted_sum",
}


def unblocked(entry: Entry, shape: Sequence[int] | None) -> Entry:
    """Return the state of a parameter with its grafting accumulator whole; as it is where there is none, or its shape is not known.

    Args:
        entry: Live or from a file.
        shape: Of the parameter.

    Raises:
        FileError: The blocks are not those of a parameter of this shape.
    """
    config = entry.group.get("grafting_config")
    key = _GRAFTED.get((config.name if isinstance(config, Record) else type(config).__name__).rpartition(".")[2])
    state: Mapping[str, Any] = entry.state
    if shape is None or key is None or "block_0" not in state or _attribute(config, "drop_weighting_factor_on_gsquare"):
        return entry
    inner = {name: one for name, one in state.items() if name.startswith("block_") and isinstance(one, dict)}
    blocks: dict[str, Any] = {name: one.get("adagrad") for name, one in inner.items()}
    limit: Any = entry.group.get("max_preconditioner_dim")
    target = _attribute(entry.group.get("distributed_config"), "target_parameter_dimensionality")
    known = isinstance(limit, (int, float)) and isinstance(target, (int, float))
    if not known or not all(isinstance(one, (Tensor, StoredTensor)) for one in blocks.values()):
        return entry  # of another version, or spread over ranks
    view = _merged(tuple(shape), limit, target)
    most = [n if limit == math.inf else int(limit) for n in view]
    wanted = {}
    for number, offsets in enumerate(product(*[range(0, n, m) for n, m in zip(view, most, strict=True)])):
        sizes = tuple(min(m, n - o) for m, n, o in zip(most, view, offsets, strict=True))
        wanted[f"block_{number}"] = (offsets, sizes)
    found = {name: tuple(one.shape) for name, one in blocks.items()}
    if found != {name: sizes for name, (_, sizes) in wanted.items()}:
        raise FileError(
            f"The blocks of {entry.name!r} in Distributed Shampoo's state ({found}) are not those of a parameter of the shape "
            f"{tuple(shape)}: the weights are of another model. Give those that were trained."
        )
    dtype = next(iter(blocks.values())).dtype
    parts = [Block(view, offsets, sizes, _source(blocks[name])) for name, (offsets, sizes) in wanted.items()]
    whole = Joined(shape, dtype, [Slice(Blocks(view, dtype, parts), 0, math.prod(shape))])
    decay = entry.group.get("weight_decay_type")
    decoupled = "L2" not in str(decay.args if isinstance(decay, Record) else decay)
    group = {**entry.group, "grafting_beta2": _attribute(config, "beta2"), "decoupled": decoupled}
    return replace(entry, state={key: whole, "step": state.get("step")}, group=group)


def _merged(shape: tuple[int, ...], limit: float, target: float) -> tuple[int, ...]:
    """Return the shape of Shampoo's view: from the last on, dimensions are merged while there are too many and they stay small."""
    if target == math.inf:
        return shape
    sizes = [n for n in reversed(shape) if n != 1] or [1]
    view = sizes[:1]
    for seen, size in enumerate(sizes[1:], start=1):
        if len(view) + len(sizes) - seen > target and view[-1] * size <= limit:
            view[-1] *= size
        else:
            view.append(size)
    return tuple(reversed(view))


class _InMemory:
    """A block of a live state."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self._tensor = tuple(tensor.shape), tensor.dtype, tensor

    def load(self) -> Tensor:
        """Return the whole tensor."""
        return self._tensor.detach()

    def read_flat(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` in flat order."""
        return self._tensor.detach().reshape(-1)[start:stop].cpu()


def _source(block: Any) -> Any:
    return _InMemory(block) if isinstance(block, Tensor) else Verified(block)


# -- tensors in memory, or in a file -----------------------------------------------------------------------------------


def _numel(tensor: Any) -> int:
    return math.prod(tensor.shape)


def _flat(tensor: Any, start: int, stop: int) -> Tensor:
    if isinstance(tensor, Tensor):
        return tensor.detach().reshape(-1)[start:stop]
    if not getattr(tensor, "is_contiguous", True):
        return tensor.load().reshape(-1)[start:stop]
    return tensor.read_flat(start, stop)
