"""model + data -> Importance: the Fisher diagonal, measured.

To read it from top to bottom:

- `fisher`, below, checks a request; `walk` goes through the data: each batch to an engine, its squares to the `sums`.
- `batches` takes a batch apart and says who measures it; `likelihood` is what is squared, with labels drawn by `sampling`.
- `loop` is the definition, one example after the other. Two engines are faster: `joint` for whole batches, `fast` for all examples at once.
- `fast` accepts a batch if three things hold. Its examples can be followed through every operation (`following` runs them; `placements` and
  `indexing` say where the rows of each example are afterwards). Every use of a parameter has a rule (`capture` sees the uses,
  `squaring` squares the gradients that come back, `rules` has one file for each kind of layer). And `proof` has compared it with the loop.
- `sharded` does the same for models that are sharded over processes; `training` takes the squares inside a training step, for `squisher.Tracker`.
- `unfinished` keeps the sums of an interrupted measurement.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..errors import ArgumentError, NamingError, SquisherError, check_choice, near
from ..guard import eager_original, refuse_batch_statistics
from ..importance import Absence, Importance, Level, Naming, Reason, structure_hash
from ..importance.weights import content_of
from ..names import LiveParameter, live_parameters
from .batches import Stream
from .likelihood import KINDS, LABELS, Objective
from .sharded.meshes import Replicas, is_spread
from .unfinished import Unfinished
from .walk import Walk

__all__ = ["fisher", "objective_for"]

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
    signs: int | None = None,
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
        batches: an iterable of mappings (`model(**batch)`, labels under "labels"), pairs (inputs, labels), or inputs alone; for a
            function as likelihood, of mappings, lists, tuples or dataclasses of any tensors. Tensors, arrays and lists of values with an entry for
            each example are cut into examples; others, and tuples, are shared by all.
        likelihood: "categorical", "tokens", "bernoulli", "gaussian" (σ = 1), a function `(model, batch) -> losses` with one
            loss per example, or "auto": what a Hugging Face model says, otherwise categorical. Losses are summed over the
            outputs or positions of an example; the label -100 is ignored (to "gaussian" it is a number), and an example that has no
            other is not part of the mean.
        labels: "data" (the empirical Fisher), "sampled" from the model (unbiased for the Fisher) or "exact" (the Fisher).
        per: "example" squares the gradient of each example; "batch" that of each whole batch, at the price of one plain
            backward (with sampled labels it is unbiased for the Fisher at any batch size).
        unit: for tokens, "sequence" (default) squares a sequence's summed gradient, "token" that of each token, which takes one
            backward pass for every position: with 64 positions, some fifty times longer.
        draws: sampled labels for each example.
        signs: for the unit "token", so many backward passes instead of one for every position: each squares the sum of a sequence's
            tokens with random signs, which is unbiased, and costs what a sequence does.
        parameters: which ones: a regular expression, names, or a function of the name. By default the trainable ones.
        max_examples: stop after this many.
        dtype: of the result, and at least of the sums.
        standard_error: also estimate, from the spread between batches, how far each parameter's mean is from its limit.
        eval_mode: measure in evaluation mode, as papers do; False keeps the mode of every module.
        seed: of sampled labels and signs, which are a function of (seed, index of the example in the stream, position).
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
    _check(model, method, dtype, max_examples, seed)
    model = eager_original(model)
    spread_out = is_spread(model)  # before its parameters are looked at: what is whole after a pass is sharded again
    objective = objective_for(model, likelihood, labels, per, unit, draws, seed, shift, signs)
    name = objective.likelihood if isinstance(objective.likelihood, str) else "function"
    chosen, absent = _choose(model, parameters)
    if not eval_mode and per == "example":
        refuse_batch_statistics(model, "Use eval_mode=True, put it into evaluation mode, or use per='batch'.")
    by_name: dict[str, Tensor] = {p.name: p.parameter for p in chosen}
    device = None if accumulate_on is None else _device(accumulate_on, spread_out)
    kept = None
    if unfinished is not None:
        if standard_error or not ranks.is_alone():
            raise SquisherError("unfinished=... is for one process, and without standard_error.")
        settings = {
            **{"likelihood": name, "labels": labels, "per": per, "unit": objective.unit, "draws": draws, "seed": seed},
            **{"dtype": str(dtype), "method": method, "eval_mode": eval_mode, "shift": objective.shift},
            **{"max_examples": max_examples, "signs": objective.signs},
        }
        kept = Unfinished(unfinished, settings, by_name)
    replicas = Replicas.of(model)
    stream = Stream(batches, model, max_examples, divided, replicas, callable(objective.likelihood))
    with torch.inference_mode(False):  # the caller may be inside it, where there are no gradients
        walk = Walk(model, objective, by_name, method, dtype, device, standard_error, kept, replicas, spread_out)
        walk.over(stream, eval_mode, progress)
        values, errors = walk.means(dtype)
    return Importance(
        values,
        kind="fisher",
        estimator={"labels": labels, "per": per, "draws": draws, "likelihood": name}
        | ({"signs": signs} if signs else {})
        | walk.noted,
        unit=objective.unit,  # what the mean is over
        examples=walk.examples if objective.unit == "token" else walk.units,
        dtype_of_source="+".join(sorted({str(p.dtype).removeprefix("torch.") for p in by_name.values()})),
        absent=absent,
        tied={alias: p.name for p in chosen for alias in p.aliases},
        live_names={p.name: p.live_name for p in chosen if p.live_name != p.name},
        naming=Naming(Level.RECORDED),
        model={
            "structure": structure_hash({p.name: tuple(p.parameter.shape) for p in live_parameters(model)}),
            "content": content_of({p.name: p.parameter for p in chosen}),
        },
        coverage=walk.coverage,
        standard_error=errors,
        tokens=walk.units if objective.unit == "token" else None,
        seed=seed if labels == "sampled" or signs else None,
    )


def _check(model: Any, method: str, dtype: Any, max_examples: Any, seed: Any) -> None:
    if method not in ("auto", "fast", "loop"):
        raise ArgumentError(f"{method!r} is not known; expected 'auto', 'fast' or 'loop'.", "method")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype == torch.float16:
        raise ArgumentError(f"{dtype} cannot hold squared gradients; use torch.float32, float64 or bfloat16.", "dtype")
    if max_examples is not None and (not isinstance(max_examples, Integral) or max_examples < 1):
        raise ArgumentError(f"is a positive whole number, or left out, not {max_examples!r}.", "max_examples")
    if not isinstance(seed, Integral):
        raise ArgumentError(f"is a whole number, not {seed!r}.", "seed")
    if not isinstance(model, nn.Module):
        raise SquisherError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")


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
                raise ArgumentError(f"{wanted!r} is not a regular expression: {error}.", "parameters") from error
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
    inference = next((p.name for p in chosen if p.parameter.is_inference()), None)
    if inference is not None:
        raise SquisherError(
            f"{inference!r} was made under torch.inference_mode, which leaves no way to its gradient: make or load the model outside of it."
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
        raise SquisherError(f"accumulate_on={name!r} is not a device that can be used here: {error}") from error
    if device.type == "meta":
        raise SquisherError("accumulate_on='meta' keeps nothing; use 'cpu'.")
    return device


def objective_for(
    model: nn.Module,
    likelihood: str | Callable[[nn.Module, Any], Tensor] = "auto",
    labels: str = "data",
    per: str = "example",
    unit: str | None = None,
    draws: int = 1,
    seed: int = 0,
    shift: int | None = None,
    signs: int | None = None,
) -> Objective:
    """Check what the user asked for, and fill in what the model says about itself.

    Args:
        model: asked for its Hugging Face configuration, if it has one.
        likelihood: a kind, "auto", or a function.
        labels: "data", "sampled" or "exact".
        per: "example" or "batch".
        unit: "example", "sequence" or "token"; None for the likelihood's own.
        draws: how many sampled labels for each example.
        seed: of sampled labels.
        shift: how far labels lie behind outputs; None asks the model.
        signs: how many sums of tokens with random signs stand for squaring every token.

    Returns:
        The objective.

    Raises:
        SquisherError: for anything unknown or refused.
    """
    if isinstance(likelihood, nn.Module):
        named = {"MSELoss": "gaussian", "BCEWithLogitsLoss": "bernoulli", "CrossEntropyLoss": "categorical"}
        better = named.get(type(likelihood).__name__)
        raise SquisherError(
            f"likelihood is a module ({type(likelihood).__name__}), which knows neither the model nor the batch. "
            + (f"Use likelihood={better!r}" if better else "Use one of the named likelihoods")
            + ", or a function (model, batch) -> losses, one per example."
        )
    if not callable(likelihood):
        check_choice("likelihood", likelihood, ("auto", *KINDS))
    check_choice("labels", labels, LABELS)
    check_choice("per", per, ("example", "batch"))
    if callable(likelihood):
        if labels != "data":
            raise ArgumentError(f"A function as likelihood knows its own labels; labels={labels!r} needs a named one.")
        kind: str | Callable[[nn.Module, Any], Tensor] = likelihood
    else:
        kind = likelihood if likelihood != "auto" else _kind_of(model)
    if kind == "tokens" and labels == "exact":
        raise ArgumentError(
            "'exact' is not done for tokens (one backward pass per position and token of the vocabulary). Use "
            "'sampled': it estimates the same Fisher without bias.",
            "labels",
        )
    if per == "batch" and labels == "exact":
        raise ArgumentError("'batch' has no meaning with exact labels; use sampled ones.", "per")
    units = ("sequence", "token") if kind == "tokens" else ("example",)
    unit = units[0] if unit is None else unit
    if unit not in units:
        raise ArgumentError(
            f"{unit!r} does not fit the likelihood {kind if isinstance(kind, str) else 'function'!r}; expected "
            f"{' or '.join(map(repr, units))}.",
            "unit",
        )
    if per == "batch" and unit == "token":
        raise ArgumentError(
            "'token' has no meaning where the gradient of a whole batch is squared (per batch).", "unit"
        )
    if not isinstance(draws, int) or draws < 1 or (draws > 1 and labels != "sampled"):
        raise ArgumentError(
            f"is a positive number, above 1 only for sampled labels, not {draws!r} with labels {labels!r}.", "draws"
        )
    if shift is not None and (not isinstance(shift, int) or shift < 0 or (shift and kind != "tokens")):
        raise ArgumentError(
            f"is a whole number, not negative, and above 0 only for the likelihood 'tokens'; found {shift!r} with the likelihood "
            f"{kind if isinstance(kind, str) else 'function'!r}.",
            "shift",
        )
    if signs is not None and (not isinstance(signs, int) or signs < 1 or unit != "token"):
        raise ArgumentError(
            f"is a positive number, for the unit 'token' only, not {signs!r} with the unit {unit!r}.", "signs"
        )
    known = _config_of(model) is not None
    by_name = _shift_of(model) if shift is None else shift
    return Objective(kind, labels, unit, draws, seed, by_name, known, per, shift is not None, signs or 0)


def _config_of(model: nn.Module) -> Any:
    """Return a Hugging Face model's configuration; None for anything else."""
    config = getattr(model, "config", None)
    return config if hasattr(config, "to_dict") else None


def _kind_of(model: nn.Module) -> str:
    """Return the likelihood that a Hugging Face model is trained with; categorical for anything else."""
    config = _config_of(model)
    if config is None:
        return "categorical"
    problem = getattr(config, "problem_type", None)
    if problem in ("regression", "multi_label_classification"):
        return "gaussian" if problem == "regression" else "bernoulli"
    name = type(model).__name__
    if "ForCTC" in name:
        raise ArgumentError(
            f"'auto' has none for {name}, whose loss sums over alignments: give a function (model, batch) -> losses, one per example.",
            "likelihood",
        )
    if "ForSequenceClassification" in name and getattr(config, "num_labels", 2) == 1:
        return "gaussian"
    marks = ("CausalLM", "LMHead", "MaskedLM", "ForConditionalGeneration", "ForPreTraining", "Seq2SeqLM")
    return "tokens" if any(mark in name for mark in marks) else "categorical"


def _shift_of(model: nn.Module) -> int | None:
    """Return 1 if output t predicts label t + 1, 0 if it predicts label t, None if the model does not say."""
    config = _config_of(model)
    if config is None:
        return None
    if getattr(config, "is_encoder_decoder", False):
        return 0
    name = type(model).__name__
    names = (name, str(getattr(model, "loss_type", None) or name))
    causal = any(mark in n for n in names for mark in ("CausalLM", "LMHead", "ForConditionalGeneration"))
    return int(causal and "MaskedLM" not in name)
