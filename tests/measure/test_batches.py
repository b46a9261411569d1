from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squisher
from squisher.errors import SquisherError
from squisher.measure.batches import batches_of, parse

CPU = torch.device("cpu")
X, Y = torch.arange(12.0).view(4, 3), torch.arange(4)


@pytest.mark.parametrize("raw", [(X, Y), [X, Y], {"x": X, "labels": Y}, ({"x": X}, Y), ((X,), Y)])
def test_kinds_of_batches_with_labels(raw):
    batch = parse(raw, nn.Identity(), CPU)
    assert batch.size == 4
    assert torch.equal(batch.labels, Y)
    part = batch.take(1, 3)
    given = part.args[0] if part.args else part.kwargs["x"]
    assert torch.equal(given, X[1:3])
    assert torch.equal(part.labels, Y[1:3])


@pytest.mark.parametrize("raw", [X, [X], (X,), {"x": X}])
def test_inputs_alone(raw):
    batch = parse(raw, nn.Identity(), CPU)
    assert batch.labels is None
    assert batch.size == 4


def test_what_has_no_batch_dimension_is_passed_on():
    positions = torch.arange(3)[None]
    batch = parse({"x": X, "positions": positions, "scale": 2, "labels": Y}, nn.Identity(), CPU)
    part = batch.take(2, 3)
    assert torch.equal(part.kwargs["positions"], positions)
    assert part.kwargs["scale"] == 2
    assert batch.take(0, 4) is batch
    assert torch.equal(batch.select([0, 0]).kwargs["x"], X[[0, 0]])


def test_inputs_that_require_gradients_are_detached():
    x = X.clone().requires_grad_()
    assert not parse((x, Y), nn.Identity(), CPU).args[0].requires_grad


def test_refusals():
    with pytest.raises(SquisherError, match="tuple of 3"):
        parse((X, Y, Y), nn.Identity(), CPU)
    with pytest.raises(SquisherError, match="batch dimension"):
        parse({"x": 3}, nn.Identity(), CPU)
    with pytest.raises(SquisherError, match="put it into a list"):
        batches_of(X)
    with pytest.raises(SquisherError, match="put it into a list"):
        batches_of({"x": X})


class _Lengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, x, lengths):
        return self.out(torch.stack([row[: lengths[n]].mean(0) for n, row in enumerate(x)]))


@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_lists_and_arrays_have_an_entry_for_each_example(kind, method):
    torch.manual_seed(0)
    model, x, labels = _Lengths(), torch.randn(3, 4, 5), torch.tensor([0, 2, 1])
    lengths = [4, 1, 2]
    found = squisher.fisher(model, [{"x": x, "lengths": kind(lengths), "labels": labels}], method=method)
    each = [{"x": x[n : n + 1, : lengths[n]], "lengths": (9,), "labels": labels[n : n + 1]} for n in range(3)]
    assert torch.allclose(found["out.weight"], squisher.fisher(model, each)["out.weight"], rtol=1e-4)


class _Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, x, table):
        return self.out(x + table[0] - table[-1])


@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize("table", [torch.tensor([[1.0], [3.0]]), [1.0, 3.0]])
def test_what_is_shared_in_one_batch_is_shared_in_one_with_as_many_examples(table, method):
    torch.manual_seed(0)
    model, x, labels = _Shifted(), torch.randn(7, 5), torch.randint(0, 3, (7,))
    cuts = [slice(0, 5), slice(5, 7)]
    found = squisher.fisher(model, [{"x": x[c], "table": table, "labels": labels[c]} for c in cuts], method=method)
    expected = squisher.fisher(model, [{"x": x, "table": table, "labels": labels}], method="loop")
    assert torch.allclose(found["out.weight"], expected["out.weight"], rtol=1e-5)


class _Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return torch.sparse.mm(x, self.weight)


def test_sparse_inputs_are_cut_too():
    torch.manual_seed(0)
    model = _Sparse()
    found = squisher.fisher(model, [(X.to_sparse(), Y), (X[:2].to_sparse(), Y[:2])])
    dense = nn.Linear(3, 4, bias=False)
    dense.weight.data = model.weight.detach().T.clone()
    expected = squisher.fisher(dense, [(X, Y), (X[:2], Y[:2])])["weight"].T
    assert torch.allclose(found["weight"], expected, rtol=1e-4)
    assert "sparse" in found.provenance.coverage["loop"]["weight"]


class Record(collections.UserDict):
    """A mapping with attributes, as tokenizers return."""

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclasses.dataclass
class Pair:
    """A batch with fields."""

    x: torch.Tensor
    y: torch.Tensor
    note: str = ""


@pytest.mark.parametrize("kind", [Record, Pair, lambda **given: [Pair(**given)]])
def test_a_function_gets_batches_of_the_type_that_was_given(kind):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    given = [{"x": torch.randn(n, 3).double(), "y": torch.randint(0, 2, (n,))} for n in (4, 3)]

    def losses(model, batch):
        batch = batch[0] if isinstance(batch, list) else batch
        return F.cross_entropy(model(batch.x), batch.y, reduction="none")

    batches = [kind(**batch) for batch in given]
    found = squisher.fisher(model, batches, likelihood=losses, method="fast", max_examples=6)
    expected = squisher.fisher(model, [(b["x"], b["y"]) for b in given], max_examples=6)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
