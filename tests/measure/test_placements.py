"""Operations that mix the rows of examples are not followed, whatever the shapes say: without the proof behind them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from squisher.measure.examples import SHARED, UNKNOWN, Call, Examples, Look, tensors_in
from squisher.measure.following import name_of
from squisher.measure.placements import state_after

N = 4
X = torch.randn(N, N, N)  # no size tells where the examples are
SHARED_ONE = torch.randn(N, N)


def _after(func, args, kwargs, states):
    look = Look({id(t): state for t, state in states}, N)
    return state_after(Call(name_of(func), args, kwargs, tensors_in((args, kwargs)), look, func(*args, **kwargs)))


MIXING = {
    "softmax": (torch.softmax, (X, 0), {}),
    "cumulated": (torch.cumsum, (X, 0), {}),
    "summed": (torch.sum, (X, 0), {}),
    "flipped": (torch.flip, (X, (0,)), {}),
    "rolled": (torch.roll, (X, 1, 0), {}),
    "transformed": (torch.fft.fft, (X,), {"dim": 0}),
    "padded": (F.pad, (X[:, :, :2], (0, 0, 0, 0, 1, -1)), {}),
    "contracted": (torch.matmul, (X[0].T, X[0]), {}),
    "einsum over them": (torch.einsum, ("nij,njk->ik", X, X), {}),
    "selected": (torch.index_select, (X, 0, torch.arange(N).flip(0)), {}),
    "gathered": (torch.gather, (X, 0, torch.zeros(N, N, N, dtype=torch.long)), {}),
    "reversed": (Tensor.__getitem__, (X, torch.arange(N).flip(0)[:, None]), {}),
    "one of them": (Tensor.__getitem__, (X, 0), {}),
    "joined": (torch.cat, ([X, X], 0), {}),
    "distances": (torch.cdist, (X[0], X[0]), {}),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_examples_is_unknown(name):
    func, args, kwargs = MIXING[name]
    tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    states = [(t, Examples(0) if t.is_floating_point() else SHARED) for t in tensors]
    assert _after(func, args, kwargs, states) is UNKNOWN


KEEPING = {
    "softmax": (torch.softmax, (X, 1), {}, Examples(0)),
    "summed": (torch.sum, (X, 2), {}, Examples(0)),
    "transposed": (torch.transpose, (X, 0, 2), {}, Examples(2)),
    "padded": (F.pad, (X, (1, 1, 0, 2, 0, 0)), {}, Examples(0)),
    "transformed": (torch.fft.fftn, (X,), {"dim": (1, 2)}, Examples(0)),
    "folded": (torch.reshape, (X, (N * N, N)), {}, Examples(0, N)),
    "own rows": (Tensor.__getitem__, (X, torch.arange(N)[:, None]), {}, Examples(0)),
    "matrices": (torch.matmul, (X, SHARED_ONE), {}, Examples(0)),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_keeps_them_apart_says_where_they_are(name):
    func, args, kwargs, expected = KEEPING[name]
    states = [(t, Examples(0) if t is X else SHARED) for t in args if isinstance(t, Tensor)]
    assert _after(func, args, kwargs, states) == expected
