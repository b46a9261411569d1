"""The method squisher_fisher inside mergekit, on small random models; needs mergekit."""

import json
import sys
from importlib.metadata import version

import pytest
import safetensors.torch
import torch

import squisher
from squisher import merge
from squisher.errors import SquisherError
from squisher.importance.weights import content_of
from tests.commands import run


def test_without_mergekit_the_message_names_the_extra(tmp_path, monkeypatch):
    from squisher.integrations import mergekit

    for name in ("mergekit", "mergekit.config", "mergekit.merge_methods"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (mergekit.register, lambda: mergekit.run(tmp_path / "c.yml", tmp_path / "out")):
        with pytest.raises(SquisherError, match=r"torch-squisher\[mergekit\]"):
            call()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    if tuple(map(int, version("mergekit").split("."))) < (0, 1, 5):
        pytest.skip("mergekit 0.1.5 is the first that methods can be added to, and takes transformers 5")
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("models")
    for k, name in enumerate("abc"):
        torch.manual_seed(k)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        model.save_pretrained(root / name)
        weights = safetensors.torch.load_file(root / name / "model.safetensors")
        values = {n: torch.rand_like(t) ** 4 * 1e-10 for n, t in weights.items()}
        imp = squisher.Importance(
            values, kind="squisher", batch_size=4.0**k, loss_reduction="mean", bias_corrected=True
        )
        imp.save(root / name if name != "c" else root / "importance-of-c.safetensors")
    return root


def squisher_mergekit(config, out, cwd, *options):
    return run("mergekit", config, "--out", out, *options, cwd=cwd)


def weights(path):
    return safetensors.torch.load_file(path / "model.safetensors")


CONFIG = """\
merge_method: squisher_fisher
models:
  - model: {root}/a
    parameters: {{weight: 1.0}}
  - model: {root}/b
    parameters: {{weight: 0.25}}
  - model: {root}/c
    parameters:
      weight: 2.0
      importance: {root}/importance-of-c.safetensors
parameters: {{{shared}}}
dtype: float32
"""


@pytest.mark.formats
@pytest.mark.parametrize(
    ("shared", "options"),
    [
        ("", {}),
        ("normalize: l2", {"normalize": "l2"}),
        ("normalize: mean, floor: 1.0e-11", {"normalize": "mean", "floor": 1e-11}),
        ("scale: stored, floor: 0", {"scale": "stored", "floor": 0}),
    ],
)
def test_it_gives_what_merge_fisher_gives(models, tmp_path, shared, options):
    (tmp_path / "config.yml").write_text(CONFIG.format(root=models, shared=shared))
    done = squisher_mergekit("config.yml", "out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = weights(tmp_path / "out")
    imps = [
        squisher.load(models / "a"),
        squisher.load(models / "b"),
        squisher.load(models / "importance-of-c.safetensors"),
    ]
    expected = merge.fisher([weights(models / name) for name in "abc"], imps, [1, 0.25, 2], **options)
    assert set(result) == set(expected)
    for name in result:
        torch.testing.assert_close(result[name], expected[name], rtol=1e-5, atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yml", "out"]
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded.model.norm.weight.data, expected["model.norm.weight"])


@pytest.mark.formats
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.replace("models:", "tokenizer_source: union\nmodels:"), "does not take tokenizer_source"),
        (lambda t: t.replace("weight: 2.0\n", "weight: 2.0\n      #").replace("#      importance", "#"), "no importance for"),
        (lambda t: t.replace("importance-of-c", "nothing"), "There is no file"),
        (lambda t: t.replace("parameters: {}", "parameters: {normalize: l1}"), "normalize is mean, l2 or none"),
        (lambda t: t.replace("parameters: {}", "parameters: {floor: '+1.0'}"), "floor is relative or a number, not '+1.0'"),
        (lambda t: t.replace("parameters: {}", "parameters: {flor: 1.0}"), "has 'flor', which squisher_fisher does not have"),
        (lambda t: t.replace("weight: 1.0", "wieght: 1.0"), "Did you mean 'weight'"),
        (lambda t: t.replace("merge_method", "method"), "is not a mergekit configuration"),
        (lambda t: "merge_method: squisher_fisher\nslices:\n  - sources:\n      - model: x\n        layer_range: [0, 1]\n",
         "does not take slices"),
    ],
)  # fmt: skip
def test_what_would_go_wrong_is_refused(models, tmp_path, change, words):
    text = change(CONFIG.format(root=models, shared=""))
    (tmp_path / "config.yml").write_text(text)
    done = squisher_mergekit("config.yml", "out", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["config.yml"]


@pytest.mark.formats
def test_importances_of_another_model_are_refused(models, tmp_path):
    renamed = {f"other.{n}": t for n, t in squisher.load(models / "a").items()}
    squisher.Importance(renamed, kind="fisher").save(tmp_path / "other.safetensors")
    text = CONFIG.format(root=models, shared="scale: stored").replace(
        f"{models}/importance-of-c.safetensors", str(tmp_path / "other.safetensors")
    )
    (tmp_path / "config.yml").write_text(text)
    done = squisher_mergekit("config.yml", "out", tmp_path)
    assert done.returncode == 1
    assert "their names differ" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.formats
def test_importances_in_the_wrong_order_are_refused(models, tmp_path):
    for name in "ab":
        content = content_of(weights(models / name))
        squisher.load(models / name).with_provenance(model={"content": content}).save(tmp_path / f"{name}.safetensors")
    text = CONFIG.format(root=models, shared="")
    text = text.replace("{weight: 1.0}", f"{{importance: {tmp_path}/b.safetensors}}")
    text = text.replace("{weight: 0.25}", f"{{importance: {tmp_path}/a.safetensors}}")
    (tmp_path / "config.yml").write_text(text)
    done = squisher_mergekit("config.yml", "out", tmp_path)
    assert done.returncode == 1
    assert "wrong models" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.formats
def test_bfloat16_and_a_second_run_give_the_same_bytes(models, tmp_path):
    text = CONFIG.format(root=models, shared="").replace("float32", "bfloat16")
    (tmp_path / "config.yml").write_text(text)
    for out in ("one", "two"):
        assert squisher_mergekit("config.yml", out, tmp_path).returncode == 0
    a, b = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert a == b
    assert json.loads((tmp_path / "one" / "config.json").read_text())["vocab_size"] == 64


@pytest.mark.formats
def test_relative_names_lie_beside_the_configuration_and_options_are_passed_on(models, tmp_path):
    config = models / "relative.yml"
    config.write_text(CONFIG.format(root=".", shared="").replace("./", ""))
    done = squisher_mergekit(config, "out", tmp_path, "--no-write-model-card", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"folder": "out"}
    assert not (tmp_path / "out" / "README.md").exists()
    given = [squisher.load(models / name) for name in ("a", "b", "importance-of-c.safetensors")]
    expected = merge.fisher([weights(models / name) for name in "abc"], given, [1, 0.25, 2])
    torch.testing.assert_close(
        weights(tmp_path / "out")["model.norm.weight"], expected["model.norm.weight"], rtol=1e-5, atol=1e-6
    )
    assert "--nonsense" in squisher_mergekit(config, "two", tmp_path, "--nonsense").stderr


@pytest.mark.formats
def test_folders_named_relative_to_here_do_not_need_the_hub(models, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "config.yml").write_text(CONFIG.format(root=".", shared="").replace("./a", "a").replace("./b", "b"))
    done = squisher_mergekit(tmp_path / "config.yml", tmp_path / "out", models)
    assert done.returncode == 0, done.stderr
    assert "model.norm.weight" in weights(tmp_path / "out")


@pytest.mark.formats
@pytest.mark.parametrize("name", ["not-here", "owner/name"])
def test_a_model_that_cannot_be_found_is_one_sentence(models, tmp_path, name, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "config.yml").write_text(CONFIG.format(root=models, shared="").replace(f"{models}/a", name))
    done = squisher_mergekit("config.yml", "out", tmp_path)
    assert done.returncode == 1
    assert f"There is no folder {name}, neither here nor beside the configuration" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["config.yml"]
