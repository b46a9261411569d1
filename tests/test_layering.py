"""Which module may import which: the table in CONTRIBUTING.md, and proof that this test can fail."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "squisher"
ROOMS = sorted(
    {
        p.stem if p.suffix == ".py" else p.name
        for p in PACKAGE.iterdir()
        if not p.name.startswith("_") and p.suffix in (".py", "")
    }
)


def allowed():
    rows = re.findall(r"^\| ([a-z, ]+?) \| ([a-z, ]*?) ?\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    table = {}
    for modules, imports in rows:
        for module in modules.split(", "):
            table[module] = set(ROOMS) if imports == "everything" else set(filter(None, imports.split(", ")))
    return table


def imported_rooms(source, file):
    """The rooms of the package that a file imports, at any depth of nesting."""
    depth = len(file.relative_to(PACKAGE).parts)
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(file.relative_to(PACKAGE).parts[: depth - node.level]) if node.level else []
            prefix = (
                ".".join(["squisher", *base, *([node.module] if node.module else [])]) if node.level else node.module
            )
            paths = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            parts = path.split(".")
            if parts[0] == "squisher" and len(parts) > 1 and not parts[1].startswith("__"):
                rooms.add(parts[1])
    return rooms


def violations(source, file):
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return imported_rooms(source, file) - allowed()[own] - {own}


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if not p.relative_to(PACKAGE).parts[0].startswith("__")]


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_table(file):
    assert not violations(file.read_text(), file)


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("from .measure import fisher", "merge.py"),
        ("from . import recycle", "merge.py"),
        ("from squisher.prune import scores", "merge.py"),
        ("import squisher.mask", "merge.py"),
        ("def f():\n    from ..merge import average", "recycle/x.py"),
        ("from ..recycle.naming import resolve", "measure/x.py"),
        ("from .importance import load", "errors.py"),
    ],
)
def test_the_test_can_fail(source, file):
    assert violations(source, PACKAGE / file)


def test_every_room_is_in_the_table():
    assert set(ROOMS) - {"py.typed"} <= set(allowed())


EXTRAS = {"transformers", "accelerate", "peft", "huggingface_hub", "lightning", "matplotlib", "resvg_py", "font_roboto", "torch_pruning", "mergekit", "jax",
          "flax", "orbax", "msgpack", "h5py", "keras", "sklearn", "datasets", "pandas", "scipy"}  # fmt: skip


def modules_after(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(' '.join({{m.split('.')[0] for m in sys.modules}}))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_everything_imports_no_extra_and_the_package_alone_not_even_torch():
    everything = "import squisher\nfor name in squisher.__all__: getattr(squisher, name)"
    assert not modules_after(everything) & EXTRAS
    assert "torch" in modules_after(everything)
    assert "torch" not in modules_after("import squisher")


def test_that_test_can_fail():
    assert modules_after("import matplotlib") & EXTRAS


def test_public_names_are_few_documented_and_resolve():
    import squisher

    assert len(squisher.__all__) <= 25
    for name in squisher.__all__:
        assert name == "__version__" or getattr(squisher, name).__doc__
    with pytest.raises(AttributeError, match="nonsense"):
        squisher.nonsense  # noqa: B018
    assert set(squisher.__all__) <= set(dir(squisher))


def test_a_public_function_never_shares_its_name_with_a_module():
    import squisher

    functions = [name for name in squisher.__all__ if callable(getattr(squisher, name))]
    assert not set(functions) & set(ROOMS)


def private_uses(source):
    """What a file takes from the package that is not in an `__all__`: imports, and attributes of `squisher`.

    Public are the names of `squisher`, and those of the integrations, which users import from their modules.
    """
    import squisher

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("squisher.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "squisher":
            integration = node.module.startswith("squisher.integrations.")
            listed = importlib.import_module(node.module).__all__ if integration else ()
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in listed]
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node).split(".")
            public = [*squisher.__all__, "__file__"]
            if path[0] == "squisher" and len(path) == 2 and path[1] not in public:
                found.append(".".join(path))
            if path[0] == "squisher" and len(path) == 3 and path[1] in squisher.__all__:
                owner = getattr(squisher, path[1])
                if path[2] not in getattr(owner, "__all__", dir(owner)) or path[2].startswith("_"):
                    found.append(".".join(path))
    return found


SCRIPTS = sorted([*(ROOT / "experiments").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_experiments_and_benchmarks_use_public_names_only(file):
    assert not private_uses(file.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "from squisher.order import Selection",
        "from squisher.integrations.model_folders import _open",
        "import squisher.storage",
        "import squisher\nsquisher.storage.read",
        "import squisher\nsquisher.merge.streaming",
        "import squisher\nsquisher.Importance._names",
    ],
)
def test_that_a_private_use_is_found(source):
    assert private_uses(source)
    assert not private_uses("import squisher\nsquisher.merge.fisher(squisher.load(a))")
