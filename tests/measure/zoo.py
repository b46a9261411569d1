"""Small models of every kind that the fast engine must get right, each with a batch of six examples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

N = 6


def _image(channels=3, size=8):
    return torch.randn(N, channels, size, size)


def _labels(classes=4):
    return torch.randint(0, classes, (N,))


class Apply(nn.Module):
    """A function of the output of some modules, to write models in one line."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.short(x)
        return self.relu(y)


def resnet():
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        Residual(6, 6, 1),
        Residual(6, 10, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, 4),
    )
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 3, 8, 8))
    return model, (_image(), _labels())


class Encoder(nn.Module):
    """BERT-type; position embeddings are looked up once and broadcast, as Hugging Face does it."""

    def __init__(self, width=12, layers=2, heads=3, vocabulary=20, length=7, classes=4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q": nn.Linear(width, width),
                    "k": nn.Linear(width, width),
                    "v": nn.Linear(width, width),
                    "o": nn.Linear(width, width),
                    "n1": nn.LayerNorm(width),
                    "n2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 2 * width),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.classifier = nn.Linear(width, classes)

    def block(self, layer, x, mask):
        q, k, v = (layer[c](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for c in "qkv")
        x = layer["n1"](x + layer["o"](F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)))
        return layer["n2"](x + layer["down"](F.gelu(layer["up"](x))))

    def forward(self, input_ids, attention_mask=None):
        where = torch.arange(input_ids.shape[1])[None]
        x = self.tokens(input_ids) + self.positions(where) + self.kinds(torch.zeros_like(input_ids))
        x = self.norm(x)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = self.block(layer, x, mask)
        return self.classifier(x[:, 0])


def encoder():
    ids = torch.randint(0, 20, (N, 7))
    mask = torch.ones(N, 7)
    mask[::2, 5:] = 0
    return Encoder(), {"input_ids": ids, "attention_mask": mask, "labels": _labels()}


class Decoder(nn.Module):
    """GPT-type; the embedding is the output layer too, and positions have no batch dimension, as in nanoGPT."""

    def __init__(self, width=12, layers=2, heads=3, vocabulary=20, length=8, way=None, tie=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "n1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "o": nn.Linear(width, width),
                    "n2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.heads, self.way = heads, way
        if tie:
            self.head.weight = self.tokens.weight

    def block(self, x, block):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in block["qkv"](block["n1"](x)).chunk(3, -1))
        x = x + block["o"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + block["down"](F.gelu(block["up"](block["n2"](x))))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            if self.way is None:
                x = self.block(x, block)
            else:
                x = checkpoint(self.block, x, block, use_reentrant=self.way == "reentrant")
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """One block, applied twice, each time under re-entrant checkpointing: its gradient comes in two parts."""

    def __init__(self):
        super().__init__()
        self.start, self.block, self.out = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.start(x)
        for _ in range(2):
            x = checkpoint(lambda x: self.block(x).tanh(), x, use_reentrant=True)
        return self.out(x)


def decoder(**settings):
    targets = torch.randint(0, 20, (N, 8))
    targets[1, 5:] = -100
    return Decoder(**settings), (torch.randint(0, 20, (N, 8)), targets)


class Hidden(nn.Module):
    """LSTM or GRU in front of a linear layer."""

    def __init__(self, kind):
        super().__init__()
        self.rnn, self.out = kind(5, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class Conv1D(nn.Module):
    """The linear layer of GPT-2 in Hugging Face: a transposed weight, and positions flattened into the batch."""

    def __init__(self, outside, inside):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inside, outside) * 0.3), nn.Parameter(torch.randn(outside))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Rms(nn.Module):
    """The norm of Llama in Hugging Face: written out, with a bare parameter."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Patches(nn.Module):
    """ViT-type: a bare class token, bare position embeddings, layer scale."""

    def __init__(self, width=12):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.scale = nn.Parameter(torch.rand(width))
        self.mix, self.norm, self.out = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x):
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = x + self.scale * self.mix(self.norm(x)).tanh()
        return self.out(x.mean(1))


class Windows(nn.Module):
    """Swin-type: windows are folded into the batch before a linear layer."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x):
        n = x.shape[0]
        x = F.unfold(x, 4, stride=4).view(n, 3, 16, 4).permute(0, 3, 2, 1).reshape(n * 4, 16, 3)
        x = self.inside(x).tanh().mean(1)
        return self.out(x.view(n, 4, 6).sum(1))


class Experts(nn.Module):
    """Mixture of experts: tokens are gathered, so that how an expert is called depends on the data."""

    def __init__(self, width=6, experts=3):
        super().__init__()
        self.router, self.out = nn.Linear(width, experts), nn.Linear(width, 4)
        self.up = nn.Parameter(torch.randn(experts, 8, width))
        self.experts = nn.ModuleList(nn.Linear(8, width) for _ in range(experts))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chances = self.router(flat).softmax(-1)
        best = chances.argmax(-1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(best == number)
            if rows.numel():
                z = expert(F.linear(flat[rows], self.up[number]).tanh())
                y = y.index_add(0, rows, z * chances[rows, number, None])
        return self.out(y.view_as(x).mean(1))


def _sequential(*modules, inputs=None, classes=4):
    return nn.Sequential(*modules), (inputs if inputs is not None else torch.randn(N, 5), _labels(classes))


def _pool(dimensions):
    return Apply(lambda s, x: x.flatten(2).mean(2)), nn.LazyLinear(4) if dimensions is None else nn.Linear(
        dimensions, 4
    )


def _shared():
    layer = nn.Linear(5, 5)
    return _sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 4))


def _shared_convolution():
    layer = nn.Conv2d(3, 3, 3, padding=1)
    return _sequential(layer, nn.Tanh(), layer, nn.Tanh(), *_pool(3), inputs=_image())


def _shared_norm():
    norm = nn.LayerNorm(5)
    return _sequential(nn.Linear(5, 5), norm, nn.Tanh(), nn.Linear(5, 5), norm, nn.Linear(5, 4))


def _parametrized():
    model, batch = _sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    nn.utils.parametrizations.weight_norm(model[0])
    return model, batch


def _attention(batch_first, cross=False, weights=True):
    attention = nn.MultiheadAttention(6, 2, batch_first=batch_first, **({"kdim": None} if cross else {}))

    def forward(s, x):
        x = x if batch_first else x.transpose(0, 1)
        memory = x.flip(0 if not batch_first else 1).cos() if cross else x
        y = s.attention(x, memory, memory, need_weights=weights)[0]
        return s.out(y.mean(1 if batch_first else 0))

    return Apply(forward, attention=attention, out=nn.Linear(6, 4)), (torch.randn(N, 5, 6), _labels())


def _torch_encoder(**settings):
    layer = nn.TransformerEncoderLayer(6, 2, 9, batch_first=True, **settings)
    return Apply(lambda s, x: s.out(s.layer(x).mean(1)), layer=layer, out=nn.Linear(6, 4)), (
        torch.randn(N, 5, 6),
        _labels(),
    )


def _lora():
    base = nn.Linear(5, 6)
    base.requires_grad_(False)
    model = Apply(
        lambda s, x: s.out(torch.tanh(s.base(x) + 2.0 * s.b(s.a(x)))),
        base=base,
        a=nn.Linear(5, 2, bias=False),
        b=nn.Linear(2, 6, bias=False),
        out=nn.Linear(6, 4),
    )
    return model, (torch.randn(N, 3, 5).mean(1), _labels())


def _in_place():
    """A bare parameter that is added in place, before and after something requires a gradient."""

    def forward(s, x):
        return s.out(s.first(x).add_(s.shift).tanh())

    model = Apply(forward, first=nn.Linear(5, 6), out=nn.Linear(6, 4))
    model.shift = nn.Parameter(torch.randn(6))
    return model, (torch.randn(N, 5), _labels())


def _relative_bias():
    """T5-type: a table of biases that is looked up without a batch dimension, permuted, and shared."""

    def forward(s, x):
        where = torch.arange(4)
        bias = s.table((where[:, None] - where[None]).abs()).permute(2, 0, 1).unsqueeze(0)
        q = s.q(x).unflatten(-1, (2, 3)).transpose(1, 2)
        weights = (q @ q.mT + bias).softmax(-1)
        return s.out((weights @ q).transpose(1, 2).flatten(2).mean(1))

    return Apply(forward, table=nn.Embedding(4, 2), q=nn.Linear(6, 6), out=nn.Linear(6, 4)), (
        torch.randn(N, 4, 6),
        _labels(),
    )


def _bare():
    def forward(s, x):
        return (torch.einsum("nd,dc->nc", x, s.weight) + s.bias) / s.temperature

    model = Apply(forward)
    model.weight, model.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(4))
    model.temperature = nn.Parameter(torch.tensor(2.0))
    return model, (torch.randn(N, 5), _labels())


def _einsums():
    """Weights of two and three dimensions, of which some are summed over; `...`; one weight in two products."""

    def forward(s, x):
        heads = torch.einsum("...d,dhk->...hk", x, s.up).tanh()
        y = torch.einsum("bthk,hkd->tbd", heads, s.down)
        y = torch.einsum("ce, tbc -> tbe", s.square, torch.einsum("tbc,ce->tbe", y, s.square).tanh())
        return s.out(y.mean(0))

    shapes = {"up": (5, 2, 3), "down": (2, 3, 5), "square": (5, 5)}
    weights = {name: nn.Parameter(torch.randn(*shape) * 0.5) for name, shape in shapes.items()}
    return Apply(forward, **weights, out=nn.Linear(5, 4)), (torch.randn(N, 3, 5), _labels())


def _indexed():
    """Rows of a parameter by their number: with repeats, from the end, along sequences."""

    def forward(s, ids):
        found = s.table[ids].mean(1) + s.table[ids[:, 0] - 9] + s.table.index_select(0, ids[:, 1])
        return s.out(found + torch.index_select(s.table, dim=0, index=ids.flatten()).view(*ids.shape, -1).sum(1))

    return Apply(forward, table=nn.Parameter(torch.randn(9, 5)), out=nn.Linear(5, 4)), (
        torch.randint(0, 9, (N, 6)),
        _labels(),
    )


def _filled():
    """DeepSeek-type: a new tensor is filled slice by slice, in place."""

    def forward(s, x):
        y = x.new_empty(2, len(x), 10)
        y[0, :, :3].copy_(s.left(x))
        y[..., 3:].copy_(s.right(x)).mul_(2)
        y[1, :, :3].fill_(0.5)
        return s.out(y.tanh().sum(0))

    layers = {"left": nn.Linear(5, 3), "right": nn.Linear(5, 7), "out": nn.Linear(10, 4)}
    return Apply(forward, **layers), (torch.randn(N, 5), _labels())


def _complex():
    """Rotations by complex numbers, and a Fourier transform along the positions."""

    def forward(s, x):
        y = s.inside(x)
        pairs = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(s.angles), s.angles)).flatten(-2)
        return s.out(
            (turned + torch.fft.fftn(turned, dim=(1, 2)).real + torch.fft.rfft(turned, dim=1).imag[:, :1]).mean(1)
        )

    model = Apply(forward, inside=nn.Linear(3, 8), out=nn.Linear(8, 4))
    model.register_buffer("angles", torch.rand(5, 4))
    return model, (torch.randn(N, 5, 3), _labels())


def _picked():
    """Positions by a list, by a mask with one for each example, by each example's own row; zeros around them."""

    def forward(s, x, length):
        y = F.pad(s.inside(x).tanh(), (0, 0, 1, 2, 0, 0))
        last = torch.arange(y.shape[1]) == length[:, None]
        own = torch.arange(len(x))[:, None]
        return s.out(y[..., [-2, 1], :].sum(1) + y[last, :] + y[last] * length[own])

    batch = {"x": torch.randn(N, 5, 3), "length": torch.randint(1, 5, (N,)), "labels": _labels()}
    return Apply(forward, inside=nn.Linear(3, 6), out=nn.Linear(6, 4)), batch


def _blocks():
    """A matrix for each head: of rows, of sequences, in einsums in both orders, shared by two uses."""

    def forward(s, x):
        y = s.inside(x)  # (N, 4, 6)
        heads = y.unflatten(-1, (2, 3))
        z = torch.baddbmm(s.bias[:, None], heads.permute(2, 0, 1, 3).flatten(1, 2), s.weight).view(2, len(x), 4, 5)
        z = z.permute(1, 0, 2, 3) + heads.transpose(1, 2) @ s.weight + torch.einsum("bthd,hed->bhte", heads, s.other)
        z = (
            z
            + torch.einsum("hed,bthd->bhte", s.once, heads)
            + torch.bmm(heads[:, 0].transpose(0, 1), s.last).transpose(0, 1)[:, :, None]
        )
        return s.out(z.tanh().sum((1, 2)))

    draw = lambda *shape: nn.Parameter(torch.randn(*shape))  # noqa: E731
    parts = {
        "weight": draw(2, 3, 5),
        "bias": draw(2, 5),
        "other": draw(2, 5, 3),
        "once": draw(2, 5, 3),
        "last": draw(2, 3, 5),
    }
    return Apply(forward, inside=nn.Linear(5, 6), **parts, out=nn.Linear(5, 4)), (torch.randn(N, 4, 5), _labels())


def _solved():
    """A triangular system for each example."""

    def forward(s, x):
        matrix = s.matrix(x).view(-1, 3, 3).tril(-1) + torch.eye(3)
        found = torch.linalg.solve_triangular(matrix, s.right(x)[..., None], upper=False)
        return s.out(found[..., 0])

    layers = {"matrix": nn.Linear(5, 9), "right": nn.Linear(5, 3), "out": nn.Linear(3, 4)}
    return Apply(forward, **layers), (torch.randn(N, 5), _labels())


def _masked_windows():
    """Swin-type: a table of biases and a mask for each window are added before they meet the examples' windows."""

    def forward(s, x):
        n = len(x)
        y = s.inside(x).view(n * 2, 4, 2, 3).transpose(1, 2)
        mask = torch.stack([torch.zeros(4, 4), torch.eye(4) * -9])[:, None]
        mask = mask[None].expand(n, -1, -1, -1, -1).reshape(-1, 1, 4, 4)
        y = F.scaled_dot_product_attention(y, y, y, s.table[torch.arange(16) % 7].view(1, 1, 4, 4) + mask)
        return s.out(y.transpose(1, 2).reshape(n, 8, 6).mean(1))

    parts = {"inside": nn.Linear(5, 6), "table": nn.Parameter(torch.randn(7, 1)), "out": nn.Linear(6, 4)}
    return Apply(forward, **parts), (torch.randn(N, 8, 5), _labels())


def _cells():
    def forward(s, x):
        state, hidden = None, None
        for step in x.unbind(1):
            state = s.lstm(step, state)
            hidden = s.gru(state[0], hidden)
        return s.out(s.rnn(hidden))

    cells = {"lstm": nn.LSTMCell(5, 6), "gru": nn.GRUCell(6, 6), "rnn": nn.RNNCell(6, 6), "out": nn.Linear(6, 4)}
    return Apply(forward, **cells), (torch.randn(N, 3, 5), _labels())


def _norms():
    model, batch = _sequential(
        nn.Conv2d(3, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 1),
        nn.InstanceNorm2d(4, affine=True),
        nn.Tanh(),
        nn.Conv2d(4, 4, 1),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.PReLU(4),
        *_pool(4),
        inputs=_image(),
    )
    return model, batch


MODELS = {
    "mlp": lambda: _sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 4)),
    "no bias": lambda: _sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 4, bias=False)),
    "sequence linear": lambda: _sequential(
        nn.Linear(5, 7),
        nn.Tanh(),
        nn.Linear(7, 7),
        Apply(lambda s, x: x.sum(1)),
        nn.Linear(7, 4),
        inputs=torch.randn(N, 3, 5),
    ),
    "two position dimensions": lambda: _sequential(
        nn.Linear(5, 7), nn.Tanh(), Apply(lambda s, x: x.sum((1, 2))), nn.Linear(7, 4), inputs=torch.randn(N, 2, 3, 5)
    ),
    "conv1d": lambda: _sequential(nn.Conv1d(3, 4, 3, 2, 1), nn.Tanh(), *_pool(4), inputs=torch.randn(N, 3, 9)),
    "conv2d": lambda: _sequential(
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        nn.Tanh(),
        nn.Conv2d(6, 6, 1, groups=6),
        nn.Tanh(),
        nn.Conv2d(6, 5, 1, 2),
        nn.Tanh(),
        *_pool(5),
        inputs=_image(),
    ),
    "conv2d same": lambda: _sequential(
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Tanh(),
        nn.Conv2d(4, 4, (2, 4), padding="same"),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding="valid"),
        *_pool(4),
        inputs=_image(),
    ),
    "conv3d": lambda: _sequential(
        nn.Conv3d(2, 4, 2, padding=1), nn.Tanh(), *_pool(4), inputs=torch.randn(N, 2, 3, 4, 3)
    ),
    "transposed": lambda: _sequential(
        nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1, groups=1),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 4, 2, groups=2, dilation=2),
        nn.Tanh(),
        *_pool(4),
        inputs=_image(size=4),
    ),
    "transposed 1d and 3d": lambda: _sequential(
        nn.ConvTranspose1d(3, 2, 3, 2),
        nn.Tanh(),
        Apply(lambda s, x: x[..., :8].reshape(len(x), 2, 2, 2, 2)),
        nn.ConvTranspose3d(2, 4, 2),
        nn.Tanh(),
        *_pool(4),
        inputs=torch.randn(N, 3, 6),
    ),
    "norms": _norms,
    "rms norm": lambda: _sequential(nn.Linear(5, 6), nn.RMSNorm(6), nn.Tanh(), Rms(6), nn.Linear(6, 4)),
    "layer norm over two": lambda: _sequential(
        nn.LayerNorm([3, 5]), nn.Flatten(), nn.Linear(15, 4), inputs=torch.randn(N, 3, 5)
    ),
    "batch norm 1d": lambda: _sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)),
    "embedding": lambda: _sequential(
        nn.Embedding(9, 5, padding_idx=2),
        Apply(lambda s, x: x.tanh().sum(1)),
        nn.Linear(5, 4),
        inputs=torch.randint(0, 9, (N, 6)),
    ),
    "negative padding": lambda: _sequential(
        nn.Embedding(9, 5, padding_idx=-1),
        Apply(lambda s, x: x.tanh().sum(1)),
        nn.Linear(5, 4),
        inputs=torch.randint(0, 9, (N, 6)),
    ),
    "resnet": resnet,
    "encoder": encoder,
    "decoder": decoder,
    "untied decoder": lambda: decoder(tie=False),
    "checkpointed": lambda: decoder(way="plain"),
    "re-entrant checkpointed": lambda: decoder(way="reentrant"),
    "shared and re-entrant checkpointed": lambda: (Recurrent(), (torch.randn(N, 5), _labels())),
    "attention": lambda: _attention(True),
    "attention, positions first": lambda: _attention(False),
    "attention without weights": lambda: _attention(True, weights=False),
    "cross attention": lambda: _attention(True, cross=True),
    "cross attention, positions first": lambda: _attention(False, cross=True),
    "torch encoder layer": lambda: _torch_encoder(),
    "torch encoder layer, norm first": lambda: _torch_encoder(norm_first=True),
    "hf conv1d": lambda: _sequential(
        Conv1D(7, 5), nn.Tanh(), Conv1D(7, 7), Apply(lambda s, x: x.sum(1)), Conv1D(4, 7), inputs=torch.randn(N, 3, 5)
    ),
    "patches": lambda: (Patches(), (_image(), _labels())),
    "windows": lambda: (Windows(), (_image(), _labels())),
    "shared linear": _shared,
    "shared convolution": _shared_convolution,
    "shared norm": _shared_norm,
    "lora": _lora,
    "in place": _in_place,
    "parametrization": _parametrized,
    "relative bias": _relative_bias,
    "bare parameters": _bare,
    "einsums": _einsums,
    "indexed": _indexed,
    "filled": _filled,
    "complex": _complex,
    "picked": _picked,
    "blocks": _blocks,
    "solved": _solved,
    "masked windows": _masked_windows,
    "cells": _cells,
    "lstm": lambda: (Hidden(nn.LSTM), (torch.randn(N, 3, 5), _labels())),
    "gru": lambda: (Hidden(nn.GRU), (torch.randn(N, 3, 5), _labels())),
    "embedding bag": lambda: _sequential(nn.EmbeddingBag(9, 5), nn.Linear(5, 4), inputs=torch.randint(0, 9, (N, 6))),
}
"""Everything in these has a rule."""

PARTLY = {
    "experts": lambda: (Experts(), (torch.randn(N, 5, 6), _labels())),
    "bilinear": lambda: (
        Apply(lambda s, x: s.b(x, x.cos()), b=nn.Bilinear(5, 5, 4)),
        (torch.randn(N, 5), _labels()),
    ),
}
"""Something in these is left to the loop."""


def build(name, dtype=torch.float32):
    """A model in evaluation mode and its batch, in this type, the same every time."""
    torch.manual_seed(0)
    model, batch = {**MODELS, **PARTLY}[name]()
    cast = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    batch = {k: cast(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(cast(t) for t in batch)
    return model.to(dtype), batch


def split(batch, size):
    """A batch in parts."""
    parts = range(0, N, size)
    if isinstance(batch, dict):
        return [{k: v[i : i + size] for k, v in batch.items()} for i in parts]
    return [tuple(t[i : i + size] for t in batch) for i in parts]
