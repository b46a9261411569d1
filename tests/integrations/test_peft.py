"""LoRA adapters: factor by factor only from one start, folded otherwise; one adapter at weight 1 gives itself back."""

import json
import math

import pytest
import safetensors.torch
import torch

import squisher
from squisher.errors import NamingError, SquisherError
from squisher.integrations.model_folders import merge_folders
from squisher.integrations.peft import Folded, open_adapter
from squisher.storage.folders import open_model

NAMES = {"layer.q.weight": (12, 8), "layer.v.weight": (12, 8), "embed.weight": (20, 8)}
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "base_model_name_or_path": "somewhere/base"}


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "base"
    folder.mkdir()
    weights = {n: torch.randn(s) for n, s in NAMES.items()} | {"layer.q.bias": torch.randn(12)}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "toy"}')
    return folder


def adapter(folder, start, seed, config=None, extra=None, rank=4):
    generator = torch.Generator().manual_seed(start)
    tensors = {}
    for name in ("layer.q", "layer.v"):
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, 8, generator=generator)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(12, rank)
    generator.manual_seed(seed)
    tensors = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()} | (extra or {})
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **(config or {})}))
    return folder


def factors(folder):
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def weights(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


EXTRAS = {
    "plain": ({}, {}),
    "rsLoRA": ({"use_rslora": True}, {}),
    "DoRA": ({"use_dora": True}, {f"base_model.model.layer.{n}.lora_magnitude_vector": torch.rand(12) for n in "qv"}),
    "bias": ({"bias": "all"}, {"base_model.model.layer.q.bias": torch.randn(12)}),
}


@pytest.mark.parametrize("kind", EXTRAS)
@pytest.mark.parametrize("method", ["average", "fisher"])
def test_one_adapter_at_weight_one_gives_itself_back(tmp_path, kind, method):
    config, extra = EXTRAS[kind]
    a = adapter(tmp_path / "a", 1, 2, config, extra)
    squisher.Importance({n: torch.rand_like(t) for n, t in factors(a).items()}, kind="fisher").save(a)
    b = adapter(tmp_path / "b", 1, 3, config, extra)
    squisher.Importance({n: torch.rand_like(t) for n, t in factors(b).items()}, kind="fisher").save(b)
    for models, coefficients in (([a], [1.0]), ([a, b], [1.0, 0.0])):
        out = tmp_path / f"out{len(models)}"
        merge_folders(method, models, out, coefficients=coefficients)
        assert json.loads((out / "adapter_config.json").read_text()) == {**PLAIN, **config}
        result = factors(out)
        assert all(torch.equal(result[n], t) for n, t in factors(a).items())
        assert set(result) == set(factors(a))


def test_from_one_start_factors_are_merged(tmp_path):
    folders = [adapter(tmp_path / name, 1, seed) for name, seed in (("a", 2), ("b", 3))]
    report = merge_folders("average", folders, tmp_path / "out")
    assert "factor by factor" in report.adapters
    result = factors(tmp_path / "out")
    for name in result:
        torch.testing.assert_close(result[name], (factors(folders[0])[name] + factors(folders[1])[name]) / 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": 9}, "did not start from the same A"),
        ({"rank": 6, "config": {"r": 6}}, "differ in r"),
        ({"config": {"lora_alpha": 16}}, "differ in lora_alpha"),
        ({"config": {"use_rslora": True}}, "differ in use_rslora"),
        ({"config": {"base_model_name_or_path": "other"}}, "different bases"),
    ],
)
def test_from_other_starts_they_are_folded_into_the_base(tmp_path, base, change, words):
    a = adapter(tmp_path / "a", 1, 2)
    b = adapter(tmp_path / "b", **{"start": 1, "seed": 3, **change})
    report = merge_folders("average", [a, b], tmp_path / "out", base=base, coefficients=[1, 3])
    assert words in report.adapters
    result, start = weights(tmp_path / "out"), weights(base)
    for n in "qv":
        total = torch.zeros(12, 8)
        for folder, share in ((a, 0.25), (b, 0.75)):
            config, own = json.loads((folder / "adapter_config.json").read_text()), factors(folder)
            scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
            product = (
                own[f"base_model.model.layer.{n}.lora_B.weight"] @ own[f"base_model.model.layer.{n}.lora_A.weight"]
            )
            total += share * scale * product
        torch.testing.assert_close(
            result[f"layer.{n}.weight"], start[f"layer.{n}.weight"] + total, rtol=1e-5, atol=1e-5
        )
    assert torch.equal(result["embed.weight"], start["embed.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "toy"}
    with pytest.raises(SquisherError, match="--base"):
        merge_folders("average", [a, b], tmp_path / "again")
    with pytest.raises(SquisherError, match="Use average or task-arithmetic"):
        merge_folders("fisher", [a, b], tmp_path / "again", base=base)


def test_task_arithmetic_adds_up_what_adapters_do(tmp_path, base):
    folders = [adapter(tmp_path / "a", 1, 2), adapter(tmp_path / "b", 5, 3)]
    merge_folders("task-arithmetic", folders, tmp_path / "out", base=base, coefficients=[1.0, -0.5])
    start = open_model(base).weights
    folded = [Folded(start, open_adapter(f)) for f in folders]
    for name in start:
        expected = start[name] + (folded[0][name] - start[name]) - 0.5 * (folded[1][name] - start[name])
        torch.testing.assert_close(weights(tmp_path / "out")[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "is a IA3 adapter"),
        ({"lora_bias": True}, "a bias in lora_B"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"target_parameters": ["experts.w1"]}, "bare parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "initialised with pissa_niter_4"),
    ],
)
def test_kinds_that_are_not_merged_are_refused_by_name(tmp_path, config, words):
    folder = adapter(tmp_path / "a", 1, 2, config)
    with pytest.raises(SquisherError, match=words):
        merge_folders("average", [folder, folder], tmp_path / "out")


def test_adapters_that_do_not_fit_are_refused(tmp_path, base):
    strange = adapter(tmp_path / "a", 1, 2, extra={"base_model.model.nowhere.lora_A.weight": torch.randn(4, 8)})
    with pytest.raises(NamingError, match="'nowhere.weight'"):
        merge_folders("task-arithmetic", [strange], tmp_path / "out", base=base)
    half = adapter(tmp_path / "b", 1, 2, extra={"base_model.model.embed.lora_embedding_A": torch.randn(4, 20)})
    with pytest.raises(NamingError, match=r"lora_embedding_A.*'embed.weight'"):
        merge_folders("task-arithmetic", [half], tmp_path / "out", base=base)
    with pytest.raises(SquisherError, match="no LoRA adapter"):
        merge_folders("average", [half, base], tmp_path / "out")


@pytest.mark.formats
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"target_modules": ["c_attn", "wte"]},
        {"modules_to_save": ["ln_f"]},
        {"alpha_pattern": {"c_proj": 3}, "rank_pattern": {"c_attn": 2}},
    ],
    ids=lambda s: ",".join(s) or "plain",
)
def test_folding_is_what_peft_does(tmp_path, settings):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "base")
    arguments = {"r": 4, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, **settings}
    if "wte" in arguments["target_modules"]:
        arguments["fan_in_fan_out"] = False
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**arguments))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        adapted.save_pretrained(tmp_path / "adapter")
        again = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
        expected = again.merge_and_unload()
        merge_folders("task-arithmetic", [tmp_path / "adapter"], tmp_path / "out", base=tmp_path / "base")
        result = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    for (name, a), (_, b) in zip(result.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
    merge_folders("average", [tmp_path / "adapter"], tmp_path / "same")
    assert all(torch.equal(factors(tmp_path / "same")[n], t) for n, t in factors(tmp_path / "adapter").items())
