from __future__ import annotations

import math

import pytest

from squisher.report.atlas import grid, labels, layers_in_order, place


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("bert.encoder.layer.3.attention.query.weight", "bert.encoder.layer.3", "attention.query.weight"),
        ("model.layers.7.mlp.experts.12.w1.weight", "model.layers.7", "mlp.experts.*.w1.weight"),
        ("layer1.0.conv1.weight", "layer1.0", "conv1.weight"),
        ("0.weight", "0", "weight"),
        ("classifier.weight", "classifier", "weight"),
        ("cls_token", "cls_token", "value"),
        ("blocks.4", "blocks.4", "value"),
        ("", "", "value"),
    ],
)
def test_a_place_is_read_off_the_name(name, layer, kind):
    assert (place(name).layer, place(name).kind) == (layer, kind)


def test_layers_are_in_the_order_of_the_file_and_of_their_numbers():
    names = ["embed.weight", "a.10.w", "a.2.w", "b.0.w", "a.1.w", "head.weight"]
    layers = layers_in_order(map(place, names))
    assert [one.layer for one in layers] == ["embed", "a.1", "a.2", "a.10", "b.0", "head"]


def test_modules_stay_together_where_an_optimizer_lists_norms_and_biases_last():
    """The order of a Trainer's two groups: with weight decay, without."""
    names = [
        "bert.embeddings.word.weight", "bert.encoder.layer.0.q.weight", "bert.encoder.layer.1.q.weight",
        "bert.pooler.dense.weight", "classifier.weight",
        "bert.embeddings.LayerNorm.weight", "bert.encoder.layer.0.q.bias", "bert.encoder.norm.weight", "classifier.bias",
    ]  # fmt: skip
    assert [one.layer for one in layers_in_order(map(place, names))] == [
        "bert.embeddings.word", "bert.embeddings.LayerNorm", "bert.encoder.layer.0", "bert.encoder.layer.1",
        "bert.encoder.norm", "bert.pooler.dense", "classifier",
    ]  # fmt: skip


def test_alphabetical_names_say_nothing_about_the_order():
    names = sorted(
        ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.w", "model.layers.1.w", "model.norm.weight"]
    )
    layers = [one.layer for one in layers_in_order(map(place, names))]
    assert layers == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]


def test_labels_are_short_and_tell_layers_apart():
    layers = layers_in_order(
        map(place, ["bert.encoder.layer.0.w", "bert.encoder.layer.1.w", "bert.pooler.dense.weight"])
    )
    assert labels(layers) == ["layer.0", "layer.1", "pooler.dense"]
    both = layers_in_order(map(place, ["encoder.block.0.w", "decoder.block.0.w"]))
    assert labels(both) == ["encoder.block.0", "decoder.block.0"]
    assert labels([]) == []


def test_a_grid_holds_weighted_means_and_none_where_nothing_is():
    places = [place(n) for n in ("a.0.x", "a.0.e.0.y", "a.0.e.1.y", "a.1.x", "head.z", "a.1.e.0.y")]
    found = grid(places, "mean", [1.0, 2.0, 5.0, 3.0, 7.0, math.nan], [1, 1, 2, 1, 1, 4])
    assert found["layers"] == ["a.0", "a.1", "head"]
    assert found["kinds"] == ["x", "e.*.y", "z"]
    assert found["mean"] == [[1.0, 3.0, None], [4.0, None, None], [None, None, 7.0]]
