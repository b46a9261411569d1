"""Merging two large models with two importance files, in bfloat16 and in float32.

Beside mergekit's linear merge of the same two models, which reads half as many tensors, and beside the limit: reading all
bytes and writing the result's, with nothing in between.

python -m benchmarks.merge [--parameters 300e6] [--rounds 5] [--mergekit-python PYTHON]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks import harness

COPY, AVERAGE, FISHER = "copy all bytes", "squisher merge average", "squisher merge fisher"
FOUR, SHALLOW = "squisher merge fisher, four models", "squisher merge fisher, a quarter of the layers"
MERGEKIT = "mergekit linear"
TYPES = ("bfloat16", "float32")
LARGE = 70e9


def shapes(parameters: int) -> tuple[dict[str, tuple[int, ...]], dict[str, object]]:
    """Return a Llama of about this size: names and shapes, and its config."""
    hidden, vocabulary = (1024, 32000) if parameters >= 1e8 else (256, 8000)
    inner = 11 * hidden // 4
    layer = {
        **{f"self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"},
        **{f"mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")},
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    layers = max(1, round((parameters - 2 * vocabulary * hidden) / (4 * hidden * hidden + 3 * hidden * inner)))
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for k in range(layers):
        out |= {f"model.layers.{k}.{name}": shape for name, shape in layer.items()}
    out |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return out, config


def make(folder: Path, parameters: int) -> int:
    """Write two models and their importances in every type; return the number of parameters."""
    import torch
    from safetensors.torch import save_file

    import squisher

    torch.manual_seed(0)
    for part, size in (("full", parameters), ("shallow", parameters // 4)):
        names, config = shapes(size)
        for dtype in TYPES:
            for model in "ab":
                path = folder / f"{part}-{dtype}-{model}"
                path.mkdir()
                (path / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
                weights = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, shape in names.items()}
                save_file(weights, path / "model.safetensors", {"format": "pt"})
                values = {name: torch.rand(shape) * 1e-10 for name, shape in names.items()}
                squisher.Importance(values, kind="squisher", batch_size=16, loss_reduction="mean").save(path)
    return sum(_product(shape) for shape in shapes(parameters)[0].values())


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def copy_all_bytes(folder: Path, dtype: str, out: Path) -> None:
    """Read every byte of both models and both importances, and write every byte of one model: the limit."""
    buffer = memoryview(bytearray(1 << 20))
    out.mkdir()
    with open(out / "copy.bin", "wb", buffering=0) as target:
        for model in "ab":
            for file in ("model.safetensors", "squisher.safetensors"):
                with open(folder / f"full-{dtype}-{model}" / file, "rb", buffering=0) as source:
                    while count := source.readinto(buffer):
                        if model == "a" and file == "model.safetensors":
                            target.write(buffer[:count])
        os.fsync(target.fileno())


MERGEKIT_CODE = """
import json, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from benchmarks.harness import PeakMemory
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

folder, dtype, out = sys.argv[2:]
models = [{"model": f"{folder}/full-{dtype}-{m}", "parameters": {"weight": 0.5}} for m in "ab"]
config = MergeConfiguration.model_validate({"merge_method": "linear", "models": models, "dtype": dtype})
with PeakMemory() as memory:
    start = time.perf_counter()
    run_merge(config, out, MergeOptions(quiet=True, copy_tokenizer=False, write_model_card=False))
    for name in os.listdir(out):
        handle = os.open(os.path.join(out, name), os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "extra_mb": memory.extra_mb}))
"""


def with_mergekit(python: str, folder: Path, dtype: str, out: Path) -> None:
    root = str(Path(__file__).parents[1])
    command = [python, "-c", MERGEKIT_CODE, root, str(folder), dtype, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    print(done.stdout.splitlines()[-1])


def with_squisher(case: str, folder: Path, dtype: str, out: Path) -> None:
    from squisher.integrations.model_folders import merge_folders  # the import is not what is measured

    part = "shallow" if case == SHALLOW else "full"
    models = [folder / f"{part}-{dtype}-{model}" for model in "ab"] * (2 if case == FOUR else 1)
    method = "average" if case == AVERAGE else "fisher"
    harness.run_case(lambda: merge_folders(method, models, out))


def extrapolated(case: dict[str, float], parameters: int, dtype: str) -> dict[str, float]:
    """Extrapolate to two models of 70 billion parameters with float32 importances, by the time per parameter."""
    width = 2 if dtype == "bfloat16" else 4
    return {
        "parameters": LARGE,
        "hours": round(case["seconds"] / parameters * LARGE / 3600, 2),
        "read_gb": LARGE * (2 * width + 2 * 4) / 1e9,
        "written_gb": LARGE * width / 1e9,
        "extra_mb": round(case["extra_mb"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--dtype")
    parser.add_argument("--parameters", type=float, default=300e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mergekit-python", default=None, help="python of an environment that has mergekit")
    parser.add_argument("--name", default="merge", help="name of the result")
    options = parser.parse_args()
    if options.case:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            out = Path(place) / "out"
            if options.case == COPY:
                harness.run_case(lambda: copy_all_bytes(options.folder, options.dtype, out))
            elif options.case == MERGEKIT:
                with_mergekit(options.mergekit_python, options.folder, options.dtype, out)
            else:
                with_squisher(options.case, options.folder, options.dtype, out)
        return
    cases = [COPY, FISHER, *([MERGEKIT] if options.mergekit_python else []), AVERAGE, FOUR, SHALLOW]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        parameters = make(Path(folder), int(options.parameters))
        for dtype in TYPES:
            arguments = ["--folder", folder, "--dtype", dtype]
            if options.mergekit_python:
                arguments += ["--mergekit-python", options.mergekit_python]
            seen = harness.interleaved("benchmarks.merge", cases, arguments, options.rounds)
            for case in seen.values():
                case["relative_to_copy"] = round(case["seconds"] / seen[COPY]["seconds"], 3)
            results[dtype] = {"cases": seen, "extrapolation": extrapolated(seen[FISHER], parameters, dtype)}
    document = {"parameters": parameters, "rounds": options.rounds, "importances": "float32", "types": results}
    if options.mergekit_python:
        code = "import importlib.metadata as m; print(m.version('mergekit'))"
        done = subprocess.run([options.mergekit_python, "-c", code], capture_output=True, text=True, check=True)
        document["mergekit"] = done.stdout.strip()
    harness.write(options.name, document)


if __name__ == "__main__":
    main()
