"""optax states: the accumulator is found wherever it is, with its step, and named by its path."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from pathlib import Path

import pytest
import torch

import squisher
from squisher.errors import ArgumentError, FileError, NoAccumulatorError, SquisherError
from squisher.recycle.formats.jax_files import is_msgpack, read_msgpack

FIXTURES = Path(__file__).parent.parent / "fixtures"
OPTAX = FIXTURES / "optax"
spec = importlib.util.spec_from_file_location("make_optax", FIXTURES / "make_optax.py")
maker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(maker)
STEPS = maker.STEPS


def truth(name):
    return {key: torch.tensor(value) for key, value in json.loads((OPTAX / f"{name}.json").read_text()).items()}


def gradients(shape):
    numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
    return [(0.1 * torch.sin(numbers * (step + 1.3))).reshape(shape) for step in range(STEPS)]


def mean_of_squares(gradients, beta):
    total, weights = torch.zeros_like(gradients[0]), 0.0
    for gradient in gradients:
        total, weights = beta * total + (1 - beta) * gradient**2, beta * weights + 1 - beta
    return total / weights


def assert_same(importance, expected):
    assert set(importance) == set(expected)
    for name, value in expected.items():
        assert torch.equal(importance[name], value), name


@pytest.mark.parametrize(
    "name", ["adamw", "amsgrad", "clipped", "injected", "multisteps", "labelled", "masked", "rmsprop", "adagrad"]
)
def test_the_accumulator_is_found_in_every_wrapping(name):
    importance = squisher.extract(OPTAX / f"{name}.msgpack", bias_correction=False)
    assert_same(importance, truth(name))
    assert importance.provenance.naming.level == "recorded"


@pytest.mark.parametrize("name", ["adamw", "injected", "labelled"])
def test_the_corrected_values_are_the_mean_of_the_squared_gradients(name):
    beta2 = None if name == "injected" else 0.99
    importance = squisher.extract(OPTAX / f"{name}.msgpack", beta2=beta2)
    assert importance.provenance.steps == {"min": STEPS, "max": STEPS}
    assert importance.provenance.optimizer["beta2"] == pytest.approx(0.99)
    for layer, shapes in maker.SHAPES.items():
        for key, shape in shapes.items():
            expected = mean_of_squares(gradients(shape), 0.99)
            assert torch.allclose(importance[f"{layer}/{key}"].double(), expected, rtol=1e-5)


def test_accumulated_steps_are_counted_as_steps_of_the_optimizer():
    importance = squisher.extract(OPTAX / "multisteps.msgpack", beta2=0.99)
    assert importance.provenance.steps == {"min": STEPS // 2, "max": STEPS // 2}


def test_without_the_decay_it_is_asked_for():
    with pytest.raises(NoAccumulatorError, match="β₂ of adam.*missing.*--beta2"):
        squisher.extract(OPTAX / "adamw.msgpack")
    with pytest.raises(ArgumentError, match=r"beta2.* 1\.5"):
        squisher.extract(OPTAX / "adamw.msgpack", beta2=1.5)


@pytest.mark.parametrize("name", ["rmsprop", "adagrad"])
def test_what_has_no_step_count_is_read_only_as_stored(name):
    with pytest.raises(NoAccumulatorError, match="no step count"):
        squisher.extract(OPTAX / f"{name}.msgpack", beta2=0.9)


def test_what_comes_before_in_the_chain_is_said():
    assert any("comes before it" in said for said in notes("clipped"))
    assert not any("comes before it" in said for said in notes("adamw"))
    assert any("adabelief, yogi and adamax" in said for said in notes("adamw"))


def notes(name):
    importance = squisher.extract(OPTAX / f"{name}.msgpack", bias_correction=False)
    assert {one.code for one in importance.provenance.pollution} == {"uncertain"}
    return [one.note for one in importance.provenance.pollution]


def test_adafactor_is_joined_over_the_axes_that_optax_chose():
    importance = squisher.extract(OPTAX / "adafactor.msgpack")
    decays = [1 - (step + 1) ** -0.8 for step in range(STEPS)]
    for layer, shapes in maker.SHAPES.items():
        for key, shape in shapes.items():
            v = torch.zeros(shape, dtype=torch.float64)
            for gradient, beta in zip(gradients(shape), decays, strict=True):
                v = beta * v + (1 - beta) * (gradient**2 + 1e-30)
            if shape == (6, 8):  # the other matrix has an axis of 3, too short to be factored here
                row, column = v.mean(1, keepdim=True), v.mean(0, keepdim=True)
                v = row * column / row.mean()
            assert torch.allclose(importance[f"{layer}/{key}"].double(), v, rtol=1e-4), (layer, key)


@pytest.mark.parametrize("name", ["lion", "momentum"])
def test_a_momentum_alone_is_refused(name):
    with pytest.raises(NoAccumulatorError, match="average of the gradient"):
        squisher.extract(OPTAX / f"{name}.msgpack")


def test_prodigy_is_refused_by_name():
    with pytest.raises(NoAccumulatorError, match="prodigy"):
        squisher.extract(OPTAX / "prodigy.msgpack", bias_correction=False)


def test_one_value_per_tensor_is_refused():
    with pytest.raises(NoAccumulatorError, match="value per weight"):
        squisher.extract(OPTAX / "novograd.msgpack", beta2=0.25)


# -- msgpack -----------------------------------------------------------------------------------------------------------


def pack(value):
    """A small msgpack writer, for files that flax would not write."""
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(pack(k) + pack(v) for k, v in value.items())
    if isinstance(value, str):
        return bytes([0xA0 | len(value)]) + value.encode()
    if isinstance(value, torch.Tensor):
        data = value.numpy().tobytes()
        name = str(value.dtype).removeprefix("torch.")
        shape = bytes([0x90 | value.dim(), *value.shape])
        inner = b"\x93" + shape + pack(name) + b"\xc6" + struct.pack(">I", len(data)) + data
        return b"\xc9" + struct.pack(">I", len(inner)) + b"\x01" + inner
    if value is True:
        return b"\xc3"
    return bytes([value])


def test_arrays_in_pieces_are_one_array(tmp_path):
    pieces = {"0": torch.arange(4.0), "1": torch.arange(4.0, 6.0)}
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": pieces}
    (tmp_path / "x.msgpack").write_bytes(pack({"0": {"count": 3, "mu": {}, "nu": {"w": chunked}}}))
    array = read_msgpack(tmp_path / "x.msgpack")["0"]["nu"]["w"]
    assert torch.equal(array.load(), torch.arange(6.0).reshape(2, 3))
    assert torch.equal(array.read_flat(3, 5), torch.tensor([3.0, 4.0]))


def test_parameters_alone_hold_no_optimizer_state(tmp_path):
    (tmp_path / "x.msgpack").write_bytes(pack({"params": {"w": torch.ones(3)}}))
    with pytest.raises(FileError, match="save the optimizer state"):
        squisher.extract(tmp_path / "x.msgpack")


@pytest.mark.parametrize("length", [1, 7, 50, 400, -1])
def test_a_cut_file_is_refused(tmp_path, length):
    (tmp_path / "x.msgpack").write_bytes((OPTAX / "adamw.msgpack").read_bytes()[:length])
    with pytest.raises(FileError):
        squisher.extract(tmp_path / "x.msgpack")


@pytest.mark.parametrize(
    "data",
    [
        pack({"nu": {"w": torch.ones(3)}}).replace(b"\x91\x03", b"\x91\x04"),  # a shape that its bytes do not have
        b"\x81\xa1a" * 500 + b"\xc0",  # too deep
        b"\xdf\xff\xff\xff\xff\xa1a\xc0",  # four billion entries
        b"\x82\xa1a\xc0\xa1a\xc0",  # a key twice
        b"\x81\xa1a\xc1",  # a kind that there is not
    ],
)
def test_hostile_files_are_refused(tmp_path, data):
    (tmp_path / "x.msgpack").write_bytes(data)
    with pytest.raises(FileError):
        squisher.extract(tmp_path / "x.msgpack")


def test_other_files_are_not_taken_for_msgpack(tmp_path):
    torch.save({"a": 1}, tmp_path / "zip.pt")
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "empty").touch()
    assert not any(is_msgpack(path) for path in tmp_path.iterdir())


# -- Orbax -------------------------------------------------------------------------------------------------------------


def test_without_tensorstore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(SquisherError, match=r"pip install 'torch-squisher\[jax\]'"):
        squisher.extract(OPTAX / "adamw.orbax")


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
def test_an_orbax_checkpoint_is_read():
    importance = squisher.extract(OPTAX / "adamw.orbax", bias_correction=False)
    assert_same(importance, truth("adamw"))
    assert importance.provenance.steps == {"min": STEPS, "max": STEPS}


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_manager_is_read_where_it_has_one_step(tmp_path):
    maker.save_manager(tmp_path)
    assert_same(squisher.extract(tmp_path / "manager", bias_correction=False), truth("adamw"))
    assert_same(squisher.extract(tmp_path / "manager" / "4", bias_correction=False), truth("adamw"))
    maker.save_manager(tmp_path / "two", (1, 2))
    with pytest.raises(FileError, match="steps 1, 2"):
        squisher.extract(tmp_path / "two" / "manager")


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
def test_nnx_variables_lose_their_last_key(tmp_path):
    expected = maker.save_nnx(tmp_path)
    importance = squisher.extract(tmp_path / "nnx.orbax", bias_correction=False)
    assert_same(importance, {name: torch.tensor(value) for name, value in expected.items()})
    assert importance.provenance.steps == {"min": STEPS, "max": STEPS}
    assert importance.provenance.optimizer["class"] == "adam (optax)"


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
def test_a_store_that_is_cut_is_refused(tmp_path):
    maker.save_orbax("adamw", tmp_path)
    for file in (tmp_path / "adamw.orbax").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(FileError):
        squisher.extract(tmp_path / "adamw.orbax", bias_correction=False)


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["adamw", "injected", "labelled", "masked", "multisteps"])
def test_fresh_files_are_read(name, tmp_path):
    maker.save_msgpack(name, tmp_path)
    maker.save_orbax(name, tmp_path)
    expected = {k: torch.tensor(v) for k, v in json.loads((tmp_path / f"{name}.json").read_text()).items()}
    assert_same(squisher.extract(tmp_path / f"{name}.msgpack", bias_correction=False), expected)
    assert_same(squisher.extract(tmp_path / f"{name}.orbax", bias_correction=False), expected)


@pytest.mark.formats
@pytest.mark.parametrize("kind", ["sm3", "adopt", "adamax", "adam", "nadam"])
def test_states_that_only_look_like_adams(tmp_path, kind):
    """optax writes mu, nu and count for all of these; the values tell, or the class must be said."""
    import flax.serialization
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import optax.contrib

    def loss(p, x):
        return 1e-2 * jnp.mean(jnp.tanh(x @ p["w"]) ** 2)  # with gradients near one, adopt looks like Adam

    make = optax.contrib.adopt if kind == "adopt" else getattr(optax, kind)
    optimizer, parameters, squares = make(1e-2), {"w": jnp.ones((4, 5))}, []
    state = optimizer.init(parameters)
    for k in range(20):
        gradient = jax.grad(loss)(parameters, jax.random.normal(jax.random.PRNGKey(k), (8, 4)))
        squares.append(np.array(gradient["w"], dtype=np.float64) ** 2)
        updates, state = optimizer.update(gradient, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    path = tmp_path / "state.msgpack"
    path.write_bytes(flax.serialization.to_bytes({"params": parameters, "opt_state": state}))
    beta2 = 0.9999 if kind == "adopt" else 0.999
    if kind in ("sm3", "adopt", "adamax"):
        for corrected in (True, False):
            with pytest.raises(NoAccumulatorError):
                squisher.extract(path, beta2=beta2, bias_correction=corrected)
    if kind == "adopt":  # the first square, then a moving average that starts from it
        expected = squares[0]
        for square in squares[1:]:
            expected = beta2 * expected + (1 - beta2) * square
        importance = squisher.extract(path, beta2=beta2, optimizer_class="adopt")
        torch.testing.assert_close(importance["w"].double(), torch.tensor(expected), rtol=1e-5, atol=0)
    elif kind in ("adam", "nadam"):
        weights = beta2 ** np.arange(20)[::-1]
        expected = np.tensordot(weights / weights.sum(), np.stack(squares), 1)
        torch.testing.assert_close(
            squisher.extract(path, beta2=beta2)["w"].double(), torch.tensor(expected), rtol=1e-5, atol=0
        )


def test_sophia_keeps_a_hessian_under_nu(tmp_path):
    state = {
        "count": 9,
        "mu": {"w": torch.ones(3)},
        "nu": {"w": torch.ones(3) / 100},
        "hessian_fn_state": {"key": torch.ones(2)},
    }
    (tmp_path / "x.msgpack").write_bytes(pack({"0": state}))
    with pytest.raises(NoAccumulatorError, match="sophia.*Hessian"):
        squisher.extract(tmp_path / "x.msgpack", beta2=0.99)


def test_adafactor_says_that_it_is_factored_and_why_a_factor_is_absent(tmp_path):
    said = squisher.extract(OPTAX / "adafactor.msgpack").provenance.pollution
    assert {one.code for one in said} >= {"factored", "epsilon"}
    factors = {"v_row": {"w": torch.ones(2)}, "v_col": {"w": torch.ones(3)}, "v": {"w": torch.ones(1)}}
    plain = {"v_row": {"b": torch.ones(1)}, "v_col": {"b": torch.ones(1)}, "v": {"b": torch.ones(4)}}
    both = {key: {**factors[key], **plain[key]} for key in factors}
    (tmp_path / "x.msgpack").write_bytes(pack({"0": {"count": 9, **both}}))
    absent = squisher.extract(tmp_path / "x.msgpack").provenance.absent
    assert "parameters that tell its shape are not in the file" in absent["w"].note
