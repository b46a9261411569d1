"""Per-example gradients of one parameter in forms that are cheaper than one full gradient each, and how to square them.

All tensors of a piece start with the example. Pieces of several uses of the same parameter are summed per example before squaring
(`add_squares`), which is what makes shared modules and tied weights right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "ConvolutionPiece",
    "ConvolutionSettings",
    "Dense",
    "Outer",
    "Piece",
    "Rows",
    "Squares",
    "add_squares",
    "examples_of",
]

TILE = 1 << 19  # elements of a gradient that is squared while it is in the cache
SMALL = 1 << 14  # weights up to this size are done several examples at a time


class Squares:
    """The squares of one gradient of an output, computed once for all who need them."""

    def __init__(self, gradient: Tensor):
        self.gradient = gradient
        self.value: Tensor | None = None

    def of(self, t: Tensor) -> Tensor:
        """The square of a tensor, kept if it is all of the gradient as it lies in memory."""
        g = self.gradient
        if t.data_ptr() != g.data_ptr() or t.numel() != g.numel() or t.dtype != g.dtype or not t.is_contiguous():
            return t.square()
        if self.value is None:
            self.value = t.square()
        return self.value.view(t.shape)


class Piece(Protocol):
    """The gradients of one use of a parameter, for all examples."""

    def add_squares(self, total: Tensor, squares: Squares | None = None) -> None:
        """Add Σ_n (gradient of example n)² to `total`, which has the parameter's shape; `squares` may know some already."""

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """The gradient of one example, in full."""


def add_squares(total: Tensor, pieces: Sequence[Piece]) -> None:
    """Add Σ_n (Σ_pieces gradient of example n)² to `total`."""
    if len(pieces) == 1:
        pieces[0].add_squares(total)
        return
    dense = [p for p in pieces if isinstance(p, Dense)]
    outer = [p for p in pieces if isinstance(p, Outer)]
    rows = [p for p in pieces if isinstance(p, Rows)]
    convolutions = [p for p in pieces if isinstance(p, ConvolutionPiece)]
    if len(dense) == len(pieces):
        Dense(torch.stack([p.values for p in dense]).sum(0)).add_squares(total)
    elif len(rows) == len(pieces):
        _join_rows(rows).add_squares(total)
    elif outer and len(outer) + len(rows) == len(pieces) and total.dim() == 2:
        _outer_squares(total, _join_outer(outer), _join_rows(rows) if rows else None)
    elif convolutions and len(convolutions) + len(outer) == len(pieces) and all(c.can_unfold() for c in convolutions):
        joined = _join_outer([*outer, *(c.unfolded() for c in convolutions)])
        _outer_squares(total.view(total.shape[0], -1), joined)
    else:
        examples = examples_of(pieces[0])
        for n in range(examples):
            gradient = torch.zeros_like(total)
            for piece in pieces:
                gradient += piece.example(n, total.shape)
            total.addcmul_(gradient, gradient)


# -- dense: small parameters ---------------------------------------------------------------------------------------------


@dataclass
class Dense:
    """Full gradients, (examples, *parameter)."""

    values: Tensor

    def add_squares(self, total: Tensor, squares: Squares | None = None) -> None:
        """Add Σ_n (gradient of example n)²."""
        values = self.values.to(total.dtype)
        if values.shape[0] == 1:
            total.addcmul_(values[0], values[0])
        else:
            total += _square(values, squares).sum(0)

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """The gradient of one example, in full."""
        return self.values[n].reshape(shape)


# -- outer products: everything that is a matrix product ----------------------------------------------------------------


@dataclass
class Outer:
    """Gradient of example n = left[n]ᵀ right[n]; left (examples, positions, R), right (examples, positions, C).

    One of the two is the gradient of the output, the other the input, which is the same for every column.
    """

    left: Tensor
    right: Tensor
    gradient_on_left: bool = True

    def add_squares(self, total: Tensor, squares: Squares | None = None) -> None:
        """Add Σ_n (gradient of example n)²."""
        _outer_squares(total.view(total.shape[0], -1), self, squares=squares)

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """The gradient of one example, in full."""
        return (self.left[n].mT @ self.right[n]).view(shape)


def _square(t: Tensor, squares: Squares | None) -> Tensor:
    return t.square() if squares is None else squares.of(t)


def _outer_squares(total: Tensor, outer: Outer, rows: Rows | None = None, squares: Squares | None = None) -> None:
    left, right = outer.left.to(total.dtype), outer.right.to(total.dtype)
    examples, positions, height = left.shape
    width = right.shape[2]
    if positions == 1 and rows is None:
        total.addmm_(_square(left[:, 0], squares).T, _square(right[:, 0], squares))
        return
    if rows is None and height * width <= SMALL and examples > 1:
        step = max(1, TILE // (height * width))
        for i in range(0, examples, step):
            total += torch.bmm(left[i : i + step].mT, right[i : i + step]).square_().sum(0)
        return
    # Tiles of equal height: a small rest would cost a matrix product of its own.
    tile = -(-height // max(1, -(-height * width // TILE)))
    buffer = total.new_empty(tile, width)
    lists = None if rows is None else [rows.sums(n, total.dtype) for n in range(examples)]
    for start in range(0, height, tile):
        stop = min(start + tile, height)
        part, gradient = total[start:stop], buffer[: stop - start]
        for n in range(examples):
            torch.mm(left[n, :, start:stop].T, right[n], out=gradient)
            if lists is not None:
                keys, values = lists[n]
                low, high = torch.searchsorted(keys, torch.tensor([start, stop], device=keys.device)).tolist()
                if low < high:
                    gradient.index_add_(0, keys[low:high] - start, values[low:high])
            part.addcmul_(gradient, gradient)


def _join_outer(pieces: Sequence[Outer]) -> Outer:
    if len(pieces) == 1:
        return pieces[0]
    return Outer(torch.cat([p.left for p in pieces], 1), torch.cat([p.right for p in pieces], 1))


# -- rows: embeddings ----------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Gradient of example n = Σ_t values[n, t] in row keys[n, t]; keys (examples, positions), -1 for none."""

    keys: Tensor
    values: Tensor

    def add_squares(self, total: Tensor, squares: Squares | None = None) -> None:
        """Add Σ_n (gradient of example n)²."""
        examples = self.keys.shape[0]
        height = total.shape[0]
        where = self.keys + torch.arange(examples, device=self.keys.device)[:, None] * height
        where, values = where.flatten(), self.values.flatten(0, 1).to(total.dtype)
        if bool((self.keys < 0).any()):
            kept = self.keys.flatten() >= 0
            where, values = where[kept], values[kept]
        unique, inverse = where.unique(return_inverse=True)
        sums = total.new_zeros(unique.numel(), total.shape[1]).index_add_(0, inverse, values)
        total.index_add_(0, unique % height, sums.square_())

    def sums(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rows that example n touches, sorted, and their gradients."""
        kept = self.keys[n] >= 0
        unique, inverse = self.keys[n][kept].unique(return_inverse=True)
        values = self.values[n][kept].to(dtype)
        return unique, values.new_zeros(unique.numel(), values.shape[1]).index_add_(0, inverse, values)

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """The gradient of one example, in full."""
        keys, values = self.sums(n, self.values.dtype)
        return values.new_zeros(shape).index_add_(0, keys, values)


def _join_rows(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return Rows(torch.cat([p.keys for p in pieces], 1), torch.cat([p.values for p in pieces], 1))


# -- convolutions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvolutionSettings:
    """What is known of a convolution besides its input; of the weight only the shape matters."""

    weight: Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


@dataclass
class ConvolutionPiece:
    """A convolution's input and output gradient; images of one example are neighbours."""

    settings: ConvolutionSettings
    a: Tensor
    g: Tensor
    examples: int

    def add_squares(self, total: Tensor, squares: Squares | None = None) -> None:
        """Add Σ_n (gradient of example n)²."""
        if self.examples > 1 and self.can_unfold() and self._unfolding_pays(total):
            self.unfolded().add_squares(total)
            return
        for n in range(self.examples):
            gradient = self.example(n, total.shape).to(total.dtype)
            total.addcmul_(gradient, gradient)

    def _unfolding_pays(self, total: Tensor) -> bool:
        positions = self.g[0, 0].numel()
        return total.numel() >= 1 << 19 and positions <= 64

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """The gradient of one example, in full."""
        images = self.a.shape[0] // self.examples
        part = slice(n * images, (n + 1) * images)
        rule, dtype = self.settings, torch.promote_types(self.g.dtype, torch.float32)
        gradients = torch.ops.aten.convolution_backward(
            self.g[part].to(dtype),
            self.a[part].to(dtype),
            rule.weight.detach().to(dtype),  # only its shape matters for its own gradient
            None,
            rule.stride,
            rule.padding,
            rule.dilation,
            rule.transposed,
            list(rule.output_padding) or [0] * len(rule.stride),
            rule.groups,
            [False, True, False],
        )
        return gradients[1]

    def can_unfold(self) -> bool:
        """Whether it can be written as an outer product."""
        return self.a.dim() == 4 and self.settings.groups == 1 and not self.settings.transposed

    def unfolded(self) -> Outer:
        """The same as an outer product: every output position sees one patch of the input."""
        rule, kernel = self.settings, self.settings.weight.shape[2:]
        a = self.a
        if tuple(kernel) == (1, 1) and not any(rule.padding):
            patches = a[:, :, :: rule.stride[0], :: rule.stride[1]].flatten(2)
        else:
            patches = F.unfold(a, tuple(kernel), tuple(rule.dilation), tuple(rule.padding), tuple(rule.stride))
        g = self.g.flatten(2)
        if a.shape[0] != self.examples:
            patches, g = (_merge_images(t, self.examples) for t in (patches, g))
        return Outer(g.mT, patches.mT)


def _merge_images(t: Tensor, examples: int) -> Tensor:
    """(images, channels, positions) to (examples, channels, images per example · positions)."""
    return t.unflatten(0, (examples, -1)).transpose(1, 2).flatten(2)


def examples_of(piece: Any) -> int:
    """Return how many examples a piece holds gradients of."""
    for name in ("values", "left", "keys"):
        if hasattr(piece, name):
            return int(getattr(piece, name).shape[0])
    return int(piece.examples)
