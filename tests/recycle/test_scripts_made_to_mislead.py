"""Training scripts that hand parameters of one shape over in another order: refused or right, at every level.

Each trains for real and knows the truth by identity. Orders that a reader may rely on stay readable; what nobody can tell is
refused, and `in_order` says it.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import squisher
from squisher.errors import NamingError
from squisher.recycle.naming import values

WIDTH = 32
KEYS = ("exp_avg_sq", "square_avg", "sum")


class Net(nn.Module):
    """Any modules by name, and how they make the loss of a batch."""

    def __init__(self, loss, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.__dict__["loss"] = lambda: loss(self)


def batch(count=24, width=WIDTH):
    x = torch.randn(count, width) * torch.linspace(0.3, 2, width) + 0.2
    return x, x[:, :5].argmax(1)


def linears(count, bias=True):
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(count))


def mlp(*sizes, act=nn.ReLU):
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def stack_loss(m):
    x, y = batch()
    for layer in m.layers:
        x = torch.relu(layer(x))
    return functional.cross_entropy(m.head(x), y)


def stack():
    return Net(stack_loss, layers=linears(4), head=nn.Linear(WIDTH, 5))


def pair_loss(m):
    x, _ = batch()
    a, b = m.query(x), m.doc(x + 0.1 * torch.randn_like(x))
    return functional.cross_entropy(a @ b.T / WIDTH**0.5, torch.arange(len(x)))


def pair():
    return Net(pair_loss, query=mlp(WIDTH, WIDTH, WIDTH), doc=mlp(WIDTH, WIDTH, WIDTH))


def contrastive_loss(m):
    """As CLIP's: a single number scales the logits."""
    x, _ = batch()
    a, b = (functional.normalize(f(x), dim=-1) for f in (m.query, m.doc))
    return functional.cross_entropy(a @ b.T * m.scale.exp(), torch.arange(len(x)))


def contrastive():
    model = Net(contrastive_loss, query=mlp(WIDTH, WIDTH, WIDTH), doc=mlp(WIDTH, WIDTH, WIDTH))
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def actor_loss(m):
    x, y = batch()
    return functional.cross_entropy(m.action(m.pi(x)), y) + functional.mse_loss(m.value(m.v(x))[:, 0], y.float() - 2)


def actor():
    towers = {name: mlp(WIDTH, WIDTH, WIDTH, act=nn.Tanh) for name in ("pi", "v")}
    return Net(actor_loss, **towers, action=nn.Linear(WIDTH, 5), value=nn.Linear(WIDTH, 1))


def heads_loss(m):
    x, y = batch()
    h = torch.relu(m.trunk(x))
    return sum(functional.cross_entropy(head(h), (y + 2 * k) % 5) for k, head in enumerate(m.heads.values()))


def heads():
    named = nn.ModuleDict({name: nn.Linear(WIDTH, 5) for name in ("zebra", "apple", "mango")})
    return Net(heads_loss, trunk=mlp(WIDTH, WIDTH, WIDTH), heads=named)


def unet_loss(m):
    x = torch.randn(8, 1, 8, 8)
    a = torch.relu(m.inc(x))
    b = torch.relu(m.down1(functional.max_pool2d(a, 2)))
    c = torch.relu(m.down2(functional.max_pool2d(b, 2)))
    c = torch.relu(m.up1(functional.interpolate(c, scale_factor=2) + b))
    c = torch.relu(m.up2(functional.interpolate(c, scale_factor=2) + a))
    return functional.mse_loss(m.outc(c), x.flip(2))


def unet():
    sizes = {"inc": (1, 16), "down1": (16, 16), "down2": (16, 16), "up1": (16, 16), "up2": (16, 16), "outc": (16, 1)}
    return Net(unet_loss, **{name: nn.Conv2d(a, b, 3, padding=1) for name, (a, b) in sizes.items()})


def recurrent_loss(m):
    x, y = batch(24 * 6, 24)
    return functional.cross_entropy(m.head(m.rnn(x.reshape(24, 6, -1))[0].mean(1)), y[::6])


def recurrent():
    return Net(recurrent_loss, rnn=nn.LSTM(24, 24, 2, batch_first=True), head=nn.Linear(24, 5))


def both_ways():
    rnn = nn.LSTM(24, 24, 2, batch_first=True, bidirectional=True)
    return Net(recurrent_loss, rnn=rnn, head=nn.Linear(48, 5))


def experts_loss(m):
    x, y = batch()
    share = torch.softmax(m.gate(x), -1)
    both = [down(torch.relu(up(x))) for up, down in zip(m.ups, m.downs, strict=True)]
    return functional.cross_entropy(m.head(sum(share[:, [k]] * part for k, part in enumerate(both))), y)


def experts():
    """Two lists with one number an expert."""
    ups, downs = (nn.ModuleList(nn.Linear(*size) for _ in range(6)) for size in ((WIDTH, 48), (48, WIDTH)))
    return Net(experts_loss, gate=nn.Linear(WIDTH, 6), ups=ups, downs=downs, head=nn.Linear(WIDTH, 5))


def embeddings_loss(m):
    users, items = torch.randint(40, (2, 64))
    return functional.mse_loss((m.users(users) * m.items(items)).sum(1), ((users * items) % 7).float() - 3)


def embeddings():
    return Net(embeddings_loss, users=nn.Embedding(40, WIDTH), items=nn.Embedding(40, WIDTH))


def normed_loss(m):
    x, y = batch()
    for layer, norm in zip(m.layers, m.norms, strict=True):
        x = torch.relu(norm(layer(x)))
    return functional.cross_entropy(m.head(x), y)


def normed():
    norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
    return Net(normed_loss, layers=linears(4), norms=norms, head=nn.Linear(WIDTH, 5))


def blocks_loss(m):
    x, y = batch()
    for block in m.blocks:
        x = torch.relu(block(x))
    return functional.cross_entropy(m.head(x), y)


def blocks():
    """Each layer beside its norm, so that biases and norms stand in turn among what is not decayed."""
    pairs = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4))
    return Net(blocks_loss, blocks=pairs, head=nn.Linear(WIDTH, 5))


def listed_apart(m):
    """Two groups: matrices, then all biases before all norms."""
    matrices, vectors = own(*(block[0] for block in m.blocks), m.head), own(*(block[1] for block in m.blocks))
    return [
        {"params": [p for p in matrices if p.ndim > 1]},
        {"params": [*(p for p in matrices[:-1] if p.ndim == 1), *vectors, matrices[-1]], "weight_decay": 0.0},
    ]


def narrow_loss(m):
    x, _ = batch(width=8)
    h = torch.relu(m.fc(x))
    mean, spread = m.mean(h), 0.1 * m.spread(h)
    z = mean + torch.randn_like(mean) * spread.exp()
    return functional.mse_loss(m.out(torch.relu(m.back(z))), x) + 0.05 * (mean**2 + spread.exp() - spread).mean()


def narrow():
    return Net(narrow_loss, **{name: nn.Linear(8, 8) for name in ("fc", "mean", "spread", "back", "out")})


class Adapted(nn.Module):
    """A frozen layer with a change of rank 4 that begins at nought."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


def adapted():
    return Net(stack_loss, layers=nn.ModuleList(Adapted() for _ in range(3)), head=nn.Linear(WIDTH, 5).requires_grad_(False))  # fmt: skip


def weight_normed():
    """Each layer's weight in two: a gain a row, and directions."""
    layers = nn.ModuleList(nn.utils.parametrizations.weight_norm(layer) for layer in linears(3))
    return Net(stack_loss, layers=layers, head=nn.Linear(WIDTH, 5))


def own(*modules):
    return [p for module in modules for p in module.parameters()]


def recurrent_layers(m, *layers):
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [getattr(m.rnn, f"{kind}_{layer}") for layer in layers for kind in kinds]


def bias_free_loss(m):
    x, y = batch()
    return functional.cross_entropy(m.layers(x), y)


def bias_free():
    layer = lambda: (nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU())  # noqa: E731
    return Net(bias_free_loss, layers=nn.Sequential(*layer(), *layer(), *layer(), nn.Linear(WIDTH, 5, bias=False)))


def tokens_loss(m):
    x, y = batch()
    tokens = torch.where(torch.rand(len(x), 1, 1) < 0.3, m.words.mask, x[:, None])
    both = torch.cat([m.words.cls.expand(len(x), 1, -1), m.first(tokens)], 1)
    return functional.cross_entropy(m.head(torch.relu(m.second(both)).mean(1)), y)


def with_tokens():
    words = nn.ParameterDict({"cls": torch.zeros(1, 1, WIDTH), "mask": torch.zeros(1, 1, WIDTH)})
    layers = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, 5)}
    return Net(tokens_loss, words=words, **layers)


def critic_loss(m):
    x, y = batch()
    return functional.cross_entropy(m.layers(x), y)


def critic(norm):
    layer = lambda: (norm(nn.Linear(WIDTH, WIDTH)), nn.LeakyReLU(0.2))  # noqa: E731
    return Net(critic_loss, layers=nn.Sequential(*layer(), *layer(), nn.Linear(WIDTH, 5)))


class Attention(nn.Module):
    """A layer of attention, with four matrices of one shape, or GPT-2's: `x @ w`, queries, keys and values in one."""

    def __init__(self, fused):
        super().__init__()
        sizes = [3 * WIDTH, WIDTH] if fused else [WIDTH] * 4
        names = ["c_attn", "c_proj"] if fused else ["query", "key", "value", "output"]
        for name, size in zip(names, sizes, strict=True):
            self.add_module(name, Transposed(WIDTH, size) if fused else nn.Linear(WIDTH, size))

    def forward(self, x):
        q, k, v = (
            self.c_attn(x).chunk(3, -1) if hasattr(self, "c_attn") else (self.query(x), self.key(x), self.value(x))
        )
        return (self.c_proj if hasattr(self, "c_proj") else self.output)(torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v)


class Transposed(nn.Module):
    """A layer of `x @ w`."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x):
        return x @ self.weight + self.bias


def attention_loss(m):
    x = torch.randn(16, 6, WIDTH) * torch.linspace(0.3, 2, WIDTH) + 0.2
    y = x[:, :, :5].sum(1).argmax(1)
    for layer in m.layers:
        x = x + layer(x)
    return functional.cross_entropy(m.head(x.mean(1)), y)


def attention(fused=False):
    return Net(attention_loss, layers=nn.ModuleList(Attention(fused) for _ in range(3)), head=nn.Linear(WIDTH, 5))


def gated_loss(m):
    x, y = batch()
    for gate, layer, carry in zip(m.gates, m.layers, m.carries, strict=True):
        t = torch.sigmoid(gate(x))
        x = t * torch.relu(layer(x)) + (1 - t) * carry(x)
    return functional.cross_entropy(m.head(x), y)


def gated():
    return Net(gated_loss, layers=linears(3), carries=linears(3), gates=linears(3), head=nn.Linear(WIDTH, 5))


def listed_loss(m):
    x, y = batch()
    for weight, bias in zip(m.weights, m.biases, strict=True):
        x = torch.relu(x @ weight + bias)
    return functional.cross_entropy(m.head(x), y)


def listed():
    weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(4))
    biases = nn.ParameterList(torch.zeros(WIDTH) for _ in range(4))
    return Net(listed_loss, weights=weights, biases=biases, head=nn.Linear(WIDTH, 5))


MISLEADING = {
    "without biases, sorted by name": (bias_free, lambda m: [p for _, p in sorted(m.named_parameters())]),
    "the second tower first": (pair, lambda m: own(m.doc, m.query)),
    "the second tower first, and a scale": (contrastive, lambda m: [m.scale, *own(m.doc, m.query)]),
    "the critic first": (actor, lambda m: own(m.v, m.pi, m.action, m.value)),
    "layers from the top": (stack, lambda m: own(*reversed(m.layers), m.head)),
    "even layers, odd layers": (stack, lambda m: own(m.layers[0], m.layers[2], m.layers[1], m.layers[3], m.head)),
    "the path up first": (unet, lambda m: own(m.inc, m.up1, m.up2, m.down1, m.down2, m.outc)),
    "heads sorted by name": (heads, lambda m: own(m.trunk, *(m.heads[k] for k in sorted(m.heads)))),
    "recurrent layers from the top": (recurrent, lambda m: [*recurrent_layers(m, "l1", "l0"), *own(m.head)]),
    "the way back first": (
        both_ways,
        lambda m: [*recurrent_layers(m, "l0_reverse", "l0", "l1_reverse", "l1"), *own(m.head)],
    ),
    "one list of two from the top": (experts, lambda m: own(m.gate, *reversed(m.ups), m.downs, m.head)),
    "norms from the top": (normed, lambda m: own(m.layers, *reversed(m.norms), m.head)),
    "biases, then norms": (blocks, listed_apart),
    "the spread before the mean": (narrow, lambda m: own(m.fc, m.spread, m.mean, m.back, m.out)),
    "adapters from the top": (
        adapted,
        lambda m: [getattr(layer, name).weight for layer in reversed(m.layers) for name in ("lora_A", "lora_B")],
    ),
    "adapters from the top, A and B apart": (
        adapted,
        lambda m: [
            {"params": [getattr(layer, name).weight for layer in reversed(m.layers)]} for name in ("lora_A", "lora_B")
        ],
    ),
    "items before users": (embeddings, lambda m: own(m.items, m.users)),
    "a list of biases from the top": (listed, lambda m: [*m.weights, *reversed(m.biases), *own(m.head)]),
    "keys before queries": (
        attention,
        lambda m: own(*(part for n in m.layers for part in (n.key, n.query, n.value, n.output)), m.head),
    ),
    "the first of every list, then the second": (
        gated,
        lambda m: own(*itertools.chain(*zip(m.gates, m.layers, m.carries, strict=True)), m.head),
    ),
}
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "Adam with decay": lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


def trained(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()


def saved(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, path)
    return path


def right(imp, model, optimizer):
    """Whether every importance is that of the parameter of its name."""
    parameters = dict(model.named_parameters())
    states = {name: optimizer.state.get(parameters[name], {}) for name in imp}
    return all(torch.equal(imp[n], next((s[k] for k in KEYS if k in s), torch.empty(0))) for n, s in states.items())


@pytest.mark.parametrize("steps", [1, 60])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("script", MISLEADING)
def test_another_order_is_refused_or_right(tmp_path, script, kind, steps):
    torch.manual_seed(steps)
    make, order = MISLEADING[script]
    model = make()
    optimizer = OPTIMIZERS[kind](order(model))
    trained(model, optimizer, steps)
    path = saved(tmp_path / "c.pt", model, optimizer)
    try:
        imp = squisher.extract(path, bias_correction=False)
    except NamingError:
        return
    assert right(imp, model, optimizer)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("steps", [1, 60])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_directions_of_a_recurrent_layer_are_told_by_what_reads_them(tmp_path, monkeypatch, kind, steps, small):
    """What the next layer reads of a direction is what the direction reads of itself: v goes alike over both."""
    if not small:  # of large models, v is not compared otherwise
        monkeypatch.setattr(values, "_SOON", 0)
    torch.manual_seed(steps)
    model = both_ways()
    optimizer = OPTIMIZERS[kind](model.parameters())
    trained(model, optimizer, steps)
    path = saved(tmp_path / "c.pt", model, optimizer)
    assert right(squisher.extract(path, bias_correction=False), model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    turned = [n.removesuffix("_reverse") if n.endswith("_reverse") else f"{n}_reverse" for n in names[:-2]]
    with pytest.raises(NamingError, match="contradict"):
        squisher.extract(path, names=[*turned, *names[-2:]])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_has_one_number_in_two_lists_belongs_together(tmp_path, kind):
    """The last of the first list is the neighbour of the first of the second, but has nothing to do with it."""
    torch.manual_seed(0)
    model = experts()
    optimizer = OPTIMIZERS[kind](model.parameters())
    trained(model, optimizer, 60)
    path = saved(tmp_path / "c.pt", model, optimizer)
    if "Adam" in kind:
        assert right(squisher.extract(path, bias_correction=False), model, optimizer)
    else:  # v alone does not tell, but contradicts nothing
        with pytest.raises(NamingError, match="Nothing tells"):
            squisher.extract(path)


def cell_loss(m):
    x, y = batch(24 * 6, 24)
    state = None
    for now in x.reshape(24, 6, -1).unbind(1):
        state = m.cell(now, state)
    return functional.cross_entropy(m.head(state[0]), y[::6])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_weights_of_one_recurrent_cell_stay_in_its_order(tmp_path, kind):
    torch.manual_seed(0)
    model = Net(cell_loss, cell=nn.LSTMCell(24, 24), head=nn.Linear(24, 5))
    optimizer = OPTIMIZERS[kind](model.parameters())
    trained(model, optimizer, 3)
    path = saved(tmp_path / "c.pt", model, optimizer)
    assert right(squisher.extract(path, bias_correction=False), model, optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_biases_of_norms_before_their_weights(tmp_path, kind):
    """A norm's weight and bias have one shape; their first moments tell them apart, v does not."""
    torch.manual_seed(0)
    model = normed()
    turned = [p for norm in model.norms for p in (norm.bias, norm.weight)]
    optimizer = OPTIMIZERS[kind]([*own(model.layers), *turned, *own(model.head)])
    trained(model, optimizer, 30)
    with pytest.raises(NamingError, match="contradict" if "Adam" in kind else "contradict|Nothing tells"):
        squisher.extract(saved(tmp_path / "c.pt", model, optimizer))


@pytest.mark.parametrize("kind", ["AdamW", "Adam with decay"])
def test_a_bias_in_the_place_of_a_norm(tmp_path, kind):
    """Both are vectors of one length; nothing else is in another place."""
    torch.manual_seed(0)
    model = normed()
    order = list(model.parameters())
    bias, weight = (
        next(k for k, p in enumerate(order) if p is q) for q in (model.layers[0].bias, model.norms[2].weight)
    )
    order[bias], order[weight] = order[weight], order[bias]
    optimizer = OPTIMIZERS[kind](order)
    trained(model, optimizer, 60)
    with pytest.raises(NamingError, match="contradict|speak against"):
        squisher.extract(saved(tmp_path / "c.pt", model, optimizer))


SPECTRAL = [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm]


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated")
@pytest.mark.parametrize("make", [*(partial(critic, norm) for norm in SPECTRAL), with_tokens, bias_free])
def test_vectors_that_no_script_hands_over_alone_are_no_doubt(tmp_path, make):
    """The buffers of a spectral norm, class tokens, norms between layers."""
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    trained(model, optimizer, 100)
    assert right(squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False), model, optimizer)


@pytest.mark.parametrize("kind", ["AdamW", "Adam with decay"])
@pytest.mark.parametrize("make", [normed, weight_normed], ids=lambda make: make.__name__)
def test_lists_of_norms_and_weight_norm_are_read(tmp_path, make, kind):
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    trained(model, optimizer, 100)
    assert right(squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False), model, optimizer)


@pytest.mark.parametrize("kind", ["AdamW", "Adam with decay", "RMSprop"])
@pytest.mark.parametrize("make", [stack, pair, actor, blocks], ids=lambda make: make.__name__)
def test_the_order_of_the_model_is_read(tmp_path, make, kind):
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    trained(model, optimizer, 100)
    assert right(squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False), model, optimizer)


@pytest.mark.parametrize(
    ("make", "seed", "steps"), [(attention, 3, 30), (gated, 3, 60), (partial(attention, fused=True), 0, 60)]
)
def test_factors_gates_and_layers_of_x_at_w_are_told(tmp_path, make, seed, steps):
    """The law of a query and its key; two lists of which only one layer is unclear; the value in a fused projection of GPT-2's."""
    torch.manual_seed(seed)
    model = make()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    trained(model, optimizer, steps)
    assert right(squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False), model, optimizer)


def test_values_that_speak_against_an_order_say_what_settles_it(tmp_path):
    torch.manual_seed(17)
    model = gated()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    trained(model, optimizer, 10)
    path = saved(tmp_path / "c.pt", model, optimizer)
    with pytest.raises(NamingError, match="speak against.*--in-order"):
        squisher.extract(path)
    assert right(squisher.extract(path, bias_correction=False, in_order=True), model, optimizer)


def test_two_networks_with_the_same_names_are_both_said(tmp_path):
    """The second generator's optimizer fits the weights of both: the names are the same, and nothing claims it is the first."""
    torch.manual_seed(0)
    there, back = mlp(WIDTH, WIDTH, WIDTH), mlp(WIDTH, WIDTH, WIDTH)
    optimizer = OPTIMIZERS["AdamW"](back.parameters())
    for _ in range(60):
        optimizer.zero_grad()
        x, _ = batch()
        (back(there(x)) - x).square().mean().backward()
        optimizer.step()
    networks = {"there": there.state_dict(), "back": back.state_dict()}
    torch.save({**networks, "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    said = str(squisher.extract(tmp_path / "c.pt").provenance.naming)
    assert "the weights under 'there' or the weights under 'back'" in said


def test_what_nothing_tells_can_be_said(tmp_path):
    """One step of Adagrad on two tables: nothing tells which is which, and the user does."""
    torch.manual_seed(0)
    model = embeddings()
    optimizer = OPTIMIZERS["Adagrad"](model.parameters())
    trained(model, optimizer, 1)
    path = saved(tmp_path / "c.pt", model, optimizer)
    with pytest.raises(NamingError, match="'users.weight' from 'items.weight'.*--in-order"):
        squisher.extract(path)
    assert right(squisher.extract(path, bias_correction=False, in_order=True), model, optimizer)


def test_saying_so_does_not_silence_the_values(tmp_path):
    torch.manual_seed(0)
    model = stack()
    optimizer = OPTIMIZERS["AdamW"](own(*reversed(model.layers), model.head))
    trained(model, optimizer, 60)
    with pytest.raises(NamingError, match="contradict"):
        squisher.extract(saved(tmp_path / "c.pt", model, optimizer), in_order=True)


def residual():
    layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "fc": nn.Linear(WIDTH, 64), "back": nn.Linear(64, WIDTH)}) for _ in range(3))  # fmt: skip
    return Net(residual_loss, layers=layers, head=nn.Linear(WIDTH, 20))


def residual_loss(m):
    x, _ = batch()
    label = x[:, :20].argmax(1)
    for layer in m.layers:
        x = x + layer["back"](torch.relu(layer["fc"](layer["norm"](x))))
    return functional.cross_entropy(m.head(x), label)


def stale(model, optimizer, steps, clear):
    """The gradient of a parameter that is no longer in the model: none, zero, or never cleared."""
    for _ in range(steps):
        (model if clear == "never" else optimizer).zero_grad(set_to_none=clear == "none")
        model.loss().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "clear", "where"),
    [
        (kind, clear, where)
        for kind, clear in (
            ("AdamW", "none"),
            ("AdamW", "zero"),
            ("AdamW", "never"),
            ("RMSprop", "none"),
            ("RMSprop", "never"),
        )
        for where in ("fc", "norm", "head")
        if (kind, clear, where) != ("AdamW", "never", "head")  # nothing tells it; docs/formats.md says so
    ],
)
@pytest.mark.parametrize("make", [stack, residual])
def test_a_module_that_was_replaced_after_the_optimizer_was_made(tmp_path, make, kind, clear, where):
    """The state of the old layer stays behind, and no weight in the file is its."""
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    stale(model, optimizer, 40, clear)
    if where == "head":
        model.head = nn.Linear(WIDTH, model.head.out_features)
    elif make is stack:
        model.layers[1] = nn.Linear(WIDTH, WIDTH)
    else:
        model.layers[1][where] = nn.Linear(WIDTH, 64) if where == "fc" else nn.LayerNorm(WIDTH)
    stale(model, optimizer, 40, clear)
    with pytest.raises(NamingError):
        squisher.extract(saved(tmp_path / "c.pt", model, optimizer))


@pytest.mark.parametrize(("clear", "where"), [("never", "fc"), ("zero", "fc"), ("zero", "head")])
def test_a_replaced_module_that_began_otherwise_than_torch_does(tmp_path, clear, where):
    torch.manual_seed(0)
    model = residual()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    stale(model, optimizer, 40, clear)
    new = nn.Linear(WIDTH, 64 if where == "fc" else 20)
    nn.init.normal_(new.weight, 0, 0.02)
    owner = model.layers[1] if where == "fc" else model
    owner.__setitem__("fc", new) if where == "fc" else setattr(owner, "head", new)
    stale(model, optimizer, 45, clear)
    with pytest.raises(NamingError, match="was the module replaced"):
        squisher.extract(saved(tmp_path / "c.pt", model, optimizer))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 40])
def test_a_layer_as_it_was_begun_is_no_doubt_where_all_are(tmp_path, kind, steps):
    """Weights that were saved before training: what they are says nothing of the state, and the shapes decide."""
    torch.manual_seed(0)
    model = mlp(16, 24, 40, 5)
    content = {"model": {name: value.clone() for name, value in model.state_dict().items()}}
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(32, 16)
        functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        optimizer.step()
    torch.save({**content, "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    assert right(squisher.extract(tmp_path / "c.pt", bias_correction=False), model, optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_moving_average_beside_the_weights_vouches_for_nothing(tmp_path, kind, turned):
    """Two networks have the same names: what either says of the order counts."""
    torch.manual_seed(0)
    model = stack()
    optimizer = OPTIMIZERS[kind](own(*(reversed(model.layers) if turned else model.layers), model.head))
    trained(model, optimizer, 30)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    trained(model, optimizer, 5)
    path = tmp_path / "c.pt"
    torch.save({"model": model.state_dict(), "ema": average, "optimizer": optimizer.state_dict()}, path)
    if turned:
        with pytest.raises(NamingError):
            squisher.extract(path)
    else:
        assert right(squisher.extract(path, bias_correction=False), model, optimizer)


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1, 2)])
def test_matrices_norms_and_biases_in_three_groups(tmp_path, order):
    """As YOLO's scripts do: a norm's weight and bias have one shape, but all of a kind are in one group."""
    torch.manual_seed(0)
    convolutions = [
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
    ]
    model = Net(lambda m: m.net(torch.randn(4, 3, 8, 8)).square().mean(), net=nn.Sequential(*convolutions, nn.Conv2d(8, 5, 1)))  # fmt: skip
    kinds = [[], [], []]
    for name, p in model.named_parameters():
        kinds[0 if p.ndim > 1 else 2 if name.endswith("bias") else 1].append(p)
    optimizer = OPTIMIZERS["AdamW"]([{"params": kinds[k]} for k in order])
    trained(model, optimizer, 3)
    assert right(squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False), model, optimizer)


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
def test_an_optimizer_that_was_handed_to_the_trainer_is_not_the_trainers(tmp_path, kind):
    """The Trainer's own has biases and norms in a second group; one list of all is somebody's, in whatever order."""
    torch.manual_seed(0)
    model = pair()
    optimizer = OPTIMIZERS[kind](own(model.doc, model.query))
    trained(model, optimizer, 1)
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    with pytest.raises(NamingError):
        squisher.extract(folder)


@pytest.mark.parametrize(("kind", "told"), [("AdamW", True), ("RMSprop", False)])
def test_given_names_that_the_values_do_not_confirm_say_so(tmp_path, kind, told):
    torch.manual_seed(0)
    model = pair()
    optimizer = OPTIMIZERS[kind](model.parameters())
    trained(model, optimizer, 60 if told else 1)
    path = saved(tmp_path / "c.pt", model, optimizer)
    naming = squisher.extract(path, names=[name for name, _ in model.named_parameters()]).provenance.naming
    assert naming.level == "given"
    assert ("weight" in naming.by) is not told  # of biases alone little can be read


class Highway(nn.Module):
    """Layers of two parts of one shape that read the same: what is new, and the gate that lets it through."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(48, 48) for n in ("transform", "gate")}) for _ in range(2)
        )
        self.head = nn.Linear(48, 5)
        for layer in self.layers:
            nn.init.constant_(layer["gate"].bias, -2.0)

    def loss(self):
        x, y = batch(32, 48)
        for layer in self.layers:
            gate = torch.sigmoid(layer["gate"](x))
            x = gate * torch.relu(layer["transform"](x)) + (1 - gate) * x
        return functional.cross_entropy(self.head(x), y)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("two", [("gate", "gate"), ("transform", "transform"), ("transform", "gate")])
def test_two_parts_of_a_highway_network_exchanged(tmp_path, two, seed):
    """In one layer alone, where no script is known that does it: what the values do not tell is refused all the same."""
    torch.manual_seed(seed)
    model = Highway()
    one, other = model.layers[0][two[0]], model.layers[1 if two[0] == two[1] else 0][two[1]]
    places = {id(p): q for p, q in zip(one.parameters(), other.parameters(), strict=True)}
    places |= {id(q): p for p, q in zip(one.parameters(), other.parameters(), strict=True)}
    optimizer = OPTIMIZERS["AdamW"]([places.get(id(p), p) for p in model.parameters()])
    trained(model, optimizer, 10)
    with pytest.raises(NamingError):
        squisher.extract(saved(tmp_path / "c.pt", model, optimizer))
