"""Ordinary training scripts for which order and shapes alone would give wrong names: refused, or right by the values.

Each script trains for real; the importance under every name must be the state of the parameter of that name.
"""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import squisher
from squisher.errors import NamingError
from squisher.recycle.formats import model_source

WIDTH = 32


def body(layers=4, bias=True):
    """Layers of one shape, after which every order of them fits."""
    modules = [nn.Linear(WIDTH, WIDTH, bias=bias) if k % 2 == 0 else nn.ReLU() for k in range(2 * layers)]
    return nn.Sequential(*modules, nn.Linear(WIDTH, 5))


def train(model, optimizer, steps=40, loss=None):
    torch.manual_seed(0)
    target = torch.randn(WIDTH, 5)
    for _ in range(steps):
        x = torch.randn(16, WIDTH)
        optimizer.zero_grad()
        value = loss() if loss else functional.cross_entropy(model(x), (x @ target).argmax(1))
        value.backward()
        optimizer.step()


def saved(path, model, optimizer, **more):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)
    return path


def right(imp, model, optimizer, names=lambda n: n):
    """Whether every importance is that of the parameter of its name."""
    own = {names(name): p for name, p in model.named_parameters()}
    assert len(imp) == sum(bool(optimizer.state.get(p)) for p in own.values())
    states = {name: optimizer.state[own[name]] for name in imp}
    return all(
        torch.equal(imp[name], s["exp_avg_sq" if "exp_avg_sq" in s else "square_avg"]) for name, s in states.items()
    )


def layers_of(model):
    return [list(m.parameters()) for m in model if isinstance(m, nn.Linear)]


def reversed_layers(model):
    return [{"params": p, "lr": 1e-3 * 0.9**k} for k, p in enumerate(reversed(layers_of(model)))]


def optimized(groups, kind=torch.optim.Adam):
    return kind(groups, lr=2e-3)


# -- several groups --------------------------------------------------------------------------------------------------------


def test_learning_rates_per_layer_with_the_top_layer_first(tmp_path):
    """The values say which layer is which; without first moments nothing does."""
    torch.manual_seed(1)
    model = body()
    optimizer = optimized(reversed_layers(model))
    train(model, optimizer)
    imp = squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False)
    assert right(imp, model, optimizer)
    assert "proven" in str(imp.provenance.naming)
    blind = optimized(reversed_layers(model), torch.optim.RMSprop)
    train(model, blind)
    with pytest.raises(NamingError, match="assignments fit.*values"):
        squisher.extract(saved(tmp_path / "d.pt", model, blind))


class Attention(nn.Module):
    """Four projections of one shape."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        x = x.reshape(4, 4, WIDTH)
        return x + self.o(functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Stack(nn.Module):
    """Attention layers and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).reshape(16, WIDTH)
        return self.head(x)


@pytest.mark.parametrize("order", ["qkvo", "okvq", "vqok"])
def test_one_group_per_projection(tmp_path, order):
    model = Stack()
    groups = [{"params": [getattr(layer, n).weight for layer in model.layers]} for n in order]
    optimizer = optimized([*groups, {"params": list(model.head.parameters())}])
    train(model, optimizer)
    path = saved(tmp_path / "c.pt", model, optimizer)
    assert right_or_refused(path, model, optimizer)


def right_or_refused(path, model, optimizer, **options):
    try:
        imp = squisher.extract(path, bias_correction=False, **options)
    except NamingError:
        return True
    return right(imp, model, optimizer)


class Towers(nn.Module):
    """Two encoders of one shape."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = body(2), body(2), nn.Linear(10, 5)

    def forward(self, x):
        return self.head(torch.cat([self.left(x), self.right(x.flip(1))], 1))


def test_twin_towers_with_the_second_first(tmp_path):
    model = Towers()
    groups = [model.head, model.right, model.left]
    optimizer = optimized([{"params": list(m.parameters()), "lr": 1e-3 * (k + 1)} for k, m in enumerate(groups)])
    train(model, optimizer)
    imp = squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False)
    assert right(imp, model, optimizer)


def test_gradual_unfreezing(tmp_path):
    """Layers join from the top; the values of those that were trained for long decide, or nothing does."""
    model = body()
    layers = layers_of(model)
    optimizer = optimized(layers[-1])
    for layer in reversed(layers[:-1]):
        train(model, optimizer, 10)
        optimizer.add_param_group({"params": layer})
    train(model, optimizer, 10)
    assert right_or_refused(saved(tmp_path / "c.pt", model, optimizer), model, optimizer)


@pytest.mark.parametrize("tower", [False, True])
def test_backbone_finetuning_of_lightning(tmp_path, tower):
    """The callback gives the optimizer the head first and adds the backbone later."""
    model = nn.ModuleDict({"backbone": body(3), "head": body(3) if tower else nn.Linear(5, 5)})
    model.forward = lambda x: functional.pad(model["backbone"](x), (0, WIDTH - 5))
    net = (lambda x: model["head"](functional.pad(model["backbone"](x), (0, WIDTH - 5)))) if tower else (
        lambda x: model["head"](model["backbone"](x))
    )  # fmt: skip
    optimizer = optimized(list(model["head"].parameters()))
    train(net, optimizer, 10)
    optimizer.add_param_group({"params": list(model["backbone"].parameters()), "lr": 1e-4})
    train(net, optimizer, 20)
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}
    torch.save(content, tmp_path / "last.ckpt")
    assert right_or_refused(tmp_path / "last.ckpt", model, optimizer)


def test_embeddings_in_a_group_of_their_own(tmp_path):
    """Input and output embedding have one shape: which one is in the first group?"""
    model = nn.ModuleDict({"wte": nn.Embedding(40, WIDTH), "body": body(2), "head": nn.Linear(WIDTH, 40, bias=False)})
    del model["body"][-1]
    tokens = torch.randint(40, (64,))

    def loss():
        return functional.cross_entropy(model["head"](model["body"](model["wte"](tokens))), tokens.roll(1))

    for first in ("wte", "head"):
        rest = [p for name, m in model.items() if name != first for p in m.parameters()]
        optimizer = optimized([{"params": list(model[first].parameters())}, {"params": rest}])
        train(model, optimizer, 30, loss)
        assert right_or_refused(saved(tmp_path / f"{first}.pt", model, optimizer), model, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_groups_of_a_distributed_checkpoint_in_another_order(tmp_path):
    model = body()
    optimizer = optimized(reversed_layers(model))
    train(model, optimizer, 10)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(tree, checkpoint_id=tmp_path / "c", no_dist=True)
    assert right_or_refused(tmp_path / "c", model, optimizer)


class Lora(nn.Module):
    """A frozen layer with a low-rank change."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return functional.relu(self.base(x) + self.lora_B(self.lora_A(x)))


@pytest.mark.parametrize("b_first", [False, True])
def test_lora_plus_has_one_division_into_groups(tmp_path, b_first):
    model = nn.Sequential(Lora(), Lora(), Lora(), nn.Linear(WIDTH, 5).requires_grad_(False))
    parts = [[getattr(m, n).weight for m in list(model)[:3]] for n in ("lora_A", "lora_B")]
    optimizer = optimized([{"params": part, "lr": 1e-3} for part in (parts[::-1] if b_first else parts)])
    train(model, optimizer, 5)
    imp = squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False)
    assert right(imp, model, optimizer)


def norm_weight_decay(model, norms=(nn.LayerNorm, nn.BatchNorm2d, nn.GroupNorm)):
    """The groups of torchvision's references with --norm-weight-decay: everything else, then the norms."""
    other, own = [], []
    for module in model.modules():
        for p in module.parameters(recurse=False):
            (own if isinstance(module, norms) else other).append(p)
    return [{"params": other}, {"params": own, "weight_decay": 0.0}]


class Block(nn.Module):
    """A transformer's feed-forward block: norms and biases of one length."""

    def __init__(self):
        super().__init__()
        self.norm1, self.fc1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(self.norm2(functional.relu(self.fc1(self.norm1(x)))))


@pytest.mark.parametrize("head_bias", [True, False])
@pytest.mark.parametrize("swapped", [True, False])
def test_norms_in_a_group_of_their_own(tmp_path, head_bias, swapped):
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 5, bias=head_bias))
    groups = norm_weight_decay(model)
    optimizer = optimized(groups[::-1] if swapped else groups)
    train(model, optimizer)
    assert right_or_refused(saved(tmp_path / "c.pt", model, optimizer), model, optimizer)


# -- evidence in the source ------------------------------------------------------------------------------------------------


def test_weights_sorted_as_text_are_no_order(tmp_path):
    """A dictionary that runs 0, 1, 10, 11, 2 was sorted, and says nothing about the module's order."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12)), nn.Linear(WIDTH, 5))
    optimizer = optimized(model.parameters(), torch.optim.RMSprop)
    train(model, optimizer, 3)
    by_name = dict(sorted(model.state_dict().items()))
    torch.save({"model": by_name, "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    with pytest.raises(NamingError, match="sorted by name"):
        squisher.extract(tmp_path / "c.pt")
    (tmp_path / "names.txt").write_text("\n".join(name for name, _ in model.named_parameters()))
    assert right(
        squisher.extract(tmp_path / "c.pt", names=tmp_path / "names.txt", bias_correction=False), model, optimizer
    )


def test_a_bias_before_its_weight_is_no_order_either(tmp_path):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer = optimized(model.parameters(), torch.optim.RMSprop)
    train(model, optimizer, 3, lambda: model(torch.randn(4, WIDTH)).square().mean())
    by_name = dict(sorted(model.state_dict().items()))
    torch.save({"model": by_name, "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    assert right_or_refused(tmp_path / "c.pt", model, optimizer)


def test_names_recorded_in_a_submodule_get_its_path(tmp_path):
    model = nn.ModuleDict({"encoder": body(2), "head": nn.Linear(5, 5)})
    encoder = model["encoder"]
    optimizer = torch.optim.AdamW(encoder.named_parameters())
    train(encoder, optimizer, 3)
    imp = squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False)
    assert right(imp, encoder, optimizer, lambda n: f"encoder.{n}")
    twins = nn.ModuleDict({"encoder": encoder, "teacher": body(2)})
    with pytest.raises(NamingError, match=r"'encoder\.'.*'teacher\.'"):
        squisher.extract(saved(tmp_path / "d.pt", twins, optimizer))


def test_weights_of_a_pickled_module_have_their_paths(tmp_path):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = optimized(model[2].parameters())
    train(model, optimizer, 3, lambda: model(torch.randn(4, WIDTH)).square().mean())
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    with pytest.raises(NamingError, match=r"'0\.weight'.*'2\.weight'"):
        squisher.extract(tmp_path / "c.pt")
    imp = squisher.extract(tmp_path / "c.pt", trainable=r"^2\.", bias_correction=False)
    assert right(imp, model, optimizer)


class Vit(nn.Module):
    """Two layers as transformers 4 registers them: norms after the feed-forward layers; version 5 has them before."""

    def __init__(self, norms_first):
        super().__init__()
        self.layer = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layer:
            layer.attention = nn.Linear(WIDTH, WIDTH)
            for part in ("norm", "mlp") if norms_first else ("mlp", "norm"):
                setattr(layer, part, nn.LayerNorm(WIDTH) if part == "norm" else nn.Linear(WIDTH, WIDTH, bias=False))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.layer:
            x = layer.norm(x + layer.mlp(functional.relu(layer.attention(x))))
        return self.head(x)


def trainer_folder(tmp_path, monkeypatch, built, weights, optimizer, file="model.safetensors"):
    """A folder of the Trainer whose config.json describes the model that the installed version builds."""
    folder = tmp_path / "checkpoint-9"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Any"], "transformers_version": "4.40.0"}))
    save_file(weights, folder / file) if file.endswith("safetensors") else torch.save(weights, folder / file)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    monkeypatch.setattr(model_source, "meta_model", lambda _: built.to("meta"))
    monkeypatch.setattr(model_source, "built_by", lambda _: "")
    return folder


def test_the_order_of_a_torch_weight_file_is_the_one_of_the_version_that_trained(tmp_path, monkeypatch):
    model = Vit(norms_first=False)
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": vectors},
    ]  # as the Trainer makes them
    optimizer = optimized(groups, torch.optim.RMSprop)
    train(model, optimizer, 3)
    weights = model.state_dict()
    folder = trainer_folder(tmp_path, monkeypatch, Vit(norms_first=True), weights, optimizer, "pytorch_model.bin")
    assert right(squisher.extract(folder, bias_correction=False), model, optimizer)


def test_tensors_that_the_model_of_the_config_lacks_may_be_the_trained_ones(tmp_path, monkeypatch):
    """The class that was trained has another head; the config's has one of its shape, which was frozen."""
    model = nn.ModuleDict({"pooler": nn.Linear(WIDTH, WIDTH), "projection": nn.Linear(WIDTH, WIDTH)})
    optimizer = optimized(model["projection"].parameters(), torch.optim.RMSprop)
    train(model["projection"], optimizer, 3, lambda: model["projection"](torch.randn(4, WIDTH)).square().mean())
    built = nn.ModuleDict({"pooler": nn.Linear(WIDTH, WIDTH)})
    folder = trainer_folder(tmp_path, monkeypatch, built, model.state_dict(), optimizer)
    with pytest.raises(NamingError, match=r"'pooler\.weight'.*'projection\.weight'"):
        squisher.extract(folder)
    imp = squisher.extract(folder, trainable="projection", bias_correction=False)
    assert right(imp, model, optimizer)


def test_a_dense_layer_of_sentence_transformers_is_not_the_pooler(tmp_path, monkeypatch):
    dense = nn.Linear(WIDTH, WIDTH)
    optimizer = optimized(dense.parameters(), torch.optim.RMSprop)
    train(dense, optimizer, 3, lambda: dense(torch.randn(4, WIDTH)).square().mean())
    built = nn.ModuleDict({"pooler": nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})})
    folder = trainer_folder(tmp_path, monkeypatch, built, built.state_dict(), optimizer)
    (folder / "2_Dense").mkdir()
    save_file({f"linear.{name}": t for name, t in dense.state_dict().items()}, folder / "2_Dense" / "model.safetensors")
    modules = [{"idx": 0, "name": "0", "path": ""}, {"idx": 2, "name": "2", "path": "2_Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(NamingError, match=r"'pooler\.dense\.weight'.*'2\.linear\.weight'"):
        squisher.extract(folder)


def test_a_sibling_checkpoint_does_not_prove_an_order_of_groups(tmp_path, monkeypatch):
    """What changed was trained; which group it is in, the sibling does not say."""
    model = body()
    optimizer = optimized(reversed_layers(model), torch.optim.RMSprop)
    folder = trainer_folder(tmp_path, monkeypatch, body(), model.state_dict(), optimizer)
    train(model, optimizer, 5)
    later = tmp_path / "checkpoint-19"
    later.mkdir()
    save_file(model.state_dict(), later / "model.safetensors")
    (later / "config.json").write_text((folder / "config.json").read_text())
    torch.save(optimizer.state_dict(), later / "optimizer.pt")
    with pytest.raises(NamingError, match="Several assignments fit"):
        squisher.extract(later)
    moving = optimized(reversed_layers(model))
    train(model, moving, 5)
    save_file(model.state_dict(), later / "model.safetensors")
    torch.save(moving.state_dict(), later / "optimizer.pt")
    imp = squisher.extract(later, bias_correction=False)
    assert right(imp, model, moving)
    assert "movement" in str(imp.provenance.naming)


# -- an exact fit that hides others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["last.ckpt", "accelerate"])
def test_a_frozen_teacher_of_the_same_shape(tmp_path, file):
    """The student and its projection are trained; the teacher is one module with just these shapes."""
    student, projection, teacher = body(2), nn.Linear(5, 5), nn.Sequential(*body(2), nn.Linear(5, 5))
    model = nn.ModuleDict({"student": student, "projection": projection, "teacher": teacher.requires_grad_(False)})
    optimizer = optimized([*student.parameters(), *projection.parameters()])
    x = torch.randn(64, WIDTH)
    train(model, optimizer, 30, lambda: functional.mse_loss(projection(student(x)), teacher(x)))
    if file == "accelerate":
        path = tmp_path / file
        path.mkdir()
        torch.save(
            nn.ModuleDict({"student": student, "projection": projection}).state_dict(), path / "pytorch_model.bin"
        )
        torch.save(teacher.state_dict(), path / "pytorch_model_1.bin")
        torch.save(optimizer.state_dict(), path / "optimizer.bin")
    else:
        path = tmp_path / file
        content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}
        torch.save(content, path)
    assert right_or_refused(path, model, optimizer)


# -- names by the user -------------------------------------------------------------------------------------------------------


def test_given_names_that_contradict_shapes_or_values(tmp_path):
    torch.manual_seed(1)
    model = body()
    optimizer = optimized(model.parameters())
    train(model, optimizer)
    path = saved(tmp_path / "c.pt", model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    assert right(squisher.extract(path, names=names, bias_correction=False), model, optimizer)
    swapped = [names[1], names[0], *names[2:]]
    with pytest.raises(NamingError, match=r"parameter 0 .*\(32, 32\).*'0.bias'"):
        squisher.extract(path, names=swapped)
    rotated = [*names[2:8], *names[:2], *names[8:]]
    with pytest.raises(NamingError, match="contradict"):
        squisher.extract(path, names=rotated)


def test_layers_of_one_group_from_the_top(tmp_path):
    """One group, but not in the order of the model: shapes fit, values do not."""
    torch.manual_seed(1)
    model = body()
    layers = layers_of(model)
    optimizer = optimized([p for layer in [*reversed(layers[:-1]), layers[-1]] for p in layer])
    train(model, optimizer)
    with pytest.raises(NamingError, match="contradict"):
        squisher.extract(saved(tmp_path / "c.pt", model, optimizer))


def test_random_groups_are_right_or_refused(tmp_path):
    """Any division into groups, in any order, each group in the model's order or not."""
    torch.manual_seed(2)
    model = body()
    parameters = list(model.parameters())
    draw = random.Random(0)
    for trial in range(12):
        count = draw.randint(1, 4)
        groups = [[] for _ in range(count)]
        order = parameters if trial % 2 else draw.sample(parameters, len(parameters))
        for p in order:
            groups[draw.randrange(count)].append(p)
        optimizer = optimized([{"params": group} for group in groups if group])
        train(model, optimizer, 25)
        assert right_or_refused(saved(tmp_path / f"{trial}.pt", model, optimizer), model, optimizer)


# -- parts of one shape, handed over in another order in one group ------------------------------------------------------------


def exchanged_towers(model):
    return [*model.right.parameters(), *model.left.parameters(), *model.head.parameters()]


@pytest.mark.parametrize(
    ("kind", "steps"), [(torch.optim.AdamW, 1), (torch.optim.AdamW, 40), (torch.optim.RMSprop, 200)]
)
def test_towers_that_are_exchanged_in_one_group(tmp_path, kind, steps):
    """Every shape fits; the sums over whole towers speak against it, with first moments and without them."""
    torch.manual_seed(2)
    model = Towers()
    ordinary = optimized(model.parameters(), kind)
    train(model, ordinary, steps)
    assert right(squisher.extract(saved(tmp_path / "c.pt", model, ordinary), bias_correction=False), model, ordinary)
    torch.manual_seed(2)
    model = Towers()
    hostile = optimized(exchanged_towers(model), kind)
    train(model, hostile, steps)
    with pytest.raises(NamingError, match="contradict.*--names"):
        squisher.extract(saved(tmp_path / "d.pt", model, hostile))
    names = [n for part in ("right", "left", "head") for n, _ in model.named_parameters() if n.startswith(part)]
    assert right(squisher.extract(tmp_path / "d.pt", names=names, bias_correction=False), model, hostile)


@pytest.mark.parametrize("seed", [4, 6, 15, 20, 23, 37, 57, 69, 1070])
def test_a_slice_of_the_scripts_made_to_mislead(tmp_path, seed):
    """The whole is `benchmarks/naming_scripts.py`."""
    from benchmarks import naming_scripts

    found = naming_scripts.run(seed)
    assert found["outcome"] == "right" if found["ordinary"] else found["outcome"] != "wrong", found


@pytest.mark.parametrize(("decay", "steps"), [(1.0, 1), (1.0, 40), (0.0, 300)])
def test_twins_in_order_do_not_look_exchanged(tmp_path, decay, steps):
    """With decay in the gradient the first moment is nearly the weight, so that weight times moment of twins is symmetric."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, 24), "b": nn.Linear(WIDTH, 24), "head": nn.Linear(48, 5)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=decay)
    net = lambda x: model["head"](functional.relu(torch.cat([model["a"](x), model["b"](x)], 1)))  # noqa: E731
    train(net, optimizer, steps)
    assert right(squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False), model, optimizer)


# -- what is no weight of the model ------------------------------------------------------------------------------------------


def stepped(parameters, loss, rate=1e-2):
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return optimizer


def test_an_entropy_coefficient_is_not_the_bias_of_its_shape(tmp_path):
    """It is named where it stands in the file; a number alone fits every number."""
    critic, coefficient = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), nn.Parameter(torch.zeros(1))
    state = stepped([coefficient], lambda: (coefficient.exp() - 0.3 * coefficient).sum()).state_dict()
    path = tmp_path / "c.pt"
    torch.save({"critic": critic.state_dict(), "log_alpha": coefficient.detach(), "alpha_optimizer": state}, path)
    assert list(squisher.extract(path)) == ["log_alpha"]
    torch.save({"critic": critic.state_dict(), "alpha_optimizer": state}, path)
    with pytest.raises(NamingError, match="single number"):
        squisher.extract(path)


def test_a_prompt_beside_a_frozen_model(tmp_path):
    model, prompt = nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 5)), nn.Parameter(torch.randn(16, WIDTH))
    optimizer = stepped([prompt], lambda: model[1](model[0].weight.detach() + prompt).square().sum())
    path = tmp_path / "c.pt"
    torch.save({"model": model.state_dict(), "prompt": prompt.data, "optimizer": optimizer.state_dict()}, path)
    with pytest.raises(NamingError, match="'0.weight'.*'prompt'"):
        squisher.extract(path)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_a_projector_that_was_not_saved(tmp_path, kind):
    """The frozen layer of its shape is as it was begun, so that the steps are not its."""
    torch.manual_seed(0)
    backbone, head = body(2), nn.Linear(WIDTH, 4)
    projector = nn.Linear(WIDTH, WIDTH)
    optimizer = kind([*projector.parameters(), *head.parameters()], lr=1e-3)
    frozen = backbone[:3].requires_grad_(False)
    train(None, optimizer, 60, lambda: head(torch.relu(projector(frozen(torch.randn(16, WIDTH))))).square().mean())
    path = tmp_path / "c.pt"
    content = {**{f"backbone.{n}": p for n, p in frozen.state_dict().items()}, **{f"head.{n}": p for n, p in head.state_dict().items()}}  # fmt: skip
    torch.save({"model": content, "optimizer": optimizer.state_dict()}, path)
    with pytest.raises(NamingError):
        squisher.extract(path)


def test_masks_and_noise_are_no_parameters(tmp_path):
    torch.manual_seed(0)
    model = body(2)
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.3)
    optimizer = optimized(model.parameters())
    train(model, optimizer)
    assert right(squisher.extract(saved(tmp_path / "c.pt", model, optimizer), bias_correction=False), model, optimizer)
