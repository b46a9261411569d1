"""Optimizer state to Importance: what training has already paid for."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import (
    ArgumentError,
    FileError,
    NamingError,
    NoAccumulatorError,
    SquisherError,
    SquisherWarning,
    check_fraction,
)
from ..importance import Absence, Importance, Naming, Reason, RunFacts
from ..importance.weights import HASHED_BYTES, content_of
from ..storage.folders import open_weights
from ..storage.hub import fetch, is_hub_id
from ..storage.tensors import LazyTensors, TensorSource, name_pattern, shape_of
from .assembly import assemble
from .formats import read_source
from .live import Tracked, from_optimizers, from_tracker, unwrapped
from .naming.candidates import candidates_of_module, given_names, matching, with_earlier, with_live_weights
from .naming.conventions import CONVENTIONS, trainer_conventions
from .naming.solver import resolve
from .optimizers import GIVEN_BETA2, rows_of_class
from .optimizers.encoded import check_precision, unblocked
from .states import Candidate, Found, FusedSlice, Named, OptimizerState, Options, Source, check_usable

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
    parameter's step count. `Importance.as_fisher` turns them into the scale of a Fisher where the batch size is known.

    Args:
        source: A live optimizer (or several), a `Tracker`, or a file or folder that training saved (or
            `hf://owner/name[@revision][/folder]`). No file is ever executed.
        model: The live model, for a live optimizer. For a file that records no names: the model it belongs to.
        names: Names in the optimizer's order, or a file of them, where nothing else names them; shapes and values are checked.
        batch_size: Examples per optimizer step: per device × accumulation × data-parallel processes.
        bias_correction: False gives the accumulator as it is stored.
        loss_reduction: `mean`, `sum` or `token_mean`; taken as `mean` if a batch size is given and the source does not record it.
        batch_tokens: Mean number of loss-bearing tokens per optimizer step, for `token_mean`.
        unit: What the loss is a mean of: `example`, `sequence` or `token`.
        trainable: A regular expression: only matching parameters of the model were trained.
        base_model: Folder of the weights that training started from: what is bit-equal to them was frozen, and how the rest
            moved is evidence for names.
        optimizer: Which optimizer, counted from 0, where a source holds several over the same names.
        allow_coarse: Accept states of four bits, which keep little more than the order of magnitude.
        beta2: Decay of the squared-gradient average, for sources that do not record it (optax, MLX, `.weights.h5`).
        optimizer_class: Name of the optimizer's class (`ADOPT`, `RMSprop`), for sources whose keys leave it open.
        hash_weights: Record the hash of every weight, not only of the smallest ones. Hashes show later whether an importance
            belongs to a model. Of a live model, the weights are copied to the CPU for it.
        in_order: Say that each of the optimizer's groups keeps the order of `model.parameters()`, where parts of one shape
            leave that open and the values do not tell; if every parameter has a group of its own, that the groups do.

    Returns:
        An importance of kind `squisher`. From a file it is lazy: nothing is read until it is asked for.

    Raises:
        NoAccumulatorError: The optimizer keeps no average of the squared gradient, or has taken no step.
        NamingError: Nothing names the parameters, several answers fit, or the values contradict the only one.
        FileError: The source cannot be read safely, or holds no optimizer state.
        ArgumentError: An argument has a value that it cannot have.
    """
    known = RunFacts(batch_size=batch_size, loss_reduction=loss_reduction, batch_tokens=batch_tokens, unit=unit)
    name_pattern(trainable)
    if beta2 is not None:
        check_fraction("beta2", beta2, "of the average that a step keeps")
    if isinstance(source, (str, os.PathLike)):
        live = model if isinstance(model, nn.Module) else None
        options = Options(
            model=Path(model) if isinstance(model, (str, os.PathLike)) else None,
            base_model=None if base_model is None else Path(base_model),
            trainable=trainable,
            allow_coarse=allow_coarse,
            named=names is not None or live is not None,
            beta2=beta2,
            optimizer=optimizer,
            optimizer_class=optimizer_class,
            in_order=in_order,
        )
        path = fetch(source) if is_hub_id(source) else Path(source)
        read = read_source(path, options)
        given = None if names is None else given_names(names)
        found = _with_what_is_known(read, live, given, options)
        _check_earlier(found.models, path, options)
        states, unusable = _usable(found.optimizers, options)
        named, naming, own = _named(states, found, given, options)
        importance = _assembled(named, naming, replace(found, parameters=own), known, unusable, bias_correction)
        return _with_content(importance, read, options.model or path, None if hash_weights else HASHED_BYTES)
    for_files = {"names": names, "trainable": trainable, "beta2": beta2, "optimizer_class": optimizer_class}
    for option, value in for_files.items():
        if value is not None:
            raise SquisherError(f"{option} is for files: a live optimizer and its model tell it themselves.")
    if isinstance(model, (str, os.PathLike)):
        raise SquisherError("A live optimizer needs the live model that it trains, not a path.")
    known = _completed(known)
    if isinstance(source, Tracked):
        return from_tracker(source, model, known, bias_correction=bias_correction, hash_weights=hash_weights)
    several = list(source) if isinstance(source, (list, tuple)) else [source]
    optimizers = [unwrapped(one) for one in several]
    chosen = [one for one in optimizers if one is not None]
    if not chosen or None in optimizers:
        kind = type(several[0]).__name__ if several else "an empty list"
        raise SquisherError(f"Cannot extract from {kind}: give a torch optimizer, a squisher.Tracker or a checkpoint.")
    if model is None:
        raise NamingError("A live optimizer has no names: pass the model too, squisher.extract(optimizer, model).")
    if optimizer is not None:
        chosen = [_one_of(chosen, optimizer)]
    return from_optimizers(
        chosen, model, known, bias_correction=bias_correction, allow_coarse=allow_coarse, hash_weights=hash_weights
    )


def _with_what_is_known(found: Found, model: nn.Module | None, given: Sequence[str] | None, options: Options) -> Found:
    """Return the evidence with what the user adds: the live model, names, earlier weights, and which parameters were trained."""
    if given is not None:
        found = replace(found, models=_knowing(found.models, given))
    every = found.parameters or [c for _, listed in found.models for c in listed]
    parameters = list({c.name: c for c in every}.values())
    found = replace(found, parameters=parameters, later=() if options.named else found.later)
    if model is not None:
        whole = candidates_of_module(model, frozen_too=True)
        own = candidates_of_module(model).parameters
        saved = list(_as_saved(own, found.models))
        listed = [("the model", one) for one in saved or [with_live_weights(own, model)]]
        facts = replace(found.facts, tied=whole.tied)
        found = replace(found, models=listed, parameters=whole.parameters, facts=facts, distant=not saved)
    if options.base_model is not None:
        before = open_weights(options.base_model)
        if before is None:
            raise FileError(f"{options.base_model} holds no weights to compare with.")
        found = replace(found, models=[(label, with_earlier(listed, before)) for label, listed in found.models])
    if options.trainable is not None:
        found = _only_trained(found, options.trainable)
    shapes = {name: c.shape for c in found.parameters for name in (c.live_name, c.name) if name}
    blocks = [[unblocked(e, shapes.get(e.name or "")) for e in one.entries] for one in found.optimizers]
    joined = [replace(one, entries=entries) for one, entries in zip(found.optimizers, blocks, strict=True)]
    return replace(found, optimizers=joined)


def _check_earlier(models: Sequence[Source], path: Path, options: Options) -> None:
    """Warn of weights that training cannot have started from; the base model of an adapter has none of its weights."""
    if options.base_model is None or (path / "adapter_config.json").is_file():
        return
    known = {label: sum(c.before is not None for c in listed) / len(listed) for label, listed in models if listed}
    if known and max(known.values()) < 0.5:
        label, listed = next((label, listed) for label, listed in models if label == max(known, key=known.__getitem__))
        unlike = next(c for c in listed if c.before is None)
        warnings.warn(
            f"{options.base_model} lacks most parameters of {label}, such as {unlike.name!r} of shape {unlike.shape}: is it what training "
            "started from?",
            SquisherWarning,
            stacklevel=3,
        )


def _only_trained(found: Found, pattern: str) -> Found:
    """Return the evidence with the parameters whose names a regular expression finds.

    Raises:
        ArgumentError: It finds none.
    """
    models = [(label, matching(listed, pattern)) for label, listed in found.models]
    later: Iterable[list[Source]] = (
        [(label, matching(listed, pattern)) for label, listed in tier] for tier in found.later
    )
    first = next((c.name for _, listed in found.models for c in listed), None)
    if first is not None and not any(listed for _, listed in models):
        later = list(later)  # several networks together are called by their keys
        if not any(listed for tier in later for _, listed in tier):
            raise ArgumentError(
                f"is {pattern!r}, which finds no parameter: they are called {first!r} and so on.", "trainable"
            )
    return replace(found, models=models, later=later)


def _knowing(models: Sequence[Source], names: Sequence[str]) -> list[Source]:
    """Return the models of a source that have the most of these names."""
    counts = [len({n for c in listed for n in (c.name, c.live_name)}.intersection(names)) for _, listed in models]
    return [one for one, count in zip(models, counts, strict=True) if count == max(counts)]


def _as_saved(own: Sequence[Candidate], models: Sequence[Source]) -> Iterator[list[Candidate]]:
    """Yield the live model's parameters with each set of weights of a source that has them, there also inside another module."""
    for _, listed in models:
        saved = {(c.name, c.shape): c.weight for c in listed if c.weight is not None}
        inside = {name.removesuffix(c.name) for c in own[:1] for name, _ in saved if f".{name}".endswith(f".{c.name}")}
        for prefix in sorted(inside):
            found = [replace(c, weight=saved.get((prefix + c.name, c.shape))) for c in own]
            if 2 * sum(c.weight is not None for c in found) > len(found):  # a tied one may have another name there
                yield found


def _usable(optimizers: Sequence[OptimizerState], options: Options) -> tuple[list[OptimizerState], str]:
    """Return the optimizers that are meant and keep a squared gradient, and why others do not (a Muon beside an AdamW).

    Raises:
        NoAccumulatorError: None does.
    """
    if options.optimizer is not None:
        optimizers = [_one_of(optimizers, options.optimizer)]
    if options.optimizer_class is not None:
        if not rows_of_class(options.optimizer_class):
            what = f"is {options.optimizer_class!r}, which is not known: docs/formats.md lists what is."
            raise ArgumentError(what, "optimizer_class")
        optimizers = [replace(one, class_name=options.optimizer_class) for one in optimizers]
    usable, refusals = [], []
    for one in optimizers:
        try:
            row = check_usable(one)
        except NoAccumulatorError as error:
            refusals.append(error)
            continue
        if options.optimizer_class is not None and row not in rows_of_class(options.optimizer_class):
            what = f"is {options.optimizer_class!r}, but the state has the {' and '.join(row.key)} of {row.optimizer}: leave it out."
            raise ArgumentError(what, "optimizer_class")
        usable.append(one)
    if not usable and refusals:
        raise refusals[0]
    return usable, refusals[0].what if refusals else ""


def _named(
    optimizers: Sequence[OptimizerState], found: Found, given: Sequence[str] | None, options: Options
) -> tuple[list[Named], dict[str, Naming], list[Candidate]]:
    """Return every parameter's state under its name, how each name was found, and all parameters of the model.

    Several networks may have the same names (generator, critic): then the parameters are those of the network that was found.

    Raises:
        NamingError: Nothing names the parameters, or two optimizers have the same name.
    """
    for one in optimizers:
        check_precision(one.entries, options.allow_coarse)
    conventions = [*found.conventions, *CONVENTIONS, *trainer_conventions(found.parameters)]
    said = {} if options.beta2 is None else {GIVEN_BETA2: options.beta2}
    named: list[Named] = []
    naming: dict[str, Naming] = {}
    parameters = {c.name: c for c in found.parameters}
    for one in optimizers:
        models = found.models if one.models is None or options.named else one.models
        if options.in_order and set(one.group_sizes) == {1}:  # a group for each parameter: the groups are in order
            one = replace(one, entries=[replace(entry, group_number=0) for entry in one.entries])
        try:
            vouched = options.in_order or found.vouched
            solution = resolve(
                one, models, given, conventions, found.later, found.hint, found.laws, vouched, found.distant
            )
        except NamingError as error:
            # Only an optimizer without layers may be left out: of SAC's entropy coefficient, of a temperature.
            layers = any(entry.shape is None or math.prod(entry.shape) > 1 for entry in one.entries)
            if layers or len(optimizers) == 1:
                raise
            warnings.warn(f"{one.place or 'One optimizer'} is left out: {error}", SquisherWarning, stacklevel=3)
            continue
        for name, how, entry in zip(solution.names, solution.how, one.entries, strict=True):
            if name in naming:
                places = ", ".join(f"{k}: {o.place or 'the file'}" for k, o in enumerate(found.optimizers))
                raise NamingError(
                    f"The source holds {len(found.optimizers)} optimizers ({places}) and {name!r} is in more than one of them: choose one "
                    "with --optimizer K (optimizer=K)."
                )
            naming[name] = how
            named.append((name, replace(entry, group={**entry.group, **said}) if said else entry, one.class_name))
        own = {c.name: c for c in solution.parameters}
        if own and not own.keys() & parameters.keys():  # several networks as one model
            parameters = own
        elif _networks(found):
            parameters.update(own)
    return named, naming, list(parameters.values())


def _networks(found: Found) -> bool:
    """Return whether a source holds several networks with the same names."""
    every: dict[str, Candidate] = {}
    for _, listed in found.models:
        if any(c.name in every and every[c.name].weight is not c.weight for c in listed):
            return True
        every.update({c.name: c for c in listed})
    return False


def _assembled(
    named: Sequence[Named],
    naming: Mapping[str, Naming],
    found: Found,
    known: RunFacts,
    unusable: str,
    bias_correction: bool,
) -> Importance:
    """Make the importance of named states, under the names that the weight file has.

    Args:
        named: The states of all optimizers.
        naming: How each name was found.
        found: The evidence of the source.
        known: What the user says about the run.
        unusable: Why other optimizers of the source are left out.
        bias_correction: False leaves the accumulators as they are stored.
    """
    # A weight file may keep a fused parameter in slices: then the slices are named, each like the parameter.
    stored: dict[str, tuple[str | None, tuple[int, ...]]] = {}
    slices: dict[str, Sequence[FusedSlice]] = {}
    for c in found.parameters:
        slices[c.name] = c.slices
        stored.update({fused.name: (c.live_name, fused.shape) for fused in c.slices})
        stored.update({} if c.slices else {c.name: (c.live_name, c.shape)})
    states: list[Named] = []
    levels: dict[str, Naming] = {}
    for name, entry, class_name in named:
        split = [(fused.name, replace(entry, slice=fused), class_name) for fused in slices.get(name, ())]
        states += split or [(name, entry, class_name)]
        levels.update(dict.fromkeys([fused for fused, _, _ in split] or [name], naming[name]))

    trained = {name for name, _, _ in states}
    beside = f", or stepped by another optimizer of the source. {unusable}" if unusable else ""
    untrained = Absence(Reason.NOT_IN_OPTIMIZER, f"not in the optimizer: frozen, or never given to it{beside}")
    others = [name for name in stored if name not in trained] if trained & stored.keys() else []
    recorded = found.facts.batch_size
    if recorded is not None and known.batch_size not in (None, recorded):
        warnings.warn(
            f"The source records a batch size of {recorded}, but {known.batch_size} was given, which is taken: per device × accumulation × "
            "processes is meant.",
            SquisherWarning,
            stacklevel=3,
        )
    facts = replace(
        found.facts,
        **{key: value for key, value in known.keywords().items() if value},
        absent=found.facts.absent or dict.fromkeys(others, untrained),
        live_names=found.facts.live_names or {n: live for n, (live, _) in stored.items() if live and n in trained},
        naming=Naming.of_all(levels),
    )
    facts = _completed(facts, assume_mean=found.assume_mean or known.batch_size is not None)
    shapes = {name: shape for name, (_, shape) in stored.items()} if trained <= stored.keys() else {}
    return assemble(states, facts, shapes, bias_correction=bias_correction)


def _with_content(importance: Importance, read: Found, path: Path, limit: int | None) -> Importance:
    """Record the hashes of the weights beside a state, where there are any.

    Of several networks with the same names, those of the network whose shapes the importance has; none, if two have them (a moving
    average, a target): nothing says which of them was trained.
    """
    weights: Mapping[str, TensorSource] = {}
    if _networks(read):
        wanted = {(name, tuple(shape_of(importance, name))) for name in importance}
        fitting = [listed for _, listed in read.models if wanted <= {(c.name, c.shape) for c in listed}]
        if len(fitting) == 1:
            weights = {c.name: c.weight for c in fitting[0] if c.weight is not None}
    else:
        with suppress(SquisherError):  # a state without weights; whatever else is wrong has been said
            opened = open_weights(path)
            weights = {} if opened is None else opened.tensors
    content = content_of(LazyTensors(weights), importance, limit)
    record = importance.provenance.model or {}
    return importance.with_provenance(model={**record, "content": content}) if content else importance


def _one_of(optimizers: Sequence[Any], which: int) -> Any:
    if not 0 <= which < len(optimizers):
        raise SquisherError(f"There is no optimizer {which}: the source holds {len(optimizers)}, counted from 0.")
    return optimizers[which]


def _completed(known: RunFacts, assume_mean: bool = True) -> RunFacts:
    """Return the facts with what follows from them: torch's losses are means by default."""
    if assume_mean and known.batch_size is not None and known.loss_reduction is None:
        known = replace(known, loss_reduction="mean")
    if known.loss_reduction is not None and known.unit is None:
        known = replace(known, unit="token" if known.loss_reduction == "token_mean" else "example")
    return known
