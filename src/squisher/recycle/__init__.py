"""Optimizer state to Importance: what training has already paid for."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import FileError, NamingError, NoAccumulatorError, SquisherError, SquisherWarning
from ..importance import Absence, Importance, Naming, Reason, RunFacts
from ..importance.weights import HASHED_BYTES, content_of
from ..storage.folders import open_weights
from ..storage.hub import fetch, is_hub_id
from ..storage.tensors import LazyTensors
from .assembly import assemble
from .formats import read_source
from .live import Tracked, from_optimizers, from_tracker, unwrapped
from .naming.candidates import candidates_of_module, given_names, matching
from .naming.frozen import with_earlier
from .naming.hf_rules import trainer_rules
from .naming.solver import RULES, resolve
from .optimizers import GIVEN_BETA2, rows_of_class
from .optimizers.quantized import check_precision
from .states import (
    Candidate,
    Entry,
    OptimizerState,
    Options,
    check_usable,
)

__all__ = ["extract"]


def extract(
    source: Any,
    model: nn.Module | str | os.PathLike[str] | None = None,
    names: Sequence[str] | str | os.PathLike[str] | None = None,
    batch_size: float | None = None,
    bias_correction: bool = True,
    *,
    loss_reduction: str | None = None,
    batch_tokens: float | None = None,
    unit: str | None = None,
    trainable: str | None = None,
    base_model: str | os.PathLike[str] | None = None,
    optimizer: int | None = None,
    allow_coarse: bool = False,
    beta2: float | None = None,
    optimizer_class: str | None = None,
    hash_weights: bool = False,
    in_order: bool = False,
) -> Importance:
    """Return the squared-gradient average that an optimizer already holds, as a named importance.

    The values are v̂, the mean squared gradient of the mini-batch loss, corrected for the start from zero with each
    parameter's own step count. `Importance.as_fisher` turns them into the scale of a Fisher where the batch size is known.

    Args:
        source: A live optimizer (or several), a `Tracker`, or a file or folder that training saved (or
            `hf://owner/name[@revision][/folder]`). No file is ever executed.
        model: The live model, for a live optimizer. For a file that records no names: the model it belongs to.
        names: Names in the optimizer's order, or a file of them, where nothing tells them; shapes and values are checked.
        batch_size: Examples per optimizer step: per device × accumulation × data-parallel processes.
        bias_correction: False gives the accumulator as it is stored.
        loss_reduction: `mean`, `sum` or `token_mean`; taken as `mean` if a batch size is given and the source does not tell.
        batch_tokens: Mean number of loss-bearing tokens per optimizer step, for `token_mean`.
        unit: What the loss is a mean of: `example`, `sequence` or `token`.
        trainable: A regular expression: only matching parameters of the model were trained.
        base_model: Folder of the weights that training started from: what is bit-equal to them was frozen, and how the rest
            moved is evidence for names.
        optimizer: Which optimizer, counted from 0, where a source holds several over the same names.
        allow_coarse: Accept states of four bits, which keep little more than the order of magnitude.
        beta2: Decay of the squared-gradient average, for sources that do not record it (optax, MLX, `.weights.h5`).
        optimizer_class: Name of the optimizer's class (`ADOPT`, `RMSprop`), for sources whose keys leave it open.
        hash_weights: Record the hash of every weight, not only of the smallest ones. Hashes tell later whether an importance
            belongs to a model. Of a live model, the weights are copied to the CPU for it.
        in_order: Say that each of the optimizer's groups keeps the order of `model.parameters()`, where parts of one shape
            leave that open and the values do not tell.

    Returns:
        An importance of kind `squisher`. From a file it is lazy: nothing is read until it is asked for.

    Raises:
        NoAccumulatorError: The optimizer keeps no average of the squared gradient, or has taken no step.
        NamingError: Nothing tells the names, several answers fit, or the values contradict the only one.
        FileError: The source cannot be read safely, or holds no optimizer state.
    """
    known = RunFacts(batch_size=batch_size, loss_reduction=loss_reduction, batch_tokens=batch_tokens, unit=unit)
    if isinstance(source, (str, os.PathLike)):
        where = Path(model) if isinstance(model, (str, os.PathLike)) else None
        base = None if base_model is None else Path(base_model)
        named = names is not None or isinstance(model, nn.Module)
        options = Options(where, base, trainable, allow_coarse, named, beta2, optimizer_class)
        path = fetch(source) if is_hub_id(source) else Path(source)
        found = _from_file(path, model, names, bias_correction, known, options, optimizer, in_order)
        return _with_content(found, path if where is None else where, None if hash_weights else HASHED_BYTES)
    for option, value in (("names", names), ("trainable", trainable)):
        if value is not None:
            raise SquisherError(f"{option} is for files; a live optimizer's names are found by identity in the model.")
    if beta2 is not None or optimizer_class is not None:
        raise SquisherError(
            "beta2 and optimizer_class are for files that do not record them; a live optimizer has its own."
        )
    if isinstance(model, (str, os.PathLike)):
        raise SquisherError("A live optimizer needs the live model that it trains, not a path.")
    known = _completed(known)
    if isinstance(source, Tracked):
        return from_tracker(source, model, known, bias_correction=bias_correction, hash_weights=hash_weights)
    several = list(source) if isinstance(source, (list, tuple)) else [source]
    optimizers = [unwrapped(one) for one in several]
    if not optimizers or None in optimizers:
        kind = type(several[0]).__name__ if several else "an empty list"
        raise SquisherError(
            f"Cannot extract from {kind}: expected a torch optimizer, a squisher.Tracker, or the path of a checkpoint."
        )
    if model is None:
        raise NamingError(
            "A live optimizer does not know names: pass the model too, squisher.extract(optimizer, model)."
        )
    if optimizer is not None:
        optimizers = [_one_of(optimizers, optimizer)]
    chosen = [o for o in optimizers if o is not None]
    return from_optimizers(
        chosen, model, known, bias_correction=bias_correction, allow_coarse=allow_coarse, hash_weights=hash_weights
    )


def _with_content(importance: Importance, path: Path, limit: int | None) -> Importance:
    """Record the hashes of the weights beside a state, where there are any."""
    try:
        weights = open_weights(path)
    except SquisherError:  # a state without weights; whatever else is wrong has been said
        return importance
    if weights is None:
        return importance
    content = content_of(LazyTensors(weights.tensors), importance, limit)
    record = importance.provenance.model or {}
    return importance.with_provenance(model={**record, "content": content}) if content else importance


def _from_file(
    path: Path,
    model: nn.Module | str | os.PathLike[str] | None,
    names: Sequence[str] | str | os.PathLike[str] | None,
    bias_correction: bool,
    known: RunFacts,
    options: Options,
    which: int | None,
    in_order: bool,
) -> Importance:
    found = read_source(path, options)
    models = list(found.models)
    parameters = list(found.parameters) or [c for _, candidates in models for c in candidates]
    tied = found.facts.tied
    if isinstance(model, nn.Module):
        whole = candidates_of_module(model, frozen_too=True)
        models = [("the model", candidates_of_module(model).parameters)]
        parameters, tied = whole.parameters, whole.tied
    if options.base_model is not None and not isinstance(model, nn.Module):
        before = open_weights(options.base_model)
        if before is None:
            raise FileError(f"{options.base_model} holds no weights to compare with.")
        models = [(label, with_earlier(candidates, before)) for label, candidates in models]
    if options.trainable is not None:
        models = [(label, matching(candidates, options.trainable)) for label, candidates in models]
    every = {c.name: c for c in parameters}
    rules = [*found.rules, *RULES, *trainer_rules(list(every.values()))]
    optimizers = list(found.optimizers) if which is None else [_one_of(found.optimizers, which)]
    if options.optimizer_class is not None:
        if not rows_of_class(options.optimizer_class):
            raise SquisherError(
                f"{options.optimizer_class} is not an optimizer that is known (docs/formats.md lists them). Leave optimizer_class out where "
                "the keys of the state tell."
            )
        optimizers = [replace(one, class_name=options.optimizer_class) for one in optimizers]
    optimizers, unusable = _usable(optimizers)
    given = None if names is None else given_names(names)
    later: Iterable[Sequence[tuple[str, Sequence[Candidate]]]] = () if options.named else found.later
    if options.trainable is not None:
        pattern = options.trainable
        later = ([(label, matching(candidates, pattern)) for label, candidates in tier] for tier in later)
    named: list[tuple[str, Entry, str | None]] = []
    namings: dict[str, Naming] = {}
    for one in optimizers:
        check_precision(one.entries, options.allow_coarse)
    for one in optimizers:
        own = models if one.models is None or options.named else one.models
        try:
            solution = resolve(one, own, given, rules, later, found.hint, found.laws, in_order or found.vouched)
        except NamingError as error:
            if len(optimizers) == 1 or not _single_numbers(one):
                raise
            warnings.warn(f"{one.place or 'One optimizer'} is left out: {error}", SquisherWarning, stacklevel=4)
            continue
        for name, naming in zip(solution.names, solution.how, strict=True):
            slices = every[name].slices if name in every else ()
            namings.update(dict.fromkeys([fused.name for fused in slices] or [name], naming))
        named += [(name, entry, one.class_name) for name, entry in zip(solution.names, one.entries, strict=True)]
    _disjoint(named, optimizers)
    if options.beta2 is not None:
        said = {GIVEN_BETA2: options.beta2}
        named = [(name, replace(entry, group={**entry.group, **said}), kind) for name, entry, kind in named]
    named, stored = _as_stored(named, every)
    held = {name for name, _, _ in named}
    shapes = {name: shape for name, (_, shape) in stored.items()} if held <= set(stored) else {}
    beside = f", or stepped by another optimizer of the source. {unusable}" if unusable else ""
    untrained = Absence(Reason.NOT_IN_OPTIMIZER, f"not in the optimizer: frozen, or never given to it{beside}")
    facts = replace(
        found.facts,
        **{key: value for key, value in known.keywords().items() if value},
        absent=found.facts.absent or {name: untrained for name in stored if name not in held and held & stored.keys()},
        live_names=found.facts.live_names
        or {name: live for name, (live, _) in stored.items() if live and name in held},
        naming=Naming.of_all(namings),
        tied=tied,
    )
    facts = _completed(facts, assume_mean=found.assume_mean or known.batch_size is not None)
    return assemble(named, facts, shapes, bias_correction=bias_correction)


def _single_numbers(optimizer: OptimizerState) -> bool:
    """Whether an optimizer has no layers, only numbers beside them: SAC's entropy coefficient, a temperature."""
    return all(entry.shape is not None and math.prod(entry.shape) <= 1 for entry in optimizer.entries)


def _as_stored(
    named: Sequence[tuple[str, Entry, str | None]], every: Mapping[str, Candidate]
) -> tuple[list[tuple[str, Entry, str | None]], dict[str, tuple[str | None, tuple[int, ...]]]]:
    """Split what the weight file keeps in slices, and return the live name and shape of every tensor there."""
    stored: dict[str, tuple[str | None, tuple[int, ...]]] = {}
    for name, c in every.items():
        stored.update({fused.name: (c.live_name, fused.shape) for fused in c.slices} or {name: (c.live_name, c.shape)})
    out: list[tuple[str, Entry, str | None]] = []
    for name, entry, class_name in named:
        slices = every[name].slices if name in every else ()
        out += [(fused.name, replace(entry, slice=fused), class_name) for fused in slices]
        if not slices:
            out.append((name, entry, class_name))
    return out, stored


def _usable(optimizers: Sequence[OptimizerState]) -> tuple[list[OptimizerState], str]:
    """Return the optimizers that keep a squared gradient, where one does (the AdamW beside a Muon), and why others do not.

    Raises:
        NoAccumulatorError: None does.
    """
    usable, refusals = [], []
    for one in optimizers:
        try:
            check_usable(one)
        except NoAccumulatorError as error:
            refusals.append(error)
        else:
            usable.append(one)
    if not usable and refusals:
        raise refusals[0]
    return usable, refusals[0].what if refusals else ""


def _one_of(optimizers: Sequence[Any], which: int) -> Any:
    if not 0 <= which < len(optimizers):
        raise SquisherError(f"There is no optimizer {which}: the source holds {len(optimizers)}, counted from 0.")
    return optimizers[which]


def _disjoint(named: Sequence[tuple[str, Entry, str | None]], optimizers: Sequence[OptimizerState]) -> None:
    seen: set[str] = set()
    for name, _, _ in named:
        if name in seen:
            places = ", ".join(f"{k}: {o.place or 'the file'}" for k, o in enumerate(optimizers))
            raise NamingError(
                f"The source holds {len(optimizers)} optimizers ({places}) and {name!r} is in more than one of them: choose one "
                "with --optimizer K (optimizer=K)."
            )
        seen.add(name)


def _completed(known: RunFacts, assume_mean: bool = True) -> RunFacts:
    """Return the facts with what follows from them: torch's losses are means unless told otherwise."""
    if assume_mean and known.batch_size is not None and known.loss_reduction is None:
        known = replace(known, loss_reduction="mean")
    if known.loss_reduction is not None and known.unit is None:
        known = replace(known, unit="token" if known.loss_reduction == "token_mean" else "example")
    return known
