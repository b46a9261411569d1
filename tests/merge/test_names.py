"""Names and shapes, not architectures: what is merged, kept, copied, tied or refused."""

import pytest
import torch
from torch import nn

import squisher
from squisher import merge
from squisher.errors import NamingError, ScaleError, SquisherError, SquisherWarning


def model(seed, classes=3, vocabulary=50, width=8):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "embed.weight": random(vocabulary, width),
        "layer.weight": random(width, width),
        "layer.bias": random(width),
        "norm.running_mean": random(width),
        "norm.num_batches_tracked": torch.tensor(seed),
        "mask": torch.ones(4, 4, dtype=torch.bool),
        "head.weight": random(classes, width),
        "head.bias": random(classes),
    }


def importance(weights, **facts):
    floats = {n: torch.rand_like(t) for n, t in weights.items() if t.is_floating_point() and "running" not in n}
    return squisher.Importance(floats, kind="fisher", **facts)


def test_buffers_are_copied_from_the_first_model():
    a, b = model(1), model(2)
    merged = merge.average([a, b])
    assert merged.copied == ("norm.running_mean", "norm.num_batches_tracked", "mask")
    assert list(merged) == list(a)
    for name in merged.copied:
        assert torch.equal(merged[name], a[name])
    assert merge.average([a, b], dtype="bfloat16")["norm.running_mean"].dtype == torch.float32
    torch.testing.assert_close(merged["head.weight"], (a["head.weight"] + b["head.weight"]) / 2)


def test_heads_that_differ_are_kept_per_model_with_a_warning():
    models = [model(1, classes=3), model(2, classes=5), model(3, classes=2)]
    with pytest.warns(SquisherWarning, match=r"2 of 8.*'head.weight'.*'head.bias'"):
        merged = merge.fisher(models, [importance(m) for m in models])
    assert merged.kept == {
        "head.weight": "5 rows in model 2, 3 in model 1",
        "head.bias": "5 rows in model 2, 3 in model 1",
    }
    assert torch.equal(merged["head.weight"], models[0]["head.weight"])
    for k in range(3):
        own = merged.for_model(k)
        assert list(own) == list(models[k])
        assert torch.equal(own["head.weight"], models[k]["head.weight"])
        assert torch.equal(own["layer.weight"], merged["layer.weight"])
        assert own["norm.num_batches_tracked"] == k + 1
        assert own.shape("head.weight") == models[k]["head.weight"].shape
    with pytest.raises(SquisherError, match="model 3.* 0, 1, 2"):
        merged.for_model(3)


def test_models_keep_their_numbers_when_one_before_them_is_dropped():
    dropped, first, second = model(1), model(2, classes=3), model(3, classes=5)
    models, coefficients = [dropped, first, second], [0, 1, 1]
    with pytest.warns(SquisherWarning, match="2 of 8 tensors"):
        merged = merge.average(models, coefficients)
    assert merged.kept["head.bias"] == "5 rows in model 3, 3 in model 2"
    assert torch.equal(merged.for_model(2)["head.weight"], second["head.weight"])
    with pytest.raises(SquisherError, match="model 0.* 1, 2"):
        merged.for_model(0)
    broken = model(3)
    broken["layer.weight"][0, 0] = torch.nan
    with pytest.raises(SquisherError, match=r"'layer.weight'.*model 3.*NaN"):
        merge.average([dropped, first, broken], coefficients)["layer.weight"]
    short = {n: t[:, :-1] if n == "layer.weight" else t for n, t in model(3).items()}
    with pytest.raises(NamingError, match="model 2 .*model 3.*different networks"):
        merge.average([dropped, first, short], coefficients)
    with pytest.raises(NamingError, match="values of model 2.* in model 3"):
        merge.average([dropped, first, {f"x.{n}": t for n, t in short.items()}], coefficients)
    with pytest.raises(NamingError, match="values of model 2.* in the base"):
        merge.task_arithmetic({f"x.{n}": t for n, t in short.items()}, [dropped, first], [0, 1])
    known = squisher.Importance(dict(importance(first)), kind="fisher")
    unknown = squisher.Importance(dict(importance(first)), kind="squisher")
    with pytest.raises(ScaleError, match="number 2.*coefficient of 0"):
        merge.fisher([dropped, first, first], [known, known, unknown], coefficients)


def test_excluded_names_are_kept_without_a_warning_and_need_no_importance():
    models = [model(1, 3), model(2, 5)]
    fishers = [importance(m).restrict(lambda name: "head" not in name) for m in models]
    merged = merge.fisher(models, fishers, exclude=r"^head\.")
    assert merged.kept == {"head.weight": "excluded", "head.bias": "excluded"}
    assert torch.equal(merged["head.bias"], models[0]["head.bias"])
    with pytest.raises(NamingError, match="No tensor is left"):
        merge.average(models, exclude=".")


def test_a_head_that_one_model_lacks_is_kept():
    a, b = model(1), model(2)
    del b["head.weight"], b["head.bias"]
    with pytest.warns(SquisherWarning, match="not all models"):
        merged = merge.average([a, b])
    assert merged.kept["head.weight"] == "model 2 does not have it"
    with pytest.warns(SquisherWarning, match="not all models"):
        merged = merge.task_arithmetic(b, [a])
    assert merged.kept["head.weight"] == "the base does not have it"
    with pytest.warns(SquisherWarning, match="'head.weight', 'head.bias' of model 2.*left out"):
        assert "head.weight" not in merge.average([b, a])
    assert "head.weight" not in merge.average([b, a], exclude="^head")
    assert "head.weight" not in merge.task_arithmetic(a, [b])  # a base may have a head of its own


def test_the_lower_half_of_a_deeper_network_is_no_network():
    deep = {f"layer.{k}.weight": torch.rand(4, 4) for k in range(5)}
    shallow = {name: torch.rand(4, 4) for name in list(deep)[:2]}
    for models in ([shallow, deep], [deep, shallow]):
        with pytest.raises(NamingError, match="layer.2.weight"):
            merge.average(models)
    with pytest.raises(NamingError, match="layer.2.weight"):
        merge.task_arithmetic(deep, [shallow])


def test_vocabularies_that_differ_are_refused_with_both_sizes():
    with pytest.raises(NamingError, match=r"'embed.weight'.*50 .*model 1.*53 .*model 2"):
        merge.average([model(1), model(2, vocabulary=53)])
    merged = merge.average([model(1), model(2, vocabulary=53)], exclude=r"embed\.weight")
    assert merged.shape("embed.weight") == (50, 8)


def test_other_networks_are_refused():
    with pytest.raises(NamingError, match=r"'embed.weight'.*\(50, 8\).*model 1.*\(50, 9\).*model 2"):
        merge.average([model(1), model(2, width=9)])
    with pytest.raises(NamingError, match=r"\(8,\).*model 1.*\(8, 1\).*base"):
        merge.task_arithmetic({**model(1), "layer.bias": torch.zeros(8, 1)}, [model(2)])


def test_names_that_do_not_match_are_an_error_and_never_a_quiet_copy():
    prefixed = {f"model.{n}": t for n, t in model(2).items()}
    with pytest.raises(NamingError, match="Did you mean 'model.embed.weight'"):
        merge.average([model(1), prefixed])
    with pytest.raises(NamingError, match="partner.* in model 2"):
        merge.average([model(1), {"layer.weight": torch.zeros(8, 8)}])


def test_complex_weights_are_called_complex():
    one, other = ({**model(k), "layer.weight": torch.full((8, 8), k, dtype=torch.complex64)} for k in (1, 2))
    with pytest.raises(SquisherError, match="'layer.weight' of model 1 is complex"):
        merge.average([one, other])
    with pytest.raises(SquisherError, match="'layer.weight' of model 2 is complex"):
        merge.average([model(1), other])
    assert "layer.weight" in merge.average([one, {**other, "layer.weight": one["layer.weight"]}]).copied


def test_quantised_weights_are_refused():
    quantised = {**model(1), "embed.weight": torch.zeros(50, 8, dtype=torch.uint8)}
    with pytest.raises(NamingError, match="Quantised"):
        merge.average([quantised, quantised])
    eight = {**model(1), "layer.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}
    with pytest.raises(SquisherError, match="model 1.*float8_e4m3fn, a quantised one"):
        merge.average([eight, eight])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_quantised_weights_of_a_later_model_or_of_some_layers_are_refused(dtype):
    packed = [{**model(1), "layer.weight": torch.full((8, 8), k).to(dtype)} for k in (3, 5)]
    with pytest.raises(SquisherError, match="model 2.*quantised"):
        merge.average([model(1), packed[0]])
    with pytest.raises(SquisherError, match="the base.*quantised"):
        merge.task_arithmetic(packed[0], [model(1)])
    with pytest.raises(SquisherError, match="quantised"):  # most values are floats
        merge.average(packed)
    with pytest.raises(SquisherError, match="quantised"):
        merge.average([packed[0], model(1)])
    if not dtype.is_floating_point:  # equal everywhere: a mask, for example
        assert "layer.weight" in merge.average([packed[0], packed[0]]).copied


def test_a_pattern_in_a_message_fits_the_name_in_python_and_in_a_shell():
    other = {**model(1), "layer.weight": torch.zeros(8, 9)}
    with pytest.raises(NamingError, match="different networks") as caught:
        merge.average([model(1), other])
    pattern = str(caught.value).split("the pattern ")[1].strip("'.")
    assert "\\" not in pattern
    assert merge.average([model(1), other], exclude=pattern).kept["layer.weight"] == "excluded"


class Tied(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.layer, self.lm_head = nn.Embedding(40, 6), nn.Linear(6, 6), nn.Linear(6, 40, bias=False)
        self.lm_head.weight = self.embed.weight


def test_tied_names_are_merged_once_and_stay_tied():
    models = [Tied(k).state_dict() for k in range(2)]
    merged = merge.average(models)
    assert merged.tied == {"lm_head.weight": "embed.weight"}
    assert merged.merged == ("embed.weight", "layer.weight", "layer.bias")
    loaded = dict(merged)
    assert loaded["lm_head.weight"] is loaded["embed.weight"]
    assert squisher.storage.tensors.tied_names(loaded) == {"lm_head.weight": "embed.weight"}
    result = Tied(5)
    result.load_state_dict(merged)
    torch.testing.assert_close(result.lm_head.weight.data, (models[0]["embed.weight"] + models[1]["embed.weight"]) / 2)


def test_a_tied_tensor_that_a_file_holds_twice_is_merged_once():
    twice = {n: t.clone() for n, t in Tied(0).state_dict().items()}
    once = {n: t.clone() for n, t in Tied(1).state_dict().items() if n != "lm_head.weight"}
    # Another model has it once.
    merged = merge.average([twice, once])
    assert merged.tied == {"lm_head.weight": "embed.weight"}
    assert merged.kept == {}
    # Or the importance knows, and has it under the other name.
    fishers = [
        squisher.Importance(
            {n: torch.rand_like(t) for n, t in once.items()}, kind="fisher", tied={"lm_head.weight": "embed.weight"}
        )
        for _ in range(2)
    ]
    other = {n: t + 1 for n, t in twice.items()}
    assert merge.fisher([twice, other], fishers).tied == {"lm_head.weight": "embed.weight"}


@pytest.mark.parametrize("only", ["embed.weight", "lm_head.weight"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_tied_tensor_that_a_later_model_holds_twice_is_merged_there_too(only, copied):
    once = {n: t for n, t in Tied(0).state_dict().items() if n == only or "layer" in n}
    twice = {n: t.clone() if copied else t for n, t in Tied(1).state_dict().items()}
    later = merge.average([once, twice]).for_model(1)
    expected = (once[only] + twice[only]) / 2
    for name in ("embed.weight", "lm_head.weight"):
        torch.testing.assert_close(later[name], expected)


def test_what_is_tied_in_the_first_model_alone_is_merged_separately():
    tied, untied = Tied(0).state_dict(), {n: t.clone() for n, t in Tied(1).state_dict().items()}
    untied["lm_head.weight"] += 1
    with pytest.warns(SquisherWarning, match="'lm_head.weight' is tied to 'embed.weight'"):
        merged = merge.average([tied, untied])
    assert merged.tied == {}
    for name in tied:
        torch.testing.assert_close(merged[name], (tied[name] + untied[name]) / 2)


def test_an_importance_under_the_other_tied_name_is_found():
    models = [Tied(k).state_dict() for k in range(2)]
    swapped = [
        {"lm_head.weight": torch.rand(40, 6), "layer.weight": torch.rand(6, 6), "layer.bias": torch.rand(6)}
        for _ in range(2)
    ]
    merged = merge.fisher(models, swapped)
    straight = [{**{n: t for n, t in f.items() if "lm" not in n}, "embed.weight": f["lm_head.weight"]} for f in swapped]
    assert torch.equal(merged["embed.weight"], merge.fisher(models, straight)["embed.weight"])


# -- importances -------------------------------------------------------------------------------------------------------


def test_a_weight_without_importance_is_an_error_that_shows_near_names():
    models = [model(1), model(2)]
    fishers = [dict(importance(m)) for m in models]
    fishers[1]["layers.bias"] = fishers[1].pop("layer.bias")
    with pytest.raises(NamingError, match=r"1 of 5.*'layer.bias'.*model 2.*'layers.bias'"):
        merge.fisher(models, fishers)
    merged = merge.fisher(models, fishers, missing="average")
    assert merged.averaged == {"layer.bias": "no importance"}
    torch.testing.assert_close(merged["layer.bias"], (models[0]["layer.bias"] + models[1]["layer.bias"]) / 2)


def test_absent_in_every_importance_is_averaged_and_listed_but_not_in_one():
    models = [model(1), model(2)]
    fishers = [
        importance(m, absent={"layer.bias": "frozen"}).restrict(lambda name: name != "layer.bias") for m in models
    ]
    merged = merge.fisher(models, fishers)
    assert merged.averaged == {"layer.bias": "frozen"}
    with pytest.raises(NamingError, match="have no importance"):
        merge.fisher(models, [fishers[0], importance(models[1])])


@pytest.mark.parametrize("missing", ["error", "average"])
def test_a_wholesale_mismatch_is_always_an_error(missing):
    models = [model(1), model(2)]
    renamed = [{f"model.{n}": t for n, t in importance(m).items()} for m in models]
    with pytest.raises(NamingError, match="other models.*'model.embed.weight'"):
        merge.fisher(models, renamed, missing=missing)
    most = [{n: t for n, t in importance(m).items() if n != "embed.weight"} for m in models]
    with pytest.raises(NamingError, match="99 of 499"):
        merge.fisher(models, most, missing=missing)
    absent = [
        squisher.Importance({"x": torch.ones(1)}, kind="fisher", absent=dict.fromkeys(importance(m), "frozen"))
        for m in models
    ]
    with pytest.raises(NamingError, match="absent"):
        merge.fisher(models, absent, missing=missing)


def test_shapes_of_importances_are_checked():
    models = [model(1), model(2)]
    fishers = [dict(importance(m)) for m in models]
    fishers[1]["layer.bias"] = torch.rand(9)
    with pytest.raises(NamingError, match=r"\(8,\).*\(9,\).*model 2"):
        merge.fisher(models, fishers)


def test_asking_for_names_reads_nothing():
    class Unread(squisher.storage.tensors.LazyTensors):
        def __getitem__(self, name):
            raise AssertionError("read")

    class Source:
        dtype, shape = torch.float32, (3, 2)

        def load(self):
            raise AssertionError("read")

        read_flat = load

    lazy = [Unread({"a": Source(), "b": Source()}) for _ in range(2)]
    merged = merge.fisher(lazy, [squisher.Importance(x, kind="fisher") for x in lazy])
    assert "a" in merged
    assert "c" not in merged
    assert merged.shape("b") == (3, 2)
    assert merged.dtype("a") == torch.float32
    assert len(merged) == 2
    with pytest.raises(KeyError, match="no tensor named 'd'"):
        merged.shape("d")


def test_a_base_without_the_prefix_of_the_models_is_named():
    models = [{"bert.layer.weight": torch.ones(4), "head": torch.ones(1)} for _ in range(2)]
    with pytest.raises(NamingError, match="in the base: 'bert.layer.weight'.*'layer.weight'"):
        merge.task_arithmetic({"layer.weight": torch.ones(4)}, models)


def test_models_that_share_too_little_together_are_refused():
    tensors = {name: torch.ones(4) for name in "abc"}
    models = [tensors] + [{n: t for n, t in tensors.items() if n != name} for name in "ab"]
    with pytest.raises(NamingError, match="Only 4 of 12 values.*'a', 'b'"):
        merge.average(models)


def test_a_sparse_tensor_is_refused():
    models = [{"a": torch.eye(3).to_sparse()}] * 2
    with pytest.raises(SquisherError, match="'a' is sparse"):
        dict(merge.average(models))
