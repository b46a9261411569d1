"""Whether files are the same bytes as an older commit wrote: importances of all fixtures, a merge, a mask, a patch.

    python -m benchmarks.same_bytes                  # the commit before the rooms against what is here now
    python -m benchmarks.same_bytes --before COMMIT

Compared are names, types, shapes and values of every tensor, not the metadata, which says more than it did. A fixture that the
older commit refuses is not compared; one that only this one refuses is listed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import warnings
from pathlib import Path

from .harness import BEFORE, ROOT, alone, command, older, write

FIXTURES = ROOT / "tests" / "fixtures"


def content(file: Path) -> str:
    """Return the hash of what a safetensors file holds, without its metadata."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    digest = hashlib.sha256()
    for name, entry in sorted(header.items()):
        first, last = entry.pop("data_offsets")
        digest.update(json.dumps([name, entry], sort_keys=True).encode())
        digest.update(data[start + first : start + last])
    return digest.hexdigest()[:16]


def extracted(scratch: Path) -> dict[str, str]:
    """Return the contents of the importance of every fixture that can be extracted without help."""
    import squisher

    found = {}
    for path in sorted([*FIXTURES.glob("*/*"), *FIXTURES.glob("*/*/*")]):
        name = str(path.relative_to(FIXTURES))
        if path.name.startswith(("expected", "__")) or path.suffix in (".json", ".py", ".md", ".txt"):
            continue
        try:
            squisher.extract(path).save(scratch / "i.safetensors")
        except squisher.SquisherError:
            continue
        found[f"extract {name}"] = content(scratch / "i.safetensors")
    return found


def applied(scratch: Path) -> dict[str, str]:
    """Return the contents of a merge, a mask and a patch of two small models."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (300, 64), "layer.0.weight": (64, 64), "layer.0.bias": (64,), "head.weight": (4, 64)}
    for folder in ("base", "a", "b"):
        (scratch / folder).mkdir()
        weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        save_file(weights, scratch / folder / "model.safetensors", {"format": "pt"})
        import squisher

        values = {name: torch.randn(shape, generator=generator).square() * 1e-9 for name, shape in shapes.items()}
        importance = squisher.Importance(values, kind="fisher", unit="example", examples=100)
        importance.save(scratch / folder / "squisher.safetensors")
    place = {name: str(scratch / name) for name in ("base", "a", "b")}
    file = str(scratch / "a" / "squisher.safetensors")
    runs = {
        "merge average": ["merge", "average", place["a"], place["b"]],
        "merge fisher": ["merge", "fisher", place["a"], place["b"]],
        "merge task-arithmetic": ["merge", "task-arithmetic", place["a"], place["b"], "--base", place["base"]],
        "prune": ["prune", place["a"], "--importance", file, "--sparsity", "0.6"],
        "mask": ["mask", file, "--keep", "0.1"],
        "patch": ["patch", "make", place["base"], place["a"]],
        "embed": ["embed", file],
    }
    found = {}
    for name, arguments in runs.items():
        single = arguments[0] in ("mask", "patch", "embed")
        out = scratch / (name.replace(" ", "_") + (".safetensors" if single else ""))
        command([*arguments, "--out", str(out)])
        found[name] = content(out if single else out / "model.safetensors")
    return found


def written() -> dict[str, str]:
    """Return the contents of all files that the package on the path writes."""
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {**extracted(Path(scratch)), **applied(Path(scratch))}


def main() -> None:
    """Compare a commit with what is here, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(written()))
        return
    with older(options.before) as source:
        before = alone(source, "same_bytes")
    after = alone(ROOT, "same_bytes")
    refused = sorted(set(before) - set(after))
    new = sorted(set(after) - set(before))
    same = sorted(name for name in before if before[name] == after.get(name))
    different = sorted(set(before) - set(same) - set(refused))
    found = {"same": same, "different": different, "refused_now": refused, "only_now": new}
    write("same_bytes", {"before": options.before, **found})
    print(
        f"{len(same)} of {len(before)} files are the same; {len(new)} are read only now; different: {different}; refused now: {refused}"
    )


if __name__ == "__main__":
    main()
