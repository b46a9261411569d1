"""Small real training runs on which wrong names are tried: different architectures, optimizers and lengths.

Each run leaves a folder as its framework or its script would: `earlier` and `last`, with weights and optimizer state. The
text is this project's own documentation; pictures are blurred prototypes with noise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import squisher

ROOT = Path(__file__).parents[1]
Batch = Callable[[], Any]


def text() -> Tensor:
    """Return the documentation as bytes."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def windows(data: Tensor, size: int, length: int) -> Tensor:
    """Return random windows of the text."""
    starts = torch.randint(len(data) - length - 1, (size,))
    return torch.stack([data[s : s + length] for s in starts]).long()


def pictures(size: int, side: int = 16) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of ten prototypes, and which prototype each shows."""
    generator = torch.Generator().manual_seed(1)
    prototypes = functional.avg_pool2d(torch.randn(10, 3, side + 4, side + 4, generator=generator), 5, 1) * 4
    labels = torch.randint(10, (size,))
    return prototypes[labels] + torch.randn(size, 3, side, side), labels


# -- models of one's own -------------------------------------------------------------------------------------------------


def mlp(activation: Callable[[], nn.Module]) -> nn.Module:
    """Return six layers, five of them of the same shape."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(768, 96), activation()]
    for _ in range(5):
        layers += [nn.Linear(96, 96), activation()]
    return nn.Sequential(*layers, nn.Linear(96, 10))


class Residual(nn.Module):
    """Two convolutions with batch norm beside the identity."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return functional.relu(x + self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))


def convolutions() -> nn.Module:
    """Return a small residual network."""
    stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(
        *stem, *(Residual(32) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


class Block(nn.Module):
    """A block of a transformer as nanoGPT writes it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({n: nn.Linear(width, width) for n in ("query", "key", "value", "proj")})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"fc": nn.Linear(width, 4 * width), "proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = self.ln_1(x)
        q, k, v = (self.attn[n](y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in ("query", "key", "value"))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attn["proj"](y)
        return x + self.mlp["proj"](functional.gelu(self.mlp["fc"](self.ln_2(x))))


class TinyGPT(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int = 96, layers: int = 4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(64, width)
        self.h = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each next byte."""
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Towers(nn.Module):
    """Two encoders of one shape, with the same weights at first or not, and a head over both."""

    def __init__(self, same: bool):
        super().__init__()
        self.left, self.right = mlp(nn.ReLU), mlp(nn.ReLU)
        if same:
            self.right.load_state_dict(self.left.state_dict())
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of the first picture's class, from the picture and its mirror image."""
        return self.head(torch.cat([self.left(x), self.right(x.flip(-1))], 1))


# -- training ------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, loss: Callable[[], Tensor], optimizer: Any, steps: int, clip: float | None) -> None:
    """Take optimizer steps, with the learning rate falling to a tenth."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for k in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - 0.9 * k / steps)
        optimizer.zero_grad()
        loss().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def save(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Write weights and state: a Hugging Face model as the Trainer would, any other in one torch file."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")


def _classifier(model: nn.Module) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        x, y = pictures(64)
        return functional.cross_entropy(model(x), y)

    return loss


def _language(model: nn.Module, data: Tensor, masked: bool = False) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        ids = windows(data, 12, 48)
        labels = ids
        if masked:
            hidden = torch.rand(ids.shape) < 0.2
            labels, ids = ids.masked_fill(~hidden, -100), ids.masked_fill(hidden, 0)
        out: Tensor = model(input_ids=ids, labels=labels).loss
        return out

    return loss


def _hf(kind: str) -> nn.Module:
    import transformers as t

    small: dict[str, Any] = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 96,
        "intermediate_size": 256,
        "vocab_size": 256,
    }
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**small, num_key_value_heads=2)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**small, num_key_value_heads=2, tie_word_embeddings=True)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**small, num_key_value_heads=4)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**small)),
        "roberta": lambda: t.RobertaForMaskedLM(t.RobertaConfig(**small, max_position_embeddings=80, pad_token_id=1)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=96, n_layer=4, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
        ),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**small)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=256, d_model=96, d_kv=24, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0
            )
        ),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(
                num_hidden_layers=4, num_attention_heads=4, hidden_size=96, intermediate_size=256, image_size=16,
                patch_size=4, num_labels=10,
            )
        ),
    }  # fmt: skip
    return makers[kind]()


def _vit_loss(model: nn.Module) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        x, y = pictures(32)
        return functional.cross_entropy(model(pixel_values=x).logits, y)

    return loss


def _adamw(model: nn.Module, lr: float = 1e-3) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=lr)


RUNS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], int, float | None]] = {
    "mlp_relu_adamw": (lambda: mlp(nn.ReLU), _adamw, 300, None),
    "mlp_gelu_adam": (lambda: mlp(nn.GELU), lambda m: torch.optim.Adam(m.parameters(), 3e-3), 120, None),
    "mlp_tanh_nadam": (lambda: mlp(nn.Tanh), lambda m: torch.optim.NAdam(m.parameters(), 1e-3), 200, None),
    "mlp_relu_rmsprop": (lambda: mlp(nn.ReLU), lambda m: torch.optim.RMSprop(m.parameters(), 1e-3), 200, None),
    "mlp_relu_adagrad": (lambda: mlp(nn.ReLU), lambda m: torch.optim.Adagrad(m.parameters(), 1e-2), 200, None),
    "resnet_adam": (convolutions, _adamw, 120, None),
    "towers_adamw": (lambda: Towers(False), _adamw, 150, None),
    "towers_same_start": (lambda: Towers(True), lambda m: _adamw(m, 1e-4), 60, None),
    "tiny_gpt_adamw": (TinyGPT, _adamw, 300, 1.0),
    "tiny_gpt_radam": (TinyGPT, lambda m: torch.optim.RAdam(m.parameters(), 1e-3), 40, None),
    "llama_adamw": (lambda: _hf("llama"), _adamw, 150, 1.0),
    "llama_short": (lambda: _hf("llama"), lambda m: _adamw(m, 2e-4), 8, 1.0),
    "mistral_adamw": (lambda: _hf("mistral"), lambda m: _adamw(m, 3e-3), 300, 1.0),
    "qwen2_adam": (lambda: _hf("qwen2"), lambda m: torch.optim.Adam(m.parameters(), 1e-3, amsgrad=True), 100, None),
    "gpt2_adamw": (lambda: _hf("gpt2"), _adamw, 150, 1.0),
    "gpt_neox_adamw": (lambda: _hf("gpt_neox"), _adamw, 150, 1.0),
    "bert_adamw": (lambda: _hf("bert"), _adamw, 150, 1.0),
    "roberta_adamw": (lambda: _hf("roberta"), lambda m: _adamw(m, 5e-4), 400, 1.0),
    "t5_adamw": (lambda: _hf("t5"), _adamw, 150, 1.0),
    "t5_adafactor": (lambda: _hf("t5"), lambda m: torch.optim.Adafactor(m.parameters(), 1e-2), 100, 1.0),
    "vit_adamw": (lambda: _hf("vit"), _adamw, 150, 1.0),
    "vit_rmsprop": (lambda: _hf("vit"), lambda m: torch.optim.RMSprop(m.parameters(), 1e-3), 100, 1.0),
}


def make(name: str, folder: Path, seed: int) -> None:
    """Train one run and save it at two thirds of the way and at its end."""
    torch.manual_seed(seed)
    build, optimize, steps, clip = RUNS[name]
    model, data = build(), text()
    optimizer = optimize(model)
    if isinstance(model, TinyGPT):
        loss: Callable[[], Tensor] = lambda: model(windows(data, 12, 48))  # noqa: E731
    elif name.startswith("vit"):
        loss = _vit_loss(model)
    elif hasattr(model, "config"):
        loss = _language(model, data, masked=name.startswith(("bert", "roberta")))
    else:
        loss = _classifier(model)
    model.train()
    train(model, loss, optimizer, steps * 2 // 3, clip)
    save(folder / name / "earlier", model, optimizer)
    train(model, loss, optimizer, steps - steps * 2 // 3, clip)
    save(folder / name / "last", model, optimizer)
    # The truth: a live optimizer's names are found by identity, in its own order.
    (folder / name / "names.json").write_text(json.dumps(list(squisher.extract(optimizer, model))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", nargs="*", default=list(RUNS))
    parser.add_argument("--seed", type=int, default=1, help="0 gave the runs that the thresholds were chosen on")
    arguments = parser.parse_args()
    for one in arguments.runs:
        if not (arguments.folder / one / "last").is_dir():
            make(one, arguments.folder, arguments.seed)
            print(one, flush=True)
