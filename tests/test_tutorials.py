"""Every tutorial runs, prints what its text speaks of, and becomes a page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))


@pytest.fixture(scope="module")
def made_pages():
    spec = importlib.util.spec_from_file_location("made_pages", ROOT / "docs" / "made_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_eight_and_the_site_names_them_and_every_page():
    assert len(TUTORIALS) == 8
    named = set(re.findall(r": ([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {f"tutorials/{script.stem}" for script in TUTORIALS} <= named
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= named


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_becomes_a_page(script, made_pages):
    page = made_pages.run(script)
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    printed = "\n".join(re.findall(r"^```{.text .output}\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert page.startswith("# ")
    assert "\n".join(code).count("print(") + "\n".join(code).count("subprocess.run(") >= 2
    assert printed
    assert "False" not in printed  # each ends with checks that say True
    links = re.findall(r"\]\(\.\./([\w-]+\.md)\)", page)
    assert all((ROOT / "docs" / link).exists() for link in links), links


def test_text_and_code_are_told_apart(made_pages):
    source = '"""Title.\n\nIntroduction.\n"""\n\n# ## Head\n#\n# words\nx = 1  # not text\nif x:\n    # nor this\n    print(x)\n'
    assert list(made_pages.blocks(source)) == [
        ("text", "# Title\n\nIntroduction."),
        ("text", "## Head\n\nwords"),
        ("code", "x = 1  # not text\nif x:\n    # nor this\n    print(x)"),
    ]


def test_output_of_subprocesses_is_shown_and_a_failing_tutorial_fails(made_pages, tmp_path):
    script = tmp_path / "tutorial.py"
    script.write_text(
        '"""A.\n"""\nimport subprocess\nprint("one")\nsubprocess.run(["echo", "two"], check=True)\nprint("three")\n'
    )
    assert "```{.text .output}\none\ntwo\nthree\n```" in made_pages.run(script)
    script.write_text('"""A.\n"""\nraise ValueError("broken")\n')
    with pytest.raises(ValueError, match="broken"):
        made_pages.run(script)


def test_pages_of_the_root_link_within_the_site(made_pages):
    made = {"contributing.md", "changelog.md", *(f"tutorials/{p.stem}.md" for p in made_pages.TUTORIALS.glob("*.py"))}
    for source in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", made_pages._moved((ROOT / source).read_text())):
            assert target.startswith("https://") or target in made or (ROOT / "docs" / target).exists(), target
