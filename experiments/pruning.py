"""Pruning on MNIST: Fisher, Squisher, magnitude and random at three sparsities, before and after retraining.

python -m experiments.pruning --data DIR     # DIR holds MNIST's four IDX files; seeds that are done are not run again
python -m experiments.pruning --table        # writes the table of the committed results into docs/pruning.md

Everything below was fixed before the first run.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import itertools
import json
import math
import platform
import statistics
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import squisher

SEEDS = tuple(range(10))
TRAIN = 10_000  # the first images of the training set; all 10,000 test images
WIDTHS = (784, 300, 100, 10)
EPOCHS, BATCH, RATE, DECAY = 15, 64, 1e-3, 0.01  # AdamW, constant rate
RETRAIN_EPOCHS = 2
METHODS = ("fisher", "squisher", "magnitude", "random")
SCOPES = ("global", "tensor")
SPARSITIES = (0.5, 0.75, 0.9)
EXCLUDE = r"bias"

RESULTS = Path(__file__).parent / "results" / "pruning.json"
PAGE = Path(__file__).parents[1] / "docs" / "pruning.md"
PAIRS = (
    ("squisher", "fisher"),
    ("fisher", "magnitude"),
    ("squisher", "magnitude"),
    ("fisher", "random"),
    ("squisher", "random"),
)


def read_idx(path: Path) -> Tensor:
    """One IDX file, as MNIST comes, gzipped or not."""
    found = next((p for p in (path, path.with_name(path.name + ".gz")) if p.exists()), None)
    if found is None:
        raise SystemExit(f"There is no {path} (nor {path.name}.gz); --data is the folder of MNIST's IDX files.")
    data = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
    rank = data[3]
    shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
    return torch.frombuffer(bytearray(data[4 + 4 * rank :]), dtype=torch.uint8).view(shape)


def mnist(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images as vectors with mean 0 and variance 1, and labels: to train on and to test on."""
    out = []
    for name, count in (("train", TRAIN), ("t10k", 10_000)):
        images = read_idx(folder / f"{name}-images-idx3-ubyte")[:count].flatten(1).float() / 255
        out += [(images - 0.1307) / 0.3081, read_idx(folder / f"{name}-labels-idx1-ubyte")[:count].long()]
    return out[0], out[1], out[2], out[3]


def network() -> nn.Sequential:
    """A multi-layer perceptron with ReLU."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, seed: int) -> torch.optim.Optimizer:
    """AdamW over shuffled epochs; the last, smaller batch of an epoch is left out."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator)[: len(labels) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return optimizer


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of test images that are recognised, in percent."""
    return 100.0 * (model(images).argmax(-1) == labels).float().mean().item()


def one_seed(seed: int, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Trains one network and prunes copies of it in every way."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    model = network()
    optimizer = train(model, images, labels, EPOCHS, seed)
    batches = list(zip(images.split(500), labels.split(500), strict=True))
    importances = {
        "fisher": squisher.fisher(model, batches, labels="exact"),
        "squisher": squisher.extract(optimizer, model, batch_size=BATCH),
    }
    rows = []
    for method in METHODS:
        importance = importances.get(method, importances["fisher"])  # the others only take its names
        score = "fisher" if method in importances else method
        for scope in SCOPES:
            for sparsity in SPARSITIES:
                pruned = copy.deepcopy(model)
                squisher.prune.weights(
                    pruned, importance, sparsity=sparsity, scope=scope, score=score, exclude=EXCLUDE, seed=seed
                )
                layers = [m for m in pruned if isinstance(m, nn.Linear)]
                zeros, total = sum(int((m.weight == 0).sum()) for m in layers), sum(m.weight.numel() for m in layers)
                before = accuracy(pruned, test_images, test_labels)
                train(pruned, images, labels, RETRAIN_EPOCHS, seed + 1000)
                assert sum(int((m.weight == 0).sum()) for m in layers) >= zeros
                rows.append(
                    {
                        "method": method, "scope": scope, "sparsity": sparsity, "zeros": zeros, "weights": total,
                        "before": round(before, 4), "after": round(accuracy(pruned, test_images, test_labels), 4),
                    }
                )  # fmt: skip
    agreement = squisher.compare(importances["squisher"], importances["fisher"]).spearman
    return {
        "seed": seed,
        "unpruned": round(accuracy(model, test_images, test_labels), 4),
        "spearman": round(agreement, 4),
        "rows": rows,
    }


def settings() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "data": "MNIST", "train": TRAIN, "test": 10_000, "widths": list(WIDTHS), "epochs": EPOCHS, "batch": BATCH,
        "optimizer": "AdamW", "lr": RATE, "weight_decay": DECAY, "retrain_epochs": RETRAIN_EPOCHS, "exclude": EXCLUDE,
        "fisher": "exact labels, all training images",
    }  # fmt: skip


def run(folder: Path) -> None:
    """Runs the seeds that are missing, writing after each."""
    torch.set_num_threads(1)
    data = mnist(folder)
    document: dict[str, Any] = {"settings": settings(), "versions": {}, "seeds": []}
    if RESULTS.exists():
        document = json.loads(RESULTS.read_text())
        if document["settings"] != settings():
            raise SystemExit(f"{RESULTS} was made with other settings; remove it to start again.")
    versions = {"squisher": squisher.__version__, "torch": torch.__version__, "python": platform.python_version()}
    document["versions"] = versions
    done = {entry["seed"] for entry in document["seeds"]}
    for seed in SEEDS:
        if seed not in done:
            document["seeds"].append(one_seed(seed, data))
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(document, indent=1) + "\n")
            print(f"seed {seed}: unpruned {document['seeds'][-1]['unpruned']:.2f}", flush=True)


def value(entry: dict[str, Any], method: str, scope: str, sparsity: float, when: str) -> float:
    """One accuracy of one seed."""
    found = [r for r in entry["rows"] if (r["method"], r["scope"], r["sparsity"]) == (method, scope, sparsity)]
    return float(found[0][when])


def table(document: dict[str, Any]) -> str:
    """The means, and the paired differences with their standard errors, as Markdown."""
    seeds = document["seeds"]
    unpruned = statistics.mean(entry["unpruned"] for entry in seeds)
    s = document["settings"]
    lines = [
        f"MNIST ({s['train']:,} training images, all test images), {'-'.join(map(str, s['widths']))} perceptron, {len(seeds)} seeds;"
        f" {s['epochs']} epochs of AdamW, then pruned, then {s['retrain_epochs']} epochs more. Test accuracy in percent;"
        f" unpruned {unpruned:.2f}.",
        "",
        f"| scope | sparsity | when | {' | '.join(METHODS)} |",
        f"|---|---|---|{'---|' * len(METHODS)}",
    ]
    cases = [(c, p, w) for c in SCOPES for p in SPARSITIES for w in ("before", "after")]
    for scope, sparsity, when in cases:
        means = [statistics.mean(value(e, m, scope, sparsity, when) for e in seeds) for m in METHODS]
        lines.append(f"| {scope} | {sparsity:.0%} | {when} | {' | '.join(f'{m:.2f}' for m in means)} |")
    lines += [
        "",
        "Paired differences over seeds, in points (mean ± standard error):",
        "",
        f"| scope | sparsity | when | {' | '.join(f'{a} − {b}' for a, b in PAIRS)} |",
        f"|---|---|---|{'---|' * len(PAIRS)}",
    ]
    for scope, sparsity, when in cases:
        cells = []
        for a, b in PAIRS:
            gaps = [value(e, a, scope, sparsity, when) - value(e, b, scope, sparsity, when) for e in seeds]
            cells.append(f"{statistics.mean(gaps):+.2f} ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.2f}")
        lines.append(f"| {scope} | {sparsity:.0%} | {when} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table() -> None:
    """Puts the table between its two marks in the page."""
    begin, end = "<!-- made by experiments.pruning -->", "<!-- end -->"
    text = PAGE.read_text()
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    PAGE.write_text(f"{head}{begin}\n{table(json.loads(RESULTS.read_text()))}\n{end}{tail}")


def main() -> None:
    """Runs what is missing, or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of MNIST's IDX files")
    parser.add_argument("--table", action="store_true", help="write the table of the results into docs/pruning.md")
    options = parser.parse_args()
    if options.data is not None:
        run(options.data)
    if options.table:
        write_table()
    if options.data is None and not options.table:
        parser.print_help()


if __name__ == "__main__":
    main()
