"""The real Trainer with our callbacks, against the optimizer that it held and against loops by hand."""

from __future__ import annotations

import types
from importlib import metadata

import pytest
import torch
from safetensors import safe_open

import squisher
from squisher.errors import NoAccumulatorError, SquisherError
from squisher.importance.weights import match
from squisher.integrations.transformers import EWCCallback, MaskCallback, SquisherCallback

from .trainers import Tokens, bert, ewc_of, in_processes, llama, lora, moments, trainer

pytestmark = [pytest.mark.formats, pytest.mark.filterwarnings("default")]


def names_in(file):
    with safe_open(file, "pt") as f:
        return set(f.keys())


def corrected(v, steps, beta2=0.999):
    return v * torch.tensor(1 / (1 - beta2**steps), dtype=torch.float32)


def test_every_checkpoint_gets_its_file_even_if_the_optimizer_is_not_saved(tmp_path):
    run = trainer(llama(tie_word_embeddings=True), tmp_path, save_only_model=True)
    callback = SquisherCallback().attach(run)
    run.train()
    assert not (tmp_path / "checkpoint-4" / "optimizer.pt").exists()
    early, late = (squisher.load(tmp_path / f"checkpoint-{n}" / "squisher.safetensors") for n in (2, 4))
    assert early.provenance.steps == {"min": 2, "max": 2}
    assert late.provenance.steps == {"min": 4, "max": 4}
    assert set(late) == names_in(tmp_path / "checkpoint-4" / "model.safetensors")
    for name, v in moments(run).items():
        assert torch.allclose(late[name], corrected(v, 4), rtol=1e-6), name
        assert torch.equal(late[name], callback.importance()[name])
    p = late.provenance
    assert p.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert p.after_clipping is True
    assert [(one.code, one.numbers) for one in p.pollution] == [("clipping", {"norm": 1.0})]
    assert not (tmp_path / "squisher.safetensors").exists()


def test_the_checkpoint_of_a_trial_gets_the_file(tmp_path):
    from transformers import Trainer

    class Search(Trainer):
        def _get_output_dir(self, trial):  # what a search over hyperparameters makes it return
            return str(tmp_path / "run-3")

    run = trainer(llama(), tmp_path, kind=Search)
    SquisherCallback().attach(run)
    run.train()
    assert {f.relative_to(tmp_path).parts[0] for f in tmp_path.rglob("squisher.safetensors")} == {"run-3"}
    assert (tmp_path / "run-3" / "checkpoint-4" / "squisher.safetensors").exists()


def test_at_the_end_only(tmp_path):
    run = trainer(llama(), tmp_path)
    SquisherCallback(at_end_only=True).attach(run)
    run.train()
    assert [str(f.relative_to(tmp_path)) for f in tmp_path.rglob("squisher*")] == ["squisher.safetensors"]
    best = trainer(llama(), tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2)
    SquisherCallback(at_end_only=True).attach(best)
    with pytest.raises(SquisherError, match="best"):
        best.train()


def test_the_best_model_has_its_own_importance(tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "greater_is_better": True,
    }  # so that the first checkpoint is the best
    run = trainer(llama(), tmp_path, load_best_model_at_end=True, metric_for_best_model="eval_loss", **options)
    callback = SquisherCallback(codec="log8").attach(run)
    run.train()
    best = run.state.best_model_checkpoint
    assert best.endswith("checkpoint-2")
    own, found = squisher.load(best), callback.importance()
    assert found.provenance == own.provenance
    assert all(torch.equal(found[name], own[name]) for name in own)
    assert match(found, run.model.state_dict()).same is True
    assert found.provenance.codec.name == "log8"
    assert set(callback.live_importance()) == {name for name, _ in run.model.named_parameters()} & set(
        callback.live_importance()
    )
    run.save_model(tmp_path / "saved")
    assert squisher.load(tmp_path / "saved").provenance.steps == own.provenance.steps
    (tmp_path / "checkpoint-2" / "squisher.safetensors").unlink()
    with pytest.raises(SquisherError, match="best model, checkpoint-"):
        callback.importance()


def test_a_saved_model_takes_the_file_along(tmp_path):
    run = trainer(llama(), tmp_path)
    callback = SquisherCallback().attach(run)
    run.save_model(tmp_path / "before")
    assert not (tmp_path / "before" / "squisher.safetensors").exists()
    run.train()
    run.save_model(tmp_path / "after")
    saved = squisher.load(tmp_path / "after")
    assert match(saved, run.model.state_dict()).same is True
    assert all(torch.equal(saved[name], callback.importance()[name]) for name in saved)
    run.save_model(_internal_call=True)  # as push_to_hub does, which then uploads this folder
    assert squisher.load(tmp_path).provenance.steps == {"min": 4, "max": 4}


def test_a_plain_callback_records_what_it_can_know(tmp_path):
    run = trainer(llama(), tmp_path)
    run.add_callback(SquisherCallback())
    run.train()
    p = squisher.load(tmp_path / "checkpoint-4" / "squisher.safetensors").provenance
    assert (p.batch_size, p.batch_tokens, p.loss_reduction) == (4, None, None)


@pytest.mark.parametrize("make", [llama, bert])
def test_accumulation_gives_the_same_fisher(tmp_path, make):
    data = Tokens(3 if make is bert else 0)
    found = []
    for accumulation in (1, 4):
        settings = {
            "learning_rate": 0.0,
            "gradient_accumulation_steps": accumulation,
            "per_device_train_batch_size": 4 // accumulation,
        }
        run = trainer(make(), tmp_path / str(accumulation), data, max_grad_norm=0.0, **settings)
        found.append(SquisherCallback().attach(run))
        run.train()
    one, four = (c.importance() for c in found)
    for name in one:
        assert torch.allclose(one.as_fisher()[name], four.as_fisher()[name], rtol=1e-3, atol=1e-9), name
    assert one.provenance.batch_size == four.provenance.batch_size == 4
    assert one.provenance.batch_tokens == four.provenance.batch_tokens
    # BERT's head (from transformers 5 on) takes the number of items and ignores it: the Trainer's gradient is four times the mean's.
    factor = four.provenance.training.get("gradients_were_times", 1)
    assert factor == (4 if make is bert and run.model_accepts_loss_kwargs else 1)
    assert four.provenance.scale == 1 / factor**2
    assert four.provenance.after_clipping is False
    assert four.provenance.pollution == ()


def test_tokens_are_those_that_the_trainer_divides_by(tmp_path):
    run = trainer(llama(), tmp_path, Tokens(size=22), num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=2)
    seen = []
    original = run.get_batch_samples

    def watched(*args):
        batches, items = original(*args)
        seen.append(int(items))
        return batches, items

    run.get_batch_samples = watched
    callback = SquisherCallback().attach(run)
    run.train()
    p = callback.importance().provenance
    assert len(seen) == 6  # 22 rows: two full steps of eight and one of six, twice
    assert p.batch_tokens == sum(seen) / 6
    assert p.batch_size == 8
    assert p.training["counted"] == {
        "steps": 6,
        "examples": 44,
        "tokens": sum(seen),
        "short_steps": 2,
        "largest": 8,
    }
    assert (p.loss_reduction, p.unit) == ("token_mean", "token")


def test_a_loss_of_ones_own_has_no_known_reduction(tmp_path):
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss * 3

    found = []
    for more in ({}, {"loss_reduction": "token_mean"}):
        run = trainer(llama(), tmp_path, kind=Own, max_steps=1)
        found.append(SquisherCallback(**more).attach(run))
        run.train()
    assert found[0].importance().provenance.loss_reduction is None
    assert found[1].importance().provenance.loss_reduction == "token_mean"
    assert found[1].importance().provenance.batch_tokens > 1
    with pytest.raises(SquisherError, match="loss_reduction"):
        SquisherCallback(loss_reduction="median")


def test_tracked_gradients_are_those_before_clipping(tmp_path):
    plain = trainer(llama(), tmp_path, max_grad_norm=0.0, max_steps=1)
    plain.train()
    run = trainer(llama(), tmp_path, max_grad_norm=1e-3, max_steps=1)
    callback = SquisherCallback(track=True).attach(run)
    run.train()
    tracked, p = callback.importance(), callback.importance().provenance
    for name, v in moments(plain).items():
        assert torch.allclose(tracked[name], corrected(v, 1), rtol=1e-4, atol=1e-12), name
    assert p.optimizer["class"] == "Tracker"
    assert p.after_clipping is False
    assert p.pollution == ()
    squeezed = sum(float(v.sum()) for v in moments(run).values())
    assert squeezed < 1e-3 * sum(float(v.sum()) for v in moments(plain).values())


def test_tracking_an_optimizer_that_keeps_nothing(tmp_path):
    run = trainer(llama(), tmp_path, optim="sgd", learning_rate=0.1)
    SquisherCallback().attach(run)
    with pytest.raises(NoAccumulatorError, match="Tracker"):
        run.train()
    run = trainer(llama(), tmp_path, optim="sgd", learning_rate=0.1)
    SquisherCallback(track=True).attach(run)
    run.train()
    imp = squisher.load(tmp_path / "checkpoint-4" / "squisher.safetensors")
    assert imp.provenance.steps == {"min": 4, "max": 4}
    assert all(imp[name].sum() > 0 for name in imp)


def test_adapters_have_the_names_of_their_file(tmp_path):
    run = trainer(lora(llama()), tmp_path, bf16=True)
    SquisherCallback().attach(run)
    run.train()
    imp = squisher.load(tmp_path / "checkpoint-4" / "squisher.safetensors")
    assert set(imp) == names_in(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    for name, v in moments(run).items():
        assert torch.allclose(imp[name.replace(".default", "")], corrected(v, 4), rtol=1e-6)
    assert imp.provenance.loss_reduction == "token_mean"
    assert imp.provenance.training["precision"] == "bf16"
    again = squisher.extract(tmp_path / "checkpoint-4", model=run.model)
    assert all(torch.equal(again[name], imp[name]) for name in imp)


def test_fused_experts_are_split_as_in_the_file(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=4, vocab_size=64)
    run = trainer(MixtralForCausalLM(config), tmp_path)
    callback = SquisherCallback().attach(run)
    run.train()
    imp = squisher.load(tmp_path / "checkpoint-4" / "squisher.safetensors")
    read = squisher.extract(tmp_path / "checkpoint-4")
    assert set(imp) == set(read) == names_in(tmp_path / "checkpoint-4" / "model.safetensors")
    assert all(torch.allclose(imp[name], read[name], rtol=1e-6) for name in imp)
    assert imp.provenance.live_names == read.provenance.live_names
    assert imp.provenance.model["structure"] == read.provenance.model["structure"]
    grouped = [name for group in imp.provenance.optimizer["groups"] for name in group["parameters"]]
    assert sorted(grouped) == sorted(imp)
    live = callback.live_importance()
    assert set(live) == set(dict(run.model.named_parameters()))


# -- EWC ----------------------------------------------------------------------------------------------------------------


def with_penalty(ewc, accumulation=1):
    """A Trainer that adds the penalty to its loss, through autograd: what everybody writes by hand."""
    from transformers import Trainer

    class Penalised(Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) + ewc.penalty() / accumulation

    return Penalised


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("adapter", [False, True])
def test_ewc_trains_as_the_penalty_in_the_loss_does(tmp_path, accumulation, adapter):
    settings = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0.5, "max_steps": 3, "optim": "sgd"}
    model = lora(llama()) if adapter else llama()
    by_hand = trainer(model, tmp_path, kind=with_penalty(ewc_of(model), accumulation), **settings)
    by_hand.train()
    run = trainer(lora(llama()) if adapter else llama(), tmp_path, **settings)
    ewc = ewc_of(run.model)
    EWCCallback(ewc).attach(run)
    first = float(ewc.penalty())
    run.train()
    for (name, a), b in zip(run.model.named_parameters(), by_hand.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-6), name
    logged = [line["ewc_penalty"] for line in run.state.log_history if "ewc_penalty" in line]
    assert len(logged) == 3
    assert logged[-1] == pytest.approx(float(ewc.penalty()))
    assert logged[0] < first  # it pulls
    assert all("loss" in line for line in run.state.log_history if "ewc_penalty" in line)


@pytest.mark.parametrize("metric", ["plain", "adam"])
def test_a_pull_follows_every_step_before_the_scheduler_and_leaves_the_state_clean(tmp_path, metric):
    from transformers import Trainer

    class ByHand(Trainer):
        def create_optimizer(self, *args, **kwargs):
            optimizer = super().create_optimizer(*args, **kwargs)
            step = optimizer.step

            def step_and_pull(_, *a, **k):
                step(*a, **k)
                ewc.pull_(optimizer, metric)

            optimizer.step = types.MethodType(step_and_pull, optimizer)  # a method: torch's schedulers count its calls
            return optimizer

    settings = {"max_steps": 3, "lr_scheduler_type": "linear", "learning_rate": 1e-2}
    by_hand = trainer(llama(), tmp_path, kind=ByHand, **settings)
    ewc = ewc_of(by_hand.model)
    by_hand.train()
    run = trainer(llama(), tmp_path, **settings)
    callback = EWCCallback(ewc_of(run.model), pull=metric).attach(run)
    run.train()
    for (name, a), b in zip(run.model.named_parameters(), by_hand.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    plain = trainer(llama(), tmp_path, **settings)
    plain.train()
    assert any(not torch.equal(a, b) for a, b in zip(run.model.parameters(), plain.model.parameters(), strict=True))
    assert callback.tracker is None
    assert "EWC" not in str(callback.importance().provenance.pollution)
    assert [line for line in run.state.log_history if "ewc_penalty" in line]
    run.optimizer.step()  # nothing follows once training has ended
    assert callback._handle is None


def test_the_importance_of_a_task_has_no_penalty_in_it(tmp_path):
    plain = trainer(llama(), tmp_path, max_grad_norm=0.0, max_steps=1)
    plain.train()
    found = {}
    for track in (True, False):
        run = trainer(llama(), tmp_path, max_steps=1, save_steps=1, max_grad_norm=0.0)
        found[track] = EWCCallback(ewc_of(run.model, 1e5), track=track).attach(run)
        run.train()
    clean, raw = found[True].importance(), found[False].importance()
    for name, v in moments(plain).items():
        assert torch.allclose(clean[name], corrected(v, 1), rtol=1e-4, atol=1e-12), name
    assert clean.provenance.pollution == ()
    assert [one.code for one in raw.provenance.pollution] == ["penalty"]
    assert sum(float(raw[n].sum()) for n in raw) > 100 * sum(float(clean[n].sum()) for n in clean)
    ewc = found[True].ewc
    ewc.consolidate(found[True].live_importance(), scale="stored")  # and on to the next task
    assert ewc.tasks == 2


def test_what_cannot_work_is_said_before_training(tmp_path):
    run = trainer(llama(), tmp_path)
    run.add_callback(EWCCallback(ewc_of(run.model)))
    with pytest.raises(SquisherError, match=r"EWCCallback"):
        run.train()
    run = trainer(llama(), tmp_path)
    EWCCallback(ewc_of(llama())).attach(run)
    with pytest.raises(SquisherError, match="another model"):
        run.train()
    searching = types.SimpleNamespace(is_hyper_param_search=True)
    with pytest.raises(SquisherError, match=r"trial.*attach"):
        SquisherCallback().on_train_begin(run.args, searching, None)
    with pytest.raises(SquisherError, match="SquisherCallback.*already"):
        SquisherCallback().attach(run)
    with pytest.raises(SquisherError, match="EWC.*dict"):
        EWCCallback({})
    with pytest.raises(SquisherError, match="call trainer.train"):
        SquisherCallback().importance()


# -- masks --------------------------------------------------------------------------------------------------------------


def test_a_mask_keeps_frozen_entries_to_the_bit(tmp_path):
    run = trainer(llama(), tmp_path, weight_decay=0.5)
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    g = torch.Generator().manual_seed(0)
    mask = {n: torch.rand(p.shape, generator=g) < 0.1 for n, p in before.items() if "norm" not in n}
    callback = MaskCallback(mask).attach(run)
    recorded = SquisherCallback().attach(run)
    run.train()
    # Frozen entries are 0 in what is recorded, and nothing said why.
    frozen = sum(p.numel() - int(mask[n].sum() if n in mask else 0) for n, p in before.items())
    (one,) = [p for p in recorded.importance().provenance.pollution if p.code == "mask"]
    assert one.numbers == {"entries": frozen}
    assert "mask" in [d.code for d in squisher.examine(recorded.importance()).diagnoses]
    for name, p in run.model.named_parameters():
        frozen = ~mask[name] if name in mask else torch.ones_like(p, dtype=torch.bool)
        assert torch.equal(p[frozen], before[name][frozen]), name
        if name in mask and "embed" not in name:
            assert (p[~frozen] != before[name][~frozen]).float().mean() > 0.9, name
    assert callback._handle is None  # taken away when training ends


# -- processes ----------------------------------------------------------------------------------------------------------

KILLED = {"optimizer": {}, "tracker": {"track": True}, "ewc": {"ewc": True}, "adapter": {"lora": True}}
# 22 rows in batches of 2 × 4: the third step of an epoch is short, and the run dies within the second epoch
LONG = {"size": 22, "args": {"max_steps": 6, "gradient_accumulation_steps": 2}}

TWO = {"tokens": {}, "ewc": {"ewc": True}, "classes": {"model": "bert"}}
SHORT = {"gradient_accumulation_steps": 2, "max_steps": 3, "save_steps": 3, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Trainings in processes of their own: whole, killed, resumed; and one process beside two."""
    root = tmp_path_factory.mktemp("runs")
    jobs, expected = [], []
    for name, how in KILLED.items():
        whole, broken = str(root / f"{name}-whole"), str(root / f"{name}-broken")
        jobs.append({**how, **LONG, "folder": whole})
        jobs.append({**how, **LONG, "folder": broken, "die_at": 5})
        jobs.append({**how, **LONG, "folder": broken, "resume": f"{broken}/checkpoint-4"})
        expected += [0, -9, 0]
    for name, how in TWO.items():
        args = {**SHORT, "learning_rate": 1e-2 if "ewc" in how else 0.0}  # at 0 nothing drifts apart
        one = {**args, "per_device_train_batch_size": 4}
        two = {**args, "per_device_train_batch_size": 2, "ddp_backend": "gloo"}
        jobs.append({**how, "folder": str(root / f"{name}-one"), "args": one})
        jobs.append({**how, "folder": str(root / f"{name}-two"), "args": two, "processes": 2})
        expected += [0, 0]
    statuses, errors = in_processes(jobs, root)
    assert statuses == expected, errors
    return root


@pytest.mark.parametrize("how", KILLED)
def test_killed_and_resumed_gives_the_same_file(folder, how):
    for step in (4, 6):
        a, b = (
            folder / f"{how}-{part}" / f"checkpoint-{step}" / "squisher.safetensors" for part in ("whole", "broken")
        )
        assert a.read_bytes() == b.read_bytes(), step
    p = squisher.load(folder / f"{how}-broken" / "checkpoint-6" / "squisher.safetensors").provenance
    assert p.steps == {"min": 6, "max": 6}
    counted = p.training["counted"]
    assert (counted["steps"], counted["examples"], counted["short_steps"]) == (6, 44, 2)
    assert p.batch_tokens == counted["tokens"] / 6


def test_the_tracker_of_a_checkpoint_does_not_disturb_readers(folder):
    read = squisher.extract(folder / "tracker-whole" / "checkpoint-6")
    live = torch.load(folder / "tracker-whole" / "end.pt")["moments"]
    assert all(torch.allclose(read[name], corrected(v, 6), rtol=1e-6) for name, v in live.items())


@pytest.mark.parametrize("how", TWO)
def test_two_processes_are_one_with_the_same_global_batch(folder, how):
    """Two processes take alternating batches of two rows: the same eight rows as one process with batches of four."""
    one, two = folder / f"{how}-one", folder / f"{how}-two"
    a, b = (squisher.load(part / "checkpoint-3" / "squisher.safetensors") for part in (one, two))
    assert a.provenance.batch_size == b.provenance.batch_size == 8
    assert a.provenance.batch_tokens == b.provenance.batch_tokens
    assert b.provenance.training["processes"] == 2
    for name in a:
        close = {"rtol": 2e-2, "atol": 1e-7} if how == "ewc" else {"rtol": 1e-4, "atol": 1e-10}
        assert torch.allclose(a.as_fisher()[name], b.as_fisher()[name], **close), name
    if how == "classes" and metadata.version("transformers") >= "5":
        # its gradients were as many times the mean's as there are micro-batches and processes
        assert a.provenance.training["gradients_were_times"] == 2
        assert b.provenance.training["gradients_were_times"] == 4
    ends = [torch.load(part / "end.pt")["weights"] for part in (one, two)]
    for name in ends[0]:
        assert torch.allclose(ends[0][name], ends[1][name], atol=1e-4), name
