"""How the house is built, before and after: sizes, imports, and how far a call walks through it.

    python -m benchmarks.house                       # the commit before the rooms against what is here now
    python -m benchmarks.house --before COMMIT

Nothing is timed. A walk runs one everyday call and counts which of our functions it calls, in how many files, and how many
of our frames lie on the stack at its deepest.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .harness import BEFORE, ROOT, alone, command, older, write

WALKS = ("extract a Trainer folder", "fisher", "merge two folders", "live extract", "report")
OPENS = ("storage.folders", "bridges.folders")
"""The module that opens a model folder, here and in the commit before."""


def sizes(package: Path) -> dict[str, Any]:
    """Return files, lines, function lengths, modules with one importer and the longest chain of imports of a package."""
    trees = {_module(package, path): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    lengths = [
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None
    ]
    imports = {name: _imports(name, package, tree, set(trees)) for name, tree in trees.items()}
    importers = {name: [other for other, used in imports.items() if name in used] for name in trees}
    return {
        "files": len(trees),
        "lines": sum(len(path.read_text().splitlines()) for path in package.rglob("*.py")),
        "modules_with_one_importer": sum(len(used) == 1 for used in importers.values()),
        "functions": len(lengths),
        "median_function_lines": statistics.median(lengths),
        "p95_function_lines": statistics.quantiles(lengths, n=20)[-1],
        "longest_import_chain": _longest_chain(imports),
    }


def _module(package: Path, path: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def _imports(name: str, package: Path, tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules of the package that importing a module imports; not what its functions import when called."""
    is_package = (package.parent / Path(*name.split("."))).is_dir()
    found = set()
    for node in _at_import(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            inside = {f"{prefix}.{alias.name}" for alias in node.names} & known
            found |= inside or {prefix}
    return (found & known) - {name}


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _at_import(child)


def _longest_chain(imports: dict[str, set[str]]) -> int:
    """Return the number of modules on the longest path of imports; an import that closes a circle is not followed."""
    depth: dict[str, int] = {}

    def of(name: str, above: tuple[str, ...]) -> int:
        if name not in depth:
            below = [of(other, (*above, name)) for other in sorted(imports[name]) if other not in above]
            depth[name] = 1 + max(below, default=0)
        return depth[name]

    return max(of(name, ()) for name in sorted(imports))


def walk(name: str) -> dict[str, int]:
    """Run one everyday call of the package on the path, and return what it went through."""
    import squisher

    package = str(Path(squisher.__file__).parent)
    functions: set[tuple[str, str, int]] = set()
    depth = deepest = 0

    def follow(frame: Any, event: str, argument: Any) -> None:
        nonlocal depth, deepest
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(package):
            depth += 1 if event == "call" else -1
            deepest = max(deepest, depth)
            functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    with tempfile.TemporaryDirectory() as scratch:
        call = _prepared(name, Path(scratch))
        sys.setprofile(follow)
        try:
            call()
        finally:
            sys.setprofile(None)
    called = {one for one in functions if not one[1].endswith(("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"))}
    return {"functions": len(called), "files": len({file for file, _, _ in called}), "depth": deepest}


def _prepared(name: str, scratch: Path) -> Callable[[], Any]:
    """Return the call, with everything it needs made and imported: a first call is not counted."""
    import torch
    from torch import nn

    import squisher

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batches = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if name == "fisher":
        call = lambda: squisher.fisher(model, batches)  # noqa: E731
    elif name == "live extract":
        call = lambda: squisher.extract(optimizer, model, batch_size=6)  # noqa: E731
    elif name == "extract a Trainer folder":
        folder = scratch / "checkpoint-3"
        shutil.copytree(ROOT / "tests" / "fixtures" / "trainer" / "bert", folder)
        (folder / "model.safetensors").unlink()
        shutil.copy(ROOT / "tests" / "fixtures" / "trainer" / "bert_pytorch_model.bin", folder / "pytorch_model.bin")
        call = lambda: dict(squisher.extract(folder))  # noqa: E731
    else:
        call = _command(name, scratch, squisher.extract(optimizer, model, batch_size=6), model)
    call()
    return call


def _command(name: str, scratch: Path, importance: Any, model: Any) -> Callable[[], Any]:
    from safetensors.torch import save_file

    for folder in ("a", "b"):
        (scratch / folder).mkdir()
        save_file(model.state_dict(), scratch / folder / "model.safetensors", {"format": "pt"})
    importance.save(scratch / "i.safetensors")
    runs = iter(range(100))

    def call() -> None:
        out = scratch / f"out{next(runs)}"
        merged = ["merge", "average", str(scratch / "a"), str(scratch / "b"), "--out", str(out)]
        page = ["report", str(scratch / "i.safetensors"), "--out", f"{out}.html"]
        command(merged if name == "merge two folders" else page)

    return call


def loaded_by_opening() -> int:
    """Return how many of our modules the one that opens a model folder brings with it."""
    import importlib
    import importlib.util

    import squisher

    package = Path(squisher.__file__).parent
    opens = next(name for name in OPENS if (package / Path(*name.split("."))).with_suffix(".py").is_file())
    importlib.import_module(f"squisher.{opens}")
    return sum(name.partition(".")[0] == "squisher" for name in sys.modules)


def measured(source: Path) -> dict[str, Any]:
    """Return everything about one tree of sources; every walk in a process of its own."""
    return {
        **sizes(source / "src" / "squisher"),
        "modules_loaded_by_opening_a_folder": alone(source, "house", "open"),
        "walks": {name: alone(source, "house", name) for name in WALKS},
    }


def main() -> None:
    """Compare a commit with what is here, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(loaded_by_opening() if options.alone == "open" else walk(options.alone)))
        return
    with older(options.before) as source:
        before = measured(source)
    after = measured(ROOT)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    head = commit.stdout.strip()
    write("house", {"before": {"commit": options.before, **before}, "after": {"commit": head, **after}})
    for key in before:
        print(f"{key}: {before[key]} -> {after[key]}")


if __name__ == "__main__":
    main()
