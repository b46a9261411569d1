"""Optimizer states of eight and four bits (bitsandbytes, torchao, FlashAdamW): read in chunks, without the libraries.

They keep codes, a small table that a code is looked up in, and one scale per block of elements in flat order:
`value = table[code] · scale[block]`; FlashAdamW's is the square root of the second moment. Here such a state becomes an
ordinary one: a lazy tensor under the usual key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import FileError, NoAccumulatorError
from ...storage.tensors import CHUNK, TensorSource
from ...storage.torch_files import Record
from ..states import Entry
from . import is_tensor

__all__ = ["Blocks", "check_precision", "decoded"]

NESTED = "__bnb_optimizer_quant_state__"
# The first function of a chain has the gradient itself; SOAP's average, for one, is in another basis.
_HEAVYBALL = re.compile(r"(?P<by>update_by_adam)_(?P<key>exp_avg(?:_sq)?)_0")


@dataclass(frozen=True, eq=False)
class Blocks:
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
        """Whether a byte holds two codes."""
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
    if any(isinstance(value, Blocks) and value.packed for entry in entries for value in entry.state.values()):
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
    return Blocks(codes, scale, table, block, tuple(codes.shape), "bnb 8bit")


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
        if not is_tensor(source):
            raise FileError(
                "A bitsandbytes state holds something that is no tensor: the file is damaged. Get it again."
            )
        for start in range(0, _numel(source), CHUNK):
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


def _flash(state: Mapping[str, Any]) -> Blocks:
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
    return Blocks(codes, scale, torch.arange(256) / 255, _FLASH_BLOCK, tuple(codes.shape), "flash 8bit", root=True)


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
    return Blocks(codes, scale, table if table_size else None, numel // sizes[1], shape, stored_as)


_TORCHAO = {  # class: what to call it, size of its table, codes per byte
    "OptimState8bit": ("torchao 8bit", 256, 1),
    "OptimState4bit": ("torchao 4bit", 16, 2),
    "OptimStateFp8": ("torchao fp8", 0, 1),
}


def _attribute(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Record) else getattr(value, name, None)


# -- tensors in memory, or in a file -----------------------------------------------------------------------------------


def _numel(tensor: Any) -> int:
    return math.prod(tensor.shape)


def _flat(tensor: Any, start: int, stop: int) -> Tensor:
    if isinstance(tensor, Tensor):
        return tensor.detach().reshape(-1)[start:stop]
    if not getattr(tensor, "is_contiguous", True):
        return tensor.load().reshape(-1)[start:stop]
    return tensor.read_flat(start, stop)
