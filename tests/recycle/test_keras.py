"""Keras files: names by config.json, layouts by their shapes, what each optimizer keeps. Needs h5py."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import squisher
from squisher.errors import FileError, NamingError, NoAccumulatorError, SquisherError

FIXTURES = Path(__file__).parent.parent / "fixtures"
KERAS = FIXTURES / "keras"
STEPS = 6


def truth(name):
    return {key: torch.tensor(value) for key, value in json.loads((KERAS / f"{name}.json").read_text()).items()}


def assert_same(importance, expected):
    assert list(importance) == list(expected)
    for name, value in expected.items():
        assert torch.equal(importance[name], value), name


NAMED = "layers nested frozen schedule adam_ema adam_accumulated adamw_clipped adagrad adadelta adafactor rmsprop_centered all"


@pytest.mark.parametrize("name", NAMED.split())
def test_an_archive_gives_every_variable_under_its_path(name):
    importance = squisher.extract(KERAS / f"{name}.keras", bias_correction=False)
    assert_same(importance, truth(name))
    assert str(importance.provenance.naming).startswith("convention: the layers in config.json")


def test_a_legacy_file_records_the_names():
    importance = squisher.extract(KERAS / "all.h5", bias_correction=False)
    assert_same(importance, truth("all"))
    assert importance.provenance.naming.level == "recorded"


def test_a_weight_file_alone_needs_names_and_the_decay():
    names = list(truth("all"))
    with pytest.raises(NamingError, match="records no names"):
        squisher.extract(KERAS / "all.weights.h5", beta2=0.999)
    with pytest.raises(NoAccumulatorError, match="--beta2"):
        squisher.extract(KERAS / "all.weights.h5", names=names)
    given = squisher.extract(KERAS / "all.weights.h5", names=names, beta2=0.999)
    whole = squisher.extract(KERAS / "all.keras")
    for name in names:
        assert torch.equal(given[name], whole[name])
    assert given.provenance.optimizer["beta2"] == whole.provenance.optimizer["beta2"] == 0.999


def test_the_bias_is_corrected_with_the_steps_that_were_taken():
    stored = truth("adam_accumulated")
    importance = squisher.extract(KERAS / "adam_accumulated.keras")
    assert importance.provenance.steps == {"min": STEPS // 2, "max": STEPS // 2}
    for name, value in stored.items():
        assert torch.allclose(importance[name], value / (1 - 0.999 ** (STEPS // 2)), rtol=1e-5)
    (accumulated,) = importance.provenance.pollution
    assert (accumulated.code, accumulated.numbers) == ("accumulated", {"batches": 2})


def test_adagrad_is_a_sum_that_starts_above_zero():
    importance = squisher.extract(KERAS / "adagrad.keras")
    for name, value in truth("adagrad").items():
        assert torch.allclose(importance[name], (value - 0.1) / STEPS, rtol=1e-4, atol=1e-8)


def test_clipping_is_said_and_decay_is_not_inside():
    provenance = squisher.extract(KERAS / "adamw_clipped.keras").provenance
    (clipped,) = provenance.pollution
    assert (clipped.code, clipped.numbers) == ("clipping", {"global_clipnorm": 0.5})
    assert provenance.after_clipping is True
    assert provenance.optimizer["weight_decay"] == 0.01
    assert squisher.extract(KERAS / "all.keras").provenance.after_clipping is False


def test_the_order_of_a_subclassed_model_is_not_guessed():
    with pytest.raises(NamingError, match="records no names"):
        squisher.extract(KERAS / "subclassed.keras")
    names = list(truth("subclassed"))
    assert_same(squisher.extract(KERAS / "subclassed.keras", names=names, bias_correction=False), truth("subclassed"))


def test_sgd_is_refused():
    with pytest.raises(NoAccumulatorError, match="Keras's SGD.*average of the gradient"):
        squisher.extract(KERAS / "sgd.keras")


def test_weights_without_an_optimizer_are_said(tmp_path):
    import h5py

    shutil.copy(KERAS / "all.weights.h5", tmp_path / "w.weights.h5")
    with h5py.File(tmp_path / "w.weights.h5", "a") as file:
        del file["optimizer"]
    with pytest.raises(FileError, match="no optimizer state"):
        squisher.extract(tmp_path / "w.weights.h5")


def changed(tmp_path, change):
    """The archive with its config.json changed."""
    out = tmp_path / "changed.keras"
    with zipfile.ZipFile(KERAS / "all.keras") as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, json.dumps(change(json.loads(data))) if name == "config.json" else data)
    return out


def test_layers_in_another_order_than_the_file_says_are_not_believed(tmp_path):
    def swap(config):
        layers = config["config"]["layers"]
        layers[1], layers[2] = layers[2], layers[1]
        return config

    with pytest.raises(NamingError):
        squisher.extract(changed(tmp_path, swap))


def test_options_that_the_variables_contradict_are_refused(tmp_path):
    def amsgrad(config):
        config["compile_config"]["optimizer"]["config"]["use_ema"] = True
        return config

    with pytest.raises(FileError, match="Keras optimizer Adam.*fit"):
        squisher.extract(changed(tmp_path, amsgrad))


def test_an_unknown_optimizer_is_refused(tmp_path):
    def rename(config):
        config["compile_config"]["optimizer"]["class_name"] = "MyAdam"
        return config

    with pytest.raises(NoAccumulatorError, match="'MyAdam'.*known"):
        squisher.extract(changed(tmp_path, rename))


def test_a_cut_file_is_refused(tmp_path):
    whole = (KERAS / "all.weights.h5").read_bytes()
    for length in (100, 3000, len(whole) - 200):
        (tmp_path / "cut.h5").write_bytes(whole[:length])
        with pytest.raises(FileError):
            squisher.extract(tmp_path / "cut.h5", names=list(truth("all")))


def test_data_in_another_file_is_not_followed(tmp_path):
    import h5py

    shutil.copy(KERAS / "all.weights.h5", tmp_path / "w.weights.h5")
    shutil.copy(KERAS / "all.weights.h5", tmp_path / "other.h5")
    with h5py.File(tmp_path / "w.weights.h5", "a") as file:
        del file["optimizer/vars/3"]
        file["optimizer/vars/3"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "optimizer/vars/3")
    with pytest.raises(FileError, match="link to elsewhere"):
        squisher.extract(tmp_path / "w.weights.h5")


def test_without_h5py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(SquisherError, match=r"pip install 'torch-squisher\[keras\]'"):
        squisher.extract(KERAS / "all.keras")


def load_maker():
    spec = importlib.util.spec_from_file_location("make_keras", FIXTURES / "make_keras.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", load_maker().CASES)
def test_fresh_files_are_read_like_the_fixtures(name, tmp_path):
    maker = load_maker()
    maker.save(tmp_path, name, *maker.CASES[name])
    expected = json.loads((tmp_path / f"{name}.json").read_text())
    path = tmp_path / f"{name}.keras"
    if name in ("sgd", "lion"):
        with pytest.raises(NoAccumulatorError):
            squisher.extract(path)
        return
    names = list(expected) if name == "subclassed" else None
    assert_same(
        squisher.extract(path, names=names, bias_correction=False), {k: torch.tensor(v) for k, v in expected.items()}
    )


def test_a_heap_that_the_library_would_walk_for_ever_is_refused(tmp_path):
    """Found by fuzzing: HDF5 itself never returns from an object of no size in a heap of strings."""
    data = bytearray((FIXTURES / "keras" / "adamw_clipped.keras").read_bytes())
    heap = data.index(b"GCOL\x01\0\0\0")
    data[heap + 16 : heap + 32] = bytes(16)
    (tmp_path / "x.keras").write_bytes(data)
    with pytest.raises(FileError, match="object in a heap"):
        squisher.extract(tmp_path / "x.keras")
    data[heap + 8 : heap + 16] = b"\xff" * 8
    (tmp_path / "x.keras").write_bytes(data)
    with pytest.raises(FileError, match="heap.*longer"):
        squisher.extract(tmp_path / "x.keras")


# -- tf.keras 2 --------------------------------------------------------------------------------------------------------


KERAS2 = Path(__file__).parent.parent / "fixtures" / "keras2"


def averages(name, beta2):
    squares = {
        k.removesuffix(":0"): torch.tensor(v, dtype=torch.float64)
        for k, v in json.loads((KERAS2 / f"{name}.json").read_text()).items()
    }
    weights = torch.tensor([beta2**age * (1 - beta2) / (1 - beta2**3) for age in (2, 1, 0)], dtype=torch.float64)
    return {k: torch.tensordot(weights, v, 1).float() for k, v in squares.items()}


@pytest.mark.parametrize(("name", "beta2"), [("adam", 0.999), ("legacy_adam", 0.999), ("legacy_rmsprop", 0.9)])
def test_tf_keras_2(name, beta2):
    importance = squisher.extract(KERAS2 / f"{name}.h5")
    expected = averages(name, beta2)
    assert set(importance) == set(expected)
    for path, value in expected.items():
        torch.testing.assert_close(importance[path], value, rtol=1e-5, atol=1e-12)
    assert importance.provenance.naming.level == "recorded"


def test_keras_2_3_numbers_its_moments_in_the_order_of_the_layers(tmp_path):
    import h5py

    with h5py.File(KERAS2 / "legacy_adam.h5") as old, h5py.File(tmp_path / "old.h5", "w") as new:
        for key, value in old.attrs.items():
            new.attrs[key] = value
        old.copy("model_weights", new)
        recorded = [n.decode() if isinstance(n, bytes) else n for n in old["optimizer_weights"].attrs["weight_names"]]
        renamed = ["training/Adam/iterations:0", *(f"training/Adam/{slot}_{k}:0" for slot in "mv" for k in range(6))]
        group = new.create_group("optimizer_weights")
        group.attrs["weight_names"] = renamed
        for before, after in zip(recorded, renamed, strict=True):
            group[after] = old["optimizer_weights"][before][()]
    importance = squisher.extract(tmp_path / "old.h5")
    for path, value in averages("legacy_adam", 0.999).items():
        torch.testing.assert_close(importance[path], value, rtol=1e-5, atol=1e-12)
    assert str(importance.provenance.naming).startswith("convention")


@pytest.mark.parametrize("name", ["adam", "legacy_adam"])
@pytest.mark.parametrize("place", [0, None], ids=["before", "after"])
def test_of_several_step_counts_none_is_guessed(tmp_path, name, place):
    """An optimizer that wraps another may count too; where the counts agree there is one answer, wherever they stand."""
    import h5py

    for count in (3, 5):
        file = shutil.copy(KERAS2 / f"{name}.h5", tmp_path)
        with h5py.File(file, "r+") as content:
            group = content["optimizer_weights"]
            recorded = [n.decode() if isinstance(n, bytes) else n for n in group.attrs["weight_names"]]
            recorded.insert(len(recorded) if place is None else place, "Wrapper/iter:0")
            group["Wrapper/iter:0"] = count
            group.attrs["weight_names"] = recorded
        if count == 3:
            assert squisher.extract(file).provenance.steps == squisher.extract(KERAS2 / f"{name}.h5").provenance.steps
        else:
            with pytest.raises(FileError, match=r"Wrapper/iter:0: 5"):
                squisher.extract(file)
