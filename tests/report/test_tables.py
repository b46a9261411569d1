from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType

from squisher.analysis.agreement import compare
from squisher.analysis.health import examine
from squisher.importance import Importance
from squisher.report import compare_tables, inspect_json, inspect_tables
from tests.report.examples import FACTS


def model(layers: int, name: str = "layer.{}.weight", seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name.format(i): torch.randn(8, 4, generator=generator).square() * 1e-7 for i in range(layers)}


def rendered(what: RenderableType, width: int = 100) -> str:
    console = Console(width=width, color_system=None, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def inspected(importance: Importance, **options: Any) -> str:
    return rendered(inspect_tables(importance, examine(importance), **options))


def test_inspect_says_what_it_is() -> None:
    text = inspected(Importance(model(3), **FACTS))
    for part in ("Squisher", "AdamW, β₂ = 0.999", "300", "32 examples, mean loss", "96 in 3 parameters", "8×4"):
        assert part in text
    assert [f"layer.{i}.weight" in text for i in range(3)] == [True] * 3
    assert "298 squared gradients" in text


def test_inspect_of_a_fisher() -> None:
    imp = Importance(
        {"x": torch.tensor(2.0)}, examples=500, estimator={"labels": "sampled", "per": "batch"}, unit="example"
    )
    text = inspected(imp * 2.0)
    for part in ("Fisher: measured on data, sampled labels, squared per batch", "500", "mean per example"):
        assert part in text
    assert "multiplied by 2" in text
    assert "scalar" in text
    assert "1 in 1 parameter\n" in "\n".join(line.rstrip() for line in text.splitlines())


def test_inspect_without_any_finding() -> None:
    assert "Nothing to remark." in inspected(Importance({"x": torch.ones(3)}))


def test_unknown_batch_and_uncorrected_values_are_said() -> None:
    facts = {**FACTS, "batch_size": None, "loss_reduction": None, "bias_corrected": False}
    text = inspected(Importance(model(1), **facts))
    assert "size not known, loss reduction not known" in text
    assert "not bias-corrected" in text


def test_findings_name_a_few_parameters() -> None:
    tensors = {f"dead.{i}": torch.zeros(2) for i in range(9)} | model(1)
    text = inspected(Importance(tensors))
    assert "! 9 parameters are exactly 0 everywhere." in text
    assert "dead.0, dead.1, dead.2, dead.3 and 5 more" in text


def test_a_long_model_is_shortened_in_the_middle() -> None:
    imp = Importance(model(80))
    text = inspected(imp, max_rows=11)
    shown = [i for i in range(80) if f"layer.{i}.weight" in text]
    assert shown == [0, 1, 2, 3, 4, 5, 75, 76, 77, 78, 79]
    assert "69 left out (--json has all)" in text
    whole = inspected(imp, max_rows=80)
    assert "left out" not in whole
    assert all(f"layer.{i}.weight" in whole for i in range(80))
    compared = rendered(compare_tables(compare(imp, imp), max_rows=2))
    assert "78 left out (--json has all)" in compared


@pytest.mark.parametrize("width", [100, 140])
def test_tables_fit_and_show_what_differs_in_long_names(width: int) -> None:
    name = "base_model.model.model.decoder.layers.{}.encoder_attn.q_proj.lora_A.default.weight"
    tensors = {n: t.view(4, 8) * 1e-30 for n, t in model(3, name).items()}
    tensors["huge"] = torch.rand(1).expand(128256, 16384)[:, :2].contiguous() * 1e-40
    imp = Importance(tensors, **FACTS, absent={name.format(9): "no gradient ever reached it"})
    for what in (inspect_tables(imp, examine(imp)), compare_tables(compare(imp, imp), "a" * 200, "b")):
        text = rendered(what, width)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
        for layer in range(3):
            assert sum(f"…{layer}…" in line and "lora_A.default.weight" in line for line in text.splitlines()) >= 1


def test_invalid_rows_are_shown_as_such(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    from squisher.importance import load

    path = tmp_path / "x.safetensors"
    save_file({"bad": torch.tensor([float("nan")]), "fine": torch.ones(2)}, path, {"squisher": '{"kind": "fisher"}'})
    text = inspected(load(path))
    assert "✗ The importance of 'bad' has NaN" in text
    assert any(line.split()[:3] == ["bad", "1", "invalid"] for line in text.splitlines())


def test_inspect_json_has_everything() -> None:
    imp = Importance(model(80), **FACTS)
    plain = json.loads(json.dumps(inspect_json(imp, examine(imp)), allow_nan=False))
    assert plain["provenance"]["batch_size"] == 32
    assert len(plain["rows"]) == 80
    assert plain["numel"] == 80 * 32
    assert plain["diagnoses"]


def test_compare_says_how_far_they_agree() -> None:
    a, b = model(3), model(3)
    b["layer.1.weight"] = b["layer.1.weight"] * 100
    found = compare({"mine": torch.ones(1), **a}, {**b, "yours": torch.ones(1)})
    text = rendered(compare_tables(found, "squisher.safetensors", "fisher.safetensors"))
    for part in ("squisher.safetensors", "fisher.safetensors", "96 in 3 parameters", f"{found.spearman:.3f}"):
        assert part in text
    assert "only in A" in text
    assert "1: mine" in text
    assert "1: yours" in text
    assert "0.01" in text
    assert "*" not in text
    assert "rounded" not in text
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["only_a"] == ["mine"]


def test_compare_marks_overlaps_that_reach_into_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(100)
    values[:20] = torch.arange(1.0, 21.0)
    monkeypatch.setattr("squisher.analysis.agreement.EXACT_LIMIT", 10)
    text = rendered(compare_tables(compare({"x": values}, {"x": values})))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "*" not in lines["10%"]
    assert "100%*" in lines["25%"]
    assert "* reaches into entries that are 0" in text
    assert "rounded to 16 bits" in text


def test_what_is_not_defined_is_a_dash() -> None:
    text = rendered(compare_tables(compare({"x": torch.zeros(20)}, {"x": torch.zeros(20)})))
    assert "nan" not in text
    assert any(line.split() == ["x", "20", "–", "–", "–", "–"] for line in text.splitlines())
