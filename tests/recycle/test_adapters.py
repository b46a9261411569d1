from __future__ import annotations

import itertools

import torch
from torch import nn

from squisher.recycle.naming.hugging_face import adapter_orders
from squisher.storage.folders import Weights


def weights(*names):
    return Weights("adapter_model.safetensors", {name: torch.zeros(1) for name in sorted(names)}, False)


def orders(*names):
    return {tuple(c.name for c in order) for order in adapter_orders(weights(*names))}


def test_a_layer_keeps_its_parts_together_and_in_order():
    assert orders("q.lora_B.weight", "q.lora_A.weight", "q.lora_magnitude_vector") == {
        ("q.lora_A.weight", "q.lora_B.weight", "q.lora_magnitude_vector")
    }


def test_numbers_count_up():
    assert orders(*(f"layers.{k}.lora_A.weight" for k in (0, 2, 10))) == {
        ("layers.0.lora_A.weight", "layers.2.lora_A.weight", "layers.10.lora_A.weight")
    }


def test_numbered_submodules_may_stand_before_or_behind_a_named_one():
    first, second, named = "0.lora_A.weight", "1.lora_A.weight", "norm.lora_A.weight"
    assert orders(first, second, named) == {(first, second, named), (named, first, second)}


def test_siblings_come_in_every_order_that_is_the_same_in_each_layer():
    names = [f"layers.{k}.{p}.lora_{x}.weight" for k in (0, 1) for p in ("q", "v") for x in "AB"]
    expected = {
        tuple(f"layers.{k}.{p}.lora_{x}.weight" for k in (0, 1) for p in order for x in "AB")
        for order in itertools.permutations("qv")
    }
    assert orders(*names) == expected


def test_the_true_order_of_a_module_is_among_them():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A = nn.Linear(1, 1, bias=False)
            self.lora_B = nn.Linear(1, 1, bias=False)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.o = Lora(), Lora(), Lora()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()
            self.up = Lora()

    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(11)), "classifier": nn.Linear(1, 1)})
    true = [name for name, _ in model.named_parameters()]
    assert tuple(true) in orders(*true)


def test_too_many_orders_are_not_tried():
    assert orders(*(f"{name}.lora_A.weight" for name in "abcdefghij")) == set()


def test_a_name_that_is_also_a_prefix_is_no_module():
    assert orders("a", "a.b") == set()
