"""`squisher report`: files in, a page out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from squisher.cli import app
from squisher.errors import SquisherError

from .report import examples

runner = CliRunner()


def run(*arguments):
    result = runner.invoke(app, ["report", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def files(tmp_path):
    for name, seed in (("sst2", 0), ("trec", 1)):
        (tmp_path / name).mkdir()
        examples.squisher(seed=seed).save(tmp_path / name)
        save_file(examples.tensors(seed=seed + 5), tmp_path / name / "model.safetensors")
    return [tmp_path / name for name in ("sst2", "trec")]


def test_a_page_and_its_data(files, tmp_path):
    out = tmp_path / "report.html"
    done = run(
        *(folder / "squisher.safetensors" for folder in files), "--out", out, "--model", files[0], "--model", files[1]
    )
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{out}: 2 importances, each of 546 entries in 20 parameters.")
    html = out.read_text("utf-8")
    assert "<h1>sst2 and trec</h1>" in html
    assert str(tmp_path) not in html
    data = json.loads(run(*files, "--json", "--model", files[0], "--model", files[1]).stdout)
    embedded = html.split('id="data">')[1].split("</script>")[0]
    assert json.loads(embedded) == data


def test_one_model_is_for_all(files):
    data = json.loads(run(*files, "--json", "--model", files[0]).stdout)
    assert [item["model"]["covered_tensors"] for item in data["importances"]] == [20, 20]


def test_names_are_the_shortest_that_tell_files_apart(tmp_path, monkeypatch):
    for place in ("a/x", "b/x"):
        (tmp_path / place).mkdir(parents=True)
        examples.squisher(layers=1).save(tmp_path / place)
    examples.squisher(layers=1).save(tmp_path / "other.safetensors")
    monkeypatch.chdir(tmp_path)

    def names(*given):
        return [item["name"] for item in json.loads(run(*given, "--json").stdout)["importances"]]

    assert names("a/x/squisher.safetensors") == ["x"]
    assert names("a/x", "b/x") == ["a/x", "b/x"]
    assert names("./other.safetensors", "b/x") == ["other", "x"]
    monkeypatch.chdir(tmp_path / "a" / "x")
    assert names("squisher.safetensors") == ["squisher"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--out.*--json"),
        (("--out", "report.txt"), "ends in .html"),
        (("--out", "nowhere/report.html"), "no folder nowhere"),
        (("--json", "--model", "a", "--model", "b", "--model", "c"), "2 importances.*3 models"),
        (("--json", "--model", "missing"), "no model missing"),
    ],
)
def test_mistakes_are_told_before_the_work(files, arguments, message):
    with pytest.raises(SquisherError, match=message):
        run(*files, *arguments)


def test_the_same_file_twice_and_a_missing_one(files, tmp_path):
    with pytest.raises(SquisherError, match="given twice"):
        run(files[0], files[0], "--json")
    with pytest.raises(SquisherError, match="There is no file"):
        run(tmp_path / "gone.safetensors", "--out", tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_help_has_an_example_and_does_not_wait_for_torch():
    code = "import sys; sys.argv = ['squisher', 'report', '--help']\nfrom squisher.cli import main\ntry: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"COLUMNS": "200"}
    )
    assert "Example: squisher report" in done.stdout
    for option in ("--out", "--model", "--json"):
        assert option in done.stdout
