from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import squisher
from squisher.errors import FileError, NamingError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "lightning"


def same(imp, truth):
    assert set(imp) == set(truth)
    assert all(torch.equal(imp[name], value) for name, value in truth.items())


def changed(tmp_path, change):
    """The GAN's checkpoint with something changed."""
    content = torch.load(FIXTURES / "gan.ckpt", weights_only=True)
    change(content)
    torch.save(content, tmp_path / "changed.ckpt")
    return tmp_path / "changed.ckpt"


def test_one_optimizer_for_each_submodule():
    imp = squisher.extract(FIXTURES / "gan.ckpt", bias_correction=False)
    same(imp, load_file(FIXTURES / "gan_reference.safetensors"))
    assert str(imp.provenance.naming) == "convention: the weights under 'state_dict', registration order in one group"
    assert imp.provenance.optimizer["beta2"] == 0.9
    assert imp.provenance.optimizer["class"] == "Adam"


def test_one_of_the_optimizers():
    imp = squisher.extract(FIXTURES / "gan.ckpt", bias_correction=False, optimizer=1)
    truth = load_file(FIXTURES / "gan_reference.safetensors")
    same(imp, {name: t for name, t in truth.items() if name.startswith("discriminator")})


def test_two_submodules_that_fit_are_refused_until_told(tmp_path):
    def add_average(content):
        weights = content["state_dict"]
        weights.update({f"average.{n}": t.clone() for n, t in list(weights.items()) if n.startswith("generator")})

    path = changed(tmp_path, add_average)
    with pytest.raises(
        NamingError, match=r"'generator\.0\.weight' .* and 'average\.generator\.0\.weight'.*--trainable"
    ):
        squisher.extract(path)
    imp = squisher.extract(path, bias_correction=False, optimizer=0, trainable="^generator")
    truth = load_file(FIXTURES / "gan_reference.safetensors")
    same(imp, {name: t for name, t in truth.items() if name.startswith("generator")})


def test_weights_only_is_refused():
    with pytest.raises(FileError, match=r"holds .*no optimizer state"):
        squisher.extract(FIXTURES / "weights_only.ckpt")


def test_an_empty_list_of_states_is_refused(tmp_path):
    path = changed(tmp_path, lambda content: content.update(optimizer_states=[]))
    with pytest.raises(FileError, match="save_weights_only=True"):
        squisher.extract(path)


def test_other_files_with_this_ending_are_read(tmp_path):
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "mine.ckpt")
    assert set(squisher.extract(tmp_path / "mine.ckpt")) == {"weight", "bias"}


def test_a_torch_file_of_the_model_settles_names(tmp_path):
    weights = torch.load(FIXTURES / "gan.ckpt", weights_only=True)["state_dict"]
    torch.save({n: t for n, t in weights.items() if n.startswith("generator")}, tmp_path / "generator.pt")
    imp = squisher.extract(FIXTURES / "gan.ckpt", tmp_path / "generator.pt", bias_correction=False, optimizer=0)
    truth = load_file(FIXTURES / "gan_reference.safetensors")
    same(imp, {name: t for name, t in truth.items() if name.startswith("generator")})


@pytest.mark.formats
@pytest.mark.filterwarnings("default")
def test_a_fresh_checkpoint_with_two_groups(tmp_path):
    import lightning
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"path": Path("x"), "width": 3})
            self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

        def training_step(self, batch, _):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            wide = [p for p in self.parameters() if p.ndim > 1]
            flat = [p for p in self.parameters() if p.ndim < 2]
            return torch.optim.AdamW([{"params": wide}, {"params": flat, "weight_decay": 0.0}])

    torch.manual_seed(0)
    model = Net()
    trainer = lightning.Trainer(
        max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = model.optimizers().optimizer.state
    same(
        squisher.extract(
            tmp_path / "last.ckpt", bias_correction=False, in_order=True
        ),  # four channels tell two layers apart by luck
        {name: state[p]["exp_avg_sq"] for name, p in model.named_parameters()},
    )


def test_a_ckpt_of_another_program_is_named_by_the_model_that_is_given(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "last.ckpt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    imp = squisher.extract(tmp_path / "last.ckpt", model=tmp_path / "model.pt", bias_correction=False)
    same(imp, {name: optimizer.state[p]["exp_avg_sq"] for name, p in model.named_parameters()})
