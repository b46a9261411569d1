"""A Hugging Face folder and a JSONL file, through the command line; needs transformers."""

import gzip
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import squisher
from squisher.errors import FileError, SquisherError
from squisher.storage.folders import open_model
from squisher.storage.safetensors import save
from tests.commands import run

LINES = [
    {"text": "the cat sat", "text_pair": "on the mat", "label": 0},
    {"text": "a dog ran far away", "text_pair": "from the cat", "label": 2},
    {"text": "the mat", "text_pair": "sat", "label": 1},
]
WORDS = ["[PAD]", "[UNK]", "[EOS]", "the", "cat", "sat", "on", "mat", "a", "dog", "ran", "far", "away", "from"]


def test_without_transformers_the_message_names_the_extra(tmp_path, monkeypatch):
    from squisher.integrations.text import load_text_model

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SquisherError, match=r"torch-squisher\[hf\]"):
        load_text_model(tmp_path)


def tokenizer_into(folder):
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: k for k, w in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    ).save_pretrained(folder)


def folder_of(kind, folder):
    import transformers

    torch.manual_seed(0)
    if kind == "classifier":
        config = transformers.BertConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            num_labels=3, max_position_embeddings=32,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
    elif kind == "tied rotary decoder":  # buffers that no file holds
        config = transformers.LlamaConfig(
            vocab_size=len(WORDS), hidden_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=24, max_position_embeddings=32, tie_word_embeddings=True, pad_token_id=0,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    elif kind == "experts":
        config = transformers.MixtralConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=24, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=32, pad_token_id=0,
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=32)
        model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    tokenizer_into(folder)
    return model.eval()


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return file


@pytest.mark.formats
def test_a_tokenizer_that_pads_on_the_left_changes_nothing(tmp_path, data):
    from squisher.integrations.text import load_text_model, text_batches

    folder_of("language model", tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "padding_side": "left"}))  # as for generation
    data.write_text("\n".join(json.dumps({"text": row["text"]}) for row in LINES))
    loaded = load_text_model(tmp_path / "model")
    alone, together = (
        squisher.fisher(loaded.model, text_batches(data, loaded, batch_size=size)) for size in (1, len(LINES))
    )
    for name in alone:
        torch.testing.assert_close(alone[name], together[name])


@pytest.mark.formats
def test_a_pair_in_some_lines_only_is_refused_by_its_line(tmp_path, data):
    from squisher.integrations.text import load_text_model, text_batches

    folder_of("classifier", tmp_path / "model")
    data.write_text("\n".join(json.dumps(row) for row in (LINES[0], {"text": "the cat", "label": 1})))
    loaded = load_text_model(tmp_path / "model")
    with pytest.raises(FileError, match=r"line 2: 'text_pair' is None"):
        list(text_batches(data, loaded))


@pytest.mark.formats
@pytest.mark.parametrize("kind", ["classifier", "language model"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_command_gives_the_definition(tmp_path, data, kind, batch_size):
    import transformers

    model = folder_of(kind, tmp_path / "model")
    if kind != "classifier":
        data.write_text("\n".join(json.dumps({"text": row["text"]}) for row in LINES))
    out = tmp_path / "fisher.safetensors"
    done = run("fisher", tmp_path / "model", "--data", data, "--out", out, "--batch-size", batch_size)
    assert done.returncode == 0, done.stderr
    assert "3 examples" in done.stdout
    imp = squisher.load(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    index = {w: k for k, w in enumerate(WORDS)}
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in LINES:
        text = row["text"].split()
        if kind == "classifier":
            encoded = tokenizer(row["text"], row["text_pair"], return_tensors="pt")
            assert encoded["input_ids"].tolist() == [[index[w] for w in text + row["text_pair"].split()]]
            logits = model(**encoded).logits
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor([row["label"]]))
        else:
            ids = torch.tensor([[index[w] for w in text]])
            loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
        model.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            totals[name] += p.grad**2 / len(LINES)
    assert set(imp) == set(totals)
    for name, expected in totals.items():
        assert torch.allclose(imp[name], expected, rtol=1e-3, atol=1e-9), name


@pytest.mark.formats
def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path, data, monkeypatch):
    from squisher.integrations import text
    from squisher.measure import unfinished

    monkeypatch.setattr(unfinished, "SECONDS", 0.0)
    folder_of("classifier", tmp_path / "model")
    data.write_text("".join(json.dumps(row) + "\n" for row in LINES * 4))
    out, whole = tmp_path / "fisher.safetensors", tmp_path / "whole.safetensors"
    arguments = ["fisher", tmp_path / "model", "--data", data, "--batch-size", 2, "--codec", "log8", "--out"]
    assert run(*arguments, whole).returncode == 0
    child = os.fork()
    if child == 0:
        made, make = [], text._batch
        monkeypatch.setattr(
            text, "_batch", lambda *a: os.kill(os.getpid(), 9) if len(made) == 3 else made.append(0) or make(*a)
        )
        run(*arguments, out)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert sorted(p.name for p in tmp_path.glob("fisher*")) == ["fisher.unfinished.safetensors"]
    done = run(*arguments, out, "--labels", "exact")
    assert done.returncode == 1
    assert "other settings (labels" in done.stderr
    done = run(*arguments, out)
    assert "Going on with" in done.stderr
    assert out.read_bytes() == whole.read_bytes()
    assert squisher.load(out).provenance.codec.name == "log8"
    assert sorted(p.name for p in tmp_path.glob("fisher*")) == ["fisher.safetensors"]


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "squisher", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.formats
@pytest.mark.parametrize("kind", ["classifier", "classifier in shards", "tied rotary decoder in shards"])
def test_under_torchrun_the_processes_share_the_batches(tmp_path, data, kind):
    folder_of(kind.split(" in ")[0], tmp_path / "model")
    data.write_text("".join(json.dumps(row) + "\n" for row in LINES * 3))
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    arguments = ["fisher", tmp_path / "model", "--data", data, "--batch-size", 2, "--labels", "sampled", "--out"]
    done = run(*arguments, one)
    assert done.returncode == 0, done.stderr
    done = torchrun(*arguments, two, *(["--shard"] if "shards" in kind else []))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("9 examples") == 1
    alone, shared = squisher.load(one), squisher.load(two)
    assert shared.provenance.examples == 9
    assert shared.provenance.model == alone.provenance.model
    assert list(shared) == list(alone)
    for name in alone:
        torch.testing.assert_close(shared[name], alone[name], rtol=1e-4, atol=1e-9)


@pytest.mark.formats
def test_shards_need_several_processes_and_whole_folders(tmp_path, data):
    folder_of("classifier", tmp_path / "model")
    arguments = ["fisher", tmp_path / "model", "--data", data, "--out", tmp_path / "out.safetensors", "--shard"]
    done = run(*arguments)
    assert done.returncode == 2
    assert "torchrun" in done.stderr
    weights = {n: t.clone() for n, t in open_model(tmp_path / "model").weights.items() if n != "classifier.weight"}
    save(tmp_path / "model" / "model.safetensors", weights, {"format": "pt"})
    done = torchrun(*arguments)
    assert done.returncode == 1
    assert "'classifier.weight'" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()
    experts = [n for n, _ in folder_of("experts", tmp_path / "model").named_parameters() if "experts" in n]
    if not any(n.endswith("gate_up_proj") for n in experts):  # transformers 4 keeps the experts apart, as the file does
        return
    done = torchrun(*arguments)
    assert done.returncode == 1
    assert "mlp.experts.gate_up_proj" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.formats
def test_labels_that_need_no_labels_and_bad_lines(tmp_path, data):
    from squisher.integrations.text import load_text_model, text_batches

    folder_of("classifier", tmp_path / "model")
    data.write_text("\n".join(json.dumps({"text": row["text"]}) for row in LINES))
    out = tmp_path / "fisher.safetensors"
    done = run("fisher", tmp_path / "model", "--data", data, "--out", out, "--labels", "exact", "--json")
    assert json.loads(done.stdout)["provenance"]["estimator"]["labels"] == "exact", done.stderr
    done = run("fisher", tmp_path / "model", "--data", data, "--out", tmp_path / "x.safetensors")
    assert done.returncode == 1
    assert "line 1 has no 'label'" in done.stderr
    loaded = load_text_model(tmp_path / "model")
    for text, words in [
        ("{", "line 1 is not JSON"),
        ("[]", "has no 'text'"),
        ('{"text": "a", "label": 7}', "not a class of the model, which has 3"),
        ('{"text": "a", "label": "spam"}', "'spam' is not one of the model's"),
        ("\n", "no lines"),
    ]:
        data.write_text(text)
        with pytest.raises(FileError, match=words):
            list(text_batches(data, loaded))
    with pytest.raises(FileError, match="No such file"):
        list(text_batches(tmp_path / "none", loaded))
    for numbers in ({"batch_size": 0}, {"batch_size": -1}, {"max_length": 0}):
        with pytest.raises(SquisherError, match="positive"):
            list(text_batches(data, loaded, **numbers))
    with pytest.raises(FileError, match=r"no config\.json"):
        load_text_model(tmp_path)
    with pytest.raises(SquisherError, match="device 'quantum'"):
        load_text_model(tmp_path / "model", device="quantum")


@pytest.mark.formats
@pytest.mark.parametrize("kind", ["classifier", "language model"])
@pytest.mark.filterwarnings("default")
def test_an_adapter_is_measured_under_the_names_of_its_file(tmp_path, data, kind):
    import peft
    from safetensors.torch import load_file

    from squisher.integrations.text import load_text_model, text_batches

    model = folder_of(kind, tmp_path / "base")
    task = "SEQ_CLS" if kind == "classifier" else "CAUSAL_LM"
    targets = ["query"] if kind == "classifier" else ["c_attn"]
    config = peft.LoraConfig(task_type=task, r=2, target_modules=targets, fan_in_fan_out=kind != "classifier")
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_()
    adapted.peft_config["default"].base_model_name_or_path = "elsewhere"
    adapted.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "fisher.safetensors"
    done = run("fisher", tmp_path / "adapter", "--data", data, "--out", out)
    assert done.returncode == 1
    assert "give the base with --base DIR" in done.stderr
    done = run(
        "fisher",
        tmp_path / "adapter",
        "--data",
        data,
        "--out",
        out,
        "--base",
        tmp_path / "base",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    imp, stored = squisher.load(out), load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert set(imp) == set(stored)
    assert all(imp[name].shape == stored[name].shape for name in stored)
    batches = list(text_batches(data, load_text_model(tmp_path / "adapter", base=tmp_path / "base")))
    live = squisher.fisher(adapted.eval(), batches, method="loop")
    measured = sorted(float(live[name].sum()) for name in live)
    assert sorted(float(imp[name].sum()) for name in imp) == pytest.approx(measured, rel=1e-3)
    other = tmp_path / "other.safetensors"
    assert "is no adapter" in run("fisher", tmp_path / "base", "--data", data, "--out", other, "--base", "x").stderr


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_folder_without_the_head_is_refused_and_a_tied_one_is_not(tmp_path):
    from squisher.integrations.text import load_text_model

    folder_of("classifier", tmp_path / "whole")
    weights = open_model(tmp_path / "whole").weights
    folder_of("classifier", tmp_path / "headless")
    kept = {n: t.clone() for n, t in weights.items() if "classifier" not in n}
    save(tmp_path / "headless" / "model.safetensors", kept, {"format": "pt"})
    with pytest.raises(FileError, match=r"2 parameters .*'classifier.bias'"):
        load_text_model(tmp_path / "headless")
    for kind in ("language model", "tied rotary decoder"):
        folder_of(kind, tmp_path / kind)
        load_text_model(tmp_path / kind)


def test_compressed_lines_and_labels_that_are_true_or_false(tmp_path):
    from squisher.integrations.text import _label, _rows, count_rows

    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in LINES).encode()))
    assert count_rows(packed) == len(LINES)
    assert [row["text"] for row in _rows(packed, True)] == [row["text"] for row in LINES]
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(FileError, match="cut off"):
        count_rows(packed)
    names = [{0: "LABEL_0", 1: "LABEL_1"}, {0: "True", 1: "False"}]
    for id2label, expected in zip(names, ([0, 1], [1, 0]), strict=True):
        config = SimpleNamespace(num_labels=2, id2label=id2label)
        found = [_label({"label": label, "line": "line 1"}, config) for label in (False, True)]
        assert found == expected
        assert {type(k) for k in found} == {int}
    with pytest.raises(FileError, match="one of two classes"):
        _label({"label": True, "line": "line 1"}, SimpleNamespace(num_labels=3, id2label=None))
