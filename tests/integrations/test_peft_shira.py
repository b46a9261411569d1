import pytest
import torch
from torch import nn

from squisher.errors import NamingError, SquisherError
from squisher.integrations.peft import shira_mask_fn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(20, 16)
        self.two = nn.Linear(16, 10)

    def forward(self, x):
        return self.two(self.one(x).relu())


def made():
    torch.manual_seed(0)
    model = Net()
    return model, {name: torch.rand(p.shape) for name, p in model.named_parameters()}


def test_the_most_important_entries_of_each_layer():
    model, importance = made()
    mask_fn = shira_mask_fn(importance, model)
    for name, layer in (("one.weight", model.one), ("two.weight", model.two)):
        mask = mask_fn(layer, 3, bias=True)
        assert mask.dtype == layer.weight.dtype
        assert mask.shape == layer.weight.shape
        expected = importance[name].flatten().topk(3 * sum(layer.weight.shape)).indices.sort().values
        assert torch.equal(mask.flatten().nonzero().flatten(), expected)
        assert set(mask.unique().tolist()) == {0.0, 1.0}


def test_what_does_not_fit():
    model, importance = made()
    mask_fn = shira_mask_fn(importance, model)
    with pytest.raises(NamingError, match="shira_mask_fn"):
        mask_fn(nn.Linear(20, 16), 1)
    with pytest.raises(SquisherError, match=r"r=9.*324.*'one\.weight'.*320"):
        mask_fn(model.one, 9)
    with pytest.raises(NamingError, match=r"no importance for 'one\.weight'"):
        shira_mask_fn({"two.weight": importance["two.weight"]}, model)(model.one, 1)
    with pytest.raises(NamingError, match="has the shape"):
        shira_mask_fn({"one.weight": torch.rand(3)}, model)(model.one, 1)


@pytest.mark.formats
@pytest.mark.filterwarnings("default")
def test_with_peft():
    import peft

    model, importance = made()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = peft.ShiraConfig(r=2, mask_type="squisher", target_modules=["one", "two"])
    config.mask_fn = shira_mask_fn(importance, model)
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(torch.randn(8, 20)).square().sum().backward()
        optimizer.step()
    merged = adapted.merge_and_unload()
    for name in ("one.weight", "two.weight"):
        moved = merged.get_parameter(name) != before[name]
        budget = 2 * sum(moved.shape)
        best = importance[name].flatten().topk(budget).indices
        assert moved.flatten()[best].all()
        assert int(moved.sum()) == budget
