from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from squisher.importance import RunFacts
from squisher.recycle.formats.trainer import facts_of, target_modules, training_args
from squisher.storage.torch_files import Record

BERT = Path(__file__).parents[1] / "fixtures" / "trainer" / "bert"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(BERT, tmp_path / "checkpoint-3"))


def facts(folder, steps=3, **changes):
    args = training_args(folder)
    args.attributes.update(changes)
    return facts_of(folder, args, steps)[0]


def codes(facts):
    return {one.code: one.numbers for one in facts.pollution}


def state(folder, **changes):
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_nothing_is_known_without_arguments(folder):
    (folder / "training_args.bin").unlink()
    assert training_args(folder) is None
    assert facts_of(folder, None, 3) == (RunFacts(), True)


def test_batch_size_is_the_product_of_recorded_factors(folder):
    assert facts(folder).batch_size == 2 * 2
    assert facts(folder, gradient_accumulation_steps=3).batch_size == 2 * 3


def test_batch_size_counts_processes_by_their_random_states(folder):
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_1.pth")
    four = Record("PartialState")
    four.attributes["num_processes"] = 2
    assert facts(folder, distributed_state=four).batch_size == 2 * 2 * 2
    assert facts(folder).batch_size is None  # the arguments say one process
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_7.pth")
    assert facts(folder, distributed_state=four).batch_size is None


def test_batch_size_with_several_devices_in_one_process(folder):
    state(folder, train_batch_size=8)
    assert facts(folder, _n_gpu=4).batch_size == 8 * 2
    assert facts(folder, _n_gpu=3).batch_size is None


@pytest.mark.parametrize(
    "changes",
    [{"parallelism_config": {"tp": 2}}, {"tp_size": 2}, {"gradient_accumulation_steps": None}, {"_n_gpu": None, "per_device_train_batch_size": 3}],
)  # fmt: skip
def test_batch_size_is_unknown_without_proof(folder, changes):
    if "_n_gpu" in changes:
        state(folder, train_batch_size=None)
    assert facts(folder, **changes).batch_size is None


def test_batch_size_that_was_searched_for_is_the_one_used(folder):
    state(folder, train_batch_size=1)
    assert facts(folder).batch_size is None
    assert facts(folder, auto_find_batch_size=True).batch_size == 1 * 2


def test_clipping(folder):
    assert facts(folder).after_clipping is True
    off = facts(folder, max_grad_norm=0.0, gradient_accumulation_steps=1)
    assert off.after_clipping is False
    assert off.pollution == ()
    assert codes(facts(folder, max_grad_norm=0.5, gradient_accumulation_steps=1)) == {"clipping": {"norm": 0.5}}


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("GPT2LMHeadModel", ("token_mean", "token")),
        ("LlamaForCausalLM", ("token_mean", "token")),
        ("T5ForConditionalGeneration", ("token_mean", "token")),
        ("BertForMaskedLM", ("token_mean", "token")),
        ("ViTForImageClassification", ("mean", "example")),
        ("BertForQuestionAnswering", ("mean", "example")),
        ("BertForPreTraining", (None, None)),
        ("SomethingElse", (None, None)),
    ],
)
def test_reduction_by_the_head(folder, architecture, expected):
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    got = facts(folder, gradient_accumulation_steps=1)
    assert (got.loss_reduction, got.unit) == expected


def test_other_trainers_have_losses_of_their_own(folder):
    args = training_args(folder)
    preference = Record("trl.trainer.dpo_config.DPOConfig")
    preference.attributes.update(args.attributes)
    assert facts_of(folder, preference, 3)[0].loss_reduction is None


def test_smoothed_labels_are_noted(folder):
    assert codes(facts(folder, label_smoothing_factor=0.1))["label_smoothing"] == {"smoothing": 0.1}


def test_steps_that_a_loss_scaler_skipped_are_no_contradiction(folder):
    assert codes(facts(folder, steps=2))["steps_disagree"] == {"optimizer": 2, "trainer": 3}
    (folder / "scaler.pt").touch()
    assert "steps_disagree" not in codes(facts(folder, steps=2))


def test_targets_of_galore(folder):
    args = training_args(folder)
    assert target_modules(args) is None
    args.attributes["optim_target_modules"] = ["attn", "mlp"]
    assert target_modules(args) == ["attn", "mlp"]
    args.attributes["optim_target_modules"] = "all-linear"
    assert target_modules(args) == "all-linear"
    args.attributes["optim_target_modules"] = [3]
    assert target_modules(args) is None


@pytest.mark.parametrize(
    ("architecture", "version", "known"),
    [
        ("BertForSequenceClassification", "5.22.0", False),
        ("BertForSequenceClassification", "4.46.0", False),
        ("BertForSequenceClassification", "4.45.2", True),  # the Trainer divided by itself
        ("T5ForConditionalGeneration", "5.22.0", False),
        ("LlamaForCausalLM", "5.22.0", True),
        ("GPT2LMHeadModel", "4.57.1", True),
    ],
)
def test_a_step_of_several_batches_may_be_their_sum(folder, architecture, version, known):
    config = folder / "config.json"
    config.write_text(json.dumps({"architectures": [architecture], "transformers_version": version}))
    several, one = facts(folder), facts(folder, gradient_accumulation_steps=1)
    assert (several.loss_reduction is not None) == known
    assert codes(several).get("added_batches") == (None if known else {"batches": 2})
    assert one.loss_reduction is not None
    assert "added_batches" not in codes(one)
