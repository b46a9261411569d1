"""`nn.LSTM`, `nn.GRU` and `nn.RNN` and their cells in single steps, and `nn.EmbeddingBag` as a lookup and a sum.

torch runs all time steps in one call that uses every weight. Written as linear layers, one for the inputs of all steps and one for the
hidden state of each, the weights are seen. Packed sequences, projections and dropout between layers stay with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["in_steps"]

State = tuple[Tensor, ...]


def in_steps(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return a function that does what torch would do, in operations that have rules; None if there is none.

    Args:
        name: of the operation.
        args: of the call.
        kwargs: of the call.
    """
    if name in _CELLS and len(args) == 9 and not kwargs:
        x, hidden, weights, bias, layers, dropout, training, both_ways, _ = args
        whole = len(weights) == layers * (1 + both_ways) * (4 if bias else 2)
        if isinstance(x, Tensor) and x.dim() == 3 and whole and not (dropout and training):
            return lambda: _recurrent(name, x, (hidden,) if isinstance(hidden, Tensor) else tuple(hidden), *args[2:])
    if name in _SINGLE and len(args) == 6 and not kwargs and args[0].dim() == 2:
        return lambda: _single(name, *args)
    if name == "embedding_bag" and len(args) >= 2 and args[0].dim() == 2:
        given = {**dict(zip(_BAG, args, strict=False)), **kwargs}
        rare = [given.get(name) for name in ("offsets", "max_norm", "padding_idx")]
        rare.append(given.get("scale_grad_by_freq") or None)
        if given.get("mode", "mean") in ("mean", "sum") and rare == [None] * 4:
            return lambda: _bag(given)
    return None


# -- recurrent layers ---------------------------------------------------------------------------------------------------------


def _recurrent(
    name: str,
    x: Tensor,
    hidden: State,
    weights: Sequence[Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Compute what torch returns: the outputs of the last layer, then the last state of every layer and direction."""
    time = 1 if batch_first else 0
    of_layer = iter(_in_fours(weights, bias))
    ends: list[State] = []
    for _ in range(layers):
        outputs = []
        for backwards in (False, True)[: 1 + both_ways]:
            start = tuple(h[len(ends)] for h in hidden)
            output, end = _direction(_CELLS[name], x, start, next(of_layer), time, backwards)
            outputs.append(output)
            ends.append(end)
        x = torch.cat(outputs, -1) if both_ways else outputs[0]
    return (x, *(torch.stack(states) for states in zip(*ends, strict=True)))


def _in_fours(weights: Sequence[Tensor], bias: bool) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    for n in range(0, len(weights), 4 if bias else 2):
        yield weights[n], weights[n + 1], weights[n + 2] if bias else None, weights[n + 3] if bias else None


def _direction(
    cell: Callable[[Tensor, Tensor, State], State],
    x: Tensor,
    state: State,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    time: int,
    backwards: bool,
) -> tuple[Tensor, State]:
    of_input, of_hidden, input_bias, hidden_bias = weights
    steps = list(F.linear(x, of_input, input_bias).unbind(time))
    outputs = []
    for step in reversed(steps) if backwards else steps:
        state = cell(step, F.linear(state[0], of_hidden, hidden_bias), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, time), state


def _lstm(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    i, f, g, o = (of_input + of_hidden).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    (ri, zi, ni), (rh, zh, nh) = of_input.chunk(3, -1), of_hidden.chunk(3, -1)
    z = (zi + zh).sigmoid()
    new = (ni + (ri + rh).sigmoid() * nh).tanh()
    return ((1 - z) * new + z * state[0],)


_CELLS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda of_input, of_hidden, _: ((of_input + of_hidden).tanh(),),
    "rnn_relu": lambda of_input, of_hidden, _: ((of_input + of_hidden).relu(),),
}


_SINGLE = {"lstm_cell": "lstm", "gru_cell": "gru", "rnn_tanh_cell": "rnn_tanh", "rnn_relu_cell": "rnn_relu"}


def _single(name: str, x: Tensor, hidden: Any, of_input: Tensor, of_hidden: Tensor, *biases: Tensor | None) -> Any:
    """Compute one step, as the cells do: `nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`."""
    state = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
    after = _CELLS[_SINGLE[name]](F.linear(x, of_input, biases[0]), F.linear(state[0], of_hidden, biases[1]), state)
    return after if name == "lstm_cell" else after[0]


# -- bags ---------------------------------------------------------------------------------------------------------------------

_BAG = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")


def _bag(given: dict[str, Any]) -> Tensor:
    rows = F.embedding(given["input"], given["weight"])
    factors = given.get("per_sample_weights")
    if factors is not None:
        rows = rows * factors[:, :, None]
    return rows.sum(1) if given.get("mode", "mean") == "sum" else rows.mean(1)
