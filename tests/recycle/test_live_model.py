"""A saved state with the live model: the weights beside the state are asked wherever they stand, and nothing passes unasked."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import squisher
from squisher.errors import NamingError

WIDTH = 32


class Codec(nn.Module):
    """An encoder and a decoder of one shape."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


def trained(turned):
    torch.manual_seed(2)
    model = Codec()
    parts = [model.decoder, model.encoder] if turned else [model.encoder, model.decoder]
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], 1e-3)
    for _ in range(60):
        x = torch.randn(24, WIDTH) * torch.linspace(0.3, 2, WIDTH)
        optimizer.zero_grad()
        functional.mse_loss(model(x), x).backward()
        optimizer.step()
    return model, optimizer


def lightning(model, state):
    weights = {f"net.{name}": value for name, value in model.state_dict().items()}
    return {"state_dict": weights, "optimizer_states": [state], "pytorch-lightning_version": "2.4.0"}


FORMS = {
    "inside a module": lightning,
    "parts": lambda model, state: {n: m.state_dict() for n, m in model.named_children()} | {"optimizer": state},
    "with a moving average": lambda model, state: {
        "model": model.state_dict(),
        "ema": {name: 0.99 * value for name, value in model.state_dict().items()},
        "optimizer": state,
    },
    "alone": lambda model, state: state,
}


@pytest.mark.parametrize("form", FORMS)
def test_parts_in_another_order_are_refused(tmp_path, form):
    model, optimizer = trained(turned=True)
    torch.save(FORMS[form](model, optimizer.state_dict()), tmp_path / "c.ckpt")
    with pytest.raises(NamingError, match="contradict"):
        squisher.extract(tmp_path / "c.ckpt", model)


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_the_model_is_read(tmp_path, form):
    model, optimizer = trained(turned=False)
    torch.save(FORMS[form](model, optimizer.state_dict()), tmp_path / "c.ckpt")
    imp = squisher.extract(tmp_path / "c.ckpt", model, bias_correction=False)
    own = dict(model.named_parameters())
    assert imp.keys() == own.keys()
    assert all(torch.equal(imp[name], optimizer.state[own[name]]["exp_avg_sq"]) for name in own)


@pytest.mark.parametrize("turned", [True, False])
def test_a_new_model_tells_nothing_of_a_state_alone(tmp_path, turned):
    _, optimizer = trained(turned)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    new = Codec()
    with pytest.raises(NamingError, match=r"Nothing tells.*in_order=True"):
        squisher.extract(tmp_path / "optimizer.pt", new)
    imp = squisher.extract(tmp_path / "optimizer.pt", new, in_order=True)  # then it is the user's word
    assert imp.provenance.naming.of("encoder.0.weight").level == "convention"


@pytest.mark.parametrize("turned", [True, False])
def test_given_names_are_checked_where_every_part_has_a_dictionary(tmp_path, turned):
    model, optimizer = trained(turned)
    torch.save(FORMS["parts"](model, optimizer.state_dict()), tmp_path / "c.pt")
    names = [name for name, _ in model.named_parameters()]
    if turned:
        with pytest.raises(NamingError, match="contradict"):
            squisher.extract(tmp_path / "c.pt", names=names)
    else:
        imp = squisher.extract(tmp_path / "c.pt", names=names)
        assert imp.keys() == {*names}
        assert not imp.provenance.absent


def test_names_that_nothing_can_check_say_so(tmp_path):
    model, optimizer = trained(turned=True)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    names = [name for name, _ in model.named_parameters()]
    assert "not checked" in squisher.extract(tmp_path / "optimizer.pt", names=names).provenance.naming.of(names[0]).by
