"""optax states in flax msgpack files and Orbax checkpoints.

The tree does not say which transformation wrote what, and chains, wrappers and masks put it at any depth, so the accumulator is
searched for: a subtree `nu` (Adam and its kin, RMSprop), `sum_of_squares` (Adagrad), or `v_row`, `v_col` and `v` (Adafactor).
Names are the path below it, joined with "/" as flax does: the same as the path below `params`. The step is the `count` beside
it. β₂ is in a file only under `inject_hyperparams`; otherwise it must be given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import FileError, NoAccumulatorError
from ...importance.facts import Pollution, RunFacts, Spoiler
from ..optimizers import Factored
from ..states import Entry, Found, OptimizerState, Options
from .jax_files import is_msgpack, is_orbax, read_msgpack, read_orbax

__all__ = ["is_optax", "read_optax"]

Tree = Mapping[str, Any]

_ALIKE = Pollution(
    Spoiler.UNCERTAIN,
    note="optax writes the same tree for adam, adamw, nadam and radam as for adabelief, yogi and adamax, whose accumulators are other "
    "things: this is right only for the former.",
)
_BEFORE = Pollution(
    Spoiler.UNCERTAIN,
    note="Another transformation comes before it in the chain: if that clips or changes the gradients, these are the squares of the "
    "result.",
)


_SAMPLE = 1 << 16  # entries of each array that are looked at


def is_optax(path: Path) -> bool:
    """Return whether a path is a file or folder of the kinds that hold optax states."""
    return is_orbax(path) if path.is_dir() else is_msgpack(path)


def read_optax(path: Path, options: Options) -> Found:
    """Read the optax states in a msgpack file or an Orbax checkpoint.

    Raises:
        FileError: It is damaged, or holds no optax state.
        NoAccumulatorError: Its states keep no average of the squared gradient.
    """
    tree: Tree = read_orbax(path) if path.is_dir() else read_msgpack(path)
    notes: dict[Pollution, None] = {}
    states = [one for place in _walk(tree, (), {}) for one in _states(*place, tree, notes, options)]
    if states:
        return Found(states, (), RunFacts(pollution=tuple(notes)))
    moments = [".".join(place) for place, node, _ in _walk(tree, (), {}) if {"mu", "trace"} & node.keys()]
    if moments:
        raise NoAccumulatorError(
            f"{path} holds only a moving average of the gradient (under {moments[0] or 'its root'!r}: lion, sgd with momentum or the "
            "like), whose square is not the average of the squares. Train with optax.adamw."
        )
    if any({"exp_avg_sq", "estim_lr"} <= node.keys() for _, node, _ in _walk(tree, (), {})):
        raise NoAccumulatorError(
            f"{path} holds a state of optax's prodigy, which squares the gradient times its own estimate of the learning rate, with a new "
            "estimate at every step. Train with optax.adamw."
        )
    raise FileError(
        f"{path} holds no optax state with a squared gradient (nu, sum_of_squares or v_row): save the optimizer state too, not "
        "only the parameters."
    )


def _walk(node: Tree, place: tuple[str, ...], settings: Tree) -> Iterator[tuple[tuple[str, ...], Tree, Tree]]:
    """Yield every dictionary of the tree, with the hyperparameters that hold there."""
    injected = node.get("hyperparams")
    if isinstance(injected, dict):
        settings = {**settings, **injected}
    yield place, node, settings
    for key, child in node.items():
        if isinstance(child, dict) and key not in ("nu", "mu", "hyperparams"):
            yield from _walk(child, (*place, key), settings)


def _states(
    place: tuple[str, ...], node: Tree, settings: Tree, tree: Tree, notes: dict[Pollution, None], options: Options
) -> Iterator[OptimizerState]:
    """Yield the states that a dictionary holds, and collect notes about them."""
    known = {key: _number(value) for key, value in settings.items()}
    group: dict[str, Any] = {key: known.get(key) for key in ("eps", "weight_decay")} | {"decoupled_weight_decay": True}
    step, named = _number(node.get("count")), "/".join(place)
    if _holds(node, "nu") and {"hessian_fn_state", "key"} & node.keys():
        raise NoAccumulatorError(
            f"{named or 'The state'} is sophia's, which keeps an estimate of the Hessian under nu, not an average of the squared gradient. "
            "Train with optax.adamw."
        )
    if _holds(node, "nu"):
        momenta = dict(_leaves(node.get("mu", {})))
        _check_moments(momenta, dict(_leaves(node["nu"])), step is not None, known.get("b2"), options, named)
        if momenta and step is not None:
            group["betas"], key = (known.get("b1"), known.get("b2")), "exp_avg_sq"
            if options.optimizer_class is None:
                notes[_ALIKE] = None
        else:
            group["alpha"], key = known.get("decay"), "square_avg"
        if _has_predecessor(place, tree):
            notes[_BEFORE] = None
        entries = []
        for name, value in _leaves(node["nu"]):
            first = {"exp_avg": momenta[name]} if name in momenta else {}
            entries.append(Entry({key: value, "step": step, **first}, group, 0, name))
        yield from _one(entries, "adam (optax)" if key == "exp_avg_sq" else "rmsprop (optax)", named)
    if _holds(node, "sum_of_squares"):
        sums = _leaves(node["sum_of_squares"])
        entries = [Entry({"sum": value, "step": None}, group, 0, name) for name, value in sums]
        yield from _one(entries, "adagrad (optax)", named)
    if {"v_row", "v_col", "v"} <= node.keys():
        yield from _one(list(_factored(node, {**group, "decay_rate": None}, step, tree)), "adafactor (optax)", named)


def _check_moments(
    momenta: Tree, squares: Tree, counted: bool, beta2: float | None, options: Options, place: str
) -> None:
    """Refuse a `nu` that cannot be an average of squared gradients, by its signs and against `mu`.

    For Adam, μ² ≤ ν / (1 − β₂) holds in every entry, whatever the gradients and β₁ are (Cauchy and Schwarz); it fails where
    `mu` averages normalised gradients (adopt). For Adamax, |μ| ≤ ν up to its decay; gradients below one break that for Adam.
    In sm3 `nu` is itself a momentum.

    Raises:
        NoAccumulatorError: It is something else, or may be.
    """
    where = place or "The state"
    beta2 = beta2 if beta2 is not None else options.beta2
    plain, seen = False, False
    for name, square in squares.items():
        count = min(math.prod(square.shape), _SAMPLE)
        values = square.read_flat(0, count).double()
        if (values < 0).any() or (momenta and set(momenta) != set(squares)):
            raise NoAccumulatorError(
                f"{where} keeps a momentum under nu, as sm3 does, not an average of the squared gradient. Train with optax.adamw."
            )
        if options.optimizer_class is not None or not counted or name not in momenta:
            continue
        first = momenta[name].read_flat(0, count).double().abs()
        plain, seen = plain or bool((first > 2 * values).any()), seen or bool((values > 0).any())
        if beta2 is not None and 0 <= beta2 < 1 and (first.square() * (1 - beta2) > values * 1.01 + 1e-30).any():
            raise NoAccumulatorError(
                f"{where} is not Adam's with β₂ = {beta2}: in {name!r} mu is larger than nu allows, as with optax's adopt, whose "
                "average needs no correction. Say what it was with --optimizer-class adopt (optimizer_class='adopt')."
            )
    if seen and not plain:
        raise NoAccumulatorError(
            f"{where} may be Adam's or Adamax's, which keeps a decayed maximum of |g|: nu is at least half of |mu| everywhere. Say which "
            "it was with --optimizer-class adam (optimizer_class='adam')."
        )


def _one(entries: Sequence[Entry], class_name: str, place: str) -> Iterator[OptimizerState]:
    names = [entry.name or "" for entry in entries]
    if names and all(name.endswith("/value") for name in names):  # nnx keeps each array as the value of a variable
        entries = [replace(entry, name=name.removesuffix("/value")) for entry, name in zip(entries, names, strict=True)]
    if entries:
        yield OptimizerState(entries, class_name, place)


def _leaves(node: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a subtree by their path; what a mask left out is empty."""
    if _is_array(node):
        yield "/".join(place), node
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(child, (*place, key))


def _has_predecessor(place: tuple[str, ...], tree: Tree) -> bool:
    """Return whether an empty state stands before it in some chain: a transformation that keeps nothing, such as clipping."""
    at: Any = tree
    for key in place:
        if key.isdecimal() and isinstance(at, dict) and any(k.isdecimal() and int(k) < int(key) for k in at):
            return True
        at = at[key]
    return False


def _factored(node: Tree, group: dict[str, Any], step: int | None, tree: Tree) -> Iterator[Entry]:
    rows, columns, plain = (dict(_leaves(node[key])) for key in ("v_row", "v_col", "v"))
    shapes = {name: tuple(value.shape) for name, value in _leaves(_parameters(tree))}
    for name, value in plain.items():
        source: Any = value
        if name in rows and tuple(rows[name].shape) != (1,) and tuple(value.shape) == (1,):
            source = _product(rows[name], columns.get(name), shapes.get(name))
        yield Entry({"exp_avg_sq": source, "step": step}, group, 0, name)


def _product(row: Any, column: Any, shape: tuple[int, ...] | None) -> Any:
    """Return the product of two factors: optax averages over the largest axis for the row, the second largest for the column."""
    if shape is None or len(shape) < 2 or column is None:
        return "a factor, and the parameters that tell its shape are not in the file"
    order = sorted(range(len(shape)), key=lambda axis: shape[axis])
    second, largest = order[-2], order[-1]
    without = [tuple(n for axis, n in enumerate(shape) if axis != left_out) for left_out in (largest, second)]
    if [tuple(row.shape), tuple(column.shape)] != without:
        return "a factor that does not fit its parameter"
    return Factored(row, column, second, largest, shape)


def _parameters(tree: Tree) -> Any:
    """Return the parameters beside the state, where the whole training state was saved."""
    params = tree.get("params", {})
    inner = params.get("params") if isinstance(params, dict) else None
    return inner if isinstance(inner, dict) and len(params) == 1 else params


def _number(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"value"}:
        value = value["value"]
    if _is_array(value):
        if tuple(value.shape) not in ((), (1,)):
            return None
        value = value.load().item()
    return value if isinstance(value, (int, float)) else None


def _is_array(value: Any) -> bool:
    # Not by the protocol: asking an array in a store for its shape opens it.
    return hasattr(type(value), "read_flat")


def _holds(node: Tree, key: str) -> bool:
    return isinstance(node.get(key), dict) or _is_array(node.get(key))
