"""One way to match names: every application gives the same message for the same mistake."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

import squisher
from squisher.errors import ArgumentError, NamingError, SquisherError, SquisherWarning
from squisher.names import align, check_known, find, live_tensors, shared

CALLED = ("the importance", "the model")


def tensors(**shapes):
    return {name: torch.rand(shape) for name, shape in shapes.items()}


def test_names_that_are_the_same_belong_together_in_the_first_order():
    assert list(align(tensors(b=2, a=3), tensors(a=3, c=1, b=2), CALLED).items()) == [("b", "b"), ("a", "a")]


@pytest.mark.parametrize(
    ("here", "there", "options", "words"),
    [
        ({"weigth": 2}, {"weight": 2}, {}, "The importance.*'weigth'.*the model.*'weight'"),
        ({"a": 2}, {"a": 3}, {}, r"'a'.*\(2,\).*importance.*\(3,\).*model"),
        ({"a": 2}, {"a": 2, "b": 1}, {"both": True}, "The model.*'b'.*the importance"),
        ({"a": 2}, {"a": 2}, {"exclude": "a"}, "'a' excludes"),
        ({"a": 2}, {"b": 2}, {"partial": True}, "in both"),
        ({"a": 2, "b": 2}, {"a": 2}, {"tied": {"b": "a"}}, "'a' and 'b'.*one tensor"),
        ({"x": 2}, {"a": 2}, {"advice": "Do this."}, r"Do this\.$"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_comes_near(here, there, options, words):
    with pytest.raises(NamingError, match=words):
        align(tensors(**here), tensors(**there), CALLED, **options)


def test_a_pattern_must_be_a_regular_expression():
    with pytest.raises(ArgumentError, match="regular expression"):
        align(tensors(a=2), tensors(a=2), CALLED, exclude="(")


def test_types_are_compared_if_asked_for():
    a, b = {"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.bfloat16)}
    assert align(a, b, CALLED) == {"w": "w"}
    with pytest.raises(NamingError, match="float32.*importance.*bfloat16.*model"):
        align(a, b, CALLED, dtypes=True)


def test_excluded_and_partial_names_are_left_out_of_both():
    here, there = tensors(a=2, head=3, only=1), tensors(a=2, head=4)
    assert align(here, there, CALLED, exclude="head|only", both=True) == {"a": "a"}
    assert align(tensors(a=2, only=1), there, CALLED, partial=True) == {"a": "a"}


def test_tied_names_are_followed_in_both_directions_and_on():
    assert find("a", {"a", "b"}, {"b": "a"}) == "a"
    assert find("b", {"a"}, {"b": "a"}) == "a"
    assert find("a", {"b"}, {"b": "a"}) == "b"
    assert find("c", {"a"}, {"b": "a", "c": "b"}) == "a"
    assert find("c", {"x"}, {"b": "a", "c": "b"}) is None
    assert find("c", {"x"}) is None


def test_a_live_model_is_known_under_all_its_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    parameters, tied = live_tensors(nn.DataParallel(model))
    assert set(parameters) == {"0.weight", "0.bias", "1.bias"}
    assert tied["1.weight"] == tied["module.0.weight"] == "0.weight"
    check_known(["1.weight"], [*parameters, *tied], CALLED)


WEIGHTS = {"w": torch.rand(4, 3) + 1, "b": torch.rand(4) + 1}


def consolidate(imp):
    model = nn.Module()
    model.w, model.b = nn.Parameter(WEIGHTS["w"].clone()), nn.Parameter(WEIGHTS["b"].clone())
    squisher.EWC(model).consolidate(imp)


APPLICATIONS = {
    "EWC.consolidate": consolidate,
    "embed.embedding": squisher.embed.embedding,
    "embed.distance": lambda imp: squisher.embed.distance(imp, WEIGHTS),
    "embed.distance of the second": lambda imp: squisher.embed.distance(WEIGHTS, imp, scale="stored"),
    "embed.rank": lambda imp: squisher.embed.rank(WEIGHTS, {"x": imp}),
    "merge.fisher": lambda imp: dict(squisher.merge.fisher([WEIGHTS, WEIGHTS], [WEIGHTS, imp])),
    "merge.ubgm": lambda imp: dict(squisher.merge.ubgm(WEIGHTS, [WEIGHTS], WEIGHTS, [imp])),
    "prune.scores": lambda imp: dict(squisher.prune.scores(WEIGHTS, imp)),
    "prune.weights": lambda imp: dict(squisher.prune.weights(WEIGHTS, imp, sparsity=0.5)),
    "mask.top_k": lambda imp: squisher.mask.top_k(imp, 0.5),
    "compare": lambda imp: squisher.compare(imp, WEIGHTS),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["dict", "lazy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-3])
@pytest.mark.parametrize("application", APPLICATIONS)
def test_plain_mappings_are_checked_like_importances(application, value, lazy):
    """NaN, infinite and negative values from a plain dict must never reach a result."""
    bad = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    bad["w"][2, 1] = value
    with pytest.raises(SquisherError, match="'w'"):
        APPLICATIONS[application](_Lazy(bad) if lazy else bad)


class _Lazy(Mapping):
    """A mapping that is no dict."""

    def __init__(self, held):
        self._held = held

    def __getitem__(self, name):
        return self._held[name]

    def __iter__(self):
        return iter(self._held)

    def __len__(self):
        return len(self._held)


def test_shared_names_have_one_shape_everywhere():
    first = {"c": torch.zeros(2), "a": torch.zeros(2), "b": torch.zeros(3)}
    assert shared([first]) == ["c", "a", "b"]
    assert shared([first, {"a": torch.ones(2), "b": torch.ones(1), "c": torch.ones(2)}]) == ["c", "a"]
    assert shared([first, {"a": torch.ones(2)}, {"c": torch.ones(2)}]) == []


def _tensors() -> dict[str, torch.Tensor]:
    return {"body.weight": torch.rand(4, 4) + 0.5, "head.weight": torch.rand(2, 4) + 0.5}


def _consolidated(importance: squisher.Importance, exclude: str) -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4, bias=False), "head": nn.Linear(4, 2, bias=False)})
    squisher.EWC(model, 1.0, exclude=exclude).consolidate(importance)


EXCLUDING = {
    "prune.weights": lambda w, f, e: squisher.prune.weights(w, f, sparsity=0.5, exclude=e),
    "prune.weights, magnitude": lambda w, f, e: squisher.prune.weights(w, None, 0.5, score="magnitude", exclude=e),
    "merge.average": lambda w, f, e: squisher.merge.average([w, w], exclude=e),
    "merge.fisher": lambda w, f, e: squisher.merge.fisher([w, w], [f, f], exclude=e),
    "quantize.sensitivity": lambda w, f, e: squisher.quantize.sensitivity(w, f, exclude=e),
    "unlearn.dampen": lambda w, f, e: squisher.unlearn.dampen(w, f, f, exclude=e),
    "embed.embedding": lambda w, f, e: squisher.embed.embedding(f, exclude=e),
    "embed.distance": lambda w, f, e: squisher.embed.distance(f, f, exclude=e),
    "EWC": lambda w, f, e: _consolidated(f, e),
}


@pytest.mark.parametrize("name", EXCLUDING)
def test_a_pattern_that_excludes_nothing_is_told(name):
    importance = squisher.Importance(_tensors(), quantity="fisher_empirical", unit="example")
    EXCLUDING[name](_tensors(), importance, "head")
    with pytest.warns(SquisherWarning, match=r"'heda'.*body\.weight"):
        EXCLUDING[name](_tensors(), importance, "heda")


def test_an_empty_mapping_is_told_as_such():
    with pytest.raises(NamingError, match="it holds no tensors"):
        align({}, {"w": torch.ones(2)}, ("the importance", "the model"))


SMALL = {"w": torch.ones(2, 4)}
USES = {
    "average": lambda x: squisher.merge.average([x, x]),
    "base": lambda x: squisher.merge.task_arithmetic(x, [SMALL]),
    "prune": lambda x: squisher.prune.weights(x, SMALL, 0.5),
    "prune without importance": lambda x: squisher.prune.weights(x, None, 0.5, score="magnitude"),
    "importance": lambda x: squisher.prune.weights(SMALL, x, 0.5),
    "scores": lambda x: squisher.prune.scores(x, SMALL),
    "reset": lambda x: squisher.mask.reset_outside(x, SMALL, {"w": torch.ones(2, 4).bool()}),
    "unlearn": lambda x: squisher.unlearn.dampen(x, SMALL, SMALL),
    "quantize": lambda x: squisher.quantize.sensitivity(x, SMALL),
    "simulate": lambda x: squisher.quantize.simulate(x, {"w": 4}),
    "patch": lambda x: squisher.patch.make(SMALL, x, "p.safetensors"),
    "patch base": lambda x: squisher.patch.make(x, SMALL, "p.safetensors"),
}


@pytest.mark.parametrize("wrong", [[SMALL], {0: torch.ones(2, 4)}, torch.ones(2, 4)], ids=["list", "key", "tensor"])
@pytest.mark.parametrize("use", USES)
def test_what_is_no_mapping_of_names_is_refused_in_words(use, wrong):
    """Half of them ended with a TypeError of Python."""
    with pytest.raises(SquisherError, match="mapping|names"):
        USES[use](wrong)


@pytest.mark.parametrize("use", [use for use in USES if not use.startswith("prune")])
def test_a_module_is_refused_where_its_weights_are_meant(use):
    with pytest.raises(SquisherError, match="Linear"):
        USES[use](nn.Linear(4, 2))


def test_fractions_and_factors_may_be_numbers_of_numpy():
    half = np.float32(0.5)
    assert squisher.mask.top_k(SMALL, half).kept == 4
    assert squisher.merge.ota(SMALL, [SMALL], [SMALL], keep=half)["w"].equal(SMALL["w"])
    assert squisher.unlearn.dampen(SMALL, SMALL, SMALL, half).counts() == {"w": (0, 8)}


def test_combine_says_that_a_plain_mapping_says_nothing():
    with pytest.raises(SquisherError, match=r"squisher\.Importance"):
        squisher.Importance.combine([SMALL, SMALL])
