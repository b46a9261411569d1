"""Optimizer states in safetensors files, as OLMo, MLX and OTA merging write them."""

import base64
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import squisher
from squisher.errors import FileError, NoAccumulatorError


@pytest.fixture
def run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3, betas=(0.9, 0.95))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def olmo(state):
    """The layout of OLMo's optim.safetensors: keys are pickled paths, and what is no tensor is pickled too."""
    flat = {}

    def walk(node, path):
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, (*path, key))
            else:
                is_tensor = isinstance(value, torch.Tensor)
                name = base64.urlsafe_b64encode(pickle.dumps(((*path, key), not is_tensor))).decode()
                flat[name] = value if is_tensor else torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

    walk(state, ())
    return flat


def by_name(optimizer):
    """A state dict keyed by names, as FSDP makes it."""
    state = optimizer.state_dict()
    names = {
        i: n for group in state["param_groups"] for i, n in zip(group["params"], group["param_names"], strict=True)
    }
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[i]: own for i, own in state["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize("place", ["file", "folder"])
def test_olmo(tmp_path, run, place):
    model, optimizer = run
    save_file(olmo(by_name(optimizer)), tmp_path / "optim.safetensors")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    imp = squisher.extract(tmp_path / "optim.safetensors" if place == "file" else tmp_path)
    live = squisher.extract(optimizer, model)
    assert list(imp) == list(live)
    for name in live:
        assert torch.equal(imp[name], live[name])
        for size in (1, 7, 1 << 20):
            assert torch.equal(torch.cat(list(imp.chunks(name, size))), live[name].flatten())
    assert imp.provenance.naming.level == "recorded"


def test_olmo_weights_and_hostile_keys_are_refused(tmp_path, run):
    model, optimizer = run
    save_file(olmo(model.state_dict()), tmp_path / "optim.safetensors")
    with pytest.raises(FileError, match="param_groups"):
        squisher.extract(tmp_path)

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    flat = olmo(by_name(optimizer))
    flat[base64.urlsafe_b64encode(pickle.dumps((("state", Evil()), True))).decode()] = torch.zeros(3, dtype=torch.uint8)
    save_file(flat, tmp_path / "optim.safetensors")
    with pytest.raises(FileError):
        squisher.extract(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_a_second_moment_alone_comes_as_it_is_stored(tmp_path, run):
    model, optimizer = run
    moments = {name: optimizer.state[p]["exp_avg_sq"] for name, p in model.named_parameters()}
    save_file(moments, tmp_path / "exp_avg_sq.safetensors")
    with pytest.raises(NoAccumulatorError, match="raw"):
        squisher.extract(tmp_path, beta2=0.95)
    imp = squisher.extract(tmp_path, bias_correction=False)
    assert {name: tensor.tolist() for name, tensor in imp.items()} == {n: m.tolist() for n, m in moments.items()}
    assert not imp.provenance.bias_corrected


def test_weights_in_safetensors_are_no_state(tmp_path, run):
    save_file(run[0].state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="no optimizer state"):
        squisher.extract(tmp_path / "model.safetensors")


def mlx(optimizer, model, **more):
    state = {"step": torch.tensor(4, dtype=torch.uint64), "learning_rate": torch.tensor(1e-3)}
    for name, p in model.named_parameters():
        own = optimizer.state[p]
        state |= {f"{name}.m": own["exp_avg"], f"{name}.v": own["exp_avg_sq"]}
    return {**state, **more}


def test_mlx_adam(tmp_path, run):
    model, optimizer = run
    save_file(mlx(optimizer, model), tmp_path / "optimizer.safetensors")
    with pytest.raises(NoAccumulatorError, match="beta2"):
        squisher.extract(tmp_path)
    imp = squisher.extract(tmp_path, beta2=0.95)
    live = squisher.extract(optimizer, model)
    assert {n: t.tolist() for n, t in imp.items()} == {n: t.tolist() for n, t in live.items()}


def test_mlx_adamax_is_not_taken_for_adam(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adamax(model.parameters(), betas=(0.9, 0.999))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    state = {"step": torch.tensor(5, dtype=torch.uint64)}
    for name, p in model.named_parameters():
        state |= {f"{name}.m": optimizer.state[p]["exp_avg"], f"{name}.v": optimizer.state[p]["exp_inf"]}
    save_file(state, tmp_path / "optimizer.safetensors")
    with pytest.raises(NoAccumulatorError, match="Adamax"):
        squisher.extract(tmp_path, beta2=0.999)


@pytest.mark.formats
@pytest.mark.parametrize(
    "kind", ["Adam", "AdamW", "RMSprop", "Adagrad", "AdaDelta", "Adafactor", "Adamax", "SGD", "Lion", "Muon"]
)
def test_mlx_itself(tmp_path, kind):
    import mlx.core as mx
    import mlx.nn
    import mlx.optimizers
    import numpy as np
    from mlx.utils import tree_flatten

    mx.random.seed(0)
    model = mlx.nn.Sequential(mlx.nn.Linear(3, 6), mlx.nn.Linear(6, 2))
    optimizer = getattr(mlx.optimizers, kind)(learning_rate=1e-3)
    step = mlx.nn.value_and_grad(model, lambda m, x: (m(x) ** 2).mean())
    gradients = []
    for _ in range(5):
        _, gradient = step(model, mx.random.normal((7, 3)))
        gradients.append({name: np.array(g, dtype=np.float64) for name, g in tree_flatten(gradient)})
        optimizer.update(model, gradient)
        mx.eval(model.parameters(), optimizer.state)
    mx.save_safetensors(str(tmp_path / "optimizer.safetensors"), dict(tree_flatten(optimizer.state)))
    decay = {"Adam": 0.999, "AdamW": 0.999, "RMSprop": 0.99, "AdaDelta": 0.9}.get(kind)
    said = {"optimizer_class": kind} if kind in ("RMSprop", "Adagrad") else {}
    if kind in ("Adamax", "SGD", "Lion", "Muon"):
        with pytest.raises(NoAccumulatorError):
            squisher.extract(tmp_path, beta2=0.999, **said)
        return
    if said:
        with pytest.raises(NoAccumulatorError, match="optimizer-class"):
            squisher.extract(tmp_path, beta2=decay)
    imp = squisher.extract(tmp_path, beta2=decay, **said)
    assert set(imp) == set(gradients[0])
    for name, tensor in imp.items():
        squares = np.stack([g[name] ** 2 for g in gradients])
        if kind == "Adafactor":
            assert tensor.shape == squares[0].shape
            continue
        ages = np.arange(len(squares))[::-1]
        weights = np.ones(5) / 5 if decay is None else decay**ages * (1 - decay) / (1 - decay**5)
        expected = torch.tensor(np.tensordot(weights, squares, 1), dtype=torch.float32)
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=0)


def test_two_states_in_one_folder_are_a_question(tmp_path):
    for name in ("exp_avg_sq.safetensors", "optimizer.safetensors"):
        save_file({"w": torch.ones(3)}, tmp_path / name)
    with pytest.raises(FileError, match=r"exp_avg_sq.safetensors and optimizer.safetensors: give the one"):
        squisher.extract(tmp_path, bias_correction=False)
