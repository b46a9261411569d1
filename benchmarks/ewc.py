"""A training step with a penalty for past tasks, beside a plain one: ours two ways, the usual loop, Avalanche's plugin.

python -m benchmarks.ewc [--rounds 20] [--threads 1] [--avalanche-python PATH] [--small]
python -m benchmarks.ewc --decoupled [--rounds 20]     the pull after the step alone, beside the plain step and add_gradient_

All ways take turns, step by step, in one process, with the same network and optimizer; what is reported is the median over rounds
of the ratio to the plain step of the same round. Avalanche is measured so in a process of its own (and its own Python, where it
is installed: `pip install avalanche-lib torch`), with the plain step beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import harness

MODELS = ("mlp", "transformer")
TASKS = (1, 10)
PLAIN = "plain"
VOCABULARY, LENGTH, SEQUENCES, BATCH = 30_522, 64, 8, 128
STRENGTH = 1e-3

Step = Callable[[], None]


class Encoder(nn.Module):
    """A transformer encoder of the size of MiniLM (22M parameters), with a head."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of whole sequences."""
        return self.head(self.body(self.embed(tokens)).mean(1))


def network(name: str, small: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the network and a batch for it."""
    torch.manual_seed(0)
    if name == "mlp":
        widths = (64, 32, 32, 10) if small else (1024, 1000, 1000, 100)  # the one of permuted MNIST: 2,126,100
        layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), torch.randn(BATCH, widths[0]), torch.randint(0, 10, (BATCH,))
    vocabulary = 100 if small else VOCABULARY
    model = Encoder(32, 1, vocabulary) if small else Encoder(384, 6, vocabulary)
    return model, torch.randint(0, vocabulary, (SEQUENCES, LENGTH)), torch.randint(0, 10, (SEQUENCES,))


def past(model: nn.Module, tasks: int) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Return importance and weights of every past task by name; any ordinary values do for timing."""
    return [
        {n: (torch.rand_like(p), p.detach() + 1e-3 * torch.randn_like(p)) for n, p in model.named_parameters()}
        for _ in range(tasks)
    ]


def ours(model: nn.Module, tasks: int) -> tuple[Any, list[dict[str, tuple[Tensor, Tensor]]]]:
    """Return an EWC with the tasks consolidated, and the tasks."""
    import squisher

    seen = past(model, tasks)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    ewc = squisher.EWC(model, strength=STRENGTH)
    for task in seen:
        model.load_state_dict({n: centre for n, (_, centre) in task.items()}, strict=False)
        ewc.consolidate({n: importance for n, (importance, _) in task.items()})
    model.load_state_dict(weights, strict=False)
    return ewc, seen


def steps(case: str, model_name: str, tasks: int, small: bool) -> tuple[dict[str, Step], int]:
    """Return the ways to take a step, by name, and the number of parameters."""
    model, inputs, labels = network(model_name, small)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)

    def step(
        penalty: Callable[[Tensor], Tensor] | None = None, after: Step | None = None, last: Step | None = None
    ) -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        (loss if penalty is None else penalty(loss)).backward()
        if after is not None:
            after()
        optimizer.step()
        if last is not None:
            last()

    ways: dict[str, Step] = {PLAIN: step}
    if case == "avalanche":
        plugin = avalanche(model, tasks)
        ways["avalanche: EWCPlugin"] = lambda: step(plugin)
    else:
        ewc, seen = ours(model, tasks)

        def usual(loss: Tensor) -> Tensor:
            for task in seen:
                for name, parameter in model.named_parameters():
                    importance, centre = task[name]
                    loss = loss + STRENGTH / 2 * (importance * (parameter - centre) ** 2).sum()
            return loss

        ways["squisher: add_gradient_"] = lambda: step(after=ewc.add_gradient_)
        if case == "decoupled":
            ewc.pull_(optimizer)  # from now on it knows which steps were taken
            ways["squisher: pull_"] = lambda: step(last=lambda: _check(ewc.pull_(optimizer)))
            ways["squisher: pull_, metric adam"] = lambda: step(last=lambda: _check(ewc.pull_(optimizer, "adam")))
            return ways, sum(p.numel() for p in model.parameters())
        ways["squisher: penalty"] = lambda: step(lambda loss: loss + ewc.penalty())
        ways["loop over parameters"] = lambda: step(usual)
    return ways, sum(p.numel() for p in model.parameters())


def _check(pulled: bool) -> None:
    if not pulled:
        raise SystemExit("The pull saw no step.")


def avalanche(model: nn.Module, tasks: int) -> Callable[[Tensor], Tensor]:
    """Return Avalanche's plugin after some tasks, called as its strategies call it before the backward pass."""
    from avalanche.training.plugins import EWCPlugin
    from avalanche.training.utils import copy_params_dict

    plugin = EWCPlugin(ewc_lambda=STRENGTH / 2)  # it has no ½
    for number, task in enumerate(past(model, tasks)):
        for kept, which in ((plugin.importances, 0), (plugin.saved_params, 1)):
            kept[number] = copy_params_dict(model)
            for name, pair in task.items():
                kept[number][name].data = pair[which]
    strategy = SimpleNamespace(clock=SimpleNamespace(train_exp_counter=tasks), model=model, device="cpu", loss=None)

    def penalised(loss: Tensor) -> Tensor:
        strategy.loss = loss
        plugin.before_backward(strategy)
        return strategy.loss

    return penalised


def measure(ways: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Time every way once a round, in a rotating order; return milliseconds and ratios to the plain step, by wall and by processor."""
    for way in ways.values():
        way()
        way()
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start, begun = time.perf_counter(), time.process_time()
            ways[name]()
            wall[name].append(1e3 * (time.perf_counter() - start))
            processor[name].append(1e3 * (time.process_time() - begun))
    return {
        name: {
            "milliseconds": round(statistics.median(wall[name]), 3),
            "relative_to_plain": _ratio(wall[name], wall[PLAIN]),
            "relative_to_plain_best": round(min(wall[name]) / min(wall[PLAIN]), 3),
            "processor_milliseconds": round(statistics.median(processor[name]), 3),
            "processor_relative_to_plain": _ratio(processor[name], processor[PLAIN]),
        }
        for name in names
    }


def _ratio(values: list[float], plain: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(values, plain, strict=True)), 3)


def run_case(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one network after one number of tasks."""
    kind, model_name, tasks = case.split(":")
    torch.set_num_threads(options.threads)
    ways, parameters = steps(kind, model_name, int(tasks), options.small)
    return {"parameters": parameters, "ways": measure(ways, options.rounds)}


def in_process(python: str, case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case in a process of its own; return an error as "not run"."""
    command = [python, "-m", "benchmarks.ewc", "--case", case]
    command += ["--rounds", str(options.rounds), "--threads", str(options.threads)] + ["--small"] * options.small
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1], env=environment
    )
    if done.returncode:
        return {"not run": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def decoupled(options: argparse.Namespace) -> None:
    """Measure the pull after the step, and leave the rest of the document as it is."""
    found = {name: in_process(sys.executable, f"decoupled:{name}:1", options) for name in MODELS}
    for name, case in found.items():
        if "not run" in case:
            raise SystemExit(f"{name} failed: {case['not run']}")
        for way, entry in case["ways"].items():
            print(f"{name}: {way}: {entry['processor_relative_to_plain']}", flush=True)
    if options.small:
        return
    torch.set_num_threads(options.threads)  # for the environment that is recorded
    file = harness.RESULTS / "ewc.json"
    document = json.loads(file.read_text("utf-8"))
    document["decoupled"] = {"rounds": options.rounds, "cases": found, "environment": harness.environment()}
    file.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


def main() -> None:
    """Run all cases, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", help="ours:mlp:10, avalanche:transformer:1, …: this one, here, printed as JSON")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--avalanche-python", help="a Python that has avalanche-lib and torch")
    parser.add_argument("--decoupled", action="store_true", help="only EWC.pull_, into a part of its own")
    parser.add_argument("--small", action="store_true", help="tiny networks: whether it runs, not how fast")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, options)))
        return
    if options.decoupled:
        decoupled(options)
        return
    cases: dict[str, Any] = {}
    for model_name, tasks in itertools.product(MODELS, TASKS):
        key = f"{model_name}, {tasks} past task{'s' * (tasks > 1)}"
        cases[key] = found = in_process(sys.executable, f"ours:{model_name}:{tasks}", options)
        if "not run" in found:
            raise SystemExit(f"{key} failed: {found['not run']}")
        if options.avalanche_python is None:
            peer: dict[str, Any] = {"not run": "no Python with avalanche-lib was given (--avalanche-python)"}
        else:
            peer = in_process(options.avalanche_python, f"avalanche:{model_name}:{tasks}", options)
            peer = peer.get("ways", {}).get("avalanche: EWCPlugin", peer)
        found["ways"]["avalanche: EWCPlugin"] = peer
        for name, entry in found["ways"].items():
            print(f"{key}: {name}: {entry.get('relative_to_plain', entry)}", flush=True)
    if options.small:
        return
    settings = {"rounds": options.rounds, "optimizer": "Adam", "batch": BATCH, "sequences": [SEQUENCES, LENGTH]}
    torch.set_num_threads(options.threads)  # for the environment that is recorded
    harness.write("ewc", {**settings, "cases": cases})


if __name__ == "__main__":
    main()
