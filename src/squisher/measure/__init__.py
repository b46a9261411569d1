"""model + data -> Importance: the Fisher diagonal, measured.

`fisher` walks the data. What is squared is decided in `likelihood`, how gradients are found one example at a time in `loop`
(the definition) and all at once in `fast` (which proves itself against the loop), and both for sharded models in `together`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import ranks
from ..errors import NamingError, SquisherError, near
from ..guard import as_it_was, eager_original, refuse_batch_statistics
from ..importance import Absence, Importance, Level, Naming, Reason, structure_hash
from ..importance.weights import content_of
from ..names import LiveParameter, live_parameters
from ..ranks import is_sharded, local_of, sharded_like
from .batches import Batch
from .fast import Fast
from .joint import Joint
from .likelihood import Objective, compared_with_own
from .loop import Loop
from .proof import check_alone
from .request import objective_for
from .sharded import copies_of, is_spread
from .stream import Stream, same_model
from .sums import Elsewhere, Sums
from .together import Together
from .unfinished import Unfinished

__all__ = ["fisher"]

Parameters = str | re.Pattern[str] | Iterable[str] | Callable[[str], bool]


def fisher(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    likelihood: str | Callable[[nn.Module, Any], Tensor] = "auto",
    labels: str = "data",
    per: str = "example",
    unit: str | None = None,
    draws: int = 1,
    parameters: Parameters | None = None,
    max_examples: int | None = None,
    dtype: torch.dtype = torch.float32,
    standard_error: bool = False,
    eval_mode: bool = True,
    seed: int = 0,
    progress: Callable[[int, int | None], None] | None = None,
    method: str = "auto",
    shift: int | None = None,
    divided: bool = False,
    accumulate_on: str | torch.device | None = None,
    unfinished: str | os.PathLike[str] | None = None,
) -> Importance:
    """Return the diagonal of the Fisher information of a model on data, as a mean over examples.

    With several processes (torchrun) every process gets the same model and the same batches, takes every world-th batch, and
    returns the same result; with `divided=True` each has examples of its own, as a DistributedSampler gives them. The result of a
    model that is sharded over processes (FSDP2, `fully_shard`) is sharded as its parameters are.

    Args:
        model: any module; wrappers (compiled, data parallel) are looked through. Nothing about it is changed.
        batches: an iterable of mappings (`model(**batch)`, labels under "labels"), pairs (inputs, labels), or inputs alone.
        likelihood: "categorical", "tokens", "bernoulli", "gaussian" (σ = 1), a function `(model, batch) -> losses` with one
            loss per example, or "auto": what a Hugging Face model says, otherwise categorical. Losses are summed over the
            outputs or positions of an example; the label -100 is ignored.
        labels: "data" (the empirical Fisher), "sampled" from the model (unbiased for the Fisher) or "exact" (the Fisher).
        per: "example" squares the gradient of each example; "batch" that of each whole batch, at the price of one plain
            backward (with sampled labels it is unbiased for the Fisher at any batch size).
        unit: for tokens, "sequence" (default) squares a sequence's summed gradient, "token" that of each token, which takes one
            backward pass for every position: with 64 positions, some fifty times longer.
        draws: sampled labels for each example.
        parameters: which ones: a regular expression, names, or a function of the name. By default the trainable ones.
        max_examples: stop after this many.
        dtype: of the result, and at least of the sums.
        standard_error: also estimate, from the spread between batches, how far each parameter's mean is from its limit.
        eval_mode: measure in evaluation mode, as papers do; False keeps the mode of every module.
        seed: of sampled labels, which are a function of (seed, index of the example in the stream, position).
        progress: called after every batch with the examples done and, if known (from `max_examples` or a DataLoader), their number.
        method: "auto" computes what it can for all examples at once, proves it against the loop, and leaves the rest to
            the loop; "fast" raises where something would be left to the loop; "loop" is the definition.
        shift: for tokens, how far labels lie behind outputs (1 for causal language models); None asks the model.
        divided: whether the processes of a job have different examples. What fits neither is refused.
        accumulate_on: a device for the sums ("cpu"), where they do not fit beside the model; the result is there, too.
        unfinished: a file that keeps the sums every minute and after Ctrl-C, so that the same call goes on there. Remove it when the
            result is saved. For one process.

    Returns:
        An importance of kind "fisher", whose provenance says what was computed how (`provenance.coverage`).

    Raises:
        SquisherError: if a batch, the model's outputs or a setting do not fit.
    """
    if method not in ("auto", "fast", "loop"):
        raise SquisherError(f"method={method!r} is not known; expected 'auto', 'fast' or 'loop'.")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype == torch.float16:
        raise SquisherError(f"dtype={dtype} cannot hold squared gradients; use torch.float32, float64 or bfloat16.")
    if max_examples is not None and max_examples < 1:
        raise SquisherError(f"max_examples={max_examples}: expected a positive number or None.")
    if not isinstance(model, nn.Module):
        raise SquisherError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
    model = eager_original(model)
    spread_out = is_spread(model)
    objective = objective_for(model, likelihood, labels, per, unit, draws, seed, shift)
    chosen, absent = _choose(model, parameters)
    if not eval_mode and per == "example":
        refuse_batch_statistics(model, "Use eval_mode=True, put it into evaluation mode, or use per='batch'.")
    by_name: dict[str, Tensor] = {p.name: p.parameter for p in chosen}
    place = None if accumulate_on is None else _device(accumulate_on, spread_out)
    partial = Sums({name: local_of(p) for name, p in by_name.items()}, dtype, place)
    adding = partial if place is None else Elsewhere(partial)
    spread = _Spread(by_name, spread_out) if standard_error else None
    together = Together(model, objective, by_name, per, method, shift, standard_error) if spread_out else None
    engine: _Engine | None = together
    noted: dict[str, Any] = {}
    count = _Count()
    same_model(by_name)
    stream = Stream(batches, model, max_examples, divided)
    kept: Unfinished | None = None
    if unfinished is not None:
        settings = {
            "likelihood": _name_of(objective),
            "labels": labels,
            "per": per,
            "unit": objective.unit,
            "draws": draws,
        }
        settings |= {
            "seed": seed,
            "dtype": str(dtype),
            "method": method,
            "eval_mode": eval_mode,
            "shift": objective.shift,
        }
        if standard_error or not ranks.is_alone():
            raise SquisherError("unfinished=... is for one process, and without standard_error.")
        kept = Unfinished(unfinished, {**settings, "max_examples": max_examples}, by_name)
        kept.fill(partial)
    failure: BaseException | None = None
    batch, index = None, None
    try:
        with (
            as_it_was(model, eval_mode),
            nullcontext() if together is None else together.ready(),
            nullcontext() if kept is None else kept.listening(),
        ):
            for batch, index, mine in stream:
                if kept is not None and kept.is_done(count.examples, (t for t, _ in batch.tensors())):
                    count.examples += batch.size
                    continue
                if mine:
                    if engine is None:
                        objective, noted = compared_with_own(model, objective, batch, shift)
                        engine = _engine(method, per, model, objective, by_name)
                        if kept is not None:
                            engine.reached.update(kept.reached)
                        if isinstance(engine, Loop) and per == "example" and batch.several_inputs():
                            whole = objective.outputs(model, batch).values.detach()
                            check_alone(model, objective, batch, whole, interacting=False)
                    units = engine.add(adding, batch, index)
                    if isinstance(adding, Elsewhere):
                        adding.finish()
                    count.units += units
                    if spread is not None:
                        spread.add(partial, units, together.totals if together is not None else None)
                count.examples += batch.size
                if kept is not None and engine is not None:
                    coverage = _merged([kept.coverage, engine.coverage], engine.reached)
                    kept.keep(partial, count.examples, count.units + kept.units, engine.reached, coverage, noted)
                if progress is not None:
                    progress(count.examples, stream.total)
            if together is not None:
                together.finish(partial, batch, index)
                noted = together.noted
    except (Exception, KeyboardInterrupt) as error:
        if together is not None:
            raise  # the others know
        failure = error
    ranks.agree(failure)
    stream.check()
    if divided:
        count.examples = sum(ranks.gather(count.examples))
    if not count.examples:
        raise SquisherError("There are no batches: nothing was measured. An iterator can be used once only.")
    if kept is not None:
        kept.check_end(count.examples)
        noted = {**kept.noted, **noted}
        count.units += kept.units
    reached = set[str]().union(*ranks.gather(set(kept.reached if kept else ()) | set(engine.reached if engine else ())))
    before = [] if kept is None else [kept.coverage]
    coverage = _merged([*before, *ranks.gather({} if engine is None else engine.coverage)], reached)
    units = sum(ranks.gather(count.units))
    if not units:
        raise SquisherError("No position counts: every label is -100 or masked, so there is nothing to measure.")
    if not reached:
        raise SquisherError(
            "No gradient reached any of the parameters: the model runs under torch.no_grad, detaches what it returns, or does not "
            "use them."
        )
    sums = partial.complete()
    ranks.sum_in_place(s for name, s in sums.items() if not is_sharded(by_name[name]))
    if together is not None:
        together.shards.sum_copies(sums)
    relative = spread.relative(sums, units) if spread is not None else None
    with torch.no_grad():
        # As examples are counted, also where tokens are the unit: what a mean is over is in `unit`.
        values = {name: sharded_like(s.div_(units).to(dtype), by_name[name]) for name, s in sums.items()}
    return Importance(
        values,
        kind="fisher",
        estimator={"labels": labels, "per": per, "draws": draws, "likelihood": _name_of(objective), **noted},
        unit=objective.unit,
        examples=count.examples,
        dtype_of_source=_dtypes(by_name.values()),
        absent=absent,
        tied={alias: p.name for p in chosen for alias in p.aliases},
        live_names={p.name: p.live_name for p in chosen if p.live_name != p.name},
        naming=Naming(Level.RECORDED),
        model={
            "structure": structure_hash({p.name: tuple(p.parameter.shape) for p in live_parameters(model)}),
            "content": content_of({p.name: p.parameter for p in chosen}),
        },
        coverage=coverage,
        standard_error=relative,
        tokens=units if objective.unit == "token" else None,
        seed=seed if labels == "sampled" else None,
    )


class _Engine(Protocol):
    @property
    def coverage(self) -> dict[str, Any]: ...

    @property
    def reached(self) -> set[str]: ...

    def add(self, sums: Sums, batch: Batch, index: Tensor) -> int: ...


class _Count:
    examples = 0
    units = 0


def _engine(method: str, per: str, model: nn.Module, objective: Objective, parameters: Mapping[str, Tensor]) -> _Engine:
    if method == "loop":
        return Loop(model, objective, parameters, per)
    if per == "batch":
        return Joint(model, objective, parameters)
    return Fast(model, objective, parameters, strict=method == "fast")


def _choose(model: nn.Module, wanted: Parameters | None) -> tuple[list[LiveParameter], dict[str, Absence]]:
    """Return the parameters to measure, and why the others are not."""
    live = live_parameters(model)
    names = {name: p for p in live for name in (p.name, p.live_name, *p.aliases)}
    if wanted is None:
        accept = {p.name for p in live if p.parameter.requires_grad}
        why = Absence(Reason.FROZEN, "frozen (requires_grad is False)")
    else:
        why = Absence(Reason.NOT_REQUESTED, "not asked for")
        if isinstance(wanted, (str, re.Pattern)):
            try:
                accept = {p.name for name, p in names.items() if re.search(wanted, name)}
            except re.error as error:
                raise SquisherError(f"parameters={wanted!r} is not a regular expression: {error}.") from error
        elif callable(wanted):
            accept = {p.name for p in live if wanted(p.name)}
        else:
            accept = set()
            for name in wanted:
                if name not in names:
                    raise NamingError(f"The model has no parameter {name!r}.{near(name, names)}")
                accept.add(names[name].name)
    chosen, absent = [], {}
    for p in live:
        if p.name not in accept:
            absent[p.name] = why
        elif not p.parameter.is_floating_point():
            absent[p.name] = Absence(Reason.NOT_FLOATING, f"not a floating-point tensor ({p.parameter.dtype})")
        else:
            chosen.append(p)
    if not chosen:
        raise SquisherError(
            f"There is no parameter to measure: the model has {len(live)}, and none is "
            + ("trainable; choose some with parameters=..." if wanted is None else f"chosen by parameters={wanted!r}.")
        )
    offloaded = [p.name for p in chosen if p.parameter.is_meta]
    if offloaded:
        raise SquisherError(
            f"{len(offloaded)} of the {len(chosen)} parameters to measure have no values here, {offloaded[0]!r} for example: they are on "
            "the meta device, where a device_map leaves what it offloads to the CPU or to disk. Their gradients would be lost. Load "
            "the model without offloading, shard it (fully_shard), or choose others with parameters=...; frozen ones may be offloaded."
        )
    return chosen, absent


def _device(name: str | torch.device, spread_out: bool) -> torch.device:
    if spread_out:
        raise SquisherError("accumulate_on=... is not done for sharded models (FSDP2): their sums are sharded, too.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise SquisherError(f"accumulate_on={name!r} is no device that can be used here: {error}") from error
    if device.type == "meta":
        raise SquisherError("accumulate_on='meta' keeps nothing; use 'cpu'.")
    return device


def _dtypes(parameters: Iterable[Tensor]) -> str:
    return "+".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))


def _name_of(objective: Objective) -> str:
    return objective.likelihood if isinstance(objective.likelihood, str) else "function"


def _merged(coverages: list[dict[str, Any]], reached: Collection[str]) -> dict[str, Any]:
    """Return one coverage for all processes: what any of them left to the loop is named, and what none reached."""
    whole: dict[str, Any] = {}
    for coverage in coverages:
        for key, value in coverage.items():
            whole[key] = {**whole.get(key, {}), **value} if isinstance(value, dict) else value
    if "unused" in whole:
        whole["unused"] = {name: why for name, why in whole["unused"].items() if name not in reached}
    return whole


class _Spread:
    """Relative standard error of each parameter's total, from the differences between batches.

    With batch means m_k over n_k units and F = Σ n_k m_k / N, the variance of F is about K/(K−1) Σ (n_k/N)² (m_k − F)². Only
    sums over batches are kept, so that processes can add theirs.
    """

    def __init__(self, parameters: Mapping[str, Tensor], spread_out: bool):
        self.names, self.spread_out = list(parameters), spread_out
        # Shards add up, copies of a shard count together, and what every process holds whole counts once.
        self.share = torch.tensor(
            [1 / copies_of(p) if is_sharded(p) else float(ranks.rank() == 0) for p in parameters.values()]
        )
        self.before = torch.zeros(len(self.names), dtype=torch.float64)
        self.sums = torch.zeros(4, len(self.names), dtype=torch.float64)  # K, Σ n², Σ n·(n m), Σ (n m)²

    def add(self, sums: Mapping[str, Tensor], units: int, totals: Mapping[str, Tensor] | None = None) -> None:
        """Note a batch: how the sums have grown since the last one, or what it added to each parameter."""
        if totals is None:
            now = self._totals(sums)
            part, self.before = now - self.before, now
        else:
            zero = torch.zeros((), dtype=torch.float64)
            part = torch.stack([totals.get(name, zero).cpu() for name in self.names])
        self.sums += torch.stack([torch.ones_like(part), torch.full_like(part, units**2), units * part, part**2])

    def relative(self, sums: Mapping[str, Tensor], units: int) -> dict[str, float | None]:
        self.sums = torch.stack(ranks.gather(self.sums)).sum(0)
        total = self._totals(sums)
        mean = total / units
        batches, squares, cross, parts = self.sums
        spread = (parts - 2 * mean * cross + mean**2 * squares).clamp(min=0)
        error = (batches / (batches - 1) * spread).sqrt() / total
        return {n: float(e) if math.isfinite(e) else None for n, e in zip(self.names, error.tolist(), strict=True)}

    def _totals(self, sums: Mapping[str, Tensor]) -> Tensor:
        totals = torch.stack([sums[name].sum(dtype=torch.float64).cpu() for name in self.names])
        return torch.stack(ranks.gather(totals * self.share)).sum(0) if self.spread_out else totals
