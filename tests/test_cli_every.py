"""What holds for every command: --json prints one document, faults ask for a report, names keep what differs."""

import json
import re
from types import SimpleNamespace
from typing import get_args, get_type_hints

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


WRONG = {
    "extract": {"source": [], "trainable": "(", "optimizer": "x", "batch_size": "-1", "batch_tokens": "0", "beta2": "2",
                "optimizer_class": "Adma", "loss_reduction": "max", "dtype": "float16", "codec": "zip", "push": "hf://nobody",
                "out": "x.bin"},
    "fisher": {"labels": "true", "per": "token", "unit": "token", "draws": "0", "signs": "2", "batch_size": "0", "max_examples": "0",
               "max_length": "0", "parameters": "(", "device": "gpu9", "seed": "x", "codec": "zip", "out": "x.bin"},
    "compress": {"codec": "zip", "out": "x.bin"},
    "push": {"address": ["run-a/final", "hf://nobody"]},
    "inspect": {"plot": "x.gif"},
    "compare": {"scale": "fisher", "exclude": "(", "plot": "x.gif"},
    "similarity": {"scale": "fisher", "by": "column", "exclude": "(", "plot": "x.gif", "files": ["run-a/final"]},
    "report": {"out": "x.pdf"},
    "merge": {"method": ["median", "run-a/final", "run-a/final", "--out", "{tmp}/x"], "coefficient": "-1", "size": "5",
              "base_size": "-5", "keep": "2", "scale": "fisher", "normalize": "max", "floor": "-1", "missing": "skip",
              "exclude": "(", "dtype": "int8", "base": "run-a/final"},
    "mergekit": {},
    "prune": {"sparsity": "1.5", "scope": "layer", "score": "best", "nm": ["run-a/final", "--nm", "5:4", "--out", "{tmp}/x"],
              "exclude": "(", "seed": "x", "plot": "x.gif"},
    "shrink": {"sparsity": "1", "scope": "layer", "exclude": "("},
    "mask": {"keep": "2", "always": "(", "minimum": "-1", "out": "x.bin", "plot": "x.gif"},
    "patch": {"out": "x.bin", "drop_outside": ["make", "run-a/final", "run-a/final", "--out", "{tmp}/x.safetensors", "--drop-outside"]},
    "embed": {"by": "column", "exclude": "(", "out": "x.bin"},
    "quantize": {"bits_per_weight": "0", "to": "zip", "bits": "2;3", "group": "0", "scheme": "nf4", "exclude": "("},
    "unlearn": {"select": "0", "strength": "-1", "scale": "fisher", "exclude": "("},
    "export": {"to": "zip"},
}  # fmt: skip
"""A wrong value of every option that takes one; a list is the whole command, [] says that any value may be right."""
NAMED = {"to": "format"}
COMPLETE = {
    **COMMANDS,
    "extract": ["run-a/state.pt", "--out", "{tmp}/i.safetensors"],
    "fisher": ["run-a/final", "--data", "run-a/data.jsonl", "--out", "{tmp}/f.safetensors"],
    "shrink": ["run-a/final", "--sparsity", "0.5", "--out", "{tmp}/s"],
}


def callbacks():
    """Return the function of every command."""
    found = {c.name or c.callback.__name__: c.callback for c in app.registered_commands}
    for group in app.registered_groups:
        found |= {f"{group.name} {c.name}": c.callback for c in group.typer_instance.registered_commands}
    return found


@pytest.mark.parametrize("command", callbacks())
def test_every_option_with_a_value_has_a_wrong_one(command):
    valued = set()
    for name, hint in get_type_hints(callbacks()[command]).items():
        kinds = {hint, *get_args(hint)} | {kind for one in get_args(hint) for kind in get_args(one)}
        if kinds & {str, int, float}:
            valued.add(name)
    assert valued <= set(WRONG[command.partition(" ")[0]])


@pytest.fixture
def no_libraries(monkeypatch, runs):
    """Let commands that open models of Hugging Face go without it: what is tested comes before the model is used."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    model.config = SimpleNamespace(pad_token_id=0)

    def loads(what):
        return SimpleNamespace(from_pretrained=lambda *_, **__: what)

    transformers = SimpleNamespace(
        AutoConfig=loads(SimpleNamespace(architectures=["BertForSequenceClassification"])),
        AutoTokenizer=loads(SimpleNamespace(pad_token="[PAD]", pad_token_id=0)),
        AutoModelForSequenceClassification=loads((model, {"missing_keys": []})),
    )
    monkeypatch.setattr("squisher.integrations.text.require", lambda *_: transformers)
    (runs / "run-a" / "final" / "config.json").write_text("{}")
    monkeypatch.setattr("squisher.prune.load", lambda _: model)
    monkeypatch.setattr("squisher.prune.example_input", lambda _: torch.zeros(1, 6))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, runs / "run-a" / "state.pt")
    (runs / "run-a" / "data.jsonl").write_text('{"text": "a", "label": 0}\n')


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, options in WRONG.items() for o in options])
def test_wrong_values_are_wrong_usage(runs, tmp_path, no_libraries, command, option):
    value = WRONG[command][option]
    if value == []:
        return
    said = f"--{NAMED.get(option, option).replace('_', '-')}"
    words = value if isinstance(value, list) else [*COMPLETE[command], said, value]
    done = run(command, *(word.format(tmp=tmp_path) for word in words), cwd=runs)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(("squisher: ", "Usage: "))
    if done.stderr.startswith("squisher"):
        assert done.stderr.count("\n") == 1
        # The option is named as it was given, not as a Python function would take it.
        assert not re.search(rf"\b{option}(=| is )" if "_" not in option else option, done.stderr.replace(said, ""))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scale", "fisher"),
        ("floor", "-1"),
        ("normalize", "max"),
        ("missing", "skip"),
        ("coefficient", "-1"),
        ("dtype", "int8"),
    ],
)
def test_wrong_values_of_a_weighted_merge(runs, tmp_path, option, value):
    done = run("merge", "fisher", *["run-a/final"] * 2, "--out", tmp_path / "x", f"--{option}", value, cwd=runs)
    assert done.returncode == 2, done.stderr
    assert option in done.stderr or value in done.stderr


def test_damaged_metadata_is_no_wrong_usage(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "i.safetensors", {"squisher": '{"kind": "fisher", "unit": "meter"}'})
    done = run("inspect", tmp_path / "i.safetensors")
    assert done.returncode == 1
    assert "unit" in done.stderr


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
