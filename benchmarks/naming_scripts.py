"""Training scripts made to mislead: what `extract` says of the names, against the truth of the live optimizer.

Each script is drawn from a seed: an architecture with parts of one shape, an optimizer, an order in which its parameters are
handed over, a number of steps and a form in which the run is saved. The answer is right, refused, or wrong; a wrong one
counts with its level. The truth is what `extract` says of the running optimizer, whose names are found by identity.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import squisher

Parameters = list[nn.Parameter]
ACTIVATIONS: list[Callable[[], nn.Module]] = [nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU]


# -- architectures: each has `parts`, the modules in the order of the model, and a loss of its own ------------------------------


class Task(nn.Module):
    """A model with data to learn from: inputs of uneven size per direction, labels by a fixed teacher."""

    def __init__(self, draw: random.Random, inputs: int, classes: int = 5):
        super().__init__()
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        self.classes, self.size = classes, inputs
        self.__dict__["mix"] = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
        self.__dict__["teacher"] = torch.randn(inputs, classes, generator=generator)

    def batch(self, count: int = 32) -> tuple[Tensor, Tensor]:
        """Return inputs and labels."""
        x = torch.randn(count, self.size) @ self.mix + 0.3
        return x, (x @ self.teacher).argmax(1)

    def loss(self) -> Tensor:
        """Return the loss of a new batch."""
        x, y = self.batch()
        return functional.cross_entropy(self(x), y)


def mlp(draw: random.Random, sizes: Sequence[int], norm: bool = False, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:  # fmt: skip
    """Return linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for k, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b)] + ([nn.LayerNorm(b)] if norm and k < len(sizes) - 2 else [])
        layers += [act()] if k < len(sizes) - 2 else []
    return nn.Sequential(*layers)


def _drawn_mlp(draw: random.Random, width: int, outputs: int) -> Callable[[], nn.Sequential]:
    depth, norm, act = draw.randint(1, 3), draw.random() < 0.3, draw.choice(ACTIVATIONS)
    return lambda: mlp(draw, [width, *[width] * depth, outputs], norm, act)


class Towers(Task):
    """Two encoders of one shape, with or without a head that reads both."""

    def __init__(self, draw: random.Random, width: int):
        super().__init__(draw, width)
        make = _drawn_mlp(draw, width, draw.choice([5, 16, width]))
        self.a, self.b = make(), make()
        out = self.a[-1].out_features
        self.head = nn.Linear(2 * out, 5) if draw.random() < 0.6 else None
        self.same_input = draw.random() < 0.5

    def loss(self) -> Tensor:
        """Return a classifier's loss, or a contrastive one."""
        x, y = self.batch()
        left, right = self.a(x), self.b(x if self.same_input else x.flip(1) + 0.1 * torch.randn_like(x))
        if self.head is not None:
            return functional.cross_entropy(self.head(torch.cat([left, right], 1)), y)
        return functional.cross_entropy(left @ right.T / left.shape[1] ** 0.5, torch.arange(len(x)))


class Ensemble(Task):
    """Members of one shape, each a classifier of its own."""

    def __init__(self, draw: random.Random, width: int):
        super().__init__(draw, width)
        make = _drawn_mlp(draw, width, 5)
        self.members = nn.ModuleList(make() for _ in range(draw.randint(2, 5)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the members."""
        return torch.stack([member(x) for member in self.members]).mean(0)


class Stack(Task):
    """Layers of one shape, plain or beside the identity."""

    def __init__(self, draw: random.Random, width: int):
        super().__init__(draw, width)
        act, bias = draw.choice(ACTIVATIONS), draw.random() < 0.7
        self.residual = draw.random() < 0.4
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(draw.randint(3, 6)))
        self.act, self.head = act(), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        for layer in self.layers:
            x = x + self.act(layer(x)) if self.residual else self.act(layer(x))
        return self.head(x)


class Autoencoder(Task):
    """An encoder and a decoder of the same shapes."""

    def __init__(self, draw: random.Random, width: int):
        super().__init__(draw, width)
        make = _drawn_mlp(draw, width, width)
        self.encoder, self.decoder = make(), make()

    def loss(self) -> Tensor:
        """Return the error of the reconstruction."""
        x, _ = self.batch()
        return functional.mse_loss(self.decoder(self.encoder(x)), x)


class Heads(Task):
    """A trunk and heads of one shape in a dictionary, one for each way to label."""

    def __init__(self, draw: random.Random, width: int):
        super().__init__(draw, width)
        self.trunk = mlp(draw, [width, width, width], act=draw.choice(ACTIVATIONS))
        deep = draw.random() < 0.5
        names = draw.sample(["seg", "depth", "edges", "normal", "caption"], draw.randint(2, 4))
        self.heads = nn.ModuleDict({n: mlp(draw, [width, width, 5] if deep else [width, 5]) for n in names})

    def loss(self) -> Tensor:
        """Return the sum of the heads' losses, labels turned by one for each."""
        x, y = self.batch()
        h = torch.relu(self.trunk(x))
        losses = [functional.cross_entropy(head(h), (y + k) % 5) for k, head in enumerate(self.heads.values())]
        return torch.stack(losses).sum()


class Critics(Task):
    """An actor with two critics of one shape, as in TD3; the actor may have their shape too."""

    def __init__(self, draw: random.Random, width: int):
        super().__init__(draw, width)
        act = draw.choice([nn.ReLU, nn.Tanh])
        self.actor = mlp(draw, [width, width, width, 1 if draw.random() < 0.5 else 4], act=act)
        self.q1, self.q2 = (mlp(draw, [width, width, width, 1], act=act) for _ in range(2))

    def loss(self) -> Tensor:
        """Return a regression for the critics and a policy loss for the actor."""
        x, y = self.batch()
        target = y.float()[:, None] + 0.1 * torch.randn(len(y), 1)
        critics = functional.mse_loss(self.q1(x), target) + functional.mse_loss(self.q2(x), target)
        return critics + (self.actor(x).tanh() * (x[:, :1] - 0.5)).mean()


class Generators(Task):
    """Two generators, from one domain to the other and back."""

    def __init__(self, draw: random.Random, width: int):
        super().__init__(draw, width)
        make = _drawn_mlp(draw, width, width)
        self.g_ab, self.g_ba = make(), make()

    def loss(self) -> Tensor:
        """Return what a cycle loses, and how far the means are from the other domain's."""
        a, _ = self.batch()
        b = self.batch()[0].flip(1).tanh()
        cycle = functional.mse_loss(self.g_ba(self.g_ab(a)), a) + functional.mse_loss(self.g_ab(self.g_ba(b)), b)
        return cycle + functional.mse_loss(self.g_ab(a).mean(0), b.mean(0)) + functional.l1_loss(self.g_ba(b), a)


def _conv(draw: random.Random, width: int, depth: int, bn: bool, act: Callable[[], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for k in range(depth):
        layers.append(nn.Conv2d(1 if k == 0 else width, width, 3, padding=1, bias=not bn))
        layers += ([nn.BatchNorm2d(width)] if bn else []) + [act()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())


class ConvTowers(Task):
    """Two convolutional encoders with a head, or one with more layers."""

    def __init__(self, draw: random.Random, width: int):
        super().__init__(draw, 64)
        width, bn, act = min(width, 48), draw.random() < 0.5, draw.choice(ACTIVATIONS)
        count, depth = draw.choice([1, 2, 2]), draw.randint(2, 4)
        names = ["rgb", "depth"][:count]
        self.encoders = nn.ModuleDict({n: _conv(draw, width, depth, bn, act) for n in names})
        self.head = nn.Linear(4 * width * count, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        picture = x.reshape(-1, 1, 8, 8)
        views = [picture, picture.flip(3)]
        return self.head(torch.cat([e(v) for e, v in zip(self.encoders.values(), views, strict=False)], 1))


class Transformers(Task):
    """One or two encoders of attention layers over the same embedding."""

    def __init__(self, draw: random.Random, width: int):
        width = 32 if width < 64 else 64
        super().__init__(draw, width)
        dropout, first, act = draw.choice([0.0, 0.1]), draw.random() < 0.5, draw.choice(["relu", "gelu"])
        make = lambda: nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, act, batch_first=True, norm_first=first)  # noqa: E731
        self.towers = nn.ModuleList(
            nn.ModuleList(make() for _ in range(draw.randint(1, 2) if k == 0 else 0)) for k in range(1)
        )
        depth = len(self.towers[0])
        if draw.random() < 0.6:
            self.towers.append(nn.ModuleList(make() for _ in range(depth)))
        self.embed, self.head = nn.Embedding(40, width), nn.Linear(width, 40, bias=False)
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        self.__dict__["order"] = torch.randperm(40)

    def loss(self) -> Tensor:
        """Return the loss of telling the successor of every token."""
        ids = torch.randint(40, (8, 12))
        out = 0
        for k, tower in enumerate(self.towers):
            x = self.embed(ids if k == 0 else ids.flip(1))
            for layer in tower:
                x = layer(x)
            out = out + (x if k == 0 else x.flip(1))
        return functional.cross_entropy(self.head(out).flatten(0, 1), self.order[ids].flatten())


class Recurrent(Task):
    """An LSTM or GRU of several layers, both directions at times."""

    def __init__(self, draw: random.Random, width: int):
        width = min(width, 48)
        super().__init__(draw, width)
        kind = draw.choice([nn.LSTM, nn.GRU])
        self.rnn = kind(width, width, draw.randint(1, 3), bidirectional=draw.random() < 0.4, batch_first=True)
        self.head = nn.Linear(width * (2 if self.rnn.bidirectional else 1), 5)

    def loss(self) -> Tensor:
        """Return the loss of sequences whose label is that of their first element."""
        x, y = self.batch(8 * 32)
        return functional.cross_entropy(self.head(self.rnn(x.reshape(32, 8, -1))[0].mean(1)), y[::8])


ARCHITECTURES: dict[str, Callable[[random.Random, int], Task]] = {
    "towers": Towers, "ensemble": Ensemble, "stack": Stack, "autoencoder": Autoencoder, "heads": Heads,
    "critics": Critics, "generators": Generators, "convolutions": ConvTowers, "transformers": Transformers,
    "recurrent": Recurrent,
}  # fmt: skip


# -- orders ---------------------------------------------------------------------------------------------------------------


def collected(module: nn.Module, arrange: Callable[[list[nn.Module]], list[nn.Module]], depth: int = 9) -> Parameters:
    """Return the parameters of a module, its children in another order."""
    if not depth or not any(True for _ in module.children()):
        return list(module.parameters())
    children = arrange([m for m in module.children() if any(True for _ in m.parameters())])
    own = [p for p in module.parameters(recurse=False)]
    return own + [p for child in children for p in collected(child, arrange, depth - 1)]


def _unique(parameters: Iterable[nn.Parameter]) -> Parameters:
    return list({id(p): p for p in parameters}.values())


def _same_shape_shuffled(model: nn.Module, draw: random.Random) -> Parameters:
    own = list(model.parameters())
    by_shape: dict[Any, Parameters] = {}
    for p in own:
        by_shape.setdefault(p.shape, []).append(p)
    for ps in by_shape.values():
        draw.shuffle(ps)
    return [by_shape[p.shape].pop() for p in own]


def _twins_swapped(model: nn.Module, draw: random.Random) -> Parameters:
    """Return the parameters after exchanging two modules of one shape that have a matrix."""
    shapes: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        key = tuple(tuple(p.shape) for p in module.parameters())
        if any(len(shape) > 1 for shape in key) and module is not model:
            shapes.setdefault(key, []).append(module)
    pairs = [
        (a, b) for ms in shapes.values() for i, a in enumerate(ms) for b in ms[i + 1 :]
        if not {id(p) for p in a.parameters()} & {id(p) for p in b.parameters()}
    ]  # fmt: skip
    if not pairs:
        return list(model.parameters())
    a, b = draw.choice(pairs)
    change = {id(p): q for p, q in zip(a.parameters(), b.parameters(), strict=True)}
    change |= {id(q): p for p, q in zip(a.parameters(), b.parameters(), strict=True)}
    return [change.get(id(p), p) for p in model.parameters()]


def _is_vector(p: nn.Parameter) -> bool:
    return p.ndim < 2


def _norms(model: nn.Module) -> set[int]:
    kinds = (nn.LayerNorm, nn.BatchNorm2d)
    return {id(p) for m in model.modules() if isinstance(m, kinds) for p in m.parameters()}


def _top_down(model: nn.Module) -> list[Parameters]:
    leaves = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    return [list(m.parameters(recurse=False)) for m in reversed(leaves)]


def _parts(model: nn.Module) -> list[Parameters]:
    children = list(model.children())
    if len(children) == 1 or (max(map(lambda c: len(list(c.children())), children)) > 1 and len(children) == 2):
        children = [c for child in children for c in (child.children() if list(child.children()) else [child])]
    return [ps for c in children if (ps := list(c.parameters()))]


def _shuffled(draw: random.Random, items: list[Any]) -> list[Any]:
    return draw.sample(items, len(items))


Way = Callable[[nn.Module, random.Random], list[Parameters]]
WAYS: dict[str, Way] = {
    "model.parameters()": lambda m, d: [list(m.parameters())],
    "children reversed": lambda m, d: [collected(m, lambda c: c[::-1], 1)],
    "children reversed, one deeper": lambda m, d: [collected(m, lambda c: c[::-1], 2)],
    "every list reversed": lambda m, d: [collected(m, lambda c: c[::-1])],
    "children shuffled": lambda m, d: [collected(m, lambda c: _shuffled(d, c), d.randint(1, 3))],
    "two twins exchanged": lambda m, d: [_twins_swapped(m, d)],
    "equal shapes shuffled": lambda m, d: [_same_shape_shuffled(m, d)],
    "biases first": lambda m, d: [sorted(m.parameters(), key=lambda p: not _is_vector(p))],
    "norms last": lambda m, d: [sorted(m.parameters(), key=lambda p: id(p) in _norms(m))],
    "sorted by name": lambda m, d: [[p for _, p in sorted(m.named_parameters())]],
    "groups: decay and none": lambda m, d: [[p for p in m.parameters() if _is_vector(p) is v] for v in (False, True)],
    "groups: none and decay": lambda m, d: [[p for p in m.parameters() if _is_vector(p) is v] for v in (True, False)],
    "groups: parts": lambda m, d: _parts(m),
    "groups: parts shuffled": lambda m, d: _shuffled(d, _parts(m)),
    "groups: top layer first": lambda m, d: _top_down(m),
}  # fmt: skip
ROLL = [*WAYS] + ["model.parameters()"] * 5 + ["two twins exchanged"] * 3 + ["children reversed", "children shuffled"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda g: torch.optim.Adam(g, 1e-3),
    "Adam, weight decay": lambda g: torch.optim.Adam(g, 1e-3, weight_decay=1e-2),
    "AdamW": lambda g: torch.optim.AdamW(g, 1e-3),
    "AdamW, small": lambda g: torch.optim.AdamW(g, 5e-5),
    "AdamW, amsgrad": lambda g: torch.optim.AdamW(g, 1e-3, amsgrad=True),
    "AdamW, large": lambda g: torch.optim.AdamW(g, 1e-2),
    "NAdam": lambda g: torch.optim.NAdam(g, 1e-3),
    "RAdam": lambda g: torch.optim.RAdam(g, 1e-3),
    "RMSprop": lambda g: torch.optim.RMSprop(g, 1e-3),
    "Adagrad": lambda g: torch.optim.Adagrad(g, 1e-2),
    "Adadelta": lambda g: torch.optim.Adadelta(g),
    "Adafactor": lambda g: torch.optim.Adafactor(g, 1e-2),
}  # fmt: skip
FORMS = ["one file", "one file", "two files", "lightning", "accelerate"]
MOMENTS = ("Adam", "AdamW", "NAdam", "RAdam")
STEPS = [1, 5, 50, 300]
WIDTHS = [16, 24, 32, 48, 64, 96, 128, 256]


class Script(NamedTuple):
    """One drawn training script."""

    seed: int
    architecture: str
    width: int
    optimizer: str
    way: str
    steps: int
    form: str


def drawn(seed: int) -> Script:
    """Return the script of a seed."""
    draw = random.Random(seed)
    kinds = [*OPTIMIZERS] + ["AdamW"] * 5 + ["Adam"] * 2
    return Script(
        seed, draw.choice([*ARCHITECTURES] + ["towers"] * 2 + ["ensemble"]), draw.choice(WIDTHS), draw.choice(kinds),
        draw.choice(ROLL), draw.choice([*STEPS, 50, 300]), draw.choice(FORMS),
    )  # fmt: skip


# -- running one ------------------------------------------------------------------------------------------------------------


def save(form: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Save a run as scripts and frameworks do; return what to extract from."""
    weights, state = model.state_dict(), optimizer.state_dict()
    if form == "one file":
        torch.save({"model": weights, "optimizer": state, "epoch": 3}, folder / "checkpoint.pt")
        return folder / "checkpoint.pt"
    if form == "lightning":
        content = {"state_dict": weights, "optimizer_states": [state], "epoch": 3, "global_step": 9}
        torch.save({**content, "pytorch-lightning_version": "2.4.0"}, folder / "last.ckpt")
        return folder / "last.ckpt"
    if form == "accelerate":
        torch.save(weights, folder / "pytorch_model.bin")
        torch.save(state, folder / "optimizer.bin")
        return folder
    torch.save(weights, folder / "model.pth")
    torch.save(state, folder / "optimizer.pth")
    return folder


def trained(script: Script) -> tuple[Task, torch.optim.Optimizer]:
    """Train the model of a script."""
    torch.manual_seed(script.seed)
    draw = random.Random(script.seed + 1)
    model = ARCHITECTURES[script.architecture](draw, script.width)
    given: set[int] = set()  # tied weights are in the first group that has them
    groups: list[Parameters] = []
    for own in WAYS[script.way](model, draw):
        groups.append([p for p in _unique(own) if id(p) not in given])
        given |= {id(p) for p in own}
    groups = [own for own in groups if own]
    optimizer = OPTIMIZERS[script.optimizer](groups[0] if len(groups) == 1 else [{"params": ps} for ps in groups])
    for _ in range(script.steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    return model, optimizer


def outcome(script: Script, folder: Path, **options: Any) -> dict[str, Any]:
    """Return what `extract` makes of a script: right, refused or wrong, and the levels of its names."""
    model, optimizer = trained(script)
    path = save(script.form, folder, model, optimizer)
    order = {id(p): k for k, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    places = [order[id(p)] for p in model.parameters() if id(p) in order]
    groups = len(optimizer.param_groups)
    found: dict[str, Any] = {**script._asdict(), "groups": groups, "ordinary": groups == 1 and places == sorted(places)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = squisher.extract(optimizer, model)
        try:
            imp = squisher.extract(path, **options)
        except squisher.SquisherError as error:
            return {**found, "outcome": "refused", "why": str(error)[:60]}
        wrong = [name for name in imp if name not in truth or not torch.equal(imp[name], truth[name])]
        naming = imp.provenance.naming
        levels = Counter(str(naming.of(name).level) for name in imp)
        if not wrong:
            return {**found, "outcome": "right", "levels": dict(levels)}
        return {**found, "outcome": "wrong", "levels": dict(Counter(str(naming.of(name).level) for name in wrong))}


def run(seed: int) -> dict[str, Any]:
    """Run the script of a seed in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return outcome(drawn(seed), Path(folder))


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the outcomes, by the order of the parameters, and whether the optimizer keeps first moments."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        order = "model.parameters()" if row["ordinary"] else "several groups" if row["groups"] > 1 else "another order"
        moments = "first moments" if row["optimizer"].split(",")[0] in MOMENTS else "no first moments"
        found.setdefault(f"{order}, {moments}", Counter())[row["outcome"]] += 1
    return {kind: dict(sorted(own.items())) for kind, own in sorted(found.items())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--first", type=int, default=1000, help="below 1000 are the scripts that the thresholds were chosen on"
    )
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "naming_scripts.json")
    arguments = parser.parse_args()
    environment = {"torch": torch.__version__, "python": platform.python_version(), "squisher": squisher.__version__}
    rows: list[dict[str, Any]] = []
    for seed in range(arguments.first, arguments.first + arguments.count):
        rows.append(run(seed))
        wrong = [row for row in rows if row["outcome"] == "wrong" or (row["ordinary"] and row["outcome"] == "refused")]
        document = {
            "environment": environment,
            "seeds": [arguments.first, seed],
            "counts": counts(rows),
            "wrong, or refused though ordinary": wrong,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
