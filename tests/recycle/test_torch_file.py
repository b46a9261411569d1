"""Files that torch.save wrote, in the wrappings that training scripts make."""

import argparse
import itertools

import pytest
import torch
from torch import nn

import squisher
from squisher.errors import ArgumentError, FileError, NamingError, NoAccumulatorError, SquisherWarning
from squisher.importance.weights import content_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.register_buffer("scale", torch.ones(1))
        self.decoder = nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.embed.weight

    def forward(self, x):
        hidden = self.norm(self.conv(self.embed(x).transpose(1, 2))).mean(-1) * self.scale
        return self.head(hidden) + self.decoder(hidden)


def trained(make_optimizer):
    torch.manual_seed(0)
    model = Net()
    optimizer = make_optimizer(model)
    for _ in range(4):
        x = torch.randint(0, 7, (8, 5))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, 0]).backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def run():
    return trained(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))


def check(path, module, optimizer, **options):
    imp = squisher.extract(path, **options)
    live = squisher.extract(optimizer, module)
    assert set(imp) == set(live)
    for name in live:
        assert torch.equal(imp[name], live[name])
        assert torch.equal(torch.cat(list(imp.chunks(name, 5))), live[name].flatten())
    assert imp.provenance.steps == live.provenance.steps
    assert imp.provenance.optimizer["beta2"] == 0.999
    return imp


WRAPPINGS = {
    "model and optimizer": lambda m, o: {"model": m.state_dict(), "optimizer": o.state_dict(), "epoch": 3},
    "the PyTorch tutorial": lambda m, o: {"model_state_dict": m.state_dict(), "optimizer_state_dict": o.state_dict(), "loss": 0.1},
    "timm, with a namespace": lambda m, o: {"state_dict": m.state_dict(), "optimizer": o.state_dict(), "args": argparse.Namespace(lr=1)},
    "a list of optimizers": lambda m, o: {"state_dict": m.state_dict(), "optimizers": [o.state_dict()]},
    "deep inside": lambda m, o: {"x": [{"y": ({"net": m.state_dict()}, {"opt": {"inner": o.state_dict()}})}]},
    "a module's own state among its weights": lambda m, o: {
        "model": {**m.state_dict(), "conv._extra_state": {"amax": torch.ones(2), "scale": torch.ones(2)}, "_extra_state": None},
        "optimizer": o.state_dict(),
    },
    "compiled and parallel": lambda m, o: {
        "model": {f"module._orig_mod.{k}": v for k, v in m.state_dict().items()}, "optimizer": o.state_dict(),
    },
}  # fmt: skip


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("zipped", [True, False])
def test_wrappings(tmp_path, run, wrapping, zipped):
    path = tmp_path / "checkpoint.pt"
    torch.save(WRAPPINGS[wrapping](*run), path, _use_new_zipfile_serialization=zipped)
    imp = check(path, *run)
    assert str(imp.provenance.naming).startswith("convention: the weights under")
    assert imp.provenance.tied == {"decoder.weight": "embed.weight"}


def test_a_bare_state_needs_names_and_takes_them_from_a_list_a_file_or_the_model(tmp_path, run):
    path = tmp_path / "optimizer.pt"
    torch.save(run[1].state_dict(), path)
    with pytest.raises(NamingError, match="records no names"):
        squisher.extract(path)
    names = [name for name, _ in run[0].named_parameters()]
    assert check(path, *run, names=names).provenance.naming.level == "given"
    (tmp_path / "names.txt").write_text("\n".join(names))
    check(path, *run, names=tmp_path / "names.txt")
    (tmp_path / "names.txt").write_bytes("\r\n".join(names).encode("utf-8-sig"))  # as Windows writes it
    check(path, *run, names=tmp_path / "names.txt")
    imp = check(path, *run, model=run[0])
    assert str(imp.provenance.naming) == "convention: the model, registration order in one group"


def test_recorded_names_with_shuffled_groups(tmp_path):
    def make(model):
        named = dict(model.named_parameters())
        groups = [
            ["head.bias", "conv.weight"],
            ["embed.weight"],
            ["norm.weight", "head.weight", "norm.bias", "conv.bias"],
        ]
        return torch.optim.AdamW([{"params": [(n, named[n]) for n in group]} for group in groups])

    run = trained(make)
    torch.save(run[1].state_dict(), tmp_path / "optimizer.pt")
    assert check(tmp_path / "optimizer.pt", *run).provenance.naming.level == "recorded"


def test_two_groups_by_decay(tmp_path):
    def make(model):
        parameters = list(model.parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ]
        )

    run = trained(make)
    torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, tmp_path / "c.pt")
    imp = check(tmp_path / "c.pt", *run)
    assert [g["weight_decay"] for g in imp.provenance.optimizer["groups"]] == [0.1, 0.0]


def test_frozen_parameters_are_listed_and_equal_shapes_refused(tmp_path):
    run = trained(lambda model: torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("conv")]))
    path = tmp_path / "c.pt"
    torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, path)
    # conv.bias, norm.weight and norm.bias have one shape: nobody can know which two were trained.
    with pytest.raises(NamingError, match="Several assignments fit"):
        squisher.extract(path)
    imp = check(path, *run, trainable="embed|norm|head")
    assert str(imp.provenance.naming).endswith("registration order in one group")


def test_a_pattern_that_finds_nothing_and_weights_of_another_model_are_told(tmp_path, run):
    path, wide = tmp_path / "c.pt", tmp_path / "wide.pt"
    torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, path)
    with pytest.raises(ArgumentError, match="trainable is 'encoder', which finds no parameter.*scale"):
        squisher.extract(path, trainable="encoder")
    torch.save({name: torch.cat([t, t], -1) if t.ndim else t for name, t in run[0].state_dict().items()}, wide)
    with pytest.warns(squisher.SquisherWarning, match="wide.pt lacks most parameters"):
        squisher.extract(path, base_model=wide)


def test_a_pickled_optimizer_and_model_are_never_executed(tmp_path, run):
    torch.save({"model": run[0].state_dict(), "optimizer": run[1]}, tmp_path / "c.pt")
    imp = check(tmp_path / "c.pt", *run)
    assert imp.provenance.optimizer["class"] == "AdamW"


def test_hostile_payloads_stay_inert(tmp_path, run):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict(), "x": Payload()}, tmp_path / "c.pt")
    check(tmp_path / "c.pt", *run)
    assert not (tmp_path / "owned").exists()


def test_several_optimizers_over_other_or_the_same_parameters(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizers = [torch.optim.Adam(dict(part.named_parameters(prefix=str(k))).items()) for k, part in enumerate(model)]
    model(torch.rand(4, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    path = tmp_path / "c.pt"
    torch.save({"optimizers": [o.state_dict() for o in optimizers]}, path)
    live = squisher.extract(optimizers, model)
    imp = squisher.extract(path)
    assert all(torch.equal(imp[name], live[name]) for name in live)
    assert set(squisher.extract(path, optimizer=1)) == {"1.weight", "1.bias"}
    with pytest.raises(squisher.SquisherError, match="no optimizer 2.* 2"):
        squisher.extract(path, optimizer=2)
    torch.save({"a": optimizers[0].state_dict(), "b": optimizers[0].state_dict()}, path)
    with pytest.raises(NamingError, match="0: a, 1: b.*--optimizer"):
        squisher.extract(path)


def test_refusals(tmp_path, run):
    path = tmp_path / "c.pt"
    with pytest.raises(FileError, match="no file or folder"):
        squisher.extract(path)
    torch.save(run[0].state_dict(), path)
    with pytest.raises(FileError, match="no optimizer state"):
        squisher.extract(path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(FileError, match="holds no optimizer state"):
        squisher.extract(path)
    torch.save(torch.optim.SGD(run[0].parameters(), lr=1).state_dict(), path)
    with pytest.raises(NoAccumulatorError, match="SGD keeps nothing"):
        squisher.extract(path)
    torch.save(torch.optim.AdamW(run[0].parameters()).state_dict(), path)
    with pytest.raises(NoAccumulatorError, match="has taken no step"):
        squisher.extract(path)
    saved = run[1].state_dict()
    saved["param_groups"][0]["param_names"] = ["one"]
    torch.save(saved, path)
    with pytest.raises(FileError, match="[87] parameters .*1 names"):
        squisher.extract(path)


def test_a_folder_with_an_optimizer_file_and_one_without(tmp_path, run):
    torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, tmp_path / "optimizer.pt")
    check(tmp_path, *run)
    (tmp_path / "optimizer.pt").unlink()
    (tmp_path / "weights.txt").write_text("")
    with pytest.raises(FileError, match=r"no optimizer state.*weights\.txt"):
        squisher.extract(tmp_path)


def test_nan_in_a_state_is_refused_when_saved_and_leaves_no_file(tmp_path, run):
    run[1].state[run[0].head.weight]["exp_avg_sq"][0, 0] = float("nan")
    torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, tmp_path / "c.pt")
    imp = squisher.extract(tmp_path / "c.pt")
    with pytest.raises(squisher.SquisherError, match=r"'head\.weight' has NaN"):
        imp.save(tmp_path / "out.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_factored_states_are_read_in_pieces_too(tmp_path):
    run = trained(lambda model: torch.optim.Adafactor(model.named_parameters()))
    torch.save(run[1].state_dict(), tmp_path / "o.pt")
    imp, live = squisher.extract(tmp_path / "o.pt"), squisher.extract(run[1], run[0])
    for name in live:
        assert torch.allclose(imp[name], live[name])
        assert torch.allclose(torch.cat(list(imp.chunks(name, 7))), live[name].flatten())


def test_asking_for_a_name_or_shape_reads_nothing(tmp_path, run, monkeypatch):
    torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, tmp_path / "c.pt")
    imp = squisher.extract(tmp_path / "c.pt")
    (tmp_path / "c.pt").unlink()
    assert "head.weight" in imp
    assert "head.wieght" not in imp
    assert imp.shape("head.weight") == (7, 4)
    assert len(list(imp)) == 7
    with pytest.raises(FileError, match="cannot be read"):
        imp["head.weight"]


def test_a_flipped_bit_in_the_accumulator_is_noticed(tmp_path, run):
    path = tmp_path / "c.pt"
    torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, path)
    data = bytearray(path.read_bytes())
    needle = run[1].state[run[0].conv.weight]["exp_avg_sq"].numpy().tobytes()
    data[data.index(needle) + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileError, match="checksum does not fit"):  # at the latest when it is read
        squisher.extract(path)["conv.weight"]
    with pytest.raises(FileError, match="checksum does not fit"):
        squisher.extract(path).save(tmp_path / "out.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_a_folder_with_one_checkpoint_is_read_and_with_several_refused(tmp_path, run):
    torch.save({"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, tmp_path / "ckpt.pt")
    (tmp_path / "notes.txt").write_text("")
    check(tmp_path, *run)
    torch.save({"optimizer": run[1].state_dict()}, tmp_path / "other.pth")
    with pytest.raises(FileError, match=r"ckpt\.pt, other\.pth"):
        squisher.extract(tmp_path)


# -- names that other writers record -----------------------------------------------------------------------------------


def in_order(optimizer, module):
    names = {id(p): name for name, p in module.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def shuffled(model):
    """An optimizer whose order no convention knows, so that only recorded names can be right."""
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": parameters[1::2]}, {"params": parameters[::2][::-1]}], lr=1e-3)


def test_names_by_index_in_each_state_and_by_key(tmp_path):
    model, optimizer = trained(shuffled)
    names = in_order(optimizer, model)
    bergson = optimizer.state_dict()
    for k, own in bergson["state"].items():
        own["param_name"] = names[k]
    nanotron = {**optimizer.state_dict(), "names": dict(enumerate(names))}
    for k, state in enumerate((bergson, nanotron)):
        torch.save(state, tmp_path / f"{k}.pt")
        assert check(tmp_path / f"{k}.pt", model, optimizer).provenance.naming.level == "recorded"


def test_an_optimizer_for_each_parameter_as_torchtune_steps_in_the_backward_pass(tmp_path):
    torch.manual_seed(0)
    model = Net()
    steps = {name: torch.optim.AdamW([p], lr=1e-3) for name, p in model.named_parameters()}
    for _ in range(3):
        model(torch.randint(0, 7, (8, 5))).square().mean().backward()
        for one in steps.values():
            one.step()
            one.zero_grad()
    torch.save(
        {"optimizer": {n: o.state_dict() for n, o in steps.items()}, "epochs_run": 1}, tmp_path / "recipe_state.pt"
    )
    imp = squisher.extract(tmp_path / "recipe_state.pt")
    live = squisher.extract(list(steps.values()), model)
    assert {n: t.tolist() for n, t in imp.items()} == {n: t.tolist() for n, t in live.items()}


def test_a_group_with_a_name_for_each_parameter(tmp_path):
    model, optimizer = trained(
        lambda m: torch.optim.AdamW([{"params": [p], "name": n} for n, p in list(m.named_parameters())[::-1]])
    )
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    check(tmp_path / "state.pt", model, optimizer)
    optimizer.param_groups[0]["name"] = "the head"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    with pytest.raises(NamingError):  # names that no weight has are only labels of groups
        squisher.extract(tmp_path / "both.pt")


@pytest.mark.parametrize("weights", ["module", "state dict"])
def test_a_pickled_optimizer_beside_its_weights_shares_their_bytes(tmp_path, weights):
    model, optimizer = trained(shuffled)
    kept = model if weights == "module" else model.state_dict()
    torch.save({"net": kept, "opt": optimizer}, tmp_path / "all.pt")
    assert check(tmp_path / "all.pt", model, optimizer).provenance.naming.level == "recorded"


def test_a_pickled_module_is_one_model_with_full_names(tmp_path):
    model, optimizer = trained(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    check(tmp_path / "all.pt", model, optimizer)


def test_the_state_inside_torchcontribs_swa(tmp_path, run):
    state = run[1].state_dict()
    swa = {"opt_state": state["state"], "swa_state": {123: {}}, "param_groups": state["param_groups"]}
    torch.save({"model": run[0].state_dict(), "optimizer": swa}, tmp_path / "swa.pt")
    check(tmp_path / "swa.pt", *run)


def test_agilerl_lists_the_networks_of_each_optimizer(tmp_path):
    torch.manual_seed(0)
    actor, critic = nn.Linear(3, 4), nn.Linear(3, 4)
    optimizer = torch.optim.Adam([{"params": critic.parameters()}, {"params": actor.parameters()}], lr=1e-3)
    (actor(torch.ones(2, 3)).square().mean() + critic(torch.ones(2, 3)).sum()).backward()
    optimizer.step()
    info = {
        "modules": {"actor_state_dict": actor.state_dict(), "critic_state_dict": critic.state_dict()},
        "optimizers": {"optimizer_state_dict": optimizer.state_dict(), "optimizer_networks": ["critic", "actor"]},
    }
    torch.save({"network_info": info}, tmp_path / "agent.pt")
    imp = squisher.extract(tmp_path / "agent.pt")
    live = squisher.extract(optimizer, nn.ModuleDict({"actor": actor, "critic": critic}))
    assert {n: t.tolist() for n, t in imp.items()} == {n: t.tolist() for n, t in live.items()}


@pytest.mark.parametrize(
    "files", [("model.pth", "optimizer.pth"), ("params.pt", "optimizer.pt"), ("net.pt", "optim.pt")]
)
def test_weights_and_state_in_two_files_of_a_folder(tmp_path, run, files):
    torch.save(run[0].state_dict(), tmp_path / files[0])
    torch.save(run[1].state_dict(), tmp_path / files[1])
    torch.save({"epoch": 3}, tmp_path / "scheduler.pt")
    check(tmp_path, *run)


def test_several_states_in_a_folder_are_a_question(tmp_path, run):
    for epoch in (1, 2):
        torch.save(run[1].state_dict(), tmp_path / f"epoch{epoch}.pt")
    torch.save(run[0].state_dict(), tmp_path / "weights.pt")
    with pytest.raises(FileError, match="--model"):
        squisher.extract(tmp_path)
    check(tmp_path / "epoch1.pt", *run, model=tmp_path / "weights.pt")


def test_the_adamw_beside_a_muon(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    matrices = [("0.weight", model[0].weight), ("1.weight", model[1].weight)]
    vectors = [("0.bias", model[0].bias), ("1.bias", model[1].bias)]
    muon, adamw = torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(vectors, lr=1e-3)
    for one in (muon, adamw):
        model(torch.randn(5, 3)).square().mean().backward()
        one.step()
    torch.save(
        {"model": model.state_dict(), "optimizers": [muon.state_dict(), adamw.state_dict()]}, tmp_path / "both.pt"
    )
    imp = squisher.extract(tmp_path / "both.pt")
    assert set(imp) == {"0.bias", "1.bias"}
    assert set(imp.provenance.absent) == {"0.weight", "1.weight"}
    with pytest.raises(NoAccumulatorError, match="Muon"):
        squisher.extract(tmp_path / "both.pt", optimizer=0)


def _trained(*sizes):
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, sizes[0])).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("names", [False, True])
def test_two_networks_with_the_same_names_keep_their_own_shapes_and_hashes(tmp_path, which, names):
    torch.manual_seed(0)
    generator, critic = _trained(8, 40, 40, 16), _trained(16, 40, 40, 1)
    saved = {"generator": generator[0].state_dict(), "critic": critic[0].state_dict()}
    saved |= {"g_optimizer": generator[1].state_dict(), "c_optimizer": critic[1].state_dict()}
    torch.save(saved, tmp_path / "gan.pt")
    model, optimizer = (generator, critic)[which]
    given = [n for n, _ in model.named_parameters()] if names else None
    found = squisher.extract(tmp_path / "gan.pt", optimizer=which, names=given, in_order=True, bias_correction=False)
    assert not found.provenance.absent
    for name, p in model.named_parameters():
        assert torch.equal(found[name], optimizer.state[p]["exp_avg_sq"])
    assert found.provenance.model["content"] == content_of(model.state_dict())
    live = squisher.extract(tmp_path / "gan.pt", model, optimizer=which, in_order=True)
    assert live.provenance.model["content"] == content_of(model.state_dict())


def test_the_values_are_asked_when_a_live_model_is_given_too(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.ReLU())))
    layers = [model[0], model[4], model[2], model[6]]  # not the order of the model
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        x = torch.randn(16, 32)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    with pytest.raises(NamingError, match="values contradict"):
        squisher.extract(tmp_path / "c.pt", model)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(NamingError, match="values contradict"):  # by the live weights
        squisher.extract(tmp_path / "optimizer.pt", model)


def test_live_weights_of_another_moment_contradict_nothing(tmp_path):
    torch.manual_seed(0)
    model, optimizer = _trained(32, 32, 32)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other, _ = _trained(32, 32, 32)
    imp = squisher.extract(tmp_path / "optimizer.pt", other, bias_correction=False)
    assert all(torch.equal(imp[name], optimizer.state[p]["exp_avg_sq"]) for name, p in model.named_parameters())


def test_of_a_model_and_its_moving_average_no_hash_is_kept(tmp_path):
    torch.manual_seed(0)
    model, optimizer = _trained(8, 40, 16)
    average = {name: t * 0.9 for name, t in model.state_dict().items()}
    torch.save({"ema": average, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    found = squisher.extract(tmp_path / "c.pt", in_order=True)
    assert set(found) == set(average)
    assert "content" not in found.provenance.model


def test_a_group_for_each_parameter_in_the_order_of_the_model(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    optimizer = torch.optim.RMSprop([{"params": [p]} for p in model.parameters()])
    model(torch.randn(5, 6)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    with pytest.raises(NamingError, match="--in-order"):
        squisher.extract(tmp_path / "c.pt")
    found = squisher.extract(tmp_path / "c.pt", in_order=True, bias_correction=False)
    for name, p in model.named_parameters():
        assert torch.equal(found[name], optimizer.state[p]["square_avg"])


def test_a_complex_parameter_has_no_value_per_weight(tmp_path):
    network = nn.ParameterDict({"real": torch.randn(3), "complex": torch.randn(4, dtype=torch.cfloat)})
    optimizer = torch.optim.Adam(network.parameters())
    (network["complex"].abs().sum() + network["real"].square().sum()).backward()
    optimizer.step()
    torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    for imp in (squisher.extract(tmp_path / "c.pt"), squisher.extract(optimizer, network)):
        assert list(imp) == ["real"]
        assert "complex" in imp.provenance.absent["complex"].note


@pytest.mark.parametrize("swapped", [False, True])
def test_several_networks_that_one_optimizer_steps(tmp_path, swapped):
    torch.manual_seed(0)
    networks = {"actor": nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), "critic": nn.Linear(6, 1)}
    parts = list(networks.values())[:: -1 if swapped else 1]
    optimizer = torch.optim.Adam([p for part in parts for p in part.parameters()])
    for _ in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(9, 6)
        sum(part(inputs).square().mean() for part in parts).backward()
        optimizer.step()
    torch.save(
        {**{k: n.state_dict() for k, n in networks.items()}, "optimizer": optimizer.state_dict()}, tmp_path / "c.pt"
    )
    imp, live = squisher.extract(tmp_path / "c.pt"), squisher.extract(optimizer, nn.ModuleDict(networks))
    assert set(imp) == set(live)
    assert all(torch.equal(imp[name], live[name]) for name in live)
    assert not imp.provenance.absent


def test_an_optimizer_for_each_parameter_under_its_name(tmp_path):
    """Pyro's `optim.save`; parameters that were never stepped have an empty state."""
    saved = {}
    for name in ("net$$$loc", "scale", "unused"):
        parameter = nn.Parameter(torch.randn(3))
        optimizer = torch.optim.Adam([parameter])
        if name != "unused":
            parameter.grad = torch.randn(3)
            optimizer.step()
        saved[name] = optimizer.state_dict()
    torch.save(saved, tmp_path / "c.pt")
    imp = squisher.extract(tmp_path / "c.pt")
    assert list(imp) == ["net$$$loc", "scale"]
    assert torch.allclose(imp["scale"], saved["scale"]["state"][0]["exp_avg_sq"] / (1 - 0.999))
    for names in (("opt_a", "opt_b"), ("actor", "critic")):  # names of optimizers are no names of parameters
        torch.save(dict(zip(names, saved.values(), strict=False)), tmp_path / "c.pt")
        with pytest.raises(NamingError):
            squisher.extract(tmp_path / "c.pt")


def test_a_broken_file_of_a_folder_is_named_beside_the_others(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(FileError, match=r"none of which.*a\.pt cannot be read.*cut short"):
        squisher.extract(tmp_path)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "b.pt")
    with pytest.warns(SquisherWarning, match=r"b\.pt's.*a\.pt cannot be read.*cut short"):
        assert set(squisher.extract(tmp_path)) == {"weight", "bias"}
    torch.save(saved, tmp_path / "c.pt")
    with pytest.raises(FileError, match=r"b\.pt, c\.pt hold an optimizer state.*a\.pt cannot be read.*cut short"):
        squisher.extract(tmp_path)
    (tmp_path / "a.pt").rename(tmp_path / "optimizer.pt")  # the one that is meant, most likely
    (tmp_path / "c.pt").unlink()
    with pytest.raises(FileError, match=r"b\.pt holds.*optimizer\.pt cannot be read"):
        squisher.extract(tmp_path)


def test_the_number_of_an_optimizer_counts_those_that_are_refused(tmp_path):
    model, optimizer = trained(lambda m: torch.optim.AdamW(m.parameters()))
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    sgd.step()
    copies = [{**optimizer.state_dict()} for _ in range(2)]
    torch.save({"model": model.state_dict(), "optimizers": [sgd.state_dict(), *copies]}, tmp_path / "x.pt")
    with pytest.raises(NamingError, match=r"0: optimizers.0, 1: optimizers.1, 2: optimizers.2"):
        squisher.extract(tmp_path / "x.pt")
    assert len(squisher.extract(tmp_path / "x.pt", optimizer=2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["state"].update({99: state["state"][0]}), "99.*no group lists"),
        (lambda state: state["param_groups"][0]["params"].append(0), "twice"),
    ],
)
def test_states_that_the_groups_do_not_list_once(tmp_path, change, words):
    model, optimizer = trained(lambda m: torch.optim.AdamW(m.parameters()))
    state = optimizer.state_dict()
    change(state)
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "x.pt")
    with pytest.raises(FileError, match=words):
        squisher.extract(tmp_path / "x.pt")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn])
def test_codes_of_an_unknown_quantisation_are_no_values(tmp_path, dtype):
    state = {"step": 3, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.ones(4).to(dtype)}
    groups = [{"betas": (0.9, 0.999), "params": [0]}]
    torch.save({"state": {0: state}, "param_groups": groups}, tmp_path / "x.pt")
    with pytest.raises(NoAccumulatorError, match="quantisation"):
        squisher.extract(tmp_path / "x.pt", names=["w"])


def test_what_the_user_says_must_not_contradict_the_file(tmp_path):
    model, optimizer = trained(lambda m: torch.optim.AdamW(m.parameters(), betas=(0.9, 0.98)))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(ArgumentError, match="0.9, but the source records 0.98"):
        squisher.extract(tmp_path / "x.pt", beta2=0.9)
    with pytest.raises(ArgumentError, match="exp_avg_sq of Adam"):
        squisher.extract(tmp_path / "x.pt", optimizer_class="RMSprop")
    assert (
        squisher.extract(tmp_path / "x.pt", beta2=0.98, optimizer_class="AdamW").provenance.optimizer["beta2"] == 0.98
    )


def test_a_folder_of_many_files(tmp_path):
    model, optimizer = trained(lambda m: torch.optim.AdamW(m.parameters()))
    for number in range(13):
        torch.save(model.state_dict(), tmp_path / f"model_{number:02d}.pt")
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    torch.save(optimizer.state_dict(), tmp_path / "z.pt")  # another state, behind all those that are looked into
    with pytest.raises(FileError, match="15 torch files: give the one"):
        squisher.extract(tmp_path)
    (tmp_path / "a.pt").unlink()
    (tmp_path / "z.pt").rename(tmp_path / "optimizer.pt")
    assert len(squisher.extract(tmp_path))
