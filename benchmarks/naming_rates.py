"""How often values accept wrong names or refuse right ones: wrong assignments tried on real runs.

For each run of naming_runs.py, with and without its earlier checkpoint: the right assignment, and wrong ones (two layers
swapped, all layers rotated by one, two tensors of one shape exchanged in one layer, same-shaped tensors permuted at random),
each given with `names=`. A wrong assignment that is not contradicted is a false acceptance; the right one contradicted is a
false refusal. Also counted: for how many parameters the right names come out proven, and whether the order of the model
is refused as a guess unless the user vouches for it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import squisher

Names = list[str]


def groups_of(names: Names) -> dict[str, dict[int, Names]]:
    """Return the numbered layers of a model: prefix to number to the names in it, for every prefix with two or more."""
    layers: dict[str, dict[int, Names]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        match = re.match(r"(.*?)\b(\d+)\.", name)
        if match:
            layers[match[1]][int(match[2])].append(name)
    return {prefix: dict(found) for prefix, found in layers.items() if len(found) > 1}


def renamed(names: Names, change: dict[str, str]) -> Names:
    """Return the names with some put in the place of others."""
    return [change.get(name, name) for name in names]


def exchange(one: Names, other: Names, shapes: dict[str, Any]) -> dict[str, str]:
    """Return the exchange of two layers, where they have the same shapes."""
    if [shapes[n] for n in one] != [shapes[n] for n in other]:
        return {}
    return {**dict(zip(one, other, strict=True)), **dict(zip(other, one, strict=True))}


def wrong(names: Names, shapes: dict[str, Any], draw: random.Random) -> Iterator[tuple[str, Names]]:
    """Yield wrong assignments that fit every shape, with their kind."""
    for layers in groups_of(names).values():
        like: dict[Any, list[Names]] = defaultdict(list)
        for own in layers.values():
            like[tuple(shapes[n] for n in own)].append(own)
        for same in like.values():
            pairs = [(a, b) for k, a in enumerate(same) for b in same[k + 1 :]]
            for a, b in draw.sample(pairs, min(2, len(pairs))):
                yield "two layers swapped", renamed(names, exchange(a, b, shapes))
            if len(same) > 2:
                turn = {
                    x: y for a, b in zip(same, [*same[1:], same[0]], strict=True) for x, y in zip(a, b, strict=True)
                }
                yield "all layers rotated", renamed(names, turn)
            for own in same[:2]:
                matrices = [n for n in own if len(shapes[n]) > 1]
                twins = [(a, b) for k, a in enumerate(matrices) for b in matrices[k + 1 :] if shapes[a] == shapes[b]]
                for a, b in draw.sample(twins, min(2, len(twins))):
                    yield "two matrices of a layer exchanged", renamed(names, {a: b, b: a})
    for _ in range(3):
        by_shape: dict[Any, Names] = defaultdict(list)
        for name in names:
            by_shape[shapes[name]].append(name)
        change = {a: b for own in by_shape.values() for a, b in zip(own, draw.sample(own, len(own)), strict=True)}
        if any(a != b for a, b in change.items()):
            yield "permuted at random", renamed(names, change)


def run_names(folder: Path) -> Names:
    """Return the names in the optimizer's order: that of the model."""
    return list(json.loads((folder / "names.json").read_text()))


def contradicted(path: Path, names: Names, base: Path | None) -> bool:
    """Return whether values refuse these names."""
    try:
        squisher.extract(path, names=names, base_model=base)
    except squisher.SquisherError as error:
        if "values contradict" not in str(error):
            raise
        return True
    return False


def rates(run: Path, base: bool) -> dict[str, Any]:
    """Return what happened to the right and to wrong assignments of one run."""
    last = run / "last"
    path = last / "checkpoint.pt" if (last / "checkpoint.pt").is_file() else last
    earlier = run / "earlier" / "checkpoint.pt"
    before = (earlier if earlier.is_file() else earlier.parent) if base else None
    try:
        right, order_refused = squisher.extract(path, base_model=before), False
    except squisher.SquisherError:
        right, order_refused = squisher.extract(path, base_model=before, in_order=True), True
    files = {live: name for name, live in right.provenance.live_names.items()}
    names = [files.get(name, name) for name in run_names(run)]
    shapes = {name: tuple(right[name].shape) for name in names}
    levels = [right.provenance.naming.of(name) for name in names]
    kinds: dict[str, list[bool]] = defaultdict(list)
    for kind, assignment in wrong(names, shapes, random.Random(0)):
        kinds[kind].append(contradicted(path, assignment, before))
    margins = sorted(level.margin for level in levels if level.margin is not None)
    return {
        "parameters": len(names),
        "proven": sum(level.level == "proven" for level in levels),
        "margin": margins[0] if margins else None,
        "right_refused": contradicted(path, names, before),
        "order_refused": order_refused,
        "wrong": {kind: {"tried": len(found), "refused": sum(found)} for kind, found in kinds.items()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, help="where naming_runs.py has left its folders")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "naming.json")
    parser.add_argument("--only", nargs="*", help="names of runs, in the order in which to take them")
    arguments = parser.parse_args()
    environment = {"torch": torch.__version__, "python": platform.python_version(), "squisher": squisher.__version__}
    found: dict[str, Any] = {}
    for run in arguments.only or sorted(p.name for p in arguments.runs.iterdir() if (p / "last").is_dir()):
        folder = arguments.runs / run
        found[run] = {"state alone": rates(folder, False), "earlier weights too": rates(folder, True)}
        print(run, found[run], flush=True)
        ordered = {name: found[name] for name in sorted(found)}
        arguments.out.write_text(json.dumps({"environment": environment, "runs": ordered}, indent=1) + "\n")
