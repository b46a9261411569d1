"""Experiments run as units: nothing is done twice, nothing of another configuration is taken over, a cut-off file is made again."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from experiments.runs import Score, Unit, execute


@pytest.fixture
def setting(monkeypatch):
    """A setting with two stages that counts its calls."""
    module = types.ModuleType("experiments.pretended")
    module.calls = []
    module.CONFIGS = {"quick": {"seeds": 2, "factor": 3}}

    def first(run, seed):
        module.calls.append(("first", seed))
        return {"value": run.config["factor"] * seed}

    def second(run, seed):
        module.calls.append(("second", seed))
        kept = run.cached(f"tensor-{seed}", lambda: torch.full((2,), float(seed)))
        return {"value": run.result(f"first/{seed}")["value"] + kept.sum().item()}

    module.first, module.second = first, second
    module.stages = lambda config, seeds: [
        [Unit(f"first/{s}", "first", {"seed": s}) for s in seeds],
        [Unit(f"second/{s}", "second", {"seed": s}) for s in seeds],
    ]
    module.scores = lambda results: [
        Score("case", "fisher", int(k[-1]), r["value"]) for k, r in results.items() if "second" in k
    ]
    monkeypatch.setitem(sys.modules, "experiments.pretended", module)
    return module


def run(out, seeds=None, lines=None):
    say = (lambda line: None) if lines is None else lines.append
    return execute("pretended", "quick", seeds=seeds, data=None, out=out, jobs=1, say=say)


def test_later_stages_read_earlier_ones_and_the_document_holds_everything(setting, tmp_path):
    document = json.loads(run(tmp_path).read_text())
    assert [score["value"] for score in document["scores"]] == [3 + 2, 6 + 4]
    assert document["seeds"] == 2
    assert document["config"] == {"factor": 3}
    assert sorted(document["units"]) == ["first/1", "first/2", "second/1", "second/2"]
    assert document["environment"]["torch"] == torch.__version__


def test_what_is_done_is_not_done_again_and_more_seeds_add_to_it(setting, tmp_path):
    run(tmp_path)
    setting.calls.clear()
    lines = []
    document = json.loads(run(tmp_path, seeds=3, lines=lines).read_text())
    assert setting.calls == [("first", 3), ("second", 3)]
    assert [score["seed"] for score in document["scores"]] == [1, 2, 3]
    assert [line.partition(";")[0] for line in lines] == [
        "pretended (quick): 5/6 first/3",
        "pretended (quick): 6/6 second/3",
    ]
    assert all("left" in line for line in lines)


def test_a_killed_run_goes_on(setting, tmp_path):
    def killed(run, seed):
        raise KeyboardInterrupt

    whole, setting.second = setting.second, killed
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    setting.second = whole
    setting.calls.clear()
    run(tmp_path)
    assert setting.calls == [("second", 1), ("second", 2)]


def test_results_of_another_configuration_are_refused(setting, tmp_path):
    run(tmp_path)
    setting.CONFIGS["quick"]["factor"] = 4
    with pytest.raises(SystemExit, match="another configuration"):
        run(tmp_path)


def test_a_cut_off_cache_file_is_made_again_and_a_dead_lock_is_taken_over(setting, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    torch.save(torch.ones(1000), cache / "tensor-1.pt")
    whole = (cache / "tensor-1.pt").read_bytes()
    (cache / "tensor-1.pt").write_bytes(whole[: len(whole) // 2])
    (cache / "tensor-2.pt.lock").write_text("999999999")
    document = json.loads(run(tmp_path).read_text())
    assert [score["value"] for score in document["scores"]] == [3 + 2, 6 + 4]
    assert not list(cache.glob("*.lock"))


def test_an_unknown_scale_is_refused_by_name(setting, tmp_path):
    with pytest.raises(SystemExit, match="'cpu'.*quick"):
        execute("pretended", "cpu", seeds=None, data=None, out=tmp_path, jobs=1, say=print)


def test_units_of_a_committed_document_are_taken_over(setting, tmp_path):
    first = run(tmp_path / "here")
    setting.calls.clear()
    document = json.loads(
        execute(
            "pretended", "quick", seeds=3, data=None, out=tmp_path / "there", jobs=1, say=lambda line: None, known=first.parent
        ).read_text()
    )  # fmt: skip
    assert setting.calls == [("first", 3), ("second", 3)]
    assert [score["seed"] for score in document["scores"]] == [1, 2, 3]
    setting.CONFIGS["quick"]["factor"] = 4  # of another protocol: not taken over
    setting.calls.clear()
    execute("pretended", "quick", seeds=1, data=None, out=tmp_path / "other", jobs=1, say=print, known=first.parent)
    assert setting.calls == [("first", 1), ("second", 1)]


def test_single_units_can_be_run_again(setting, tmp_path):
    first = run(tmp_path / "here")
    setting.calls.clear()
    execute(
        "pretended", "quick", seeds=None, data=None, out=tmp_path / "again", jobs=1, say=print, known=first.parent, again="^second/2$"
    )  # fmt: skip
    assert setting.calls == [("second", 2)]


def test_a_partial_document_says_what_is_missing_and_goes_on(setting, tmp_path):
    arguments = {"data": None, "jobs": 1, "say": lambda line: None}
    path = execute("pretended", "quick", seeds=None, out=tmp_path / "a", only="first/1$", **arguments)
    document = json.loads(path.read_text())
    assert document["missing"] == ["first/2", "second/1", "second/2"]
    assert document["scores"] == []
    path = execute("pretended", "quick", seeds=None, out=tmp_path / "b", known=path.parent, stages=1, **arguments)
    assert json.loads(path.read_text())["missing"] == ["second/1", "second/2"]
    assert setting.calls == [("first", 1), ("first", 2)]


def test_what_says_what_is_done_may_change_and_stale_results_are_made_again(setting, tmp_path):
    setting.WHAT = ("wanted",)
    setting.CONFIGS["quick"]["wanted"] = [1]
    run(tmp_path)
    setting.CONFIGS["quick"]["wanted"] = [1, 2]
    setting.calls.clear()
    setting.stale = lambda run, unit, result: unit.key == "second/2"
    run(tmp_path)
    assert setting.calls == [("second", 2)]
