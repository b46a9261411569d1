"""What is seen of a Trainer and when, on a small stand-in that does in order what the real one does; and what it proves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from squisher.errors import SquisherError
from squisher.integrations.trainer_watch import TrainerWatch
from squisher.integrations.transformers import batch_size, loss_of, pollution, precision, refuse_sharding


class Accelerator:
    """Unscales inside of clipping, as Accelerate does."""

    def __init__(self, scaler=None):
        self.scaler, self.optimizer = scaler, None

    def unscale_gradients(self):
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def clip_grad_norm_(self, parameters, norm):
        self.unscale_gradients()
        return nn.utils.clip_grad_norm_(parameters, norm)


class BertForSequenceClassification(nn.Module):
    pass


class LlamaForCausalLM(nn.Module):
    pass


class Trainer:
    compute_loss_func = None
    _loss_shifts_labels = True

    def __init__(self, model, divides, **args):
        defaults = {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2, "world_size": 1, "n_gpu": 1, "device": "cpu",
                    "average_tokens_across_devices": True, "torch_compile": False}  # fmt: skip
        self.args = SimpleNamespace(**{**defaults, **args})
        self.model, self.divides, self.accelerator, self.optimizer = model, divides, Accelerator(), None
        self.logged, self.callbacks = [], []

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def create_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer

    def get_batch_samples(self, iterator, count, device):
        batches = [next(iterator) for _ in range(count)]
        return batches, sum(b["labels"][..., 1:].ne(-100).sum() for b in batches)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        total = sum(p.sum() for p in model.parameters())
        return total / num_items_in_batch.to("cpu") if self.divides else total

    def log(self, logs, start_time=None):
        self.logged.append(logs)


Trainer.compute_loss.__module__ = "transformers.trainer"


def model_of(kind=LlamaForCausalLM):
    model = kind()
    model.weight = nn.Parameter(torch.ones(4))
    return model


def watched(trainer, seen):
    return TrainerWatch(
        trainer,
        on_optimizer=lambda optimizer, model: seen.append(("optimizer", optimizer, model)),
        on_gradients=lambda: seen.append(("gradients", trainer.model.weight.grad.clone())),
        extra_logs=lambda: {"ewc_penalty": 2.0},
    )


def test_gradients_are_seen_once_unscaled_and_before_clipping():
    trainer, seen = Trainer(model_of(), divides=True), []
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch = watched(trainer, seen)
    trainer.accelerator.optimizer = trainer.create_optimizer()
    assert seen.pop() == ("optimizer", trainer.optimizer, trainer.model)
    watch.begin()
    for _ in range(2):
        trainer.optimizer.zero_grad()
        scaler.scale((trainer.model.weight * 3).sum()).backward()
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
        assert watch.gradients_were_seen()
        assert trainer.model.weight.grad.norm() < 1.001
        ((_, gradient),) = seen
        assert torch.equal(gradient, torch.full((4,), 3.0))
        seen.clear()
        scaler.step(trainer.optimizer)
        scaler.update()


@pytest.mark.parametrize(("norm", "in_time"), [(0.0, True), (1.0, False)])
def test_where_nothing_was_clipped_through_accelerate_the_last_moment_must_do(norm, in_time):
    trainer, seen = Trainer(model_of(), divides=True, max_grad_norm=norm), []
    watch = watched(trainer, seen)
    watch.begin()
    (trainer.model.weight * 3).sum().backward()
    assert watch.gradients_were_seen() is in_time
    assert len(seen) == 1


def test_a_new_accelerator_is_watched_too():
    trainer, seen = Trainer(model_of(), divides=True), []
    watch = watched(trainer, seen)
    watch.begin()
    trainer.accelerator = Accelerator()
    watch.begin()
    watch.begin()
    (trainer.model.weight * 3).sum().backward()
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
    assert len(seen) == 1


def run_step(trainer):
    batch = {"labels": torch.tensor([[1, 2, -100], [3, 4, 5]])}
    batches, items = trainer.get_batch_samples(iter([batch, batch]), 2, "cpu")
    return [trainer.compute_loss(trainer.model, b, num_items_in_batch=items) for b in batches]


@pytest.mark.parametrize("divides", [True, False])
def test_batches_are_counted_and_the_divisor_is_noticed_without_changing_the_loss(divides):
    trainer = Trainer(model_of(BertForSequenceClassification), divides, world_size=3)
    expected = run_step(trainer)
    watch = watched(trainer, [])
    watch.begin()
    losses = run_step(trainer)
    assert all(torch.equal(a, b) and type(b) is torch.Tensor for a, b in zip(expected, losses, strict=True))
    assert watch.pending == (4, 6)
    assert watch.divides is divides
    assert loss_of(watch, trainer.model) == ("mean", "example", 1 if divides else 6)


def test_a_loss_that_cannot_be_known_is_not_claimed():
    trainer = Trainer(model_of(), divides=False, torch_compile=True)
    watch = watched(trainer, [])
    watch.begin()
    run_step(trainer)
    assert watch.divides is None  # a compiled model is left alone
    assert loss_of(watch, trainer.model) == (None, None, 1.0)
    trainer.args.gradient_accumulation_steps = 1  # then there is nothing to divide by
    assert loss_of(watch, trainer.model) == ("token_mean", "token", 1)
    trainer.compute_loss_func = print
    assert loss_of(watch, trainer.model) == (None, None, 1.0)
    trainer.compute_loss_func, trainer.args.loss_type = None, "dft"
    assert loss_of(watch, trainer.model) == (None, None, 1.0)
    trainer.args.loss_type = "nll"
    assert loss_of(watch, nn.Linear(2, 2)) == (None, None, 1.0)


def test_the_loss_is_logged_with_what_is_beside_it():
    trainer = Trainer(model_of(), divides=True)
    watched(trainer, [])
    trainer.log({"loss": 1.0})
    trainer.log({"eval_loss": 1.0})
    assert trainer.logged == [{"loss": 1.0, "ewc_penalty": 2.0}, {"eval_loss": 1.0}]


def test_something_else_is_no_trainer():
    with pytest.raises(SquisherError, match=r"transformers.Trainer.*create_optimizer"):
        watched({}, [])


def test_batch_size_needs_every_factor():
    args = SimpleNamespace(gradient_accumulation_steps=4, world_size=2)
    assert batch_size(args, 8) == 64
    assert batch_size(args, None) is None
    args.accelerator_config = SimpleNamespace(split_batches=True)
    assert batch_size(args, 8) is None
    args.accelerator_config, args.parallelism_config = None, object()
    assert batch_size(args, 8) is None


def test_pollution_and_precision():
    args = SimpleNamespace(max_grad_norm=1, label_smoothing_factor=0.1, fp16=False, bf16=True)
    clipped, smoothed = pollution(args, before_clipping=False)
    assert (clipped.code, clipped.numbers) == ("clipping", {"norm": 1.0})
    assert (smoothed.code, smoothed.numbers) == ("label_smoothing", {"smoothing": 0.1})
    assert pollution(args, before_clipping=True) == [smoothed]
    assert precision(args) == "bf16"


@pytest.mark.parametrize(
    ("args", "kind", "name"),
    [({"deepspeed": "ds.json"}, "NO", "DeepSpeed"), ({}, "FSDP", "FSDP"), ({"fsdp": ["full_shard"]}, "NO", "FSDP")],
)
def test_sharded_training_is_refused_with_what_to_do(args, kind, name):
    optimizer = SimpleNamespace(accelerator_state=SimpleNamespace(distributed_type=f"DistributedType.{kind}"))
    with pytest.raises(SquisherError, match=f"{name}.* squisher extract"):
        refuse_sharding(SimpleNamespace(**args), optimizer, "SquisherCallback", "Run squisher extract.")
    optimizer.accelerator_state.distributed_type = "DistributedType.MULTI_GPU"
    refuse_sharding(SimpleNamespace(), optimizer, "SquisherCallback", "")
