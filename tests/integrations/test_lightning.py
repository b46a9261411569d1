"""Both packages of Lightning with our callbacks, against the optimizer that they held and against loops by hand."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from torch import nn

import squisher
from squisher.errors import NoAccumulatorError, SquisherError
from squisher.integrations.lightning import EWCCallback, MaskCallback, SquisherCallback

from .trainers import in_processes, net

pytestmark = [pytest.mark.formats, pytest.mark.filterwarnings("default")]


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(request.param)


def loader(batch=4, size=22):
    g = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(size, 6, generator=g), torch.randint(0, 3, (size,), generator=g))
    return torch.utils.data.DataLoader(data, batch_size=batch)


def trainer(pl, folder, *callbacks, checkpoints=2, **more):
    keep = pl.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=checkpoints, save_top_k=-1 if checkpoints == 2 else 1
    )
    settings = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, callbacks=[keep, *callbacks], **{**settings, **more}
    )


def moments(trainer, model):
    (optimizer,) = trainer.optimizers
    return {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in model.named_parameters()}


def test_a_file_beside_every_checkpoint(pl, tmp_path):
    module, callback = net(pl), SquisherCallback()
    run = trainer(pl, tmp_path, callback, accumulate_grad_batches=2, gradient_clip_val=0.5)
    run.fit(module, loader())
    files = sorted(f.name for f in tmp_path.glob("*.safetensors"))
    assert files == ["step=2.squisher.safetensors"]  # 22 rows in batches of 2 × 4: three steps
    assert squisher.load(tmp_path / files[0]).provenance.steps == {"min": 2, "max": 2}
    imp = callback.importance()
    for name, v in moments(run, module).items():
        assert torch.allclose(imp[name], v / (1 - 0.999**3), rtol=1e-5)
    p = imp.provenance
    assert (p.batch_size, p.loss_reduction, p.unit) == (8, "mean", "example")
    counted = {"steps": 3, "examples": 22, "tokens": None, "short_steps": 1, "largest": 8}
    assert p.training["counted"] == counted
    assert [(one.code, one.numbers) for one in p.pollution] == [("clipping", {"norm": 0.5})]
    weights = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["state_dict"]
    assert set(weights) == set(imp)


def test_files_go_with_their_checkpoints(pl, tmp_path):
    run = trainer(pl, tmp_path, SquisherCallback(submodule="model"), checkpoints=1)
    run.fit(net(pl), loader())
    (checkpoint,) = tmp_path.glob("*.ckpt")
    (file,) = tmp_path.glob("*.safetensors")
    assert file.name.partition(".")[0] == checkpoint.stem
    assert set(squisher.load(file)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_at_the_end_only(pl, tmp_path):
    run = trainer(pl, tmp_path, SquisherCallback(tmp_path / "out" / "end.safetensors"))
    run.fit(net(pl), loader())
    assert [f.name for f in tmp_path.rglob("*.safetensors")] == ["end.safetensors"]


def test_tracked_gradients_are_those_before_clipping_and_without_a_penalty(pl, tmp_path):
    module = net(pl)
    plain = trainer(pl, tmp_path, max_steps=1)
    plain.fit(module, loader())
    expected = moments(plain, module)
    one, two = net(pl), net(pl, torch.optim.SGD)
    tracked = SquisherCallback(track=True)
    trainer(pl, tmp_path, tracked, max_steps=1, gradient_clip_val=1e-3).fit(one, loader())
    ewc = squisher.EWC(two, 100.0)
    ewc.consolidate({n: torch.ones_like(p) for n, p in two.named_parameters()})
    with torch.no_grad():
        ewc._centre["model.0.weight"].add_(1.0)
    penalised = EWCCallback(ewc)
    trainer(pl, tmp_path, penalised, max_steps=1).fit(two, loader())
    for callback in (tracked, penalised):
        imp = callback.importance()
        assert all(torch.allclose(imp[n], v / (1 - 0.999), rtol=1e-4, atol=1e-12) for n, v in expected.items())
        assert imp.provenance.pollution == ()
    ewc.consolidate(penalised.live_importance(), scale="stored")


def test_ewc_trains_as_the_penalty_in_the_loss_does(pl, tmp_path):
    ends = []
    for by_hand in (True, False):
        module = net(pl, torch.optim.SGD)
        ewc = squisher.EWC(module, 0.5)
        ewc.consolidate({n: torch.ones_like(p) for n, p in module.named_parameters()})
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.3)
        callbacks = []
        if by_hand:
            step = module.training_step
            module.training_step = lambda batch, index, step=step, ewc=ewc: step(batch, index) + ewc.penalty()
        else:
            callbacks = [EWCCallback(ewc)]
        run = trainer(pl, tmp_path, *callbacks, accumulate_grad_batches=2, gradient_clip_val=0.1, log_every_n_steps=1)
        run.fit(module, loader())
        ends.append({n: p.detach().clone() for n, p in module.named_parameters()})
        if not by_hand:
            assert float(run.callback_metrics["ewc_penalty"]) > 0
    assert all(torch.allclose(ends[0][n], ends[1][n], atol=1e-6) for n in ends[0])


def test_a_pull_follows_every_step_and_leaves_the_state_clean(pl, tmp_path):
    ends, callback = [], None
    for by_hand in (True, False):
        module = net(pl)
        ewc = squisher.EWC(module, 10.0)
        ewc.consolidate({n: torch.ones_like(p) for n, p in module.named_parameters()})
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.3)
        if by_hand:
            module.optimizer_step = lambda epoch, index, optimizer, closure, ewc=ewc: (
                optimizer.step(closure),
                ewc.pull_(optimizer, "adam"),
            )
        else:
            callback = EWCCallback(ewc, pull="adam")
        run = trainer(pl, tmp_path, *([] if by_hand else [callback]), accumulate_grad_batches=2, log_every_n_steps=1)
        run.fit(module, loader())
        ends.append({n: p.detach().clone() for n, p in module.named_parameters()})
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])
    assert float(run.callback_metrics["ewc_penalty"]) > 0
    assert callback.tracker is None
    assert callback.importance().provenance.pollution == ()


@pytest.mark.parametrize("track", [False, True])
def test_resumed_gives_the_same_file(pl, tmp_path, track):
    def run(folder, epochs, resume=None):
        callback = SquisherCallback(track=track)
        run = trainer(pl, folder, callback, max_epochs=epochs, gradient_clip_val=0.1)
        run.fit(net(pl), loader(size=16), ckpt_path=resume)
        return callback

    run(tmp_path / "whole", 2)
    run(tmp_path / "broken", 1)
    resumed = run(tmp_path / "broken", 2, str(tmp_path / "broken" / "step=4.ckpt"))
    a, b = (tmp_path / part / "step=8.squisher.safetensors" for part in ("whole", "broken"))
    assert a.read_bytes() == b.read_bytes()
    assert resumed.counts.steps == 8


def test_a_mask_keeps_frozen_entries_to_the_bit(pl, tmp_path):
    module = net(pl)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    mask = {"0.weight": torch.rand(8, 6) < 0.3}
    callback = SquisherCallback(tmp_path / "squisher.safetensors", track=True)
    trainer(pl, tmp_path, MaskCallback(mask, submodule="model"), callback).fit(module, loader())
    frozen = sum(p.numel() for p in before.values()) - int(mask["0.weight"].sum())
    found = squisher.load(tmp_path / "squisher.safetensors").provenance.pollution
    assert [p.numbers for p in found if p.code == "mask"] == [{"entries": frozen}]
    for name, p in module.named_parameters():
        kept = mask.get(name.removeprefix("model."), torch.zeros_like(p, dtype=torch.bool))
        assert torch.equal(p[~kept], before[name][~kept])
        assert (p[kept] != before[name][kept]).all()


def test_token_means(pl, tmp_path):
    class Words(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = nn.Embedding(10, 10)

        def training_step(self, batch, index):
            logits = self.body(batch["input_ids"])[:, :-1]
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    rows = [{"input_ids": torch.arange(6), "labels": torch.tensor([1, 2, 3, -100, -100, k])} for k in range(8)]
    callback = SquisherCallback(loss_reduction="token_mean")
    trainer(pl, tmp_path, callback).fit(Words(), torch.utils.data.DataLoader(rows, batch_size=4))
    p = callback.importance().provenance
    assert (p.batch_tokens, p.batch_size, p.unit) == (12, 4, "token")
    own = SquisherCallback(loss_reduction="token_mean", tokens=lambda batch: 7)
    trainer(pl, tmp_path, own).fit(Words(), torch.utils.data.DataLoader(rows, batch_size=4))
    assert own.importance().provenance.batch_tokens == 7


def test_what_cannot_work_is_said(pl, tmp_path):
    with pytest.raises(NoAccumulatorError, match="Tracker"):
        trainer(pl, tmp_path, SquisherCallback()).fit(net(pl, torch.optim.SGD), loader())
    other = squisher.EWC(net(pl), 1.0)
    other.consolidate({n: torch.ones_like(p) for n, p in net(pl).named_parameters()})
    with pytest.raises(SquisherError, match="another model"):
        trainer(pl, tmp_path, EWCCallback(other)).fit(net(pl), loader())
    module = net(pl)
    whole = squisher.EWC(module, 1.0)
    whole.consolidate({n: torch.ones_like(p) for n, p in module.named_parameters()})
    part = next(name for name, _ in module.named_children())
    with pytest.raises(SquisherError, match=rf"squisher\.EWC\(module\.{part}\)"):
        trainer(pl, tmp_path, EWCCallback(whole, submodule=part)).fit(module, loader())
    with pytest.raises(SquisherError, match="call trainer.fit"):
        SquisherCallback().importance()
    with pytest.raises(SquisherError, match="loss_reduction"):
        SquisherCallback(loss_reduction="median")
    with pytest.raises(SquisherError, match="EWC.*dict"):
        EWCCallback({})


@pytest.mark.parametrize("ewc", [False, True])
def test_two_processes_are_one_with_the_same_global_batch(tmp_path, ewc):
    """Two processes take rows in turn: two batches of two are the rows of one batch of four."""
    one = {"lightning": True, "ewc": ewc, "folder": str(tmp_path / "1"), "devices": 1, "strategy": "auto", "batch": 4}
    two = {**one, "folder": str(tmp_path / "2"), "devices": 2, "strategy": "ddp", "batch": 2, "processes": 2}
    statuses, errors = in_processes([one, two], tmp_path)
    assert statuses == [0, 0], errors
    a, b = (squisher.load(tmp_path / name / "squisher.safetensors") for name in "12")
    assert a.provenance.batch_size == b.provenance.batch_size == 8
    assert b.provenance.training["processes"] == 2
    assert a.provenance.training["counted"] == b.provenance.training["counted"]
    assert all(torch.allclose(a[name], b[name], rtol=1e-3, atol=1e-9) for name in a)
