"""What several processes hold and send while a Fisher is measured, per parameter; and what follows for large models.

A bfloat16 decoder is measured by one process, by two that share the data, and by two that share the model (fully_shard). Memory
is the growth of anonymous memory, with an allocator that returns what is freed; traffic is counted where torch.distributed is
called, after the first batch. Times are those of whole calls beside a plain forward and backward pass of the same sharded model on
the same batches, interleaved. The tables of docs/at-scale.md are arithmetic on these numbers (`tables`).

python -m benchmarks.at_scale [--width 768] [--layers 8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import harness

CASES = {  # processes, whether they share the model, per
    "one process, per example": (1, False, "example"),
    "one process, per batch": (1, False, "batch"),
    "two share the data, per example": (2, False, "example"),
    "two share the model, per example": (2, True, "example"),
    "two share the model, per batch": (2, True, "batch"),
}
EXAMPLES, BATCH, LENGTH, VOCABULARY = 16, 2, 8, 2000
GB = 1e9
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
MODELS = {"7B": (7e9, 32), "70B": (70e9, 80)}  # parameters, layers


def decoder(width: int, layers: int) -> Any:
    """Return a decoder-type model: residual blocks of attention and a wide layer."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.wide(x))))

    torch.manual_seed(0)
    head = nn.Linear(width, VOCABULARY)
    parts = [nn.Embedding(VOCABULARY, width), *(Block() for _ in range(layers)), head]
    return nn.Sequential(*parts).to(torch.bfloat16)


def shard(model: Any) -> None:
    """Shard every block as a group, and the rest as the outermost one."""
    from torch.distributed.fsdp import fully_shard

    for block in list(model)[1:-1]:
        fully_shard(block)
    fully_shard(model)


class Traffic:
    """Bytes handed to torch.distributed, by kind of operation: those of the whole (not of the part) tensor."""

    NAMES = (
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    )

    def __init__(self) -> None:
        import torch.distributed as dist

        self.bytes: dict[str, int] = {}
        self.inside = False
        for name in self.NAMES:
            if hasattr(dist, name):
                setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, call: Any) -> Any:
        import torch

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.inside:  # one of these may be written with another
                return call(*args, **kwargs)
            sizes = [t.nbytes for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            kind = next(k for k in ("all_reduce", "all_gather", "reduce_scatter") if name.startswith(k))
            self.bytes[kind] = self.bytes.get(kind, 0) + max(sizes)
            self.inside = True
            try:
                return call(*args, **kwargs)
            finally:
                self.inside = False

        return counted


def run(case: str, rank: int, store: str, width: int, layers: int) -> None:
    """Run one process of one case, and print its measurements as JSON."""
    import torch
    import torch.distributed as dist

    import squisher

    processes, shared, per = CASES[case]
    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    settings: dict[str, Any] = {"likelihood": "tokens", "shift": 0, "labels": "data", "per": per}
    ids = torch.randint(0, VOCABULARY, (EXAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    batches = [(b, b) for b in ids.split(BATCH)]
    small = decoder(64, 1)  # so that what is loaded once does not count
    model = decoder(width, layers)
    parameters = sum(p.numel() for p in model.parameters())
    if shared:
        shard(small)
        shard(model)
    squisher.fisher(small, batches, **settings)
    traffic = Traffic()
    first: list[float] = []
    with harness.PeakMemory() as memory:

        def after_a_batch(done: int, total: int | None) -> None:
            if not first:  # the fast engine proves itself on the first batch, which needs more
                first.append(memory.extra_mb)
                memory.peak = 0
                traffic.bytes.clear()

        found = squisher.fisher(model, batches, progress=after_a_batch, **settings)
    kept = sum((t.to_local() if shared else t).nbytes for t in found.values())
    passes = len(batches) // processes - 1
    print(
        json.dumps(
            {
                "kept_bytes_per_parameter": kept / parameters,
                "peak_bytes_per_parameter": max(first[0], memory.extra_mb) * 1e6 / parameters,
                "later_bytes_per_parameter": memory.extra_mb * 1e6 / parameters,
                "traffic_bytes_per_parameter": {kind: size / parameters for kind, size in traffic.bytes.items()},
                "batches": passes,
                "parameters": parameters,
                "block_parameters": sum(p.numel() for p in model[1].parameters()),
            }
        )
    )
    if processes > 1:
        dist.destroy_process_group()


def measured(case: str, width: int, layers: int) -> dict[str, Any]:
    """Run all processes of one case; return the measurements of the one that needed most."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--width", str(width), "--layers", str(layers)]
        command = [sys.executable, "-m", "benchmarks.at_scale", "--case", case, "--store", f"{folder}/store", *sizes]
        running = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env={**os.environ, **RETURNING}
            )
            for rank in range(CASES[case][0])
        ]
        seen = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    print(case, seen, flush=True)
    return max(seen, key=lambda values: values["peak_bytes_per_parameter"])


def constants(cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the constants of the arithmetic, per parameter: bytes, or bytes for each backward pass."""
    share, model = cases["two share the data, per example"], cases["two share the model, per example"]
    sent = model["traffic_bytes_per_parameter"]
    kept = model["kept_bytes_per_parameter"]
    # Beside its part of the accumulators: blocks that are whole for a moment.
    whole = (model["later_bytes_per_parameter"] - kept) * model["parameters"] / (2 * model["block_parameters"])
    return {
        "accumulator": cases["one process, per example"]["kept_bytes_per_parameter"],
        "accumulator, sharded in two": kept,
        "peak, per example": cases["one process, per example"]["peak_bytes_per_parameter"],
        "later, per example": cases["one process, per example"]["later_bytes_per_parameter"],
        "peak, per batch": cases["one process, per batch"]["peak_bytes_per_parameter"],
        "peak, sharded in two": model["peak_bytes_per_parameter"],
        "later, sharded in two": model["later_bytes_per_parameter"],
        "whole blocks, sharded": whole,
        "all-reduce, once": share["traffic_bytes_per_parameter"]["all_reduce"],
        "all-gather, each batch": sent["all_gather"] / model["batches"],
        "reduce-scatter, each batch": sent["reduce_scatter"] / model["batches"],
    }


def measurements(c: dict[str, float]) -> str:
    """Return the first table of docs/at-scale.md."""
    rows = ["| | bytes per parameter |", "|---|---|"]
    told = {
        "accumulator": "result, one process",
        "accumulator, sharded in two": "result, each of two that share the model",
        "peak, per example": 'largest growth over the weights, one process, `per="example"`',
        "later, per example": "the same, after the first batch",
        "peak, per batch": 'the same, `per="batch"`, from the first batch on',
        "peak, sharded in two": 'largest growth over the weights, each of two that share the model, `per="example"`',
        "later, sharded in two": "each of the two, after the first batch",
        "all-reduce, once": "handed to all-reduce, two that share the data, in all",
        "all-gather, each batch": "handed to all-gather, two that share the model, each batch",
        "reduce-scatter, each batch": "handed to reduce-scatter, two that share the model, each batch",
    }
    return "\n".join([*rows, *(f"| {text} | {c[name]:.2f} |" for name, text in told.items())])


def tables(c: dict[str, float]) -> tuple[str, str]:
    """Return the other tables of docs/at-scale.md, from the constants: sharing the data, sharing the model."""
    rows = [
        "| model | weights | accumulators | peak per rank, per example | per batch | sent per rank, once, 8 ranks |"
    ]
    rows.append("|---|---|---|---|---|---|")
    for name, (p, _) in MODELS.items():
        cells = [2 * p, c["accumulator"] * p, (2 + c["peak, per example"]) * p, (2 + c["peak, per batch"]) * p]
        sent = 2 * 7 / 8 * c["all-reduce, once"] * p
        rows.append(f"| {name} | {' | '.join(f'{x / GB:.0f} GB' for x in (*cells, sent))} |")
    first = "\n".join(rows)
    rows = [
        "| model | ranks | weights, accumulators | proof | whole blocks | sum | sent per rank and batch | 1,000 examples |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|")
    sent_each = c["all-gather, each batch"] + c["reduce-scatter, each batch"]
    for name, (p, layers) in MODELS.items():
        for ranks in (8, 64):
            held = (2 + c["accumulator"]) * p / ranks
            proof = 2 * (c["peak, sharded in two"] - c["later, sharded in two"]) * p / ranks
            block = c["whole blocks, sharded"] * 2 * p / layers
            sent = sent_each * p * (ranks - 1) / ranks
            cells = [held, proof, block, held + proof + block, sent, sent * -(-1000 // (8 * ranks))]
            sizes = [f"{x / GB:.1f} GB" if x < 1e12 else f"{x / 1e12:.1f} TB" for x in cells]
            rows.append(f"| {name} | {ranks} | {' | '.join(sizes)} |")
    return first, "\n".join(rows)


def time_case(rank: int, processes: int, store: str, rounds: int) -> None:
    """Run one process of the timing (calls of `fisher` beside plain passes over the same batches), and print seconds as JSON."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn

    import squisher

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    model = decoder(256, 4).float()
    shard(model)
    ids = torch.randint(0, VOCABULARY, (64, 64), generator=torch.Generator().manual_seed(rank))
    batches = [(b, b) for b in ids.split(8)]

    def plain() -> None:
        for x, y in batches:
            nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
            model.zero_grad()

    def measured(**settings: Any) -> Any:
        return squisher.fisher(model, batches, likelihood="tokens", shift=0, divided=True, **settings)

    ways = {"plain": plain, "fast": measured, "batch": lambda: measured(per="batch")}
    if rounds > 1:
        ways["loop"] = lambda: squisher.fisher(
            model, batches[:1], likelihood="tokens", shift=0, divided=True, method="loop"
        )
    assert measured().provenance.coverage["method"] == "fast"
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            seconds[name].append((time.perf_counter() - start) * (len(batches) if name == "loop" else 1))
    print(json.dumps(seconds))
    dist.destroy_process_group()


def timed(processes: int, rounds: int) -> dict[str, float]:
    """Return what a whole call takes as a multiple of plain passes: the median over rounds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.at_scale", "--time", str(processes), "--store", f"{folder}/store"]
        running = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--rounds", str(rounds)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(processes)
        ]
        seen = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    ratios = {
        name: statistics.median(t / p for t, p in zip(times, seen[0]["plain"], strict=True))
        for name, times in seen[0].items()
    }
    print(processes, ratios, flush=True)
    return ratios


def times(ratios: dict[str, dict[str, float]]) -> str:
    """Return the table of times of docs/at-scale.md."""
    rows = ['| processes | `fisher`, fast | `per="batch"` | `method="loop"` |', "|---|---|---|---|"]
    for processes, found in ratios.items():
        rows.append(f"| {processes} | {found['fast']:.2f}× | {found['batch']:.2f}× | {found['loop']:.0f}× |")
    return "\n".join(rows)


def main() -> None:
    """Measure everything, and write `benchmarks/results/at_scale.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.add_argument("--time", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.time:
        time_case(options.rank, options.time, options.store, options.rounds)
        return
    if options.case:
        run(options.case, options.rank, options.store, options.width, options.layers)
        return
    cases = {case: measured(case, options.width, options.layers) for case in CASES}
    found = constants(cases)
    ratios = {str(processes): timed(processes, options.rounds) for processes in (2, 4)}
    document = {"width": options.width, "layers": options.layers, "cases": cases, "constants": found, "times": ratios}
    harness.write("at_scale", document)
    print(json.dumps(found, indent=2))
    print(measurements(found), times(ratios), *tables(found), sep="\n\n")


if __name__ == "__main__":
    main()
