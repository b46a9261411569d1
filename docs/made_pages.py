"""What mkdocs is told beyond its configuration: tutorials are run and become pages; the README becomes the first one.

A tutorial is a script. Comments that begin a line are its text, in Markdown; what stands between them is its code. Every block
of code is run when the site is built, and what it prints is shown below it; a tutorial that fails stops the build.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TUTORIALS = Path(__file__).parent / "tutorials"
REPOSITORY = "https://github.com/torch-squisher/torch-squisher"


def blocks(source: str) -> Iterator[tuple[str, str]]:
    """Yield ("text" or "code", content), in order; the module's docstring comes first."""
    docstring = ast.parse(source).body[0]
    yield "text", "# " + (ast.get_docstring(ast.parse(source)) or "").replace(".\n", "\n", 1)
    lines = source.splitlines()[docstring.end_lineno :]
    for is_text, group in itertools.groupby(lines, key=lambda line: line.startswith("#")):
        block = "\n".join(re.sub("^# ?", "", line) if is_text else line for line in group).strip("\n")
        if block:
            yield ("text" if is_text else "code"), block


def run(script: Path) -> str:
    """Run a tutorial in a folder of its own and return it as Markdown, with its output."""
    out: list[str] = []
    namespace: dict[str, Any] = {"__name__": "__main__"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory() as folder, _inside(folder), _environment(PATH=path):
        for kind, content in blocks(script.read_text()):
            if kind == "text":
                out.append(content)
                continue
            printed = _capture(content, script.name, namespace)
            out.append(f"```python\n{content}\n```")
            if printed:
                out.append(f"```{{.text .output}}\n{printed}\n```")
    return "\n\n".join(out) + "\n"


def _capture(code: str, name: str, namespace: dict[str, Any]) -> str:
    """Return the output of a block of code and of its subprocesses, which write to the file behind standard output."""
    with tempfile.TemporaryFile("w+") as target:
        kept = os.dup(1)
        sys.stdout.flush()
        os.dup2(target.fileno(), 1)
        text = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), line_buffering=True, write_through=True)
        try:
            with contextlib.redirect_stdout(text):
                exec(compile(code, name, "exec"), namespace)
        finally:
            text.close()
            os.dup2(kept, 1)
            os.close(kept)
        target.seek(0)
        return target.read().rstrip()


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    kept = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(kept)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    kept = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in kept.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def _moved(page: str) -> str:
    """Return a page of the project's root with links as they are within the site."""
    page = re.sub(rf"\]\({re.escape(REPOSITORY)}/(?:blob|raw)/main/", "](", page)
    page = re.sub(r"\]\(docs/tutorials/(\w+)\.py\)", r"](tutorials/\1.md)", page).replace("](docs/", "](")
    page = page.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](CHANGELOG.md)", "](changelog.md)")
    return re.sub(r"\[([^]]+)\]\((?:CITATION\.cff|LICENSE)\)", r"\1", page)  # files that are not in the site


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages: tutorials and the README."""
    from mkdocs.structure.files import File

    for source, made in (
        ("README.md", "index.md"),
        ("CONTRIBUTING.md", "contributing.md"),
        ("CHANGELOG.md", "changelog.md"),
    ):
        files.append(File.generated(config, made, content=_moved((ROOT / source).read_text())))
    for script in sorted(TUTORIALS.glob("*.py")):
        files.append(File.generated(config, f"tutorials/{script.stem}.md", content=run(script)))
    for made in [f for f in files if f.src_uri.endswith(".py")]:
        files.remove(made)  # sources are shown inside their pages
    return files
