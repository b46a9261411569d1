"""States of eight and four bits: decoded as their own libraries do it, in any piece; what may be what is not guessed."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

import squisher
from squisher.errors import FileError, NoAccumulatorError, SquisherWarning
from squisher.recycle.optimizers.encoded import Quantized, decoded
from squisher.recycle.states import Entry
from squisher.storage.tensors import chunks_of

FIXTURES = Path(__file__).parent.parent / "fixtures"
FOLDER = FIXTURES / "quantized"
spec = importlib.util.spec_from_file_location("make_quantized", FIXTURES / "make_quantized.py")
maker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(maker)
NAMES = ["weight", "odd", "bias"]
STEPS, DECAY = maker.STEPS, maker.DECAY


def truth(name, folder=FOLDER):
    return torch.load(folder / f"{name}.truth.pt")


def read(name, folder=FOLDER, **options):
    return squisher.extract(folder / f"{name}.pt", names=NAMES, allow_coarse="4bit" in name, **options)


def mean_of_squares(shape, beta=0.999, l2=0.0):
    weight = maker.weight(shape)
    total, weights = torch.zeros_like(weight), 0.0
    for step in range(STEPS):
        square = (maker.gradient(shape, step) + l2 * weight) ** 2
        total, weights = beta * total + (1 - beta) * square, beta * weights + 1 - beta
    return total / weights


READABLE = ["bnb_AdamW8bit", "bnb_RMSprop8bit", "bnb_Adagrad8bit", "ao_AdamW8bit", "ao_AdamW4bit", "ao_AdamWFp8"]
STORED_AS = {
    "bnb": "bnb 8bit",
    "ao_AdamW8bit": "torchao 8bit",
    "ao_AdamW4bit": "torchao 4bit",
    "ao_AdamWFp8": "torchao fp8",
}


@pytest.mark.parametrize("name", READABLE)
def test_codes_are_decoded_as_the_library_does(name):
    importance = read(name, bias_correction=False)
    for key, value in truth(name).items():
        assert torch.equal(importance[key], value), key
        assert torch.equal(torch.cat(list(chunks_of(importance, key, 100))).reshape(value.shape), value), key
    stored_as = STORED_AS.get(name) or STORED_AS[name.partition("_")[0]]
    assert stored_as in importance.provenance.dtype_of_source
    assert importance.provenance.steps == {"min": STEPS, "max": STEPS}


@pytest.mark.parametrize(
    ("name", "beta", "l2", "tolerance"),
    [
        ("bnb_AdamW8bit", 0.999, 0.0, 0.05),
        ("bnb_RMSprop8bit", 0.99, DECAY, 0.1),
        ("bnb_Adagrad8bit", 1 - 1e-12, DECAY, 0.1),
        ("ao_AdamW8bit", 0.999, 0.0, 0.05),
        ("ao_AdamWFp8", 0.999, 0.0, 0.15),
    ],
)
def test_they_are_the_mean_of_the_squares_to_their_resolution(name, beta, l2, tolerance):
    importance = read(name)
    for key in NAMES:
        got = importance[key].double()
        expected = mean_of_squares(tuple(got.shape), beta, l2)
        assert ((got - expected).abs() / expected).median() < tolerance / 3
        assert torch.allclose(got, expected, rtol=tolerance, atol=float(tolerance * expected.mean()))
    # What is too small to be quantised is exact.
    assert torch.allclose(importance["bias"].double(), mean_of_squares((6,), beta, l2), rtol=1e-3)


def test_four_bits_must_be_asked_for():
    with pytest.raises(NoAccumulatorError, match=r"four bits.*--allow-coarse"):
        squisher.extract(FOLDER / "ao_AdamW4bit.pt", names=NAMES)


def test_low_precision_is_warned_of_where_values_count():
    importance = squisher.extract(FOLDER / "ao_AdamWFp8.pt", names=NAMES, batch_size=4)
    with pytest.warns(SquisherWarning, match="fp8"):
        importance.as_fisher()


def test_a_momentum_is_refused_by_its_signs():
    with pytest.raises(NoAccumulatorError, match="SGD or Lion.*average of the gradient"):
        squisher.extract(FOLDER / "bnb_Lion8bit.pt", names=NAMES)


@pytest.mark.parametrize(
    ("name", "inside"), [("bnb_AdamW8bit", False), ("bnb_RMSprop8bit", True), ("bnb_Adagrad8bit", True)]
)
def test_decay_is_inside_where_bitsandbytes_couples_it(name, inside):
    said = read(name).provenance.pollution
    assert [one.numbers for one in said if one.code == "l2"] == ([{"weight_decay": 0.05}] if inside else [])


# -- states made by hand -------------------------------------------------------------------------------------------------


def eight_bits(numel, block, number="2"):
    codes = (torch.arange(numel) * 37 % 256).to(torch.uint8)
    blocks = -(-numel // block)
    return {
        "step": 3,
        f"state{number}": codes,
        f"qmap{number}": torch.linspace(0, 1, 256),
        f"absmax{number}": torch.arange(1.0, blocks + 1),
    }


@pytest.mark.parametrize(
    ("numel", "block"), [(5000, 256), (5000, 2048), (4096, 2048), (4097, 256), (256, 256), (100, 256)]
)
def test_the_block_size_follows_from_the_number_of_blocks(numel, block):
    state = {"state1": torch.zeros(numel), **eight_bits(numel, block)}
    (entry,) = decoded([Entry(state, {"betas": (0.9, 0.999)})])
    expected = state["qmap2"][state["state2"].long()] * state["absmax2"][torch.arange(numel) // block]
    assert torch.equal(entry.state["exp_avg_sq"].load(), expected)
    assert torch.equal(entry.state["exp_avg_sq"].read_flat(7, 99), expected[7:99])


def test_older_files_without_the_nesting_are_the_same():
    state = {"state1": torch.zeros(5000), **eight_bits(5000, 256)}
    nested = {"step": 3, "__bnb_optimizer_quant_state__": {k: v for k, v in state.items() if k != "step"}}
    flat, inner = decoded([Entry(state, {"betas": (0.9, 0.999)}), Entry(nested, {"betas": (0.9, 0.999)})])
    assert torch.equal(flat.state["exp_avg_sq"].load(), inner.state["exp_avg_sq"].load())
    assert inner.shape == (5000,)


@pytest.mark.parametrize("lost", ["qmap2", "absmax2"])
def test_incomplete_codes_are_refused(lost):
    state = {"state1": torch.zeros(5000), **eight_bits(5000, 256)}
    del state[lost]
    with pytest.raises(FileError, match="cannot be decoded"):
        decoded([Entry(state, {"betas": (0.9, 0.999)})])


def test_blocks_that_do_not_fit_are_refused():
    state = {"state1": torch.zeros(5000), **eight_bits(5000, 256), "absmax2": torch.ones(7)}
    with pytest.raises(FileError, match="7 block scales"):
        decoded([Entry(state, {"betas": (0.9, 0.999)})])


@pytest.mark.parametrize(
    ("betas", "key"), [((0.99, 0.0), "square_avg"), ((0.0, 0.0), "sum"), ((0.9, 0.99), "square_avg")]
)
def test_one_state_without_negative_entries_is_told_by_its_first_beta(betas, key):
    entries = decoded([Entry(eight_bits(5000, 256, "1"), {"betas": betas})])
    assert isinstance(entries[0].state[key], Quantized)


def test_one_negative_entry_makes_every_state_a_momentum():
    states = [{"state1": torch.ones(100), "step": 1}, {"state1": torch.tensor([1.0, -1e-9]), "step": 1}]
    for entry in decoded([Entry(state, {"betas": (0.9, 0.0)}) for state in states]):
        assert "square_avg" not in entry.state


def test_too_few_entries_to_tell_are_asked_about():
    with pytest.raises(NoAccumulatorError, match="RMSprop.*momentum.*live optimizer"):
        decoded([Entry({"state1": torch.ones(5), "step": 1}, {"betas": (0.9, 0.0)})])
    (entry,) = decoded([Entry({"state1": torch.ones(5), "step": 1}, {"betas": (0.9, 0.0)})], "RMSprop8bit")
    assert "square_avg" in entry.state


def test_a_state_that_is_no_tensor_is_refused():
    with pytest.raises(FileError, match="no tensor"):
        decoded([Entry({"state1": "x", "step": 1}, {"betas": (0.9, 0.0)})])


@pytest.mark.parametrize("bits", [8, 32])
def test_a_parameter_that_was_not_contiguous_is_absent(bits, tmp_path):
    """bitsandbytes steps through memory, in the strides' order or (since it copies the parameter first) not: no file says which."""
    state = {"state1": torch.zeros(80, 64), **eight_bits(80 * 64, 256)}
    state["state2"] = (state["state2"] if bits == 8 else torch.rand(80 * 64)).reshape(64, 80).t()
    plain = {"state1": torch.zeros(3), "state2": torch.ones(3), "step": 3}
    groups = [{"betas": (0.9, 0.999), "params": [0, 1]}]
    torch.save({"state": {0: state, 1: plain}, "param_groups": groups}, tmp_path / "x.pt")
    importance = squisher.extract(tmp_path / "x.pt", names=["w", "b"], bias_correction=False)
    assert list(importance) == ["b"]
    assert "not contiguous" in importance.provenance.absent["w"].note


def test_clipping_at_a_percentile_is_said():
    from squisher.recycle.optimizers import reading

    state = {"state1": torch.zeros(100), "state2": torch.ones(100), "gnorm_vec": torch.zeros(100), "step": 2}
    (entry,) = decoded([Entry(state, {"betas": (0.9, 0.999)})])
    assert [one.code for one in reading(entry.state, entry.group).pollution] == ["clipping"]


# -- with the libraries --------------------------------------------------------------------------------------------------


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", maker.NAMES)
def test_fresh_states_and_live_optimizers_agree_with_the_library(name, tmp_path):
    maker.save(name, tmp_path)
    optimizer, module = maker.train(name)
    if "Lion" in name or "SGD" in name:
        for source in ((tmp_path / f"{name}.pt",), (optimizer, module)):
            with pytest.raises(NoAccumulatorError, match="average of the gradient"):
                squisher.extract(*source)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = squisher.extract(optimizer, module, bias_correction=False, allow_coarse="4bit" in name)
        stored = read(name, tmp_path, bias_correction=False)
    for key, value in truth(name, tmp_path).items():
        assert torch.equal(stored[key], value), key
        assert torch.equal(live[key], value), key
    if "4bit" in name:
        with pytest.raises(NoAccumulatorError, match="four bits"):
            squisher.extract(optimizer, module)
