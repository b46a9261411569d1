from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from squisher.analysis.health import Diagnosis, Health, effective_steps, examine
from squisher.errors import FileError
from squisher.importance import Importance, Pollution, load

HEALTHY: dict[str, Any] = {
    "kind": "squisher",
    "optimizer": {"class": "AdamW", "key": "exp_avg_sq", "meaning": "ema", "beta2": 0.999, "pollution": []},
    "steps": {"min": 5000, "max": 5000},
    "bias_corrected": True,
    "loss_reduction": "mean",
    "batch_size": 32,
    "dtype_of_source": "float32",
}


def squisher(tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Importance:
    return Importance(tensors or {"w": torch.rand(4, 5) + 1, "b": torch.rand(5) + 1}, **{**HEALTHY, **changes})


def find(importance: Importance, code: str) -> Diagnosis:
    found = [diagnosis for diagnosis in examine(importance).diagnoses if diagnosis.code == code]
    assert len(found) == 1, [diagnosis.code for diagnosis in examine(importance).diagnoses]
    return found[0]


def codes(importance: Importance) -> dict[str, str]:
    return {diagnosis.code: diagnosis.severity for diagnosis in examine(importance).diagnoses}


def test_a_healthy_one_has_nothing_worse_than_its_noise() -> None:
    assert codes(squisher()) == {"noise": "info"}


# -- noise


@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("steps", [1, 10, 1000])
def test_effective_steps_is_the_ratio_of_sums_of_weights(beta2: float, steps: int) -> None:
    weights = [beta2**age for age in range(steps)]
    assert effective_steps(beta2, steps) == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights))


@pytest.mark.parametrize(("beta2", "steps"), [(0.9, 1000), (0.99, 30), (0.999, 50)])
def test_the_expected_error_is_what_a_simulation_shows(beta2: float, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    average = torch.zeros(40_000)
    for _ in range(steps):
        average.mul_(beta2).add_(torch.randn(40_000, generator=generator).square(), alpha=1 - beta2)
    average /= 1 - beta2**steps
    found = examine(squisher(optimizer={"beta2": beta2}, steps={"min": steps, "max": steps})).diagnoses
    numbers = next(diagnosis.numbers for diagnosis in found if "relative_error" in diagnosis.numbers)
    assert numbers["relative_error"] == pytest.approx(float(average.std() / average.mean()), rel=0.03)
    assert numbers["effective_steps"] == pytest.approx(effective_steps(beta2, steps))


@pytest.mark.parametrize(
    ("beta2", "steps", "code", "severity"),
    [
        (0.999, 2, "few_steps", "problem"),
        (0.999, 20, "few_steps", "warning"),
        (0.999, 400, "noise", "info"),
        (0.999, 100_000, "noise", "info"),
        (0.9, 100_000, "short_memory", "warning"),
        (0.9, 2, "few_steps", "problem"),
    ],
)
def test_few_steps_and_short_memory(beta2: float, steps: int, code: str, severity: str) -> None:
    found = find(squisher(optimizer={"beta2": beta2}, steps={"min": steps, "max": steps}), code)
    assert found.severity == severity
    assert f"β₂ = {beta2:g} and {steps:,} steps" in found.sentence
    assert "Gaussian" in found.sentence
    assert found.parameters == []
    if code == "short_memory":
        assert "More steps do not help" in found.advice


def test_the_worst_parameters_are_named() -> None:
    steps = {"min": 10, "max": 5000, "per_parameter": {"w": 5000, "b": 10}}
    found = find(squisher(steps=steps), "few_steps")
    assert found.parameters == ["b"]
    assert found.numbers["steps"] == 10

    groups = [{"beta2": 0.5, "parameters": ["b"]}, {"beta2": 0.999, "parameters": ["w"]}]
    found = find(squisher(optimizer={"groups": groups}), "short_memory")
    assert (found.parameters, found.numbers["beta2"]) == (["b"], 0.5)


def test_a_plain_sum_averages_all_its_steps() -> None:
    found = find(squisher(optimizer={"class": "Adagrad", "meaning": "sum"}, steps={"min": 50, "max": 50}), "noise")
    assert found.numbers["effective_steps"] == 50
    assert "β₂" not in found.sentence


def test_no_steps_at_all_is_json_too() -> None:
    found = examine(squisher(steps={"min": 0, "max": 0}))
    assert found.diagnoses[0].severity == "problem"
    json.dumps(found.to_dict(), allow_nan=False)


def test_without_bias_correction() -> None:
    found = find(squisher(bias_corrected=False, steps={"min": 200, "max": 200}), "not_corrected")
    assert found.numbers["factor"] == pytest.approx(1 - 0.999**200)
    assert found.severity == "warning"
    assert "0.181 of the mean squared gradient" in found.sentence
    assert find(squisher(bias_corrected=False, steps={"min": 9000, "max": 9000}), "not_corrected").severity == "info"


def test_few_examples() -> None:
    tensors = {"w": torch.rand(3)}
    assert codes(Importance(tensors, kind="fisher", examples=1000)) == {"examples": "info"}
    assert codes(Importance(tensors, kind="fisher", examples=10)) == {"examples": "warning"}
    assert codes(Importance(tensors, kind="fisher")) == {}


# -- what else is in it


def test_pollution_by_weight_decay() -> None:
    sentence = "Weight decay 0.1 was added to the gradient before squaring."
    found = find(squisher(pollution=[Pollution("l2", {"weight_decay": 0.1}, sentence)]), "l2")
    assert (found.severity, found.sentence, found.numbers) == ("warning", sentence, {"weight_decay": 0.1})
    assert "AdamW" in found.advice


def test_pollution_of_one_group_names_its_parameters() -> None:
    sentence = "Weight decay 0.1 was added to the gradient before squaring."
    said = Pollution("l2", {"weight_decay": 0.1}, sentence, ("w",))
    assert find(squisher(pollution=[said]), "l2").parameters == ["w"]


def test_clipping_and_amsgrad_and_others() -> None:
    assert codes(squisher(optimizer={"pollution": ["Gradients were clipped to norm 1."]}))["clipping"] == "info"
    assert codes(squisher(optimizer={"after_clipping": True}))["clipping"] == "info"
    assert codes(squisher(optimizer={"amsgrad": True, "key": "exp_avg_sq"}))["amsgrad"] == "info"
    assert codes(squisher(optimizer={"amsgrad": True, "key": "max_exp_avg_sq"}))["amsgrad"] == "warning"
    assert codes(squisher(optimizer={"pollution": ["It averages g² + eps."]}))["pollution"] == "info"


@pytest.mark.parametrize("source", ["bfloat16", "bfloat16, float32", "8bit"])
def test_low_precision(source: str) -> None:
    found = find(squisher(dtype_of_source=source), "low_precision")
    assert found.severity == "warning"
    assert "0.39" in found.advice
    assert "1.8 times" in found.advice
    assert codes(Importance({"w": torch.rand(3)}, dtype_of_source=source)) == {"low_precision": "info"}


def test_the_advice_on_bfloat16_is_what_a_simulation_shows() -> None:
    gradients = torch.exp(torch.linspace(-12, 3, 4000)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    equal, noisy, exact = torch.zeros(4000).bfloat16(), torch.zeros(4000).bfloat16(), torch.zeros(4000)
    for _ in range(3000):
        equal.mul_(0.999).addcmul_(gradients, gradients, value=0.001)
        g = torch.randn(4000, generator=generator).bfloat16()
        noisy.mul_(0.999).addcmul_(g, g, value=0.001)
        exact.mul_(0.999).addcmul_(g.float(), g.float(), value=0.001)
    share = equal.float() / gradients.float().square() / (1 - 0.999**3000)
    assert float(share.mean()) == pytest.approx(0.39, abs=0.005)
    assert float(share.min()) == pytest.approx(0.27, abs=0.005)
    assert float(share.max()) == pytest.approx(0.54, abs=0.005)
    assert float((noisy.float() / exact).mean()) == pytest.approx(1.8, abs=0.05)


# -- steps, absent parameters, scale


def test_steps_that_differ() -> None:
    steps = {"min": 4000, "max": 5000, "per_parameter": {"w": 5000, "b": 4000}}
    found = find(squisher(steps=steps), "steps_differ")
    assert (found.severity, found.parameters) == ("info", ["b"])
    assert "between 4,000 and 5,000" in found.sentence
    assert find(squisher(steps=steps, bias_corrected=False), "steps_differ").severity == "warning"


def test_absent_parameters() -> None:
    absent = {"x": "frozen", "y": "frozen", "z": "no gradient ever reached it"}
    found = find(squisher(absent=absent), "absent")
    assert found.parameters == ["x", "y", "z"]
    assert "3 parameters of the model have no importance: 2 × frozen; 1 × no gradient" in found.sentence
    assert "1 parameter of the model has" in find(squisher(absent={"x": "frozen"}), "absent").sentence


def test_unknown_scale() -> None:
    found = find(squisher(batch_size=None), "scale_unknown")
    assert found.severity == "info"
    assert "batch_size" in found.sentence
    assert "scale_unknown" not in codes(squisher())


# -- values


def test_zeros_denormals_and_empty_tensors() -> None:
    tensors = {
        "dead": torch.zeros(10),
        "half": torch.tensor([0.0, 0.0, 0.0, 1.0]),
        "fine": torch.ones(100),
        "tiny": torch.tensor([1e-40, 2e-39, 1.0]),
        "none": torch.zeros(0, 4),
    }
    imp = squisher(tensors)
    assert find(imp, "all_zero").parameters == ["dead"]
    assert find(imp, "all_zero").sentence == "1 parameter is exactly 0 everywhere."
    zeros = find(imp, "zeros")
    assert (zeros.severity, zeros.parameters) == ("info", ["half"])
    assert zeros.numbers == {"share": 13 / 117, "zeros": 13, "tensors_mostly_zero": 1}
    denormals = find(imp, "denormals")
    assert (denormals.parameters, denormals.numbers["denormals"]) == (["tiny"], 2)
    assert codes(squisher({"x": torch.tensor([0.0, 0.0, 1.0])}))["zeros"] == "warning"
    assert codes(squisher({"x": torch.tensor([1e-40, 1.0])}))["denormals"] == "warning"


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Importance:
    """A file that holds what an importance would refuse to save."""
    safetensors.torch.save_file(tensors, path, {"squisher": json.dumps(HEALTHY)})
    return load(path)


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "infinite"), (-1.0, "negative")])
def test_invalid_values_in_a_file_are_a_problem_and_do_not_stop_the_rest(
    tmp_path: Path, value: float, word: str
) -> None:
    bad = torch.ones(7)
    bad[3] = value
    tensors = {"a": torch.ones(4), "bad": bad, "worse": bad.clone(), "z": torch.ones(5)}
    calls: list[tuple[int, int]] = []
    health = examine(write(tmp_path / "x.safetensors", tensors), lambda done, work: calls.append((done, work)))
    first = health.diagnoses[0]
    assert (first.code, first.severity, first.parameters) == ("invalid", "problem", ["bad", "worse"])
    assert f"'bad' has {word}" in first.sentence
    assert "1 other" in first.sentence
    assert [bool(row.invalid) for row in health.rows] == [False, True, True, False]
    assert health.rows[3].values.numel == 5
    assert calls[-1] == (23, 23)
    json.dumps(health.to_dict(), allow_nan=False)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    imp = write(path, {"a": torch.ones(400)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileError):
        examine(imp)


def test_plain_mappings_have_values_but_no_provenance() -> None:
    health = examine({"a": torch.zeros(3), "b": torch.ones(5)})
    assert [diagnosis.code for diagnosis in health.diagnoses] == ["all_zero", "zeros"]


# -- the whole


def test_rows_and_totals() -> None:
    tensors = {"w": torch.rand(30, 20), "b": torch.rand(20) * 1e-6}
    health = examine(squisher(tensors))
    assert [(row.name, row.shape, row.values.numel) for row in health.rows] == [("w", (30, 20), 600), ("b", (20,), 20)]
    assert health.totals.numel == 620
    assert health.totals.total == pytest.approx(sum(float(t.double().sum()) for t in tensors.values()))
    assert health.totals.max == float(tensors["w"].max())
    assert [sum(counts) for counts in zip(*(row.values.histogram for row in health.rows), strict=True)] == (
        health.totals.histogram
    )


def test_the_worst_comes_first_and_everything_is_json() -> None:
    imp = squisher(
        {"dead": torch.zeros(3), "x": torch.rand(3)},
        steps={"min": 1, "max": 1},
        absent={"y": "frozen"},
        batch_size=None,
    )
    health: Health = examine(imp)
    order = [diagnosis.severity for diagnosis in health.diagnoses]
    assert order == sorted(order, key=("problem", "warning", "info").index)
    assert len(set(order)) == 3
    plain = json.loads(json.dumps(health.to_dict(), allow_nan=False))
    assert plain["tensors"] == 2
    assert plain["rows"][0]["zeros"] == 3
    assert plain["diagnoses"][0]["code"] == "few_steps"


def test_reads_in_one_pass_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    imp = squisher()
    reads: list[str] = []
    chunks = Importance.chunks
    monkeypatch.setattr(Importance, "chunks", lambda self, name: reads.append(name) or chunks(self, name))
    monkeypatch.setattr(Importance, "__getitem__", lambda self, name: pytest.fail("read whole"))
    examine(imp)
    assert reads == ["w", "b"]


def test_every_diagnosis_says_what_and_what_to_do() -> None:
    imp = squisher(
        {"dead": torch.zeros(3), "x": torch.tensor([1e-40, 1.0])},
        optimizer={"beta2": 0.999, "pollution": ["l2", "clipping"], "amsgrad": True},
        steps={"min": 3, "max": 9, "per_parameter": {"dead": 3, "x": 9}},
        absent={"y": "frozen"},
        batch_size=None,
        bias_corrected=False,
        dtype_of_source="bfloat16",
    )
    found = examine(imp).diagnoses
    assert {diagnosis.code for diagnosis in found} == {
        *("all_zero", "zeros", "denormals", "few_steps", "not_corrected", "l2", "clipping", "amsgrad"),
        *("steps_differ", "scale_unknown", "low_precision", "absent"),
    }
    for diagnosis in found:
        assert diagnosis.sentence.endswith(".")
        assert diagnosis.advice.endswith(".")


def test_invalid_values_of_a_plain_mapping_are_a_diagnosis():
    health = examine({"good": torch.ones(2), "bad": torch.tensor([1.0, math.nan])})
    assert [(d.code, d.parameters) for d in health.diagnoses if d.severity == "problem"] == [("invalid", ["bad"])]


@pytest.mark.parametrize(("beta2", "worth"), [(1.0, 10.0), (2.0, None), (-1.0, None)])
def test_a_decay_of_one_weighs_all_steps_alike_and_an_impossible_one_says_nothing(beta2, worth):
    imp = Importance({"w": torch.ones(3)}, kind="squisher", optimizer={"beta2": beta2}, steps={"min": 10, "max": 10})
    found = [d.numbers["effective_steps"] for d in examine(imp).diagnoses if "effective_steps" in d.numbers]
    assert found == ([worth] if worth else [])
