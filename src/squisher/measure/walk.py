"""The walk over the data: each batch goes to the engine, its squares to the sums, and the sums of all processes are combined."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import ranks
from ..errors import SquisherError
from ..guard import as_it_was
from ..ranks import is_sharded, local_of, sharded_like
from .batches import Batch, Stream, same_model
from .fast import Fast
from .joint import Joint
from .likelihood import Objective, compared_with_own
from .loop import Loop
from .proof import check_alone, check_repeats
from .sharded.meshes import Replicas, copies_of
from .sharded.together import Together
from .sums import Elsewhere, Sums
from .unfinished import Unfinished

__all__ = ["Walk"]


class Walk:
    """One pass over the data, and the sums of squares that it leaves.

    Args:
        model: what is measured.
        objective: which Fisher.
        parameters: with respect to what, by name.
        method: "auto", "fast" or "loop".
        dtype: at least of the sums.
        device: of the sums; by default where each parameter is.
        standard_error: whether to note how batches differ.
        kept: where the sums of an earlier, interrupted call are, and go.
        replicas: the processes that share examples.
        spread_out: whether the model is sharded over processes.

    Attributes:
        examples: how many there were.
        units: what the mean is over: tokens that count, or examples in which anything counts.
        coverage: what was computed how.
        noted: what to write down about the model's own loss.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        parameters: Mapping[str, Tensor],
        method: str,
        dtype: torch.dtype,
        device: torch.device | None,
        standard_error: bool,
        kept: Unfinished | None,
        replicas: Replicas,
        spread_out: bool,
    ):
        self.model, self.objective, self.parameters = model, objective, parameters
        self.method, self.kept, self.replicas = method, kept, replicas
        if standard_error and replicas.parallel:
            raise SquisherError("standard_error=True is not done for tensor-parallel models.")
        self.sums = Sums({name: local_of(p) for name, p in parameters.items()}, dtype, device)
        self._adding = self.sums if device is None else Elsewhere(self.sums)
        self._together = (
            Together(model, objective, parameters, method, replicas, standard_error) if spread_out else None
        )
        self._engine: _Engine | None = self._together
        self._spread = _Spread(parameters, spread_out) if standard_error else None
        self.examples = self.units = 0
        self._between = True  # whether the sums are those of whole batches
        self.coverage: dict[str, Any] = {}
        self.noted: dict[str, Any] = {}
        same_model(parameters)
        if kept is not None:
            kept.fill(self.sums)

    def over(self, stream: Stream, eval_mode: bool, progress: Callable[[int, int | None], None] | None) -> None:
        """Measure all batches of a stream.

        Raises:
            SquisherError: on all processes, if one failed or they were given the wrong batches.
        """
        failure: BaseException | None = None
        try:
            with (
                as_it_was(self.model, eval_mode),
                nullcontext() if self._together is None else self._together.ready(),
                nullcontext() if self.kept is None else self.kept.listening(),
            ):
                self._measure(stream, progress)
        except (Exception, KeyboardInterrupt) as error:
            if self._between:  # the data, or who shows the progress, failed or was interrupted
                self._keep(now=True)
            if self._together is not None:
                raise  # `Together` has told the other processes
            failure = error
        ranks.agree(failure)
        stream.check()
        self._combine(stream.divided)

    def _measure(self, stream: Stream, progress: Callable[[int, int | None], None] | None) -> None:
        batch, index = None, None
        for batch, index, mine in stream:
            self._between = False
            if self.kept is not None and self.kept.is_done(self.examples, (t for t, _ in batch.tensors())):
                self.examples += batch.size
                self._between = True
                continue
            if mine:
                if self._engine is None:
                    self._engine = self._first(batch)
                units = self._engine.add(self._adding, batch, index)
                if isinstance(self._adding, Elsewhere):
                    self._adding.finish()
                self.units += units
                if self._spread is not None:
                    self._spread.add(self.sums, units, None if self._together is None else self._together.totals)
            self.examples += batch.size
            self._between = True
            self._keep()
            if progress is not None:
                progress(self.examples, stream.total)
        if self._together is not None:
            self._together.finish(self.sums, batch, index)
            self._together.check_copies(self.sums)
            self.noted = self._together.noted

    def _keep(self, now: bool = False) -> None:
        if self.kept is not None and self._engine is not None:
            reached = self._engine.reached
            coverage = _merged([self.kept.coverage, self._engine.coverage], reached)
            units = self.units + self.kept.units
            self.kept.keep(self.sums, self.examples, units, reached, coverage, self.noted, now)

    def _first(self, batch: Batch) -> _Engine:
        """Choose the engine, with the first batch at hand."""
        model, parameters = self.model, self.parameters
        self.objective, self.noted = compared_with_own(model, self.objective, batch)
        engine: _Engine
        if self.method == "loop":
            engine = Loop(model, self.objective, parameters)
            if self.objective.per == "example" and batch.several_inputs():
                whole = self.objective.outputs(model, batch).values.detach()
                check_alone(model, self.objective, batch, whole, interacting=False)
            if self.objective.per == "example":
                check_repeats(model, self.objective, batch.take(0, 1))
        elif self.objective.per == "batch":
            engine = Joint(model, self.objective, parameters)
        else:
            engine = Fast(model, self.objective, parameters, strict=self.method == "fast")
        if self.kept is not None:
            engine.reached.update(self.kept.reached)
        return engine

    def _combine(self, divided: bool) -> None:
        """Add up what the processes, and an earlier call, found.

        Raises:
            SquisherError: nothing was measured.
        """
        if divided:
            self.examples = self.replicas.total(self.examples)
        if not self.examples:
            raise SquisherError("There are no batches: nothing was measured. An iterator can be used once only.")
        reached, coverages = (set(), {}) if self._engine is None else (set(self._engine.reached), self._engine.coverage)
        before = []
        if self.kept is not None:
            self.kept.check_end(self.examples)
            self.noted = {**self.kept.noted, **self.noted}
            self.units += self.kept.units
            reached |= set(self.kept.reached)
            before = [self.kept.coverage]
        reached = set[str]().union(*ranks.gather(reached))
        self.coverage = _merged([*before, *ranks.gather(coverages)], reached)
        self.units = self.replicas.total(self.units)
        if not self.units:
            raise SquisherError("No position counts: every label is -100 or masked, so there is nothing to measure.")
        if not reached:
            raise SquisherError(
                "No gradient reached any of the parameters: the model runs under torch.no_grad, detaches what it returns, or does not "
                "use them."
            )

    def means(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, float | None] | None]:
        """Return the means in this type, sharded as the parameters are, and their relative standard errors, if those were wanted."""
        sums = self.sums.complete()
        whole = [s for name, s in sums.items() if not is_sharded(self.parameters[name])]
        ranks.sum_in_place(whole)
        for s in whole if self.replicas.parallel else ():
            s.div_(len(self.replicas.groups[0]))  # the processes of a group have the same sums
        if self._together is not None:
            self._together.shards.sum_copies(sums)
        relative = None if self._spread is None else self._spread.relative(sums, self.units)
        with torch.no_grad():
            return {
                name: sharded_like(s.div_(self.units).to(dtype), self.parameters[name]) for name, s in sums.items()
            }, relative


class _Engine(Protocol):
    @property
    def coverage(self) -> dict[str, Any]: ...

    @property
    def reached(self) -> set[str]: ...

    def add(self, sums: Sums, batch: Batch, index: Tensor) -> int: ...


def _merged(coverages: list[dict[str, Any]], reached: Collection[str]) -> dict[str, Any]:
    """Return one coverage for all processes: what any of them left to the loop, and what none of them reached."""
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
