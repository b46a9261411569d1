"""λ of EWC: every method has as many values, a run from end to end, and the table of its curves."""

from __future__ import annotations

import json

from experiments import ewc, strengths
from experiments.continual import METHODS
from experiments.runs import execute


def test_every_method_has_as_many_values_and_the_protocol_is_that_of_split_mnist_but_for_the_iterations():
    config = strengths.CONFIGS["cpu"]
    assert len({len(exponents) for exponents in config["exponents"].values()}) == 1
    assert config["seeds"] == 5
    assert max(config["exponents"]["squisher (decoupled)"]) > 10
    assert set(config["exponents"]) <= set(METHODS)
    different = {key for key in ("widths", "contexts", "batch", "lr") if config[key] != ewc.CONFIGS["split-task"][key]}
    assert not different


def test_from_end_to_end_and_as_a_table(tmp_path, monkeypatch):
    small = strengths.CONFIGS["quick"] | {"iterations": 5, "exponents": {m: [2] for m in strengths._EXPONENTS}}
    monkeypatch.setitem(strengths.CONFIGS, "cpu", small)
    monkeypatch.setitem(strengths.CONFIGS, "quick", small)
    made = json.loads(
        execute("strengths", "quick", seeds=2, data=None, out=tmp_path, jobs=1, say=lambda line: None).read_text()
    )
    assert len(made["units"]) == 2 * 3
    (tmp_path / "strengths-cpu.json").write_text(json.dumps(made))
    searched = {"units": {"search/squisher (decoupled)/1e4": {"result": {"accuracy": 42.0, "diverged": 3}}}}
    (tmp_path / "ewc-split-task.json").write_text(json.dumps(searched))
    found = strengths.parts(tmp_path, tmp_path).blocks["decoupled curves"]
    assert "| squisher (decoupled) | 42.00† |" in found
    tracked = [made["units"][f"seed-{s}/squisher (tracked)/1e2"]["result"]["accuracy"] for s in (1, 2)]
    assert f"| squisher (tracked) | {sum(tracked) / 2:.2f} ± " in found
    assert (tmp_path / strengths.PICTURE).exists()
