"""What holds for every command: --json prints one document, faults ask for a report, names keep what differs."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import squisher
from squisher.cli import app
from tests.commands import run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs whose folders have the same last part, each with weights and an importance; heads of different sizes."""
    root = tmp_path_factory.mktemp("runs")
    for k, name in enumerate(("run-a", "run-b")):
        torch.manual_seed(k)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3 + k))
        folder = root / name / "final"
        folder.mkdir(parents=True)
        save_file(model.state_dict(), folder / "model.safetensors")
        values = {n: torch.rand_like(p) for n, p in model.named_parameters()}
        squisher.Importance(values, kind="squisher", batch_size=4.0**k, loss_reduction="mean").save(folder)
    return root


COMMANDS = {
    "inspect": ["run-a/final", "--json"],
    "compare": ["run-a/final", "run-b/final", "--exclude", "^2", "--json"],
    "similarity": ["run-a/final", "run-b/final", "--exclude", "^2", "--json"],
    "embed": ["run-a/final", "--out", "{tmp}/e.safetensors", "--json"],
    "mask": ["run-a/final", "--keep", "0.1", "--out", "{tmp}/m.safetensors", "--json"],
    "prune": ["run-a/final", "--sparsity", "0.5", "--out", "{tmp}/pruned", "--json"],
    "merge": ["average", "run-a/final", "run-a/final", "--out", "{tmp}/merged", "--json"],
    "patch": ["make", "run-a/final", "run-a/final", "--out", "{tmp}/p.safetensors", "--json"],
    "quantize": ["run-a/final", "--importance", "run-a/final", "--bits-per-weight", "20", "--group", "2",
                 "--out", "{tmp}/plan.json", "--json"],
    "unlearn": ["run-a/final", "--importance", "run-a/final", "--forget", "run-a/final", "--out", "{tmp}/forgot", "--json"],
    "export": ["run-a/final", "--format", "ota", "--out", "{tmp}/ota.safetensors", "--json"],
    "compress": ["run-a/final", "--codec", "log8", "--out", "{tmp}/c.safetensors", "--json"],
    "push": ["run-a/final", "hf://owner/name", "--dry-run", "--json"],
    "report": ["run-a/final", "run-b/final", "--out", "{tmp}/r.html", "--json"],
}  # fmt: skip
ELSEWHERE = {
    "shrink": "prune",
    "extract": "test_cli",
    "fisher": "integrations/test_text",
    "mergekit": "integrations/test_mergekit",
}


def test_no_command_is_forgotten():
    every = {c.name or c.callback.__name__ for c in app.registered_commands} | {g.name for g in app.registered_groups}
    assert every == set(COMMANDS) | set(ELSEWHERE)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document(runs, tmp_path, command):
    done = run(command, *(word.format(tmp=tmp_path) for word in COMMANDS[command]), cwd=runs)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


def test_compare_on_one_scale(runs):
    def scale(*options):
        return json.loads(
            run(*["compare", "run-a/final", "run-b/final", "--exclude", "^2", "--json"], *options, cwd=runs).stdout
        )

    stored, fisher = scale(), scale("--scale", "as_fisher")
    assert stored["scale"] == pytest.approx(4 * fisher["scale"], rel=1e-4)
    assert scale("--scale", "auto")["scale"] == fisher["scale"]
    assert stored["spearman"] == fisher["spearman"]
    assert "not a regular expression" in run("compare", "run-a/final", "run-b/final", "--exclude", "(", cwd=runs).stderr
    assert "--scale is stored" in run("compare", "run-a/final", "run-b/final", "--scale", "x", cwd=runs).stderr


def test_folders_of_one_name_are_told_apart(runs, tmp_path):
    shown = run("compare", "run-a/final", "run-b/final", "--exclude", "^2", cwd=runs).stdout
    assert "run-a/final" in shown
    assert "run-b/final" in shown
    run("merge", "average", "run-a/final", "run-b/final", "--exclude", "^2", "--out", tmp_path / "merged", cwd=runs)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "| run-a/final |" in card
    assert "| run-b/final |" in card
    assert str(runs) not in card


def test_a_pruned_model_has_a_card(runs, tmp_path):
    for k in range(2):
        assert run("prune", "run-a/final", "--sparsity", "0.5", "--out", tmp_path / f"{k}", cwd=runs).returncode == 0
    card = (tmp_path / "0" / "README.md").read_text()
    assert card == (tmp_path / "1" / "README.md").read_text()
    assert "sparsity 0.5" in card
    assert "Ranked by: Squisher" in card
    tensors = load_file(tmp_path / "0" / "model.safetensors")
    zeros = sum(int((t == 0).sum()) for t in tensors.values())
    assert f"{zeros:,} of {sum(t.numel() for t in tensors.values()):,} weights are zero" in card


def test_a_fault_of_ours_asks_for_a_report(runs, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("squisher.analysis.health.examine", broken)
    done = run("inspect", "run-a/final", cwd=runs)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "unexpected ZeroDivisionError: division by zero" in done.stderr
    assert re.search(r"/issues", done.stderr)
    assert "command   squisher inspect run-a/final" in done.stderr
    assert f"squisher {squisher.__version__}" in done.stderr
    assert f"torch {torch.__version__.partition('+')[0]}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in run("--debug", "inspect", "run-a/final", cwd=runs).stderr


def test_a_folder_with_an_importance_needs_no_optimizer_state(runs, tmp_path):
    done = run("extract", "run-a/final", "--out", tmp_path / "x.safetensors", cwd=runs)
    assert done.returncode == 1
    assert "run-a/final/squisher.safetensors as it is" in done.stderr
