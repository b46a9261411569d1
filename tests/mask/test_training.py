"""Training a small transformer under a mask: frozen entries keep their bits, kept ones follow a run of their own."""

import copy
import math

import pytest
import torch
from torch import nn

from squisher import mask
from squisher.errors import NamingError, SquisherError
from tests.processes import run_together

WIDTH, WORDS, LENGTH = 16, 11, 6


class Transformer(nn.Module):
    """Tied embeddings, attention, norms, a head: what real ones have."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        # No biases: the gradient of a key's bias is nothing but rounding, which Adam would blow up to a whole step.
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h + self.down(self.up(self.norm(h)).relu()))


def model_and_mask(share=0.1, seed=0):
    torch.manual_seed(seed)
    model = Transformer()
    masks = {name: torch.rand(p.shape) < share for name, p in model.named_parameters() if name != "up.bias"}
    masks["norm.weight"][:] = True
    return model, masks


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, WORDS, (4, LENGTH), generator=generator)
    loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    return loss


def train(model, optimizer, steps=6, clip=None, parameters=None, set_to_none=True):
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, step)
        if clip:
            nn.utils.clip_grad_norm_(parameters or model.parameters(), clip)
        optimizer.step()


def only_them(model, masks, make, steps=6, clip=None):
    """The definition: one vector per tensor holds the kept entries, and nothing else exists for the optimizer."""
    model = copy.deepcopy(model)
    named = dict(model.named_parameters())
    vectors = {name: nn.Parameter(named[name].detach()[kept]) for name, kept in masks.items() if kept.any()}
    optimizer = make(vectors.values())
    for step in range(steps):
        for p in named.values():
            p.grad = None
        backward(model, step)
        for name, vector in vectors.items():
            vector.grad = named[name].grad[masks[name]]
        if clip:
            nn.utils.clip_grad_norm_(vectors.values(), clip)
        optimizer.step()
        with torch.no_grad():
            for name, vector in vectors.items():
                named[name][masks[name]] = vector
    return named


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam l2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


def check(model, before, masks, expected, exact):
    for name, p in model.named_parameters():
        kept = masks.get(name, torch.zeros(p.shape, dtype=torch.bool))
        moved = p.detach().view(torch.int32) != before[name].view(torch.int32)
        assert not (moved & ~kept).any(), f"{name} moved outside the mask"
        if exact:
            assert torch.equal(p[kept], expected[name][kept]), name
        else:  # clipping sums in another order, and RMSprop's first steps divide the rounding by a small root
            torch.testing.assert_close(p[kept], expected[name][kept], rtol=1e-4, atol=1e-5)
    assert sum(int((p.detach() != before[n]).sum()) for n, p in model.named_parameters()) > 50


def bits(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("share", [0.02, 0.5])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_train_only(kind, share, clip):
    model, masks = model_and_mask(share)
    before = bits(model)
    expected = only_them(model, masks, OPTIMIZERS[kind], clip=clip)
    optimizer = OPTIMIZERS[kind](model.parameters())
    with mask.train_only(model, optimizer, mask.Mask(masks)):
        train(model, optimizer, clip=clip)
    # The fused kernel rounds the last few entries of a tensor in its own way, and other entries come last here and there.
    check(model, before, masks, expected, exact=clip is None and kind != "adamw fused")


CLASSES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3, "fused": True}),
}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", CLASSES)
def test_compact(kind, clip):
    model, masks = model_and_mask()
    before = bits(model)
    make, options = CLASSES[kind]
    expected = only_them(model, masks, lambda p: make(p, **options), clip=clip)
    optimizer = mask.compact(model, masks, make, **options)
    train(model, optimizer, clip=clip)
    check(model, before, masks, expected, exact=clip is None)


def test_the_state_of_compact_is_that_of_the_kept_entries():
    model, masks = model_and_mask()
    optimizer = mask.compact(model, masks, torch.optim.AdamW, lr=0.01)
    assert isinstance(optimizer, torch.optim.AdamW)
    train(model, optimizer, steps=1)
    kept = sum(int(m.sum()) for m in masks.values())
    held = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    assert held == kept
    assert sum(p.numel() for g in optimizer.param_groups for p in g["params"]) == kept


def test_compact_works_with_a_scheduler_a_closure_and_a_saved_state():
    model, masks = model_and_mask()
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # torch wraps the class's step at its first use
    start = copy.deepcopy(model)

    def run(model, optimizer, steps):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        calls = []
        hook = optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for step in range(*steps):
            optimizer.zero_grad()
            assert optimizer.step(lambda step=step: backward(model, step)) > 0
            schedule.step()
        assert len(calls) == steps[1] - steps[0]
        hook.remove()

    optimizer = mask.compact(model, masks, torch.optim.AdamW, lr=0.01)
    run(model, optimizer, (0, 4))
    other = copy.deepcopy(start)
    first = mask.compact(other, masks, torch.optim.AdamW, lr=0.01)
    run(other, first, (0, 2))
    resumed = copy.deepcopy(start)
    resumed.load_state_dict(other.state_dict())
    second = mask.compact(resumed, masks, torch.optim.AdamW, lr=0.01)
    second.load_state_dict(first.state_dict())
    run(resumed, second, (2, 4))
    # The schedule begins anew after two steps, as it does in the middle of the long run.
    assert math.isclose(second.param_groups[0]["lr"], optimizer.param_groups[0]["lr"])
    for name, p in model.named_parameters():
        assert torch.equal(p, dict(resumed.named_parameters())[name]), name


def test_gradients_that_accumulate_and_zeros_instead_of_none():
    model, masks = model_and_mask()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1) for m in (model, twin)]
    handle = mask.train_only(model, optimizers[0], masks)
    compact = mask.compact(twin, masks, torch.optim.SGD, lr=0.1, weight_decay=0.1)
    before = bits(model)
    for round_ in range(3):
        for m, optimizer in ((model, optimizers[0]), (twin, compact)):
            optimizer.zero_grad(set_to_none=False)
            backward(m, round_)
            backward(m, round_ + 10)
            optimizer.step()
    handle.remove()
    check(model, before, masks, dict(twin.named_parameters()), exact=True)


def test_old_momentum_and_infinite_gradients_do_not_reach_frozen_entries():
    model, masks = model_and_mask()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, steps=2)
    backward(model, 3)  # a gradient that is there already
    before = bits(model)
    handle = mask.train_only(model, optimizer, masks)
    assert not model.up.weight.grad[~masks["up.weight"]].any()
    with torch.no_grad():
        model.up.weight.grad[~masks["up.weight"]] = math.inf  # set by hand, after the hooks
    optimizer.step()
    now = bits(model)
    for name, kept in masks.items():
        assert torch.equal(now[name][~kept], before[name][~kept])
    handle.remove()


def test_a_gradient_is_masked_before_it_is_clipped():
    model, masks = model_and_mask(0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = mask.train_only(model, optimizer, masks)
    backward(model, 0)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    handle.remove()
    optimizer.zero_grad()
    backward(model, 0)
    squares = [p.grad[masks[n]].square().sum() for n, p in model.named_parameters() if n in masks]
    assert math.isclose(norm, torch.stack(squares).sum().sqrt(), rel_tol=1e-5)
    assert norm < 0.9 * nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def test_weights_may_be_loaded_meanwhile():
    model, masks = model_and_mask()
    optimizer = torch.optim.AdamW(model.parameters())
    with mask.train_only(model, optimizer, masks):
        train(model, optimizer, steps=1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        before = bits(model)
        train(model, optimizer, steps=1)
    assert all(torch.equal(bits(model)[n][~kept], before[n][~kept]) for n, kept in masks.items())


def test_removed_is_removed():
    model, masks = model_and_mask()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    handle = mask.train_only(model, optimizer, masks)
    handle.remove()
    handle.remove()
    released = mask.compact(model, masks, torch.optim.SGD, lr=0.1)
    released.release()
    train(model, optimizer)
    train(twin, twin_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_names_of_wrapped_and_tied_parameters():
    model, masks = model_and_mask()
    masks["head.weight"] = masks.pop("embed.weight")  # the other name of the same tensor
    before = bits(model)
    wrapped = nn.DataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with mask.train_only(wrapped, optimizer, masks):
        train(model, optimizer)
    moved = bits(model)["embed.weight"] != before["embed.weight"]
    assert moved.any()
    assert not (moved & ~masks["head.weight"]).any()


def test_what_does_not_fit_is_refused():
    model, masks = model_and_mask()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NamingError, match=r"'up\.weigt'.*'up\.weight'"):
        mask.train_only(model, optimizer, {"up.weigt": torch.ones(1, dtype=torch.bool)})
    with pytest.raises(NamingError, match=r"\(1,\).*\(32, 16\)"):
        mask.train_only(model, optimizer, {"up.weight": torch.ones(1, dtype=torch.bool)})
    with pytest.raises(NamingError, match="are one tensor"):
        mask.train_only(model, optimizer, {**masks, "head.weight": masks["embed.weight"]})
    with pytest.raises(SquisherError, match="NoneType for a Transformer"):
        mask.train_only(model, optimizer, None)
    with pytest.raises(SquisherError, match="boolean"):
        mask.train_only(model, optimizer, {"up.bias": torch.ones(32)})
    with pytest.raises(SquisherError, match="'attention.*optimizer"):
        mask.train_only(model, torch.optim.SGD([model.embed.weight], lr=1), masks)
    with pytest.raises(SquisherError, match="Optimizer.* str"):
        mask.train_only(model, "adam", masks)
    with pytest.raises(SquisherError, match="keeps no entry"):
        mask.compact(model, {}, torch.optim.SGD, lr=1)
    with pytest.raises(SquisherError, match="LBFGS"):
        mask.compact(model, masks, torch.optim.LBFGS)
    with pytest.raises(SquisherError, match="needs an optimizer class"):
        mask.compact(model, masks, optimizer)
    model.down.weight.requires_grad_(False)
    with pytest.raises(SquisherError, match=r"'down\.weight'.*requires_grad"):
        mask.train_only(model, optimizer, masks)


def _data_parallel(rank, masks):
    model, _ = model_and_mask()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, weight_decay=0.3)
    with mask.train_only(wrapped, optimizer, masks):
        for step in range(3):
            optimizer.zero_grad()
            backward(wrapped, 2 * step + rank)
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.05)
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_data_parallel_processes_stay_together_and_within_the_mask(tmp_path):
    model, masks = model_and_mask()
    before = bits(model)
    first, second = run_together(_data_parallel, tmp_path, masks)
    # One process with both halves of each batch: the mean of the two losses.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.3)
    with mask.train_only(model, optimizer, masks):
        for step in range(3):
            optimizer.zero_grad()
            backward(model, 2 * step)
            backward(model, 2 * step + 1)
            for p in model.parameters():
                p.grad /= 2
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    for a, b, (name, p) in zip(first, second, model.named_parameters(), strict=True):
        assert torch.equal(a, b)
        kept = masks.get(name, torch.zeros(p.shape, dtype=torch.bool))
        assert torch.equal(a[~kept], before[name][~kept])
        torch.testing.assert_close(a, p.detach(), rtol=1e-5, atol=1e-6)


def test_gradients_of_any_layout_are_masked():
    layer = nn.Linear(3, 2)
    layer.weight.grad = torch.ones(3, 2).t()  # before the hooks, and not contiguous
    kept = torch.eye(2, 3, dtype=torch.bool)
    with mask.train_only(layer, torch.optim.SGD(layer.parameters(), lr=0.1), {"weight": kept}):
        assert torch.equal(layer.weight.grad, kept.float())
    for share in (torch.ones(4, 2, dtype=torch.bool), torch.eye(4, 2, dtype=torch.bool)):
        table = nn.Embedding(4, 2, sparse=True)
        before = table.weight.detach().clone()
        optimizer = mask.compact(table, {"weight": share}, torch.optim.SGD, lr=0.1)
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
        moved = torch.zeros(4, 2)
        moved[1] = 0.1
        assert torch.equal(table.weight, before - moved * share)


@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize("way", ["train_only", "compact"])
def test_channels_last_is_trained_as_any_other_order_in_memory(way, share):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    masks = {name: torch.rand(p.shape) < share for name, p in plain.named_parameters()}
    inputs, start = torch.randn(2, 3, 8, 8), copy.deepcopy(plain.state_dict())
    for model in (plain, other):
        if way == "compact":
            optimizer = mask.compact(model, masks, torch.optim.SGD, lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            mask.train_only(model, optimizer, masks)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    for name, p in other.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(name), rtol=1e-4, atol=1e-5)
        assert torch.equal(p[~masks[name]], start[name][~masks[name]])
        assert not (masks[name].any() and torch.equal(p[masks[name]], start[name][masks[name]]))
    assert other[0].weight.is_contiguous(memory_format=torch.channels_last)
