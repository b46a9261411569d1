"""Linear layers and matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Gradients, Rule, Uses, to_examples
from .lookup import Rows
from .norm import Broadcast

__all__ = ["LINEAR", "Einsum", "Grouped", "Linear", "Outer", "add_outer", "einsum_terms", "join_outer", "outer_squares"]

TILE = 1 << 20  # elements of a gradient that is squared while it is in the cache
SMALL = 1 << 14  # weights up to this size are done several examples at a time
# On an AMD processor it is twice as fast as MKL, by AVX-512. What comes out is proven like all that rules compute.
_AVX512 = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if _AVX512 else None


@dataclass
class Linear:
    """output = a Wᵀ, or a W if transposed; positions are all dimensions of a but the last and the examples'."""

    a: Tensor
    transposed: bool = False

    def gradients(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Gradients:
        """Return the gradients of this use."""
        a = self.a.square() if squared else self.a
        a, g = (to_examples(t, dim, examples).flatten(1, -2) for t in (a, g))
        return Outer(a, g, False) if self.transposed else Outer(g, a)

    def saved(self) -> Sequence[Tensor]:
        """Return the tensors that must not change before the backward pass."""
        return (self.a,)


@dataclass
class Outer:
    """Gradient of example n = left[n]ᵀ right[n]; left (examples, positions, R), right (examples, positions, C).

    One of the two is the gradient of the output, the other the input, which is the same for every column.
    """

    left: Tensor
    right: Tensor
    gradient_on_left: bool = True

    def add_squares(self, total: Tensor) -> None:
        """Add Σ_n (gradient of example n)²."""
        outer_squares(total.view(self.left.shape[2], self.right.shape[2]), self)

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """Return the gradient of one example, in full."""
        left, right = self.left[n], self.right[n]
        dtype = torch.promote_types(left.dtype, right.dtype)  # they differ under autocast
        return (left.mT.to(dtype) @ right.to(dtype)).view(shape)


@dataclass
class Blocks:
    """Gradient of example n and block k = left[n, k]ᵀ right[n, k]; left (examples, blocks, positions, R), right (…, C)."""

    left: Tensor
    right: Tensor

    def add_squares(self, total: Tensor) -> None:
        """Add Σ_n (gradient of example n)²."""
        left, right = self.left.to(total.dtype), self.right.to(total.dtype)
        whole = total.view(left.shape[1], left.shape[3], right.shape[3])
        step = max(1, TILE // whole.numel())
        for i in range(0, len(left), step):
            whole += (left[i : i + step].mT @ right[i : i + step]).square_().sum(0)

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """Return the gradient of one example, in full."""
        dtype = torch.promote_types(self.left.dtype, self.right.dtype)  # they differ under autocast
        return (self.left[n].mT.to(dtype) @ self.right[n].to(dtype)).view(shape)


@dataclass
class Einsum:
    """output = einsum of an input and a weight, which may have a matrix for each head, group or expert.

    Attributes:
        a: the input.
        terms: the letters of the input, the weight and the output.
    """

    a: Tensor
    terms: tuple[str, str, str]

    @classmethod
    def of(cls, a: Tensor, terms: tuple[str, str, str]) -> Einsum | None:
        """Return the rule; None unless the weight's letters are those of the blocks, then some summed over and some new, in turn."""
        given, weight, result = terms
        kinds = ["summed" if c not in result else "block" if c in given else "new" for c in weight]
        distinct = all(len(set(term)) == len(term) for term in terms)
        once = all(c in result or c in weight for c in given) and all(c in given or c in weight for c in result)
        rest = kinds[kinds.count("block") :]
        in_turn = set(rest) == {"summed", "new"} and rest in (sorted(rest), sorted(rest, reverse=True))
        return cls(a, terms) if distinct and once and in_turn else None

    def apart_from(self, dim: int, dims: int) -> bool:
        """Return whether the weight has one matrix for all rows of this dimension of the output."""
        return self.terms[2][dim] not in self.terms[1]

    def gradients(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Gradients:
        """Return the gradients of this use."""
        given, weight, result = self.terms
        blocks = [c for c in weight if c in given and c in result]
        kept = [c for c in result if c not in weight and c != result[dim]]
        sides = []
        for t, term in ((self.a.square() if squared else self.a, given), (g, result)):
            own = [c for c in weight if c in term and c not in blocks]
            t = t.permute([term.index(c) for c in (result[dim], *kept, *blocks, *own)])
            t = to_examples(t, 0, examples).flatten(1, 1 + len(kept))
            sides.append(t.reshape(*t.shape[:2], *((-1,) if blocks else ()), math.prod(t.shape[2 + len(blocks) :])))
        a, g = sides
        left, right = (g, a) if weight[len(blocks)] in result else (a, g)
        return Blocks(left.transpose(1, 2), right.transpose(1, 2)) if blocks else Outer(left, right, left is g)

    def saved(self) -> Sequence[Tensor]:
        """Return the tensors that must not change before the backward pass."""
        return (self.a,)


def einsum_terms(equation: Any, operands: Sequence[Tensor]) -> tuple[list[str], str] | None:
    """Return the letters of every operand and of the output, with letters for `...`; None if the equation has another form."""
    if not isinstance(equation, str) or "->" not in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return None
    spare = "".join(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation)
    hidden = [t.dim() - len(term.replace("...", "")) for term, t in zip(terms, operands, strict=True)]
    most = max((n for n, term in zip(hidden, terms, strict=True) if "..." in term), default=0)
    if most > len(spare):
        return None
    terms = [
        term.replace("...", spare[most - n : most]) if "..." in term else term
        for term, n in zip(terms, hidden, strict=True)
    ]
    return terms, result.replace("...", spare[:most])


@dataclass
class Grouped:
    """output[rows] = a[rows] · W[k] for the rows of matrix k, which end at ends[k]; W[k]ᵀ if `transposed`.

    Attributes:
        a: the rows.
        ends: where the rows of each matrix end.
        owner: the example of each row.
        transposed: whether W[k] is (columns of the output, columns of a).
    """

    a: Tensor
    ends: Tensor
    owner: Tensor
    transposed: bool

    def gradients(self, g: Tensor, dim: int, examples: int, squared: bool = False) -> Gradients:
        """Return the gradients of this use."""
        a = self.a.square() if squared else self.a
        left, right = (g, a) if self.transposed else (a, g)
        return GroupedOuter(left, right, self.ends, self.owner, examples)

    def saved(self) -> Sequence[Tensor]:
        """Return the tensors that must not change before the backward pass."""
        return (self.a, self.ends)


@dataclass
class GroupedOuter:
    """Gradient of example n and matrix k = Σ over the rows of n among those of k of left[row] right[row]ᵀ."""

    left_rows: Tensor
    right_rows: Tensor
    ends: Tensor
    owner: Tensor
    examples: int

    def add_squares(self, total: Tensor) -> None:
        """Add Σ_n (gradient of example n)²."""
        for k, here in enumerate(self._groups()):
            if here.start == here.stop:
                continue
            _, inverse, counts = self.owner[here].unique(return_inverse=True, return_counts=True)
            order = inverse.argsort(stable=True)
            owner = inverse[order]
            place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[owner]
            sides = []
            for rows in (self.left_rows[here], self.right_rows[here]):  # as many positions for each, the rest zeros
                side = rows.new_zeros(len(counts), int(counts.max()), rows.shape[1])
                side[owner, place] = rows[order]
                sides.append(side)
            outer_squares(total[k], Outer(sides[0], sides[1]))

    def example(self, n: int, shape: torch.Size) -> Tensor:
        """Return the gradient of one example, in full."""
        whole = self.left_rows.new_zeros(shape)
        for k, here in enumerate(self._groups()):
            mine = self.owner[here] == n
            whole[k] = self.left_rows[here][mine].mT @ self.right_rows[here][mine].to(whole.dtype)
        return whole

    def _groups(self) -> list[slice]:
        ends = self.ends.tolist()
        return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def outer_squares(total: Tensor, outer: Outer, rows: Rows | None = None) -> None:
    """Add Σ_n (left[n]ᵀ right[n] + rows of n)², tile by tile, to `total`."""
    left, right = outer.left.to(total.dtype), outer.right.to(total.dtype)
    g, a = (left, right) if outer.gradient_on_left else (right, left)
    if g.shape[1] > 1 and g.device.type == "cpu" and not bool(g[:, -1].any()):
        kept = g.any(2).any(0)  # one position, where nothing but a class token is used after the layer
        kept[0] = True
        if bool(a[:, ~kept].sum().isfinite()):  # zero times what is not finite is not zero
            left, right = left[:, kept], right[:, kept]
    examples, positions, height = left.shape
    width = right.shape[2]
    if positions == 1 and rows is None:
        add_outer(total, left[:, 0].square(), right[:, 0].square())
        return
    if rows is None and height * width <= SMALL and examples > 1:
        step = max(1, TILE // (height * width))
        for i in range(0, examples, step):
            total += torch.bmm(left[i : i + step].mT, right[i : i + step]).square_().sum(0)
        return
    lists = None if rows is None else [rows.sums(n, total.dtype) for n in range(examples)]
    for start, stop in _tiles(total, max(width, examples * positions // 2), TILE):
        part, turned = total[start:stop], left[:, :, start:stop].mT
        if _is_fast(left, stop - start, width):  # of all examples at once: one alone would not occupy all threads
            turned = turned.contiguous()
        for n in range(examples):
            gradient = _product(turned[n], right[n])
            if lists is not None:
                keys, values = lists[n]
                low, high = torch.searchsorted(keys, torch.tensor([start, stop], device=keys.device)).tolist()
                if low < high:
                    gradient.index_add_(0, keys[low:high] - start, values[low:high])
            part.addcmul_(gradient, gradient)


def add_outer(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right."""
    if _is_fast(left, len(total), total.shape[1]):
        # Small tiles: each is made in the memory of the one before.
        for start, stop in _tiles(total, total.shape[1], TILE >> 2):
            total[start:stop] += _product(left.T[start:stop], right)
    else:
        total.addmm_(left.T, right)


def _tiles(total: Tensor, width: int, size: int) -> Iterator[tuple[int, int]]:
    """Return where tiles of rows begin and end; of equal height, as a small rest would cost a matrix product of its own."""
    height = len(total)
    step = max(1, -(-height // max(1, -(-height * width // size))))
    return ((start, min(start + step, height)) for start in range(0, height, step))


def _product(left: Tensor, right: Tensor) -> Tensor:
    if _is_fast(left, left.shape[0], right.shape[1]):
        return _ONEDNN(left.contiguous(), right.T, None, "none", [], "")
    return left @ right


def _is_fast(t: Tensor, height: int, width: int) -> bool:
    """Return whether oneDNN may be twice as fast as what torch makes a product of this form with."""
    return bool(_ONEDNN) and t.dtype == torch.float32 and t.device.type == "cpu" and height >= 128 and width >= 32


def join_outer(summands: Sequence[Outer]) -> Outer:
    """Join several uses into one summand, whose positions are added up."""
    if len(summands) == 1:
        return summands[0]
    return Outer(torch.cat([p.left for p in summands], 1), torch.cat([p.right for p in summands], 1))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Uses:
    yield weight, Linear(input)
    if bias is not None:
        yield bias, Broadcast.of(bias)


def _matmul(input: Tensor, other: Tensor) -> Uses:
    if other.dim() == 2 and input.dim() >= 2:
        yield other, Linear(input, transposed=True)
    elif input.dim() >= other.dim() > 2 and input.shape[-other.dim() : -2] == other.shape[:-2]:
        letters = "abcdefghijklm"[: input.dim() - 2]  # a matrix for each head
        yield from _einsum(f"{letters}xy,{letters[2 - other.dim() :]}yz->{letters}xz", input, other)
    elif input.dim() == 2 < other.dim():
        yield from _einsum("xy,...yz->...xz", input, other)


def _einsum(equation: Any, *operands: Any) -> Uses:
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    found = einsum_terms(equation, tensors) if len(tensors) == 2 else None
    if found is not None:
        (first, second), result = found
        sizes = dict(zip(first + second, (*tensors[0].shape, *tensors[1].shape), strict=True))
        if any(sizes[c] != n for c, n in zip(first, tensors[0].shape, strict=True)):
            return  # a letter has size 1 in one of them: it is broadcast
        for a, weight, terms in ((*tensors, (first, second, result)), (*tensors[::-1], (second, first, result))):
            rule = Einsum.of(a, terms)
            if rule is not None:
                yield weight, rule


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Iterator[tuple[Any, Rule]]:
    if beta == 1 and alpha == 1:
        yield mat2, Linear(mat1, transposed=True)
        yield input, Broadcast.of(input)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Uses:
    if beta == 1 and alpha == 1:
        yield from _matmul(batch1, batch2)
        yield input, Broadcast.of(input)


LINEAR: dict[Any, Callable[..., Uses]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.einsum: _einsum,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.bmm: _matmul,
    Tensor.bmm: _matmul,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
}
