"""What the README and the pages of docs/ say is run, or at least known to exist."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import squisher
from squisher.cli.shell import ISSUES

ROOT = Path(__file__).parents[1]
REPOSITORY = re.search(r'Homepage = "(.+)"', (ROOT / "pyproject.toml").read_text())[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def snippets(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_snippets_run_one_after_the_other(page, tmp_path):
    code = "\n".join(snippets(page, "python"))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_readme_has_snippets():
    assert len(snippets(ROOT / "README.md", "python")) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_their_options_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    helps = {}
    for line in "\n".join(snippets(page, "sh")).splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        elif words[:1] == ["squisher"]:
            if words[1] not in helps:
                done = subprocess.run(
                    [Path(sys.executable).with_name("squisher"), words[1], "--help"],
                    capture_output=True, text=True, check=False, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"},
                )  # fmt: skip
                assert done.returncode == 0, line
                helps[words[1]] = done.stdout
            for option in re.findall(r"--[a-z-]+", line):
                assert option in helps[words[1]], line


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        ours = re.match(rf"{re.escape(REPOSITORY)}/(?:blob|raw)/main/(.+)", target)
        if ours:
            assert (ROOT / ours[1]).exists(), target
        else:
            assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_readme_reads_on_a_package_page():
    text = (ROOT / "README.md").read_text()
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)#]+)\)", text))
    assert text.index("## Install") < text.index("```python") < text.index("benchmarks: readme")
    assert REPOSITORY in ISSUES


def test_links_of_the_site_stay_in_the_site():
    for page in (ROOT / "docs").glob("**/*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert not target.startswith("../benchmarks"), (page.name, target)
            assert Path(target).suffix != ".py", (page.name, target)  # sources are no pages of it


def test_the_reference_has_every_public_name_as_one_types_it():
    """Functions and classes of `squisher` itself, and the lower-case ones of the rooms that it exports."""
    said = set(
        re.findall(
            r"^::: (squisher\.[\w.]+)$", "\n".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md")), re.M
        )
    )
    for name in said:
        value = squisher
        for part in name.split(".")[1:]:
            value = (
                importlib.import_module(f"{value.__name__}.{part}")
                if part in ("integrations", "transformers", "lightning", "report", "model_folders")
                else getattr(value, part)
            )
    expected = set()
    for name in set(squisher.__all__) - {"__version__"}:
        value = getattr(squisher, name)
        if inspect.ismodule(value):
            expected |= {f"squisher.{name}.{inner}" for inner in value.__all__ if inner.islower()}
        else:
            expected.add(f"squisher.{name}")
    assert expected <= said, expected - said
