"""States of public checkpoints, synthesised under their writers' names, extracted under those of the published weights."""

import json

import pytest
import torch
from safetensors.torch import save_file

import squisher
from squisher.errors import FileError, NamingError
from squisher.recycle.formats.model_source import in_hugging_face_names
from squisher.recycle.states import Entry, Found, OptimizerState

D, HEADS, GROUPS, WIDE, VOCAB = 16, 4, 2, 12, 11  # four channels a head
KV = D * GROUPS // HEADS


def llama(norms=("input_layernorm", "post_attention_layernorm")):
    """Names and shapes of a model of two layers in Llama's style, as Hugging Face stores it."""
    out = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,), "lm_head.weight": (VOCAB, D)}
    for k in range(2):
        layer = f"model.layers.{k}"
        rows = {"q": D, "k": KV, "v": KV}
        out |= {f"{layer}.self_attn.{part}_proj.weight": (n, D) for part, n in rows.items()}
        out |= {f"{layer}.self_attn.o_proj.weight": (D, D), f"{layer}.mlp.down_proj.weight": (D, WIDE)}
        out |= {f"{layer}.mlp.{part}_proj.weight": (WIDE, D) for part in ("gate", "up")}
        out |= {f"{layer}.{norm}.weight": (D,) for norm in norms}
    return out


def olmo2():
    out = llama(("post_attention_layernorm", "post_feedforward_layernorm"))
    for k in range(2):
        out |= {f"model.layers.{k}.self_attn.{part}_norm.weight": (n,) for part, n in (("q", D), ("k", KV))}
    return out


def neox(head="embed_out"):
    out = {"gpt_neox.embed_in.weight": (VOCAB, D), f"{head}.weight": (VOCAB, D)}
    linear = {
        "attention.query_key_value": (3 * D, D),
        "attention.dense": (D, D),
        "mlp.dense_h_to_4h": (WIDE, D),
        "mlp.dense_4h_to_h": (D, WIDE),
    }
    norms = ["gpt_neox.final_layer_norm"]
    for k in range(2):
        for name, shape in linear.items():
            out |= {f"gpt_neox.layers.{k}.{name}.weight": shape, f"gpt_neox.layers.{k}.{name}.bias": shape[:1]}
        norms += [f"gpt_neox.layers.{k}.{norm}" for norm in ("input_layernorm", "post_attention_layernorm")]
    return out | {f"{norm}.{kind}": (D,) for norm in norms for kind in ("weight", "bias")}


def bloom(prefix=""):
    out = {}
    for name, shape in neox().items():
        if name != "embed_out.weight":
            name = name.replace("gpt_neox.", "").replace("layers.", "h.").replace("attention.", "self_attention.", 1)
            name = name.replace("embed_in", "word_embeddings").replace("final_layer_norm", "ln_f")
            out[prefix + name] = shape
    return out | {f"{prefix}word_embeddings_layernorm.{kind}": (D,) for kind in ("weight", "bias")}


def as_neox(hf, sequential=""):
    """What GPT-NeoX calls each parameter: layers are numbered with the embedding and what has no parameters."""
    out = {}
    for name, value in hf.items():
        parts = name.removeprefix("gpt_neox.").split(".")
        if parts[0] == "layers":
            own = f"{int(parts[1]) + 2}.{'.'.join(parts[2:])}"
        else:
            places = {"embed_in": "0.word_embeddings", "final_layer_norm": "5.norm"}
            own = f"{places.get(parts[0], '6.final_linear')}.{parts[1]}"
        out[sequential + own] = value
    return out


def as_bloom(hf):
    out = {}
    for name, value in hf.items():
        parts = name.removeprefix("transformer.").split(".")
        if parts[0] == "h":
            out[f"{int(parts[1]) + 3}.{'.'.join(parts[2:])}"] = value
        elif parts[0] == "ln_f":
            out[f"6.{parts[1]}"] = value
        else:
            place = parts[0].replace("_layernorm", ".norm")
            out[f"tied_modules.embed.{place}.{parts[1]}"] = value
    return out


def as_olmo(hf):
    """OLMo fuses queries, keys and values, and in the feed-forward layer `up` before `gate`."""
    out = {
        "transformer.wte.weight": hf["model.embed_tokens.weight"],
        "transformer.ln_f.weight": hf["model.norm.weight"],
        "transformer.ff_out.weight": hf["lm_head.weight"],
    }
    for k in range(2):
        own, layer = f"transformer.blocks.{k}", f"model.layers.{k}"
        attention = [hf[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        out[f"{own}.att_proj.weight"] = torch.cat(attention)
        out[f"{own}.attn_out.weight"] = hf[f"{layer}.self_attn.o_proj.weight"]
        out[f"{own}.ff_proj.weight"] = torch.cat([hf[f"{layer}.mlp.{part}_proj.weight"] for part in ("up", "gate")])
        out[f"{own}.ff_out.weight"] = hf[f"{layer}.mlp.down_proj.weight"]
        out[f"{own}.attn_norm.weight"] = hf[f"{layer}.post_attention_layernorm.weight"]
        out[f"{own}.ff_norm.weight"] = hf[f"{layer}.post_feedforward_layernorm.weight"]
        out |= {f"{own}.{part}_norm.weight": hf[f"{layer}.self_attn.{part}_norm.weight"] for part in "qk"}
    return out


def as_olmo_core(hf):
    out = {
        "embeddings.weight": hf["model.embed_tokens.weight"],
        "lm_head.norm.weight": hf["model.norm.weight"],
        "lm_head.w_out.weight": hf["lm_head.weight"],
    }
    for k in range(2):
        own, layer = f"blocks.{k}", f"model.layers.{k}"
        for ours, theirs in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}.items():
            out[f"{own}.attention.w_{ours}.weight"] = hf[f"{layer}.self_attn.{theirs}.weight"]
        for ours, theirs in {"w1": "gate", "w2": "down", "w3": "up"}.items():
            out[f"{own}.feed_forward.{ours}.weight"] = hf[f"{layer}.mlp.{theirs}_proj.weight"]
        out |= {f"{own}.attention.{part}_norm.weight": hf[f"{layer}.self_attn.{part}_norm.weight"] for part in "qk"}
        out[f"{own}.attention_norm.weight"] = hf[f"{layer}.post_attention_layernorm.weight"]
        out[f"{own}.feed_forward_norm.weight"] = hf[f"{layer}.post_feedforward_layernorm.weight"]
    return out


def as_nanotron(hf, interleaved):
    """nanotron fuses `gate` before `up`; told so, it puts the two channels that a rotary embedding turns side by side."""

    def rotary(tensor, heads):
        if not interleaved:
            return tensor
        return tensor.reshape(heads, 2, -1, D).transpose(1, 2).reshape(tensor.shape)

    out = {
        "model.token_position_embeddings.pp_block.token_embedding.weight": hf["model.embed_tokens.weight"],
        "model.final_layer_norm.pp_block.weight": hf["model.norm.weight"],
        "model.lm_head.pp_block.weight": hf["lm_head.weight"],
    }
    for k in range(2):
        own, layer = f"model.decoder.{k}.pp_block", f"model.layers.{k}"
        q, key, v = (hf[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
        out[f"{own}.attn.qkv_proj.weight"] = torch.cat([rotary(q, HEADS), rotary(key, GROUPS), v])
        out[f"{own}.attn.o_proj.weight"] = hf[f"{layer}.self_attn.o_proj.weight"]
        halves = [hf[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        out[f"{own}.mlp.gate_up_proj.weight"] = torch.cat(halves)
        for rest in ("mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
            out[f"{own}.{rest}.weight"] = hf[f"{layer}.{rest}.weight"]
    return out


def values(shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def saved(folder, own, **more):
    """A torch file with a state under the writer's names."""
    state = {n: {"exp_avg_sq": v, "exp_avg": -v, "step": torch.tensor(3.0)} for n, v in own.items()}
    group = {"params": list(own), "betas": (0.9, 0.95), "lr": 0.1, "eps": 1e-8, "weight_decay": 0.1, **more}
    torch.save({"state": state, "param_groups": [group]}, folder / "optim.pt")
    return folder / "optim.pt"


WRITERS = {
    "GPT-NeoX": (neox(), as_neox),
    "GPT-NeoX, no pipeline": (neox(), lambda hf: as_neox(hf, "sequential.")),
    "BLOOM": (bloom("transformer."), as_bloom),
    "BLOOM's base model": (bloom(), as_bloom),
    "GPT-NeoX, a head of transformers 5": (neox("lm_head"), as_neox),
    "OLMo": (olmo2(), as_olmo),
    "OLMo-core": (olmo2(), as_olmo_core),
    "nanotron": (llama(), lambda hf: as_nanotron(hf, False)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_parameter_has_its_name_in_the_published_weights(tmp_path, writer):
    shapes, own = WRITERS[writer]
    published = values(shapes)
    source = saved(tmp_path, own(published))
    save_file(published, tmp_path / "model.safetensors")
    imp = squisher.extract(source, model=tmp_path, bias_correction=False)
    assert set(imp) == set(published)
    for name, value in published.items():
        assert torch.equal(imp[name], value)
        for size in (1, 7, 1 << 20):
            assert torch.equal(torch.cat(list(imp.chunks(name, size))), value.flatten())
    assert imp.provenance.naming.level == "recorded"
    assert set(imp.provenance.live_names.values()) <= set(own(published))
    recorded = squisher.extract(source, bias_correction=False)
    assert set(recorded) == set(own(published))


@pytest.mark.parametrize("interleaved", [True, False, None])
def test_rotary_pairs_of_nanotron_go_half_a_head_apart(tmp_path, interleaved):
    """SmolLM2's 1.7B was trained with neighbours as pairs, its small models with halves; at first nanotron knew neighbours only."""
    published = values(llama())
    folder = tmp_path / "optimizer"
    folder.mkdir()
    own = as_nanotron(published, interleaved is not False)
    state = {k: {"exp_avg_sq": v, "exp_avg": -v, "step": torch.tensor(3.0)} for k, v in enumerate(own.values())}
    groups = [{"params": list(state), "betas": (0.9, 0.95), "lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}]
    content = {"state": state, "param_groups": groups, "names": dict(enumerate(own)), "gradient_accumulator": {}}
    torch.save(content, folder / "optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt")
    (folder / "optimizer_config.json").write_text('{"configs": {}}')
    weights = tmp_path / "published"
    weights.mkdir()
    save_file(published, weights / "model.safetensors")
    with pytest.raises(FileError, match="model_config.json"):
        squisher.extract(tmp_path, model=weights)
    config = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "hidden_size": D}
    config |= {} if interleaved is None else {"rope_interleaved": interleaved}
    (tmp_path / "model_config.json").write_text(json.dumps(config | {"hidden_size": 2 * D}))
    with pytest.raises(FileError, match="another model"):
        squisher.extract(tmp_path, model=weights)
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    imp = squisher.extract(tmp_path, model=weights, bias_correction=False)
    assert set(imp) == set(published)
    for name, value in published.items():
        assert torch.equal(imp[name], value)


def test_another_model_is_refused(tmp_path):
    published = values(olmo2())
    source = saved(tmp_path, as_olmo(published))
    weights = tmp_path / "model.safetensors"
    save_file({n: v for n, v in published.items() if "layers.1" not in n}, weights)
    with pytest.raises(NamingError, match="lacks"):
        squisher.extract(source, model=tmp_path)
    published["model.embed_tokens.weight"] = torch.zeros(VOCAB + 1, D)
    save_file(published, weights)
    with pytest.raises(NamingError, match="shape"):
        squisher.extract(source, model=tmp_path)


@pytest.mark.formats
@pytest.mark.parametrize("writer", [w for w in WRITERS if "base" not in w and "head" not in w])
def test_published_names_are_those_of_transformers(writer):
    """The shapes above are those of the real classes."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    gated = {**sizes, "intermediate_size": WIDE, "num_key_value_heads": GROUPS, "pad_token_id": None}
    if writer.startswith("GPT"):
        config = transformers.GPTNeoXConfig(**sizes, intermediate_size=WIDE)
    elif writer == "BLOOM":
        config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=D, n_layer=2, n_head=HEADS)
    else:
        config = (transformers.LlamaConfig if writer == "nanotron" else transformers.Olmo2Config)(**gated)
    model = transformers.AutoModelForCausalLM.from_config(config)
    real = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if "lm_head.weight" in real and writer.startswith("GPT"):  # transformers 5, in the running model
        real["embed_out.weight"] = real.pop("lm_head.weight")
    assert set(real) == set(WRITERS[writer][0])
    if writer != "BLOOM":  # whose feed-forward layer is always four times as wide
        assert real == WRITERS[writer][0]


def test_names_that_no_writer_has_stay(tmp_path):
    entries = [Entry({"exp_avg_sq": torch.ones(2)}, {}, 0, "net.weight")]
    assert in_hugging_face_names(Found([OptimizerState(entries)]), {"model.norm.weight": (2,)}) is None
