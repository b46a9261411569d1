"""Sums that are kept on another device than the model's; on a machine with one device, by the same road."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squisher
from squisher import SquisherError
from squisher.measure.sums import Elsewhere, Sums


class Recorded(Elsewhere):
    largest = 0

    def __getitem__(self, name: str) -> Tensor:
        value = super().__getitem__(name)
        Recorded.largest = max(Recorded.largest, sum(t.numel() for _, t in [self._current] if t is not None))
        return value


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(32, 3))


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 9, (4, 4), generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(5)
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"labels": "exact"}, {"per": "batch"}, {"method": "loop"}, {"standard_error": True}]
)
def test_the_result_is_the_same_and_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("squisher.measure.walk.Elsewhere", Recorded)
    Recorded.largest = 0
    model = network().double()
    here = squisher.fisher(model, data(), dtype=torch.float64, **settings)
    there = squisher.fisher(model, data(), dtype=torch.float64, accumulate_on="cpu", **settings)
    for name in here:
        assert there[name].device.type == "cpu"
        torch.testing.assert_close(there[name], here[name], rtol=1e-10, atol=1e-20)
    assert there.provenance.coverage == here.provenance.coverage
    # Beside the model there is never more than the squares of one parameter.
    assert 0 < Recorded.largest <= max(p.numel() for p in model.parameters())


def test_what_is_added_arrives_once() -> None:
    parameters = {"a": torch.zeros(3), "b": torch.zeros(2)}
    sums = Sums(parameters, torch.float32)
    adding = Elsewhere(sums)
    adding["a"].add_(1)
    adding["b"] += torch.ones(2)
    adding["a"].add_(2)
    adding["a"] = adding["a"]
    adding.finish()
    assert sums["a"].tolist() == [3, 3, 3]
    assert sums["b"].tolist() == [1, 1]


def test_no_such_device_is_refused() -> None:
    for device in ("nowhere", "meta", "cuda:77"):
        with pytest.raises(SquisherError, match="accumulate_on"):
            squisher.fisher(network(), data(), accumulate_on=device)


class Quantised(nn.Module):
    """A frozen base of eight bits under a low-rank update, as adapters have it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 127, (outputs, inputs), dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.rand(outputs, 1) / 127)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.scale) + self.up(self.down(x))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_an_adapter_on_a_frozen_base_of_eight_bits(reentrant: bool | None, autocast: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Quantised(6, 8), Quantised(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                x = self.first(x)
                if reentrant is None:
                    return self.second(torch.tanh(x)).float()
                return checkpoint(lambda t: self.second(torch.tanh(t)), x, use_reentrant=reentrant).float()

    model = Whole()
    batches = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(3)]
    found = squisher.fisher(model, batches, accumulate_on="cpu")
    slow = squisher.fisher(model, batches, method="loop")
    assert set(found) == {f"{part}.{name}.weight" for part in ("first", "second") for name in ("down", "up")}
    for name in slow:
        limit = (0.1 if autocast else 1e-4) * float(slow[name].max())
        torch.testing.assert_close(found[name], slow[name], rtol=1e-4, atol=limit)
