"""State index to name: one answer with proof, or a refusal that says what settles it."""

import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from squisher.errors import FileError, NamingError, SquisherWarning
from squisher.recycle.naming.candidates import clean_names, given_names
from squisher.recycle.naming.conventions import in_order
from squisher.recycle.naming.solver import resolve
from squisher.recycle.states import Candidate, Entry, OptimizerState


def optimizer(*groups, names=None):
    entries = []
    for number, shapes in enumerate(groups):
        for shape in shapes:
            state = {} if shape is None else {"exp_avg_sq": torch.zeros(shape), "exp_avg": torch.zeros(shape)}
            entries.append(Entry(state, {"betas": (0.9, 0.999)}, number))
    if names:
        entries = [Entry(e.state, e.group, e.group_number, name) for e, name in zip(entries, names, strict=True)]
    return OptimizerState(entries)


def model(*parameters):
    return [("the model", [Candidate(name, shape) for name, shape in parameters])]


MLP = (("a.weight", (4, 3)), ("a.bias", (4,)), ("b.weight", (2, 4)), ("b.bias", (2,)))


def test_recorded_names_win_and_lose_their_wrappers():
    found = resolve(
        optimizer([(4, 3), (4,)], names=["module._orig_mod.a.weight", "module._orig_mod.a.bias"]), model(*MLP)
    )
    assert found.names == ["a.weight", "a.bias"]
    assert {one.level for one in found.how} == {"recorded"}


def test_registration_order_in_one_group():
    found = resolve(optimizer([(4, 3), (4,), (2, 4), (2,)]), model(*MLP))
    assert found.names == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert {str(one) for one in found.how} == {
        "convention: the model, registration order in one group; every shape occurs once"
    }


def test_two_groups_by_dimension_in_either_order():
    assert resolve(optimizer([(4, 3), (2, 4)], [(4,), (2,)]), model(*MLP)).names == [
        "a.weight",
        "b.weight",
        "a.bias",
        "b.bias",
    ]
    assert resolve(optimizer([(4,), (2,)], [(4, 3), (2, 4)]), model(*MLP)).names == [
        "a.bias",
        "b.bias",
        "a.weight",
        "b.weight",
    ]


def test_groups_one_after_the_other():
    found = resolve(optimizer([(4, 3), (4,)], [(2, 4)], [(2,)]), model(*MLP))
    assert found.names == [name for name, _ in MLP]


def test_a_frozen_layer_is_found_if_shapes_leave_one_way():
    found = resolve(optimizer([(2, 4), (2,)]), model(*MLP))
    assert found.names == ["b.weight", "b.bias"]


def test_a_frozen_layer_among_equal_ones_is_refused_and_shown():
    """The trap of the wild: fc1 frozen, fc2 of the same shape. Order and shape alone would name it fc1, silently."""
    twins = (("fc1.weight", (4, 4)), ("fc1.bias", (4,)), ("fc2.weight", (4, 4)), ("fc2.bias", (4,)))
    with pytest.raises(NamingError, match=r"'fc1\.weight'.*'fc2\.weight'.*--names"):
        resolve(optimizer([(4, 4), (4,)]), model(*twins))


def test_conventions_that_disagree_are_refused():
    square = (("a.weight", (4,)), ("a.bias", (4,)), ("norm.weight", (4,)), ("norm.bias", (4,)))
    with pytest.raises(NamingError, match="Several assignments fit"):
        resolve(optimizer([(4,), (4,)], [(4,), (4,)]), model(*square))


def test_nothing_fits():
    with pytest.raises(NamingError, match="groups of 1.* 4 parameters.*--names"):
        resolve(optimizer([(9, 9)]), model(*MLP))
    with pytest.raises(NamingError, match="nothing in the source"):
        resolve(optimizer([(9, 9)]), [])


def test_parameters_without_a_state_fit_anything_but_do_not_decide():
    assert resolve(optimizer([(4, 3), None, (2, 4), None]), model(*MLP)).names == [name for name, _ in MLP]


def test_given_names(tmp_path):
    one = optimizer([(4, 3), (4,)])
    with pytest.warns(SquisherWarning, match="given names.*checked"):
        assert resolve(one, model(*MLP), ["x", "y"]).names == ["x", "y"]
    known = [name for name, _ in MLP]
    with pytest.raises(NamingError, match="1 of the 2 given names"):
        resolve(one, model(*MLP), [known[0], "y"])
    assert {one.level for one in resolve(one, [], ["x", "y"]).how} == {"given"}
    with pytest.raises(NamingError, match="3 names.* 2 parameters"):
        resolve(one, [], ["x", "y", "z"])
    with pytest.raises(NamingError, match="'x' appears twice"):
        resolve(one, [], ["x", "x"])
    (tmp_path / "lines").write_text("x\n\n  y \n")
    (tmp_path / "list").write_text(json.dumps(["x", "y"]))
    assert (
        given_names(tmp_path / "lines") == given_names(str(tmp_path / "list")) == given_names(["x", "y"]) == ["x", "y"]
    )
    for text in ("[1, 2]", '["x",'):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(FileError, match="JSON list"):
            given_names(tmp_path / "bad")
    with pytest.raises(FileError, match="No such file"):
        given_names(tmp_path / "none")


def test_clean_names():
    assert clean_names(["module.a", "module.b"]) == ["a", "b"]
    assert clean_names(["module.module.a"]) == ["a"]
    assert clean_names(["module.a", "b"]) == ["module.a", "b"]
    assert clean_names(["net._orig_mod.a", "net._fsdp_wrapped_module.b._checkpoint_wrapped_module.c"]) == [
        "net.a",
        "net.b.c",
    ]
    with pytest.raises(NamingError, match="'a' appears twice"):
        clean_names(["a", "_orig_mod.a"])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([(1,), (2,), (3,)]), min_size=1, max_size=8),
    st.lists(st.sampled_from([(1,), (2,), (3,), None]), max_size=5),
)
def test_fits_agrees_with_trying_everything(available, wanted):
    candidates = [Candidate(f"p{k}", shape) for k, shape in enumerate(available)]
    ways = [
        chosen
        for chosen in itertools.combinations(range(len(available)), len(wanted))
        if all(w is None or w == available[k] for w, k in zip(wanted, chosen, strict=True))
    ]
    found = in_order(wanted, candidates)
    assert len(found) == min(len(ways), 2)
    assert all(way in ways for way in found)
    assert len({tuple(way) for way in found}) == len(found)


def test_what_was_surely_trained_is_never_left_out():
    """Against trying every choice: none, the only one, or two that differ."""
    draw = random.Random(0)
    for _ in range(2000):
        candidates = [
            Candidate(str(k), (draw.randint(1, 2),), required=draw.random() < 0.3) for k in range(draw.randint(0, 7))
        ]
        count = draw.randint(0, len(candidates))
        shapes = [None if draw.random() < 0.15 else (draw.randint(1, 2),) for _ in range(count)]
        must = {k for k, c in enumerate(candidates) if c.required}
        ways = [
            way
            for way in itertools.combinations(range(len(candidates)), count)
            if must <= set(way) and all(s in (None, candidates[k].shape) for s, k in zip(shapes, way, strict=True))
        ]
        found = in_order(shapes, candidates)
        assert len(found) == len(set(found)) == min(2, len(ways))
        assert set(found) <= set(ways)
