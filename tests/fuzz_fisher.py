"""Random networks whose later batches lie about the first one: `python -m tests.fuzz_fisher --count 2000`.

Every network is a chain of blocks, drawn from ordinary layers and from the tricks that break a per-example gradient: rows that are
sorted, packed, routed or folded into the batch, weights that are transformed, reused or sliced, parameters in operations without a
rule. Blocks may differ between batches. What `fisher` returns must be what one example at a time gives, or it must refuse. The seed
of every failure is printed, and `--seed` runs it again alone.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from squisher import SquisherError, fisher

WIDTH, CLASSES, LENGTH = 6, 3, 4


class Block(nn.Module):
    """A function of itself and x (examples, positions, width), with parameters of its own."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p, self.q = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.table = nn.Embedding(LENGTH + 1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.function(self, x)


def _attention(s, x):
    q, k = (m(x).unflatten(-1, (2, 3)).transpose(1, 2) for m in (s.a, s.b))
    return x + F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


def _packed(s, x):
    mask = x[..., 0] > 0
    y = torch.zeros_like(x)
    y[mask] = s.a(x[mask])
    return x + y


def _routed(s, x):
    flat = x.reshape(-1, WIDTH)
    left = s.a(flat)[:, 0] > 0
    y = torch.zeros_like(flat)
    for chosen, expert in ((left, s.a), (~left, s.b)):
        (rows,) = torch.where(chosen)
        y = y.index_add(0, rows, expert(flat[rows]).tanh())
    return y.view_as(x)


def _sorted_examples(s, x):
    order = x[:, 0, 0].argsort()
    return x + s.a(s.a(x)[order].tanh())[order.argsort()]


def _set_item(s, x):
    y = torch.zeros(x.shape[0], x.shape[1] + 1, WIDTH, dtype=x.dtype)
    y[:, 1:] = s.a(x)
    return y[:, 1:] + y[:, :1] + x


def _filled(s, x):
    y = x.new_empty(x.shape[1], len(x), 2 * WIDTH)  # both sizes may be the number of examples
    y[..., :WIDTH].copy_(s.a(x).transpose(0, 1))
    y[..., WIDTH:].copy_(x.transpose(0, 1)).mul_(s.p)
    return y.transpose(0, 1).unflatten(-1, (2, -1)).sum(2)


def _filled_parameter(s, x):
    y = s.q[None, :1].repeat(len(x), x.shape[1], 1)
    y[..., 1:3].copy_(s.a(x)[..., :2])
    y[:, :1].add_(1.0)
    return y + x


def _heads(s, x):
    weight = s.q.view(2, 3, WIDTH)
    rows = x.unflatten(-1, (2, 3)).permute(2, 0, 1, 3).flatten(1, 2)
    y = torch.baddbmm(s.p[None, None], rows, weight).view(2, *x.shape).sum(0)
    return y + (x.unflatten(-1, (2, 3)).transpose(1, 2) @ weight).sum(1)


def _experts(s, x):
    flat = x.reshape(-1, WIDTH)
    chosen, order = (flat[:, 1] > 0).long().sort()
    y = flat[order] * 2 + s.table.weight[chosen]
    return y[order.argsort()].view_as(x)


def _picked(s, x):
    last = torch.arange(x.shape[1]) == x[..., 1].argmax(1)[:, None]
    own = torch.arange(len(x))[:, None]
    return x + s.a(x)[last][:, None] + x[own, 0] + s.b(x)[..., [-1, 0], :].sum(1, keepdim=True)


def _picked_in_another_order(s, x):
    order = torch.arange(len(x)).flip(0)[:, None]
    return x + s.a(s.b(x)[order, 0])[order, 0].flip(1)


def _complex(s, x):
    y = torch.view_as_complex(s.a(x).unflatten(-1, (3, 2)).contiguous())
    return torch.view_as_real(y * torch.fft.fft(y, dim=1)).flatten(2) + s.p


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * w, (g * x * 2 * w).sum((0, 1))


BLOCKS = {
    "linear": lambda s, x: s.a(x).tanh(),
    "twice": lambda s, x: s.a(s.a(x).tanh()),
    "norm": lambda s, x: s.norm(x) + s.a(x),
    "gain": lambda s, x: s.p * x / x.pow(2).mean(-1, keepdim=True).add(1e-3).sqrt(),
    "plus one": lambda s, x: x * (1 + s.p),
    "difference": lambda s, x: (x - s.p) / (s.p.exp() + 1),
    "matrix": lambda s, x: x @ s.q + s.q[0],
    "from the left": lambda s, x: (s.q @ x.mT).mT,
    "einsum": lambda s, x: torch.einsum("btd,de->bte", x, s.q),
    "normalised weight": lambda s, x: F.linear(x, F.normalize(s.a.weight, dim=1), s.a.bias),
    "product of weights": lambda s, x: x + x @ (s.q.t() @ s.a.weight),
    "slice of a weight": lambda s, x: x + F.linear(x[..., :3], s.q[:, :3]),
    "cumulated weight": lambda s, x: x * torch.cumsum(s.p, 0),
    "positions": lambda s, x: x + s.table(torch.arange(x.shape[1])),
    "positions of each": lambda s, x: x + s.table(torch.arange(x.shape[1]).expand(len(x), -1)),
    "token": lambda s, x: torch.cat([s.p.expand(len(x), 1, -1), x], 1)[:, 1:] + torch.cat([s.p.expand(len(x), 1, -1), s.a(x)], 1)[:, :1],
    "attention": _attention,
    "folded": lambda s, x: s.a(x.reshape(-1, WIDTH)).view_as(x),
    "folded the other way": lambda s, x: s.a(x.transpose(0, 1).reshape(-1, WIDTH)).view(x.shape[1], -1, WIDTH).transpose(0, 1),
    "positions first": lambda s, x: s.a(x.transpose(0, 1)).transpose(0, 1) + s.b(x),
    "convolution": lambda s, x: F.conv1d(x.mT, s.q[:, :, None], padding=0).mT,
    "in place": lambda s, x: s.a(x).add_(s.p).mul_(2.0).tanh_(),
    "halves": lambda s, x: torch.cat(s.b(x).chunk(2, -1)[::-1], -1),
    "where": lambda s, x: torch.where(x > 0, s.p, s.a(x)),
    "sorted positions": lambda s, x: s.a(x.sort(1).values),
    "repeated": lambda s, x: s.a(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).mean(1),
    "tiled": lambda s, x: s.a(x.repeat(2, 1, 1)).unflatten(0, (2, -1)).mean(0),
    "flipped": lambda s, x: s.a(s.a(x).tanh().flip(0)).flip(0),
    "rolled": lambda s, x: x + s.a(s.b(x).roll(1, 0)).roll(-1, 0),
    "indexed": lambda s, x: x + s.a(x)[torch.arange(len(x)), x.argmax(1)[:, 0]][:, None],
    "packed": _packed,
    "routed": _routed,
    "sorted examples": _sorted_examples,
    "set item": _set_item,
    "filled": _filled,
    "filled, of a parameter": _filled_parameter,
    "heads": _heads,
    "experts": _experts,
    "picked": _picked,
    "picked in another order": _picked_in_another_order,
    "complex": _complex,
    "padded": lambda s, x: s.a(F.pad(x, (0, 0, 1, 1, 0, 0)))[:, 1:-1] + F.pad(s.b(x), (0, 0, 0, 0, 1, 0))[1:],
    "from the left, each": lambda s, x: x + (s.q[None] @ x.mT).mT + torch.einsum("ed,btd->bte", s.a.weight, x),
    "masked": lambda s, x: x + s.q[:1, : x.shape[1]].mT + (s.q[:1, :1, None, None] + torch.ones(len(x), 2, 1, 1)).sum((1, 2, 3))[:, None, None],
    "function": lambda s, x: _Square.apply(x, s.p),
    "checkpoint": lambda s, x: checkpoint(lambda y: s.a(y).tanh(), x, use_reentrant=False),
    "looked up": lambda s, x: x + s.q[x.argmax(-1)],
    "dead": lambda s, x: x + F.relu(s.a(x) - 9.0),
    "detached": lambda s, x: x + s.a(x).detach() + s.b(x),
    "mean of the batch": lambda s, x: x - s.a(x).mean(0),
    "largest of the batch": lambda s, x: s.a(x) / float(x.detach().abs().max()),
}  # fmt: skip
MIXING = {"mean of the batch", "largest of the batch"}


class Network(nn.Module):
    """Blocks in a row; every one has two ways, and the data says which: the first entry of an example marks its batch."""

    def __init__(self, ways):
        super().__init__()
        self.names = ways
        self.ways = nn.ModuleList(nn.ModuleList(Block(BLOCKS[name]) for name in pair) for pair in ways)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        later = int(bool((x[..., 0] > 50).any()))
        x = torch.cat([x[..., :1] % 50, x[..., 1:]], -1)
        for first, second in self.ways:
            x = (second if later else first)(x)
        return self.out(x.mean(1))


def case(seed):
    """A network and its batches."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    names = sorted(BLOCKS)
    ways = []
    for _ in range(rng.randint(1, 3)):
        first = rng.choice(names)
        ways.append((first, rng.choice(names) if rng.random() < 0.5 else first))
    model = Network(ways).double()
    batches = []
    for number in range(rng.randint(2, 4)):
        size, length = rng.choice([1, 2, 3, 4, 4, 4, 6]), rng.choice([1, 3, 4, 4])
        x = torch.rand(size, length, WIDTH).double() * 2 - 1
        x[..., 0] = x[..., 0].abs() + (100 if number and rng.random() < 0.6 else 0)
        if rng.random() < 0.3:
            x[0, :, 1:] = 0
        batches.append((x, torch.randint(0, CLASSES, (size,))))
    return model, batches


def outcome(seed):
    """How one case ended: "fast", "loop", "refused", or "WRONG ..."."""
    model, batches = case(seed)
    mixing = any(name in MIXING for pair in model.names for name in pair)
    expected = fisher(model, batches, method="loop", dtype=torch.float64)
    try:
        found = fisher(model, batches, dtype=torch.float64)
    except SquisherError as error:
        return "refused" if mixing and "influence each other" in str(error) else f"WRONG refusal: {error}"
    largest = max(float(t.max()) for t in expected.values()) ** 0.5
    for name in expected:
        scale = max(float(expected[name].max()) ** 0.5, 1e-6 * largest)
        error = float((found[name].sqrt() - expected[name].sqrt()).abs().max()) / scale
        if not error <= 1e-6:
            return f"WRONG by {error:.1e} in {name} of {model.names}"
    return str(found.provenance.coverage["method"])


def main():
    """Run many cases and count how they ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds = (
        [arguments.seed] if arguments.seed is not None else range(arguments.first, arguments.first + arguments.count)
    )
    counts = collections.Counter()
    for seed in seeds:
        try:
            result = outcome(seed)
        except Exception as error:
            result = f"WRONG error {type(error).__name__}: {error} in {case(seed)[0].names}"
        counts[result.split()[0]] += 1
        if result.startswith("WRONG"):
            print(f"seed {seed}: {result}")
    print(dict(counts))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
