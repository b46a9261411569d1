"""Optimizers that a script or a repository brings along: their states as they write them, against squares averaged here."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import squisher
from squisher.errors import NamingError, NoAccumulatorError
from tests.commands import run

BETA2, STEPS = 0.95, 6


def squares():
    """Gradients of a matrix and a vector, the moving average of their squares from zero, and its mean."""
    torch.manual_seed(0)
    out = {}
    for name, shape in (("weight", (5, 7)), ("bias", (5,))):
        moment, first = torch.zeros(shape), torch.zeros(shape)
        for _ in range(STEPS):
            gradient = torch.randn(shape) * 0.1
            moment = BETA2 * moment + (1 - BETA2) * gradient.square()
            first = 0.9 * first + 0.1 * gradient
        out[name] = (first, moment, moment / (1 - BETA2**STEPS))
    return out


MUON_GROUP = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0}
WRITERS = {
    "a script of one's own": (lambda m, v: {"m": m, "v": v, "t": STEPS}, {"lr": 1e-3, "betas": (0.9, BETA2), "eps": 1e-8}, None),
    "another one": (lambda m, v: {"t": STEPS, "m": m, "v": v}, {"lr": 1e-3, "beta1": 0.9, "beta2": BETA2, "weight_decay": 0.1}, None),
    "Adam-mini": (lambda m, v: {"m": m, "v": v, "step": STEPS}, {"lr": 1e-3, "beta1": 0.9, "beta2": BETA2, "epsilon": 1e-8}, None),
    "dion": (
        lambda m, v: {"momentum": m, "variance": v},
        {"algorithm": "adamw", "beta1": 0.9, "beta2": BETA2, "mu": 0.95, "step": STEPS},
        ({"momentum": torch.randn(5, 7)}, {"algorithm": "muon", "beta1": 0.9, "beta2": BETA2, "mu": 0.95, "step": STEPS}),
    ),
    "MuonWithAuxAdam": (
        lambda m, v: {"exp_avg": m, "exp_avg_sq": v, "step": STEPS},
        {"lr": 1e-3, "betas": (0.9, BETA2), "eps": 1e-10, "weight_decay": 0, "use_muon": False},
        ({"momentum_buffer": torch.randn(5, 7)}, {**MUON_GROUP, "use_muon": True}),
    ),
    "Moonlight's Muon": (
        lambda m, v: {"use_muon": False, "step": STEPS, "moment1": m, "moment2": v},
        {**MUON_GROUP, "ns_steps": 5, "adamw_betas": (0.9, BETA2), "adamw_eps": 1e-8},
        ({"use_muon": True, "momentum_buffer": torch.randn(5, 7)}, {**MUON_GROUP, "ns_steps": 5, "adamw_betas": (0.9, BETA2)}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_values_are_the_mean_square(tmp_path, writer):
    make, group, muon = WRITERS[writer]
    true = squares()
    state = {k: make(true[name][0], true[name][1]) for k, name in enumerate(("weight", "bias"))}
    groups = [{**group, "params": [0, 1]}]
    names = ["weight", "bias"]
    if muon is not None:
        state[2] = muon[0]
        groups.append({**muon[1], "params": [2]})
        names.append("hidden")
    torch.save({"state": state, "param_groups": groups}, tmp_path / "state.pt")
    imp = squisher.extract(tmp_path / "state.pt", names=names)
    for name in ("weight", "bias"):
        torch.testing.assert_close(imp[name], true[name][2], rtol=1e-6, atol=0)
    assert set(imp.provenance.absent) == set(names) - {"weight", "bias"}


def test_the_compressed_state_of_flash_adamw(tmp_path):
    """By its published layout: the root of the second moment in eight bits, one half-precision scale for 32 elements."""
    torch.manual_seed(0)
    moment = torch.rand(9, 15).square() * 1e-4
    root = torch.nn.functional.pad(moment.sqrt().flatten(), (0, -moment.numel() % 32)).reshape(-1, 32)
    scale = root.amax(1).half()
    codes = (root / scale.float()[:, None] * 255).round().clamp(0, 255).to(torch.uint8).flatten()[: moment.numel()]
    state = {
        "step": torch.tensor(float(STEPS)),
        "exp_avg::quantized": torch.zeros(9, 15, dtype=torch.int8), "exp_avg::scales": scale,
        "exp_avg_sq::quantized": codes.reshape(9, 15), "exp_avg_sq::scales": scale,
    }  # fmt: skip
    saved = {
        "state": {0: state},
        "param_groups": [{"params": [0], "betas": (0.9, BETA2), "eps": 1e-8, "weight_decay": 0.0}],
    }
    torch.save(saved, tmp_path / "flash.pt")
    imp = squisher.extract(tmp_path / "flash.pt", names=["w"])
    decoded = (codes.float().div(255) * scale.float().repeat_interleave(32)[: moment.numel()]).square().reshape(9, 15)
    torch.testing.assert_close(imp["w"], decoded / (1 - BETA2**STEPS), rtol=1e-6, atol=0)
    assert (imp["w"] * (1 - BETA2**STEPS) - moment).abs().max() < moment.max() / 100
    for size in (1, 7, 1 << 20):
        assert torch.equal(torch.cat(list(imp.chunks("w", size))), imp["w"].flatten())
    assert "flash" in imp.provenance.dtype_of_source


def test_the_class_settles_what_keys_leave_open(tmp_path):
    """pytorch_optimizer's ADOPT and RAdam write the same keys; what their accumulator is differs."""
    group = {"params": [0], "betas": (0.9, BETA2), "fixed_decay": False, "weight_decouple": True, "step": STEPS}
    moment = torch.rand(3, 4)
    torch.save(
        {"state": {0: {"exp_avg": moment, "exp_avg_sq": moment}}, "param_groups": [group]}, tmp_path / "state.pt"
    )
    with pytest.raises(NoAccumulatorError, match="optimizer-class"):
        squisher.extract(tmp_path / "state.pt", names=["w"])
    adopt = squisher.extract(tmp_path / "state.pt", names=["w"], optimizer_class="ADOPT")
    radam = squisher.extract(tmp_path / "state.pt", names=["w"], optimizer_class="RAdam")
    assert torch.equal(adopt["w"], moment)
    torch.testing.assert_close(radam["w"], moment / (1 - BETA2**STEPS))


def test_what_another_optimizer_steps_is_said_to_be_its(tmp_path):
    model = nn.Linear(5, 7)
    muon, adamw = torch.optim.Muon([model.weight], lr=1e-3), torch.optim.AdamW([model.bias], lr=1e-3)
    model(torch.randn(4, 5)).square().sum().backward()
    muon.step()
    adamw.step()
    content = {"model": model.state_dict(), "optimizers": [muon.state_dict(), adamw.state_dict()]}
    torch.save(content, tmp_path / "c.pt")
    imp = squisher.extract(tmp_path / "c.pt")
    assert list(imp) == ["bias"]
    assert "another optimizer of the source. Muon keeps" in str(imp.provenance.absent["weight"])


def test_a_state_without_steps_or_decay_is_read_as_it_is_stored(tmp_path):
    """One answer settles it: the step is asked for before the decay, which nobody could use without it."""
    moment = torch.rand(3, 4)
    save_file({"w": moment}, tmp_path / "exp_avg_sq.safetensors")
    with pytest.raises(NoAccumulatorError, match="--raw"):
        squisher.extract(tmp_path)
    done = run("extract", tmp_path, "--raw", "--out", tmp_path / "out.safetensors")
    assert done.returncode == 0
    assert "None" not in done.stdout
    assert torch.equal(squisher.load(tmp_path / "out.safetensors")["w"], moment)


def test_a_muon_alone_asks_for_the_adamw_beside_it(tmp_path):
    group = {"params": [0], "lr": 0.02, "momentum": 0.95, "ns_steps": 5}
    torch.save({"state": {0: {"momentum_buffer": torch.rand(3, 4)}}, "param_groups": [group]}, tmp_path / "state.pt")
    with pytest.raises(NoAccumulatorError, match="AdamW beside it"):
        squisher.extract(tmp_path / "state.pt", names=["w"])


@pytest.mark.parametrize("keys", [("m", "v"), ("momentum", "variance"), ("moment1", "moment2")])
def test_first_moments_prove_names_whatever_they_are_called(tmp_path, keys):
    torch.manual_seed(0)
    layers = [
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 8),
    ]
    network, target = nn.Sequential(*layers), torch.randn(32, 8)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _ in range(60):
        inputs = torch.randn(64, 32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), (inputs @ target).argmax(1)).backward()
        optimizer.step()
    saved = optimizer.state_dict()
    moments = [
        {keys[0]: one["exp_avg"], keys[1]: one["exp_avg_sq"], "step": one["step"]} for one in saved["state"].values()
    ]
    group = {**saved["param_groups"][0], "beta2": 0.999, "algorithm": "adamw", "ns_steps": 5}
    for order, named in (([0, 1, 2, 3, 4, 5, 6, 7], True), ([0, 1, 4, 5, 2, 3, 6, 7], False)):
        state = {k: moments[place] for k, place in enumerate(order)}
        content = {"model": network.state_dict(), "optimizer": {"state": state, "param_groups": [group]}}
        torch.save(content, tmp_path / "c.pt")
        if named:
            naming = squisher.extract(tmp_path / "c.pt").provenance.naming
            assert all(naming.of(f"{k}.weight").level == "proven" for k in (0, 2, 4, 6))
        else:
            with pytest.raises(NamingError):
                squisher.extract(tmp_path / "c.pt")
