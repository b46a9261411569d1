"""Channels that are really gone, with Torch-Pruning; scores against their definitions."""

import math
import sys

import pytest
import torch
from torch import nn

from squisher import prune
from squisher.errors import ArgumentError, FileError, NamingError, SquisherError
from squisher.importance import Importance

pytestmark = pytest.mark.filterwarnings("ignore:::torch_pruning")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 12, 3, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.two(self.norm(self.one(x)).relu()).relu()
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.inner = nn.Conv2d(16, 10, 3, padding=1)
        self.outer = nn.Conv2d(10, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.stem(x)
        x = self.norm(x + self.outer(self.inner(x).relu()))
        return self.head(self.grouped(x).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 4, 4
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        def split(y):
            return y.view(x.shape[0], x.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(x.shape[0], x.shape[1], self.num_heads * self.head_dim)
        return self.head(x + self.out(mixed))


IMAGE = torch.randn(2, 3, 8, 8)


def made(kind):
    torch.manual_seed(0)
    model = kind().eval()
    return model, {name: torch.rand(p.shape) + 0.1 for name, p in model.named_parameters()}


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    model, fisher = made(Plain)
    with pytest.raises(SquisherError, match=r"pip install 'torch-squisher\[prune\]'"):
        prune.channels(model, fisher, IMAGE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, "below 1"),
        ({"scope": "x"}, "scope.*global or tensor"),
        ({"score": "x"}, "score is fisher"),
        ({"score": "orthoreg"}, "needs gradients="),
        ({"minimum": math.nan}, "minimum"),
        ({"minimum": 2}, "minimum"),
        ({"round_to": 0}, "round_to"),
        (
            {"score": "orthoreg", "gradients": {"one.bias": torch.full((8,), math.nan)}},
            "'one.bias' of the gradients.*NaN",
        ),
    ],
)
def test_wrong_wishes(options, message):
    model, fisher = made(Plain)
    with pytest.raises(SquisherError, match=message):
        prune.channels(model, fisher, IMAGE, **options)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value):
    model, fisher = made(Plain)
    model.two.weight.data[0, 0, 0, 0] = value
    with pytest.raises(SquisherError, match="'two.weight'.*NaN"):
        prune.channels(model, fisher, IMAGE)


@pytest.mark.formats
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("score", ["fisher", "sqrt", "importance"])
def test_importances_that_no_mean_of_squares_can_have_are_refused(score, value):
    model, fisher = made(Plain)
    fisher["one.weight"][0, 0, 0, 0] = value
    with pytest.raises(SquisherError, match="importance of 'one.weight'"):
        prune.channels(model, fisher, IMAGE, score=score)


@pytest.mark.formats
@pytest.mark.parametrize("kind", [Plain, Residual])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_shapes_shrink_and_the_model_runs(kind, scope):
    model, fisher = made(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    smaller = prune.channels(model, fisher, IMAGE, sparsity=0.5, scope=scope)
    assert smaller(IMAGE).shape == model(IMAGE).shape
    count = [sum(p.numel() for p in m.parameters()) for m in (smaller, model)]
    assert count[0] < 0.55 * count[1]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    if scope == "tensor" and kind is Plain:
        assert (smaller.one.out_channels, smaller.two.in_channels, smaller.norm.num_features) == (4, 4, 4)
        assert smaller.two.out_channels == smaller.head.in_features == 6
    if kind is Residual:
        assert smaller.stem.out_channels == smaller.outer.out_channels == smaller.grouped.in_channels
        assert smaller.grouped.groups in (1, 2, 4)
    smaller(IMAGE).sum().backward()


@pytest.mark.formats
def test_the_right_channels_go():
    model, fisher = made(Plain)
    dead = [1, 4, 6]
    for name in ("one.weight", "one.bias"):
        fisher[name][dead] = 1e-9
    smaller = prune.channels(model, fisher, IMAGE, sparsity=3 / 20)
    kept = [c for c in range(8) if c not in dead]
    assert torch.equal(smaller.one.weight, model.one.weight[kept])
    assert torch.equal(smaller.two.weight, model.two.weight[:, kept])
    assert torch.equal(smaller.norm.running_mean, model.norm.running_mean[kept])


def filter_scores(model, values, score):
    w, b = model.one.weight.detach().flatten(1), model.one.bias.detach()
    vw, vb = values["one.weight"].flatten(1), values["one.bias"]
    return {
        "fisher": 0.5 * ((w**2 * vw).sum(1) + b**2 * vb),
        "sqrt": 0.5 * ((w * vw.sqrt()).sum(1) + b * vb.sqrt()) ** 2,
        "magnitude": (w**2).sum(1) + b**2,
        "importance": vw.sum(1) + vb,
        "orthoreg": ((w * vw).sum(1) + b * vb) ** 2,
    }[score]


@pytest.mark.formats
@pytest.mark.parametrize("score", ["fisher", "sqrt", "magnitude", "importance", "orthoreg"])
def test_scores_are_what_they_are_called(score):
    model, fisher = made(Plain)
    gradients = {name: torch.randn(f.shape) for name, f in fisher.items()}
    smaller = prune.channels(
        model, fisher, IMAGE, sparsity=0.5, scope="tensor", score=score, gradients=gradients, minimum=0.0
    )
    expected = filter_scores(model, gradients if score == "orthoreg" else fisher, score)
    kept = expected.topk(4).indices.sort().values
    assert torch.equal(smaller.one.weight, model.one.weight[kept])


@pytest.mark.formats
def test_random_is_seeded_and_every_layer_keeps_its_minimum():
    model, fisher = made(Plain)
    a, b, c = (prune.channels(model, None, IMAGE, sparsity=0.5, score="random", seed=s) for s in (1, 1, 2))
    assert torch.equal(a.one.weight, b.one.weight)
    assert a.one.weight.shape != c.one.weight.shape or not torch.equal(a.one.weight, c.one.weight)
    for name in ("one.weight", "one.bias"):
        fisher[name].fill_(1e-12)
    guarded = prune.channels(model, fisher, IMAGE, sparsity=0.6, minimum=0.25)
    assert guarded.one.out_channels == 2


@pytest.mark.formats
def test_whole_heads_go():
    model, fisher = made(Attention)
    for name in ("q", "k", "v"):
        fisher[f"{name}.weight"].view(4, 4, 16)[2] = 1e-9  # the third head does not matter
        fisher[f"{name}.bias"].view(4, 4)[2] = 1e-9
    x = torch.randn(2, 5, 16)
    smaller = prune.channels(
        model, fisher, x, sparsity=0.25, heads={"q": 4, "k": 4, "v": 4}, exclude=r"^(out|head)$", minimum=0.0
    )
    assert smaller.num_heads == 3
    assert smaller.q.out_features == smaller.out.in_features == 12
    assert smaller(x).shape == model(x).shape
    kept = [i for i in range(16) if i // 4 != 2]
    assert torch.equal(smaller.q.weight, model.q.weight[kept])


@pytest.mark.formats
def test_what_does_not_fit():
    model, fisher = made(Plain)
    with pytest.raises(NamingError, match=r"'three\.weight'.*the model"):
        prune.channels(model, {**fisher, "three.weight": torch.ones(1)}, IMAGE)
    with pytest.raises(NamingError, match="'query'.*the model"):
        prune.channels(model, fisher, IMAGE, heads={"query": 2})
    with pytest.raises(SquisherError, match="example input"):
        prune.channels(model, fisher, torch.randn(2, 7))
    with pytest.raises(ArgumentError, match="regular expression"):
        prune.channels(model, fisher, IMAGE, exclude="(")
    kept = prune.channels(model, fisher, IMAGE, sparsity=0.5, scope="tensor", exclude="^one$")
    assert kept.one.out_channels == 8
    assert kept.two.out_channels == 6
    same = prune.channels(model, fisher, IMAGE, sparsity=0.0)
    assert torch.equal(same(IMAGE), model(IMAGE))


@pytest.mark.formats
def test_an_output_that_would_shrink_is_refused():
    class Softmax(Plain):
        def forward(self, x):
            return super().forward(x).log_softmax(-1)

    model, fisher = made(Softmax)
    with pytest.raises(SquisherError, match="output.*shape"):
        prune.channels(model, fisher, IMAGE, scope="tensor")
    assert prune.channels(model, fisher, IMAGE, scope="tensor", exclude="head")(IMAGE).shape == (2, 5)


# -- Hugging Face models


def hugging_face(kind, grouped=4):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=100, max_position_embeddings=32, num_labels=3, **sizes)
        model = transformers.BertForSequenceClassification(config)
    elif kind == "vit":
        model = transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **sizes)
        )
    elif kind == "tied":
        config = transformers.DistilBertConfig(
            vocab_size=100, dim=64, n_layers=2, n_heads=4, hidden_dim=128, max_position_embeddings=32
        )
        model = transformers.DistilBertForMaskedLM(config)
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=100, max_position_embeddings=32, num_key_value_heads=grouped, **sizes)
        )
    fisher = {name: torch.rand(p.shape) * (1e-9 if ".0." in name else 1.0) for name, p in model.named_parameters()}
    return model.eval(), fisher


@pytest.mark.formats
@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("kind", ["bert", "vit", "tied", "llama"])
def test_a_pruned_hugging_face_model_is_saved_and_loaded(tmp_path, kind, scope):
    model, fisher = hugging_face(kind)
    example = prune.example_input(model)
    smaller = prune.channels(model, fisher, example, sparsity=0.5, scope=scope)  # a layer of no importance keeps a head
    prune.save(smaller, tmp_path / "smaller")
    again = prune.load(tmp_path / "smaller")
    assert torch.equal(again(**example).logits, smaller(**example).logits)
    sizes = [sum(p.numel() for p in one.parameters()) for one in (model, smaller, again)]
    assert sizes[0] > sizes[1] == sizes[2]
    prune.save(again, tmp_path / "twice")
    assert torch.equal(prune.load(tmp_path / "twice")(**example).logits, smaller(**example).logits)


@pytest.mark.formats
def test_more_heads_than_there_are_cannot_go():
    model, fisher = hugging_face("bert")
    with pytest.raises(SquisherError, match=r"every head of .*query"):
        prune.channels(model, fisher, prune.example_input(model), sparsity=0.9)


@pytest.mark.formats
def test_grouped_keys_are_refused_because_they_cannot_be_followed():
    model, fisher = hugging_face("llama", grouped=2)
    with pytest.raises(SquisherError, match="grouped"):
        prune.channels(model, fisher, prune.example_input(model), sparsity=0.5)


@pytest.mark.formats
def test_heads_come_from_the_config_and_without_them_the_error_names_them():
    model, fisher = hugging_face("vit")
    assert set(prune.heads_of(model).values()) == {4}
    assert len(prune.heads_of(model)) == 6
    with pytest.raises(SquisherError, match="pruned model.*heads="):
        prune.channels(model, fisher, prune.example_input(model), sparsity=0.5, heads={})


@pytest.mark.formats
def test_the_command_shrinks_a_folder(tmp_path):
    from typer.testing import CliRunner

    from squisher.cli import app

    model, fisher = hugging_face("bert")
    model.save_pretrained(tmp_path / "model")
    Importance(fisher).save(tmp_path / "f.safetensors")
    arguments = ["--importance", str(tmp_path / "f.safetensors"), "--sparsity", "0.5", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["shrink", str(tmp_path / "model"), *arguments])
    assert result.exit_code == 0, result.output
    expected = prune.channels(model, fisher, prune.example_input(model), sparsity=0.5)
    example = prune.example_input(model)
    assert torch.equal(prune.load(tmp_path / "out")(**example).logits, expected(**example).logits)


@pytest.mark.formats
def test_what_is_no_model_of_transformers_is_refused(tmp_path):
    with pytest.raises(SquisherError, match="transformers"):
        prune.save(nn.Linear(2, 2), tmp_path / "x")
    with pytest.raises(FileError, match=r"no config\.json"):
        prune.load(tmp_path)
