"""Each rule that transformers has used, written down naively, must be found again from the state that it made."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import nn

import squisher
from squisher.errors import NamingError
from squisher.recycle.naming.conventions import galore_convention, trainer_conventions
from squisher.recycle.states import Candidate


class LlamaRMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class MistralRMSNorm(LlamaRMSNorm):
    pass


class Block(nn.Module):
    def __init__(self, norm, first, second, bias):
        super().__init__()
        setattr(self, first, norm(4))
        self.q_proj = nn.Linear(4, 4, bias=bias)
        self.k_proj = nn.Linear(4, 4, bias=bias)
        setattr(self, second, norm(4))
        self.up = nn.Linear(4, 6, bias=bias)


class Model(nn.Module):
    """Registration order and norm classes are what matters; it is never run."""

    def __init__(self, norm, names=("input_layernorm", "ln_2"), bias=False):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Block(norm, *names, bias) for _ in range(2))
        self.relative_attention_bias = nn.Embedding(3, 4)
        self.norm = norm(4)
        self.head = nn.Linear(4, 5, bias=False)


def inside(model, classes):
    """Names of parameters that are inside a module of one of these classes."""
    return {
        f"{m}.{n}"
        for m, module in model.named_modules()
        if isinstance(module, classes)
        for n, _ in module.named_parameters()
    }


def before_4_6(model, registered):
    return [n for n, _ in model.named_parameters() if not any(part in n for part in ("bias", "LayerNorm.weight"))]


def from_4_6(model, registered):
    norms = inside(model, nn.LayerNorm)
    return [n for n, _ in model.named_parameters() if n not in norms and "bias" not in n]


def from_4_24(model, registered):
    norms = inside(model, (nn.LayerNorm, *registered))
    return [n for n, _ in model.named_parameters() if n not in norms and "bias" not in n]


def from_4_49(model, registered):
    norms = inside(model, (nn.LayerNorm, *registered))
    words = ("bias", "layernorm", "rmsnorm")
    return [n for n, _ in model.named_parameters() if n not in norms and not any(w in n.lower() for w in words)]


def from_4_53(model, registered):
    norms = inside(model, nn.LayerNorm)
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    return [
        n for n, _ in model.named_parameters() if n not in norms and not any(re.search(p, n.lower()) for p in patterns)
    ]


def saved_state(model, decayed, path, seed=0):
    """An AdamW state in the Trainer's two groups, and the truth by name."""
    parameters = dict(model.named_parameters())
    groups = [[n for n in parameters if n in decayed], [n for n in parameters if n not in decayed]]
    optimizer = torch.optim.AdamW([{"params": [parameters[n] for n in names]} for names in groups])
    generator = torch.Generator().manual_seed(seed)
    for p in parameters.values():
        p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
    return {n: optimizer.state[p]["exp_avg_sq"] for n, p in parameters.items() if p in optimizer.state}


RULES = [before_4_6, from_4_6, from_4_24, from_4_49, from_4_53]
MODELS = [
    (lambda: Model(nn.LayerNorm, bias=True), ()),
    (lambda: Model(nn.LayerNorm, names=("LayerNorm", "out_norm"), bias=True), ()),
    (lambda: Model(LlamaRMSNorm), (LlamaRMSNorm,)),
    (lambda: Model(MistralRMSNorm, names=("input_layernorm", "post_attention_layernorm")), ()),
    (lambda: Model(MistralRMSNorm, bias=True), (MistralRMSNorm,)),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_every_rule_is_recovered(tmp_path, rule, number):
    make, registered = MODELS[number]
    model = make()
    truth = saved_state(model, set(rule(model, registered)), tmp_path / "optimizer.pt")
    imp = squisher.extract(tmp_path / "optimizer.pt", model, bias_correction=False, in_order=True)
    assert set(imp) == set(truth)
    for name, value in truth.items():
        assert torch.equal(imp[name], value), name


def test_frozen_parameters_inside_the_groups_have_no_state(tmp_path):
    model = Model(nn.LayerNorm, bias=True)
    for p in model.layers[0].parameters():
        p.requires_grad_(False)
    truth = saved_state(model, set(from_4_24(model, ())), tmp_path / "optimizer.pt")
    for p in model.parameters():  # the file does not say which were frozen, and need not
        p.requires_grad_(True)
    imp = squisher.extract(tmp_path / "optimizer.pt", model, bias_correction=False, in_order=True)
    assert set(imp) == set(truth)
    assert all(torch.equal(imp[name], truth[name]) for name in truth)
    assert imp.provenance.absent["layers.0.q_proj.weight"].reason == "no_gradient"


def test_with_anything_frozen_names_are_right_or_refused(tmp_path):
    draw = random.Random(0)
    right = refused = 0
    for _ in range(120):
        make, registered = draw.choice(MODELS)
        model = make()
        names = [name for name, _ in model.named_parameters()]
        kept = set(draw.sample(names, draw.randint(1, len(names))))
        decayed = {n for n in draw.choice(RULES)(model, registered) if n in kept}
        groups = [[n for n in names if n in kept and (n in decayed) == first] for first in (True, False)]
        parameters = dict(model.named_parameters())
        optimizer = torch.optim.AdamW([{"params": [parameters[n] for n in group]} for group in groups])
        for name in kept:
            parameters[name].grad = torch.rand_like(parameters[name])
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        try:
            imp = squisher.extract(tmp_path / "optimizer.pt", model, bias_correction=False, in_order=True)
        except squisher.SquisherError:
            refused += 1
            continue
        right += 1
        assert set(imp) == kept
        assert all(torch.equal(imp[n], optimizer.state[parameters[n]]["exp_avg_sq"]) for n in kept)
    assert right > 10
    assert refused > 10


def candidate(name, *classes, shape=(4, 4)):
    return Candidate(name, shape, classes)


def test_two_kinds_of_norms_of_which_one_is_registered():
    both = [
        candidate("a.weight", "m.IdeficsRMSNorm"),
        candidate("b.weight", "m.MistralRMSNorm"),
        candidate("c.weight", "m.Linear"),
    ]
    divisions = {tuple(rule(c) for c in both) for _, rule in trainer_conventions(both)}
    assert {(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)} <= divisions


def test_rules_by_class_do_not_guess_without_classes():
    answers = {
        label: rule(candidate("h.0.ln_1.weight")) for label, rule in trainer_conventions([candidate("h.0.ln_1.weight")])
    }
    assert answers["the Trainer's groups of transformers 4.6 to 4.48"] is None
    assert answers["the Trainer's groups of transformers before 4.6"] == 0


LINEAR = "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj"], [1, 0, 0, 0]),
        (["layers.0.q_proj", r".*\.up"], [1, 1, 0, 0]),
        ("all-linear", [1, 1, 1, 0]),
        (r".*proj", [1, 0, 0, 0]),
        (["("], [0, 0, 0, 0]),
    ],
)
def test_galore_targets(targets, expected):
    names = ["layers.0.q_proj.weight", "layers.0.up.weight", "lm_head.weight"]
    candidates = [candidate(name, LINEAR) for name in names] + [candidate("layers.0.q_proj_norm.weight", "m.Norm")]
    _, rule = galore_convention(targets)
    assert [rule(c) for c in candidates] == expected
    assert rule(candidate("layers.0.q_proj.bias", LINEAR)) == 0
    assert rule(candidate("layers.0.q_proj.weight")) is None


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token, self.pos_embed = (nn.Parameter(torch.randn(1, n, 24)) for n in (1, 5))
        self.patch_embed, self.blocks = nn.Linear(8, 24), nn.ModuleList(_Layer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 5)

    def forward(self, x):
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def _with_layer_decay(model, turned, tokens):
    """Groups as MAE's and BEiT's scripts make them: by layer and decay, in the order of first appearance."""
    groups = {}
    for name, p in model.named_parameters():
        layer = (
            int(name.split(".")[1]) + 1 if name.startswith("blocks") else 0 if "embed" in name or "token" in name else 5
        )
        rate = 0.65 ** (layer if turned and 0 < layer < 5 else 5 - layer)
        decayed = p.ndim > 1 and not (tokens and p.ndim == 3)
        group = {"params": [], "lr": 1e-2 * rate, "lr_scale": rate, "weight_decay": 0.05 * decayed}
        groups.setdefault((layer, decayed), group)["params"].append(p)
    return list(groups.values())


@pytest.mark.parametrize("steps", [1, 30])
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("turned", [False, True])
def test_a_rate_for_each_layer_as_mae_and_beit_set_it(tmp_path, turned, tokens, steps):
    """By shapes any layer may be any group: the convention proposes one order if the rates grow with the layers."""
    torch.manual_seed(0)
    model = _Vision()
    optimizer = torch.optim.AdamW(_with_layer_decay(model, turned, tokens))
    for _ in range(steps):
        x = torch.randn(24, 4, 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, 0, :5].argmax(1)).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    if turned:
        with pytest.raises(NamingError):
            squisher.extract(tmp_path / "c.pt")
        return
    imp = squisher.extract(tmp_path / "c.pt", bias_correction=False)
    assert all(torch.equal(imp[n], optimizer.state[p]["exp_avg_sq"]) for n, p in model.named_parameters())
