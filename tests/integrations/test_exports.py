"""Files of other tools: what is in them; and the tools' own code reads them, where it installs."""

import json
import re
import signal
import sys

import pytest
import torch

import squisher
from squisher.integrations.exports import export, gguf_name, mlx_sensitivities, tensor_types, write_plan
from squisher.quantize import allocate, sensitivity
from squisher.storage import safetensors
from tests.commands import run

NAMES = {
    "model.layers.11.self_attn.q_proj.weight": "blk.11.attn_q.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.3.mlp.gate_proj.weight": "blk.3.ffn_gate.weight",
    "model.layers.3.mlp.up_proj.weight": "blk.3.ffn_up.weight",
    "model.layers.3.mlp.down_proj.weight": "blk.3.ffn_down.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "transformer.h.2.attn.c_attn.weight": "blk.2.attn_qkv.weight",
    "transformer.h.2.mlp.c_proj.weight": "blk.2.ffn_down.weight",
    "blk.4.attn_k.weight": "blk.4.attn_k.weight",
}


@pytest.mark.parametrize(("name", "there"), NAMES.items())
def test_names_in_gguf_files(name, there):
    assert gguf_name(name) == there


def test_an_unknown_name_is_not_guessed():
    with pytest.raises(squisher.SquisherError, match="--exclude"):
        gguf_name("encoder.layers.0.weight")


def plan_of(names, scheme="llama.cpp", bits=(2, 4, 8)):
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(8, 256, generator=generator) for name in names}
    importance = {name: torch.rand(8, 256, generator=generator) * 10**k for k, name in enumerate(names)}
    return allocate(sensitivity(weights, importance, bits, scheme=scheme), 5.0)


def test_lines_for_llama_quantize():
    names = ["model.layers.1.self_attn.q_proj.weight", "model.layers.11.self_attn.q_proj.weight", "lm_head.weight"]
    plan = plan_of(names)
    lines = dict(line.rsplit("=", 1) for line in tensor_types(plan).splitlines())
    types = {2: "q2_k", 4: "q4_k", 8: "q8_0"}
    for name, bits in plan.bits.items():
        hits = [kind for pattern, kind in lines.items() if re.search(pattern, gguf_name(name))]
        assert hits == [types[bits]]  # one line matches one tensor, though layers 1 and 11 share their digits
    with pytest.raises(squisher.SquisherError, match="--scheme llama.cpp"):
        tensor_types(plan_of(names, "affine"))


def test_experts_that_are_stacked_get_the_widest():
    plan = plan_of([f"model.layers.0.mlp.experts.{k}.up_proj.weight" for k in range(3)])
    (line,) = tensor_types(plan).splitlines()
    assert line == r"^blk\.0\.ffn_up_exps\.weight$=" + {2: "q2_k", 4: "q4_k", 8: "q8_0"}[max(plan.bits.values())]


def test_a_plan_for_stacked_experts_keeps_its_budget(tmp_path):
    """The widest of eight widths was written for all of them: 8.5 bits a weight under a plan that said 4.4."""
    weights = {f"model.layers.0.mlp.experts.{k}.up_proj.weight": torch.randn(8, 256) for k in range(8)}
    weights["lm_head.weight"] = torch.randn(8, 256)
    importance = {name: torch.rand(8, 256) * 10.0**-k for k, name in enumerate(weights)}
    safetensors.save(tmp_path / "model.safetensors", weights, None)
    squisher.Importance(importance).save(tmp_path / "i.safetensors")
    options = ("--importance", tmp_path / "i.safetensors", "--bits-per-weight", "4.5", "--format", "llama.cpp")
    done = run("quantize", tmp_path / "model.safetensors", *options, "--out", tmp_path / "types.txt", "--json")
    assert done.returncode == 0, done.stderr
    lines = dict(line.rsplit("=", 1) for line in (tmp_path / "types.txt").read_text().splitlines())
    plan = json.loads(done.stdout)
    assert set(plan["tensors"]) == {"blk.0.ffn_up_exps.weight", "lm_head.weight"}
    assert plan["tensors"]["blk.0.ffn_up_exps.weight"]["numel"] == 8 * 8 * 256
    bits = {"q2_k": 2.625, "q3_k": 3.4375, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625, "q8_0": 8.5}
    written = [bits[lines[rf"^{re.escape(name)}$"]] for name in ("blk.0.ffn_up_exps.weight", "output.weight")]
    mean = (8 * written[0] + written[1]) / 9
    assert mean <= 4.5
    assert plan["bits_per_weight"] == pytest.approx(mean)


def test_sensitivities_for_mlx(tmp_path):
    plan = plan_of(["model.layers.0.mlp.up_proj.weight", "lm_head.weight"], "affine", (4, 5))
    write_plan(plan, "mlx", tmp_path / "s.json")
    found = dict(json.loads((tmp_path / "s.json").read_text()))
    losses = plan.sensitivity.losses["lm_head.weight"]
    assert list(found) == ["model.layers.0.mlp.up_proj", "lm_head"]
    assert found["lm_head"] == pytest.approx((losses[4] - losses[5]) / (8 * 256 / 1e6))
    with pytest.raises(squisher.SquisherError, match="3 were not measured"):
        mlx_sensitivities(plan.sensitivity, 3, 4)


@pytest.mark.parametrize("known_by", ["the file", "the importance"])
def test_squeezellm_gives_a_tied_weight_its_importance_under_both_names(tmp_path, known_by):
    """The second name had zeros, and the command said that it has no importance."""
    weight, tied = torch.ones(4, 2), {"head.weight": "embed.weight"} if known_by == "the importance" else {}
    state = {"embed.weight": weight, "head.weight": weight.clone() if tied else weight}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    importance = squisher.Importance({"embed.weight": torch.rand(4, 2)}, tied=tied)
    said = export(importance, "squeezellm", tmp_path / "out", tmp_path)
    made, _ = safetensors.open_archive(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(made[name], importance["embed.weight"]) for name in state)
    assert "no importance" not in said


def test_squeezellm_folder_has_every_name(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"dtype": "float16"}')
    safetensors.save(tmp_path / "m" / "model.safetensors", {"a": torch.ones(2, 3).half(), "b": torch.ones(4)}, None)
    said = export(squisher.Importance({"a": torch.full((2, 3), 1e-9)}), "squeezellm", tmp_path / "g", tmp_path / "m")
    assert "1 tensors have no importance and are 0" in said
    out = safetensors.open_archive(tmp_path / "g" / "model.safetensors")[0]
    assert torch.equal(out["a"], torch.full((2, 3), 1e-9))
    assert torch.equal(out["b"], torch.zeros(4))
    with pytest.raises(squisher.SquisherError, match="the model"):
        export(squisher.Importance({"c": torch.ones(2)}), "squeezellm", tmp_path / "h", tmp_path / "m")
    assert not (tmp_path / "h").exists()


# -- with the tools themselves -----------------------------------------------------------------------------------------


@pytest.fixture
def tiny_llama(tmp_path):
    """A tiny Llama after three steps of AdamW, saved, with its Squisher."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        tokens = torch.randint(64, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "model")
    return model, squisher.extract(optimizer, model), tmp_path


@pytest.mark.formats
def test_bergson_reads_its_normalizers(tiny_llama):
    from bergson.gradients import AdamNormalizer
    from bergson.utils.load_from_optimizer import load_from_optimizer

    model, importance, place = tiny_llama
    export(importance, "bergson", place / "bergson")
    found = load_from_optimizer(model, str(place / "bergson"))
    assert len(found) == 2 * 7 + 2  # all matrices, the embedding and the head among them
    assert all(isinstance(n, AdamNormalizer) for n in found.values())
    key = "layers.1.mlp.up_proj"
    assert torch.equal(found[key].weight_avg_sq, importance["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.formats
def test_transformers_load_the_gradient_checkpoint_of_squeezellm(tiny_llama):
    # Its chunk_models.py does just this and then takes the .weight.data of each projection; it is no package to install.
    from transformers import LlamaForCausalLM

    _, importance, place = tiny_llama
    export(importance, "squeezellm", place / "gradients", place / "model")
    gradients = LlamaForCausalLM.from_pretrained(place / "gradients", dtype="auto")
    layer = gradients.model.layers[1]
    assert torch.equal(layer.self_attn.o_proj.weight.data, importance["model.layers.1.self_attn.o_proj.weight"])
    assert torch.equal(layer.mlp.down_proj.weight.data, importance["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.formats
def test_safetensors_open_the_file_of_ota(tiny_llama):
    from safetensors import safe_open

    model, importance, place = tiny_llama
    export(importance, "ota", place / "exp_avg_sq.safetensors")
    with safe_open(place / "exp_avg_sq.safetensors", framework="pt", device="cpu") as file:
        for name, parameter in model.named_parameters():
            assert file.get_tensor(name).shape == parameter.shape
            assert torch.equal(file.get_tensor(name), importance[name])


@pytest.mark.formats
def test_gguf_has_these_names_types_and_sizes():
    import gguf

    architectures = {
        "model.layers": "LLAMA",
        "model.embed_tokens": "LLAMA",
        "lm_head": "LLAMA",
        "transformer.h": "GPT2",
    }
    for name, there in NAMES.items():
        kind = next((a for start, a in architectures.items() if name.startswith(start)), None)
        if kind is not None:
            known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind), 12)
            assert known.get_name(name, try_suffixes=(".weight",)) == there
    for bits, quantizer in plan_of(["lm_head.weight"], bits=(2, 3, 4, 5, 6, 8)).sensitivity.quantizers.items():
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quantizer.name.upper()]]
        assert quantizer.size((1, 256)) == 256 // values * size * 8, bits


@pytest.mark.skipif(sys.platform == "win32", reason="files have no limits of size there")
def test_a_full_disk_is_told_of_by_the_export_for_bergson_too(tmp_path):
    """torch's own error was reported as a fault of squisher."""
    import resource

    importance, limits = squisher.Importance({"w": torch.rand(100_000)}), resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(squisher.errors.FileError, match="disk full"):
            export(importance, "bergson", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())
