"""Importance: a mapping that says what it is, checks what it holds, and knows its scale."""

import math
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import squisher
import squisher.storage.safetensors
from squisher.errors import ArgumentError, FileError, NamingError, ScaleError, SquisherError, SquisherWarning
from squisher.importance import Importance, load, on_common_scale, structure_hash
from squisher.storage.tensors import Computed, chunks_of

FIXTURES = Path(__file__).parent / "fixtures"


def example(**provenance):
    torch.manual_seed(0)
    return Importance(
        {"a.weight": torch.rand(5, 3), "a.bias": torch.rand(5), "b.weight": torch.rand(2, 5)}, **provenance
    )


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "NaN"), (math.inf, "infinite"), (-1e-30, "negative"), (-math.inf, "negative")]
)
def test_impossible_values_are_refused_by_name(tmp_path, value, words):
    tensor = torch.rand(4, 4)
    tensor[2, 1] = value
    with pytest.raises(SquisherError, match=rf"'bad\.one' has {words}"):
        Importance({"good": torch.rand(2), "bad.one": tensor})
    # The same in a file: opening it costs nothing, so it is noticed when it is read, in whole or in pieces.
    squisher.storage.safetensors.save(tmp_path / "x.safetensors", {"bad.one": tensor}, {"kind": "fisher"})
    lazy = load(tmp_path / "x.safetensors")
    with pytest.raises(SquisherError, match=rf"'bad\.one' has {words}"):
        lazy["bad.one"]
    with pytest.raises(SquisherError, match=rf"'bad\.one' has {words}"):
        lazy.save(tmp_path / "y.safetensors")
    assert not (tmp_path / "y.safetensors").exists()


def test_what_is_not_a_mapping_of_tensors_is_refused():
    with pytest.raises(SquisherError, match="named tensor.*nothing"):
        Importance({})
    with pytest.raises(SquisherError, match="'a' is a list"):
        Importance({"a": [1.0]})
    with pytest.raises(NamingError, match="not 3"):
        Importance({3: torch.rand(2)})
    with pytest.raises(SquisherError, match=r"torch\.int64"):
        Importance({"a": torch.arange(3)})
    with pytest.raises(SquisherError, match="not 'fischer'.*'fisher'"):
        Importance({"a": torch.rand(2)}, kind="fischer")
    with pytest.raises(KeyError, match=r"Did you mean 'a\.weight'"):
        example()["a.wieght"]


def test_denormals_survive_to_the_bit(tmp_path):
    tiny = torch.tensor([1e-45, 1e-40, 1.2e-38, 0.0])
    Importance({"a": tiny}).save(tmp_path / "a.safetensors")
    assert torch.equal(load(tmp_path / "a.safetensors")["a"].view(torch.int32), tiny.view(torch.int32))


# -- files -------------------------------------------------------------------------------------------------------------


def test_round_trip_with_unknown_keys(tmp_path):
    imp = example(
        kind="squisher", batch_size=8, loss_reduction="mean", steps={"min": 1, "max": 3}, absent={"c": "frozen"},
        invented={"deep": [1, {"x": None}]}, optimizer={"class": "AdamW", "surprise": 7},
    )  # fmt: skip
    imp.save(tmp_path / "a.safetensors")
    back = load(tmp_path / "a.safetensors")
    back.save(tmp_path / "b.safetensors")
    again = load(tmp_path / "b.safetensors")
    assert again.provenance == back.provenance
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert again.provenance.extra == {"invented": {"deep": [1, {"x": None}]}}
    assert again.provenance.optimizer["surprise"] == 7
    assert again.provenance.created_with == f"torch-squisher {squisher.__version__}"
    assert list(again) == list(imp)
    assert all(torch.equal(again[n], imp[n]) for n in imp)
    for name, tensor in imp.items():
        assert again.provenance.sum[name] == pytest.approx(tensor.double().sum().item(), rel=1e-11)
        assert again.provenance.sum_of_squares[name] == pytest.approx(tensor.double().square().sum().item(), rel=1e-11)


def test_bfloat16_file_holds_rounded_values_and_their_sums(tmp_path):
    imp = example() * 1e-14
    imp.save(tmp_path / "a.safetensors", dtype="bfloat16")
    back = load(tmp_path / "a.safetensors")
    assert back["a.weight"].dtype == torch.bfloat16
    assert torch.equal(back["a.weight"], imp["a.weight"].bfloat16())
    assert back.provenance.sum["a.bias"] == pytest.approx(imp["a.bias"].bfloat16().double().sum().item(), rel=1e-11)


def test_float16_is_refused_with_the_reason(tmp_path):
    with pytest.raises(SquisherError, match="float16 underflows"):
        example().save(tmp_path / "a.safetensors", dtype=torch.float16)
    with pytest.raises(SquisherError, match="float16 underflows"):
        Importance({"a": torch.rand(3).half()}).save(tmp_path / "a.safetensors")
    with pytest.raises(SquisherError, match=r"not int8"):
        example().save(tmp_path / "a.safetensors", dtype="int8")
    assert not list(tmp_path.iterdir())


def test_a_folder_and_files_that_are_not_ours(tmp_path):
    with pytest.raises(FileError, match="holds no squisher.safetensors"):
        load(tmp_path)
    example().save(tmp_path)
    assert set(load(tmp_path)) == set(example())
    with pytest.raises(FileError, match="There is no file"):
        load(tmp_path / "nothing.safetensors")
    squisher.storage.safetensors.save(tmp_path / "weights.safetensors", {"a": torch.rand(2)}, {"kind": "mask"})
    with pytest.raises(FileError, match="'mask'.*importance"):
        load(tmp_path / "weights.safetensors")
    from safetensors.torch import save_file

    save_file({"a": torch.rand(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(FileError, match="without Squisher's metadata"):
        load(tmp_path / "plain.safetensors")
    squisher.storage.safetensors.save(
        tmp_path / "new.safetensors", {"a": torch.rand(2)}, {"kind": "fisher", "format_version": 99}
    )
    with pytest.raises(FileError, match="update torch-squisher"):
        load(tmp_path / "new.safetensors")


def test_loading_reads_no_tensor(tmp_path):
    """A sparse file of 64 GB opens at once: only the header is read."""
    header = '{"a":{"dtype":"F32","shape":[16000000000],"data_offsets":[0,64000000000]},"__metadata__":{"squisher":"{\\"kind\\":\\"fisher\\"}"}}'
    with open(tmp_path / "huge.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 64_000_000_000)
    imp = load(tmp_path / "huge.safetensors")
    assert imp.shape("a") == (16_000_000_000,)
    assert next(imp.chunks("a")).sum() == 0


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_scaling_is_lazy_and_recorded(tmp_path):
    example().save(tmp_path / "a.safetensors")
    imp = load(tmp_path / "a.safetensors")
    twice = 2.0 * imp * 3 / 2
    assert twice.provenance.scale == 3.0
    assert imp.provenance.scale == 1.0
    assert torch.allclose(twice["a.bias"], 3 * imp["a.bias"])
    assert torch.allclose(torch.cat(list(chunks_of(twice, "a.weight", 4))), 3 * imp["a.weight"].flatten())
    assert twice.provenance.sum["a.bias"] == pytest.approx(3 * imp.provenance.sum["a.bias"])
    assert twice.provenance.sum_of_squares["a.bias"] == pytest.approx(9 * imp.provenance.sum_of_squares["a.bias"])
    for wrong in (0, -1, math.nan, math.inf):
        with pytest.raises(SquisherError, match="positive number"):
            imp * wrong
    with pytest.raises(TypeError):
        imp * "2"


def test_a_factor_that_loses_the_values_is_refused():
    imp = squisher.Importance({"w": torch.tensor([3e-9, 0.0, 1e-39])})
    for lost in (imp * 1e-300, imp * 1e-20 * 1e-20, imp / 1e30):
        with pytest.raises(SquisherError, match="count as 0"):
            lost["w"]
        with pytest.raises(SquisherError, match="count as 0"):
            list(lost.chunks("w", 1))
    torch.testing.assert_close((imp * 1e-300 * 1e300)["w"], imp["w"])
    assert (imp * 1e-25)["w"][0] > 0  # small, and still a normal number
    assert (squisher.Importance({"w": torch.tensor([1.3e-38])}) / 32)["w"][0] > 0  # a batch size refuses nothing
    with pytest.raises(SquisherError, match="divided by a positive number"):
        imp / 1e-320


def test_restrict():
    imp = example(tied={"head.weight": "b.weight"})
    assert list(imp.restrict("weight$")) == ["a.weight", "b.weight"]
    assert list(imp.restrict(re.compile("^b"))) == ["b.weight"]
    assert list(imp.restrict(lambda name: "bias" in name)) == ["a.bias"]
    assert imp.restrict("^a").provenance.tied == {}
    assert "b.weight" not in imp.restrict("^a")
    with pytest.raises(KeyError):
        imp.restrict("^a")["b.weight"]
    with pytest.raises(NamingError, match="'zzz'"):
        imp.restrict("zzz")
    with pytest.raises(ArgumentError, match="regular expression"):
        imp.restrict("(")


def test_combine_is_the_mean_over_all_examples(tmp_path):
    per_example = torch.rand(10, 4)
    parts = [
        Importance({"w": per_example[:3].mean(0)}, examples=3, unit="example"),
        Importance({"w": per_example[3:].mean(0)}, examples=7, unit="example"),
    ]
    whole = Importance.combine(parts)
    assert torch.allclose(whole["w"], per_example.mean(0))
    assert whole.provenance.examples == 10
    assert torch.allclose(Importance.combine(parts, weights="equal")["w"], (parts[0]["w"] + parts[1]["w"]) / 2)
    assert torch.allclose(Importance.combine(parts, weights=[1, 3])["w"], (parts[0]["w"] + 3 * parts[1]["w"]) / 4)
    whole.save(tmp_path / "a.safetensors")
    assert torch.equal(load(tmp_path / "a.safetensors")["w"], whole["w"])


def test_combine_is_the_mean_over_all_tokens_where_these_are_the_unit():
    per_token = torch.rand(10, 4)
    parts = [
        Importance({"w": per_token[:8].mean(0)}, examples=2, unit="token", tokens=8, standard_error={"w": 0.1}),
        Importance({"w": per_token[8:].mean(0)}, examples=2, unit="token", tokens=2, standard_error={"w": 0.2}),
    ]
    whole = Importance.combine(parts)
    assert torch.allclose(whole["w"], per_token.mean(0))
    assert (whole.provenance.examples, whole.provenance.tokens) == (4, 10)
    with pytest.raises(SquisherError, match="Importance 2 .*tokens"):
        Importance.combine([parts[0], Importance(dict(parts[1]), examples=2, unit="token")])


def test_a_combination_claims_only_what_is_true_of_all_its_parts(tmp_path):
    clean, dirty = {"class": "AdamW", "eps": 1e-8}, {"class": "AdamW", "eps": 1e-6}
    dirty |= {"pollution": [{"code": "weight_decay", "note": "L2"}], "after_clipping": True}
    made = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}]
    parts = [
        Importance(
            {"a": torch.rand(20), "b": torch.rand(30)},
            kind="squisher",
            optimizer=optimizer,
            seed=seed,
            absent={name: {"reason": "frozen", "note": "frozen"}},
            model={"structure": "s", "content": content},
            dtype_of_source=dtype,
        )
        for seed, (optimizer, name, content, dtype) in enumerate(
            zip((clean, dirty), ("c", "d"), made, ("float32", "bfloat16"), strict=True)
        )
    ]
    parts[1].save(tmp_path / "b.safetensors", codec="log8")
    parts[1] = load(tmp_path / "b.safetensors")
    for order in (parts, parts[::-1]):
        p = Importance.combine(order, weights="equal").provenance
        assert p.optimizer == {"class": "AdamW"}
        assert [one.code for one in p.pollution] == ["weight_decay"]
        assert p.after_clipping is True
        assert p.seed is None
        assert set(p.absent) == {"c", "d"}
        assert p.model == {"structure": "s", "content": {"a": "1"}}
        assert p.low_precision
        assert p.codec.before == ("log8",)
    same = Importance.combine([parts[0], parts[0]], weights="equal").provenance
    assert same.to_dict() == {**parts[0].provenance.to_dict()}


def test_a_combination_of_float64_keeps_its_digits():
    part = Importance({"a": torch.full((3,), 1e-60, dtype=torch.float64), "b": torch.ones(2)}, examples=1)
    mean = Importance.combine([part, part * 3.0])
    assert (mean["a"].dtype, mean["b"].dtype) == (torch.float64, torch.float32)
    assert torch.allclose(mean["a"], torch.full((3,), 2e-60, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("number", [np.float32(2), np.float64(2), np.int64(2)])
def test_numbers_of_numpy_multiply_from_both_sides(number):
    imp = Importance({"a": torch.ones(2)})
    for found in (imp * number, number * imp, imp * 4.0 / number):
        assert isinstance(found, Importance)
        assert found["a"].tolist() == [2.0, 2.0]


def test_combine_refuses_what_does_not_belong_together():
    a, b = example(examples=3), example(examples=4)
    with pytest.raises(SquisherError, match="none"):
        Importance.combine([])
    with pytest.raises(NamingError, match=r"'b\.weight', which"):
        Importance.combine([a, b.restrict("^a")])
    with pytest.raises(ScaleError, match=r"unit \(('token'|None) against"):
        Importance.combine([a, example(unit="token")])
    with pytest.raises(SquisherError, match="how many examples"):
        Importance.combine([a, example()])
    with pytest.raises(SquisherError, match="2 positive weights"):
        Importance.combine([a, b], weights=[1])
    other = Importance({**dict(a), "a.bias": torch.rand(6)}, examples=3)
    with pytest.raises(NamingError, match=r"'a\.bias'.*\(5,\).*\(6,\)"):
        Importance.combine([a, other])


# -- the scale rule ----------------------------------------------------------------------------------------------------


def squisher_of(**provenance):
    return example(kind="squisher", bias_corrected=True, **provenance)


@pytest.mark.parametrize(
    ("provenance", "unit", "factor", "becomes"),
    [
        ({"loss_reduction": "mean", "batch_size": 8}, None, 8, "example"),
        ({"loss_reduction": "mean", "batch_size": 8, "unit": "sequence"}, None, 8, "sequence"),
        ({"loss_reduction": "sum", "batch_size": 8}, None, 1 / 8, "example"),
        ({"loss_reduction": "token_mean", "batch_tokens": 50}, None, 50, "token"),
        ({"loss_reduction": "token_mean", "batch_tokens": 50, "batch_size": 4}, "sequence", 50 * 50 / 4, "sequence"),
    ],
)
def test_as_fisher_factor_unit_and_idempotence(provenance, unit, factor, becomes):
    imp = squisher_of(**provenance)
    fisher = imp.as_fisher(unit)
    assert torch.allclose(fisher["a.weight"], factor * imp["a.weight"])
    assert fisher.provenance.scale == pytest.approx(factor)
    assert fisher.provenance.unit == becomes
    assert fisher.as_fisher().provenance == fisher.provenance
    assert fisher.as_fisher(unit)["a.weight"].equal(fisher["a.weight"])


def test_as_fisher_moves_between_tokens_and_sequences():
    imp = squisher_of(loss_reduction="token_mean", batch_tokens=50, batch_size=4)
    there = imp.as_fisher("token").as_fisher("sequence")
    assert torch.allclose(there["a.bias"], imp.as_fisher("sequence")["a.bias"])
    assert torch.allclose(there.as_fisher("token")["a.bias"], imp.as_fisher()["a.bias"])


@pytest.mark.parametrize(
    ("provenance", "unit", "words"),
    [
        ({}, None, "batch_size and loss_reduction"),
        ({"batch_size": 8}, None, "loss_reduction.*not known"),
        ({"loss_reduction": "mean"}, None, "batch_size.*not known"),
        ({"loss_reduction": "token_mean", "batch_size": 8}, None, "batch_tokens.*not known"),
        ({"loss_reduction": "token_mean", "batch_tokens": 8}, "sequence", "batch_size.*not known"),
        ({"loss_reduction": "token_mean", "batch_tokens": 8}, "example", "not per example"),
        ({"loss_reduction": "mean", "batch_size": 8}, "token", "never apart"),
        (
            {"loss_reduction": "mean", "batch_size": 8, "unit": "example"},
            "sequence",
            "per sequence",
        ),
        ({"loss_reduction": "mean", "batch_size": 8, "bias_corrected": False}, None, "without bias correction"),
    ],
)
def test_as_fisher_refuses_and_names_what_is_missing(provenance, unit, words):
    with pytest.raises(ScaleError, match=words):
        example(kind="squisher", **{"bias_corrected": True, **provenance}).as_fisher(unit)


def test_a_missing_batch_size_can_be_supplied():
    imp = squisher_of(loss_reduction="mean")
    assert imp.with_provenance(batch_size=16).as_fisher().provenance.scale == 16


def test_a_fisher_is_returned_as_it_is():
    imp = example(unit="example")
    assert imp.as_fisher()["a.bias"] is imp["a.bias"]
    with pytest.raises(ScaleError, match="measure it so"):
        imp.as_fisher("token")


def test_low_precision_states_warn():
    with pytest.warns(SquisherWarning, match="bfloat16 optimizer state"):
        squisher_of(loss_reduction="mean", batch_size=2, dtype_of_source="bfloat16").as_fisher()


@pytest.mark.parametrize(
    "wrong",
    [
        {"unit": "word"},
        {"loss_reduction": "median"},
        {"batch_size": 0},
        {"batch_size": "8"},
        {"batch_tokens": math.nan},
        {"absent": ["a"]},
    ],
)
def test_provenance_that_cannot_be(wrong):
    with pytest.raises(SquisherError, match=next(iter(wrong))):
        example(**wrong)


class TestSimulation:
    """The factors, from the definition: gradients of single tokens are noise of mean zero at frozen weights.

    Then the Fisher per unit is the variance of one unit's gradient, and the mean squared gradient of the step's loss,
    multiplied as the rule says, must converge to it; with gradient accumulation, where a step sums micro-batches.
    """

    STEPS, MICRO, ACCUMULATION = 4000, 4, 3

    def gradients(self):
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(1, 9, (self.STEPS, self.ACCUMULATION, self.MICRO), generator=generator)
        noise = torch.randn(self.STEPS, self.ACCUMULATION, self.MICRO, 8, generator=generator) * 1.7
        token_gradients = noise * (torch.arange(8) < lengths[..., None])
        return token_gradients.double(), lengths

    def check(self, step_gradients, target, unit=None, **provenance):
        v_hat = step_gradients.square().mean().reshape(1).float()
        imp = Importance({"w": v_hat}, kind="squisher", bias_corrected=True, **provenance)
        assert imp.as_fisher(unit)["w"].item() == pytest.approx(target, rel=5 * math.sqrt(2 / self.STEPS))

    def test_mean_over_examples_with_accumulation(self):
        tokens, _ = self.gradients()
        examples = tokens.sum(-1)  # summed token log-likelihood of one example
        micro_means = examples.mean(-1)
        self.check(
            micro_means.mean(-1),
            examples.square().mean().item(),
            loss_reduction="mean",
            batch_size=self.MICRO * self.ACCUMULATION,
        )

    def test_sum_over_examples_with_accumulation(self):
        examples = self.gradients()[0].sum(-1)
        self.check(
            examples.sum((-1, -2)),
            examples.square().mean().item(),
            loss_reduction="sum",
            batch_size=self.MICRO * self.ACCUMULATION,
        )

    def test_mean_over_tokens_with_accumulation(self):
        tokens, lengths = self.gradients()
        counts = lengths.sum((-1, -2))
        step = tokens.sum((-1, -2, -3)) / counts
        known = {"loss_reduction": "token_mean", "batch_tokens": counts.double().mean().item(), "batch_size": 12}
        self.check(step, (tokens.square().sum() / lengths.sum()).item(), unit="token", **known)
        self.check(step, tokens.sum(-1).square().mean().item(), unit="sequence", **known)


# -- combining several -------------------------------------------------------------------------------------------------

KNOWN = {"loss_reduction": "mean", "batch_size": 8}


def test_common_scale_converts_if_all_can():
    a, b, c = squisher_of(**KNOWN), squisher_of(loss_reduction="sum", batch_size=4), example()
    scaled = on_common_scale([a, b, c])
    assert [s.provenance.scale for s in scaled] == [8, 0.25, 1]
    assert [s.provenance.scale for s in on_common_scale([a, b, c], "stored")] == [1, 1, 1]


def test_common_scale_takes_stored_values_if_none_can_and_nothing_differs():
    a, b = squisher_of(), squisher_of()
    assert on_common_scale([a, b]) == [a, b]
    plain = {"a": torch.rand(2)}
    assert on_common_scale([plain, plain]) == [plain, plain]
    assert on_common_scale([a, plain])[0] is a


def test_common_scale_refuses_mixtures_and_says_which():
    with pytest.raises(ScaleError, match="number 2 cannot: batch_size"):
        on_common_scale([squisher_of(**KNOWN), squisher_of(loss_reduction="mean")])
    with pytest.raises(ScaleError, match=r"loss_reduction \(None against 'mean'\)"):
        on_common_scale([squisher_of(), squisher_of(loss_reduction="mean")])
    with pytest.raises(ScaleError, match="plain mapping"):
        on_common_scale([example(), {"a": torch.rand(2)}])
    with pytest.raises(ScaleError, match="Importance 2 of 2"):
        on_common_scale([squisher_of(**KNOWN), squisher_of()], "as_fisher")
    with pytest.raises(ScaleError, match="token.*example"):
        on_common_scale([example(unit="token"), example(unit="example")])
    with pytest.raises(SquisherError, match="not 'best'"):
        on_common_scale([], "best")


def test_common_scale_finds_the_unit_that_all_can_have():
    language = squisher_of(loss_reduction="token_mean", batch_tokens=50, batch_size=4)
    fisher = example(unit="sequence")
    scaled = on_common_scale([language, fisher])
    assert [s.provenance.unit for s in scaled] == ["sequence", "sequence"]
    assert scaled[0].provenance.scale == pytest.approx(625)


def test_structure_hash_depends_on_names_and_shapes_only():
    first = structure_hash({"a": (2, 3), "b": (4,)})
    assert first == structure_hash({"b": torch.Size([4]), "a": [2, 3]})
    assert first != structure_hash({"a": (3, 2), "b": (4,)})


def test_a_model_under_warnings_as_errors_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squisher_of(**KNOWN).as_fisher()


def test_the_accumulators_that_ota_merging_publishes(tmp_path):
    values = {"a.weight": torch.rand(2, 3)}
    for name in ("exp_avg_sq.safetensors", "other.safetensors"):
        squisher.storage.safetensors.save(tmp_path / name, values, None)
    imp = squisher.load(tmp_path / "exp_avg_sq.safetensors")
    assert imp.provenance.kind == "squisher"
    assert imp.provenance.batch_size is None
    assert torch.equal(imp["a.weight"], values["a.weight"])
    with pytest.raises(squisher.SquisherError, match="batch_size"):
        imp.as_fisher()
    with pytest.raises(squisher.SquisherError, match="without Squisher's metadata"):
        squisher.load(tmp_path / "other.safetensors")


# -- files of format version 1


def test_sentences_of_version_1_are_read_as_codes(tmp_path):
    """Written by the last commit of format version 1 from an Adam run with two groups."""
    p = squisher.load(FIXTURES / "version1" / "adam.safetensors").provenance
    assert {name: why.reason for name, why in p.absent.items()} == {
        "0.bias": "frozen",
        "2.weight": "not_in_optimizer",
        "2.bias": "not_in_optimizer",
        "spare.weight": "no_gradient",
        "spare.bias": "no_gradient",
    }
    assert {(one.code, name) for one in p.pollution for name in one.parameters} == {
        ("l2", "0.weight"), ("l2", "1.weight"),
        ("amsgrad", "0.weight"), ("amsgrad", "1.weight"), ("amsgrad", "1.bias"),
    }  # fmt: skip
    assert p.naming.level == "recorded"
    assert p.format_version == 2


def test_keys_that_version_1_put_beside_its_fields_are_fields():
    p = squisher.load(FIXTURES / "version1" / "fisher.safetensors").provenance
    assert (p.seed, p.coverage["method"], set(p.standard_error)) == (0, "capture", {"0.weight", "2.weight"})
    assert {why.reason for why in p.absent.values()} == {"not_requested"}
    assert p.extra == {}


@pytest.mark.parametrize("name", ["adam", "fisher"])
def test_version_1_becomes_version_2_without_loss(tmp_path, name):
    old = squisher.load(FIXTURES / "version1" / f"{name}.safetensors")
    old.save(tmp_path / "new.safetensors")
    new = squisher.load(tmp_path / "new.safetensors")
    assert replace(new.provenance, created_with=None) == replace(old.provenance, created_with=None)
    assert all(torch.equal(new[n], old[n]) for n in old)


# -- a look at it


def test_top_is_what_the_sums_say(tmp_path):
    imp = Importance({"small": torch.full((2, 3), 0.5), "large": torch.full((10,), 4.0), "zero": torch.zeros(4)})
    rows = imp.top(2)
    assert [(row.name, row.shape, row.entries, row.total, row.mean) for row in rows] == [
        ("large", (10,), 10, 40.0, 4.0),
        ("small", (2, 3), 6, 3.0, 0.5),
    ]
    assert [row.share for row in imp.top(None)] == [40 / 43, 3 / 43, 0.0]
    imp.save(tmp_path / "i.safetensors")
    assert load(tmp_path / "i.safetensors").top(None) == imp.top(None)  # with the sums of the file
    assert [row.total for row in (imp * 2.0).top(2)] == [80.0, 6.0]
    assert Importance({"zero": torch.zeros(2)}).top()[0].share == 0.0
    assert Importance({"many": torch.ones(100), "strong": torch.full((1,), 9.0)}).top(1, by="mean")[0].name == "strong"
    with pytest.raises(SquisherError, match="share or mean"):
        imp.top(by="size")


def test_without_pandas_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SquisherError, match="pip install pandas"):
        example().to_frame()


@pytest.mark.formats
def test_a_frame_has_a_row_for_each_parameter():
    imp = example(standard_error={"a.weight": 0.5, "a.bias": None, "b.weight": 0.25})
    frame = imp.to_frame()
    assert list(frame.index) == list(imp)
    assert frame.loc["a.bias", "total"] == pytest.approx(float(imp["a.bias"].sum()))
    assert frame.loc["b.weight", "standard_error"] == 0.25


def test_notebooks_show_a_table_and_escape_names():
    imp = Importance({"<b>": torch.ones(2), **{f"p{k}": torch.ones(1) for k in range(11)}})
    page = imp._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert page.count("<tr>") == 11
    assert "2 more parameters" in page


def test_to_a_device_reads_all_and_keeps_what_it_says(tmp_path):
    imp = example(batch_size=4, kind="squisher", loss_reduction="mean").as_fisher().restrict("weight")
    imp.save(tmp_path / "i.safetensors")
    moved = load(tmp_path / "i.safetensors").to("cpu")
    (tmp_path / "i.safetensors").unlink()
    assert set(moved) == {"a.weight", "b.weight"}
    assert all(torch.equal(moved[name], imp[name]) for name in imp)
    assert moved.provenance.scale == 4
    assert all(t.device.type == "meta" for t in imp.to("meta").values())


def test_a_provenance_is_shown_in_one_line():
    p = example(batch_size=8, absent={f"layer.{k}": "frozen" for k in range(200)}, examples=3).provenance
    assert repr(p).startswith("Provenance(")
    assert "batch_size=8" in repr(p)
    assert "absent=<200 entries>" in repr(p)
    assert len(repr(p)) < 300


@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_standard_errors_are_those_of_the_mean_of_parts(weights):
    torch.manual_seed(0)
    counts = [10, 20, 30]
    parts = [Importance({"w": torch.rand(3, 5), "b": torch.rand(4)}, examples=count) for count in counts]
    found = Importance.standard_errors(parts, weights)
    shares = [1 / 3] * 3 if weights == "equal" else [count / 60 for count in counts]
    for name in ("w", "b"):
        mean = sum(share * part[name].double() for share, part in zip(shares, parts, strict=True))
        squares = sum((share * (part[name] - mean)) ** 2 for share, part in zip(shares, parts, strict=True))
        expected = (3 / 2 * squares).sqrt().float()
        assert torch.allclose(found[name], expected, rtol=1e-6)
        for size in (1, 7, 1 << 18):
            assert torch.equal(torch.cat(list(chunks_of(found, name, size))), found[name].flatten())
    with pytest.raises(SquisherError, match="two parts"):
        Importance.standard_errors(parts[:1])


def test_standard_errors_shrink_with_the_number_of_parts():
    """Of K parts with independent noise of deviation σ, the mean has the error σ/√K."""
    torch.manual_seed(0)
    parts = [Importance({"w": (3 + torch.randn(4000)).clamp(min=0)}) for _ in range(25)]
    error = Importance.standard_errors(parts, "equal")["w"]
    assert float(error.mean()) == pytest.approx(1 / 5, rel=0.05)


def test_sums_of_another_importance_do_not_speak_for_new_values(tmp_path):
    example().save(tmp_path / "old.safetensors")
    old = load(tmp_path / "old.safetensors")
    new = Importance({name: 3 * values for name, values in old.items()}, **old.provenance.to_dict())
    expected = {name: values.double().sum().item() for name, values in new.items()}
    assert {row.name: row.total for row in new.top(None)} == pytest.approx(expected)
    assert squisher.embed.embedding(new)["a.bias"].item() == pytest.approx(expected["a.bias"] / 5)


def test_a_scale_that_overflows_is_refused_and_not_infinite():
    importance = squisher.Importance(
        {"w": torch.full((3,), 1e38)}, kind="squisher", batch_size=32, loss_reduction="mean", unit="example"
    )
    for scaled in (importance.as_fisher(), importance * 10.0):
        with pytest.raises(SquisherError, match="'w' times .* float32"):
            scaled["w"]
        with pytest.raises(SquisherError, match="'w' times .* float32"):
            list(scaled.chunks("w"))
    wide = squisher.Importance({"w": torch.full((3,), 1e38, dtype=torch.float64)}, kind="fisher") * 10.0
    assert wide["w"].isfinite().all()


@pytest.mark.parametrize(("value", "dtype"), [(3.4e38, "bfloat16"), (1e60, "float32"), (1e200, None)])
def test_values_that_the_file_cannot_hold_are_refused_in_a_sentence(tmp_path, value, dtype):
    imp = squisher.Importance({"w": torch.full((4,), value, dtype=torch.float64)})
    with pytest.raises(SquisherError, match="'w'.*more than their type holds"):
        imp.save(tmp_path / "a.safetensors", dtype=dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [
        {"examples": "many"}, {"tokens": [1]}, {"dtype_of_source": 1}, {"sum": {"w": "x"}}, {"sum_of_squares": {"w": None}}, {"tied": {"a": {}}},
        {"pollution": 1}, {"optimizer": {"pollution": 1}}, {"optimizer": {"beta2": "x"}}, {"optimizer": {"groups": [1]}}, {"optimizer": {"groups": [{"parameters": 1}]}},
        {"steps": {"min": "x", "max": 3}}, {"steps": {"per_parameter": 1}}, {"naming": {"level": "proven", "each": 1}}, {"absent": {"w": {"reason": 1}}}, {"extra": [1]},
        {"model": {"content": {"w": 1}}}, {"codec": {"name": "exact", "before": 5}}, {"codec": {"name": "exact", "overlap": [1]}}, {"codec": 3},
    ],
)  # fmt: skip
def test_metadata_of_a_wrong_type_is_a_file_error(tmp_path, wrong):
    path = tmp_path / "a.safetensors"
    squisher.storage.safetensors.save(path, {"w": torch.ones(2)}, {"kind": "squisher", **wrong})
    with pytest.raises(FileError, match=r"a\.safetensors.*provenance has"):
        load(path)


def test_what_is_null_is_not_known(tmp_path):
    path = tmp_path / "a.safetensors"
    absent = {"b": {"reason": "frozen", "note": None}}
    known = {
        "kind": "squisher",
        "absent": absent,
        "pollution": [{"code": "l2", "numbers": None, "parameters": None}],
        "examples": None,
    }
    squisher.storage.safetensors.save(
        path, {"w": torch.ones(2)}, {**known, "codec": {"name": "exact", "spearman": None}}
    )
    found = load(path).provenance
    assert (str(found.absent["b"]), found.pollution[0].parameters, found.examples) == ("frozen", (), None)


def test_an_unknown_key_may_have_any_name(tmp_path):
    path = tmp_path / "a.safetensors"
    squisher.storage.safetensors.save(path, {"w": torch.ones(2)}, {"kind": "fisher", "tensors": 1, "self": 2})
    load(path).save(tmp_path / "b.safetensors")
    assert load(tmp_path / "b.safetensors").provenance.extra == {"tensors": 1, "self": 2}
    assert Importance.combine([load(path)], "equal").provenance.extra == {"tensors": 1, "self": 2}


def test_a_fisher_stays_what_it_is(tmp_path):
    imp = Importance({"w": torch.ones(2)}, unit="example", examples=3)
    assert imp.as_fisher().provenance == imp.provenance
    assert Importance.combine([imp, imp.as_fisher()]).provenance.examples == 6


def test_given_provenance_replaces_what_was_there():
    imp = Importance({"w": torch.ones(2)}, kind="squisher", optimizer={"pollution": ["l2"]}, unknown=7)
    changed = imp.with_provenance(pollution=["clipping"], batch_size=4).provenance
    assert [one.code for one in changed.pollution] == ["clipping"]
    assert (changed.batch_size, changed.extra) == (4, {"unknown": 7})
    assert imp.with_provenance(pollution=[]).provenance.pollution == ()


@pytest.mark.parametrize("wrapped", [dict, Computed])
def test_the_sums_of_other_values_are_not_taken_over(tmp_path, wrapped):
    Importance({"w": torch.ones(4)}).save(tmp_path / "a.safetensors")
    known = load(tmp_path / "a.safetensors").provenance
    assert known.sum == {"w": 4}
    assert Importance(wrapped({"w": torch.full((4,), 2.0)}), **known.to_dict()).total("w") == 8
