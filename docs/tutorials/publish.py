"""Publish the Squisher of your fine-tune.

You have trained a network with Adam. Its optimizer holds an average of every parameter's squared gradient: a measure of how much
each parameter matters, which usually is thrown away. Here it becomes a small file beside the weights that others can use to
merge, prune, mask or compare, without your data.
"""

import subprocess
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import squisher

# ## Train as you always do
#
# Nothing about the training changes. Digits of 8×8 pixels stand in for your data.
torch.manual_seed(0)
data = load_digits()
inputs, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(30):
    for rows in torch.randperm(len(labels))[:1792].split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()

# ## In the training script
#
# One line, while the optimizer is still there. The batch size is what one optimizer step saw (per device × accumulation ×
# processes); it is recorded, so that whoever uses the file can bring it to the scale of a Fisher.
importance = squisher.extract(optimizer, model, batch_size=32)
importance.save("squisher.safetensors")

# ## From a checkpoint on disk
#
# The same from a file, with the command line: nothing in the checkpoint is executed, and only the accumulator is read. Trainer
# folders, Lightning, DeepSpeed, FSDP, Keras, JAX and others are read alike; see [Formats](../formats.md).
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
subprocess.run(
    ["squisher", "extract", "checkpoint.pt", "--out", "from-disk.safetensors", "--batch-size", "32"], check=True
)

# Both ways give the same numbers:
again = squisher.load("from-disk.safetensors")
print(all(torch.equal(again[name], importance[name]) for name in importance))

# ## What the file says of itself
#
# Names and shapes are those of the weights; the provenance says which optimizer, how many steps, what pollutes it, and how the
# names were proven.
about = again.provenance
print(about.kind, about.optimizer["class"], about.steps, "batch", about.batch_size)
print({name: tuple(tensor.shape) for name, tensor in again.items()})
print(f"{Path('squisher.safetensors').stat().st_size:,} bytes")

# ## Is it any good?
#
# If you have data, compare it with the real Fisher diagonal. Rank correlation says whether the same parameters matter; scale
# says whether the numbers can be read as a Fisher; see [When to trust it](../when-to-trust-it.md).
fisher = squisher.fisher(model, [(inputs, labels)], labels="exact")
agreement = squisher.compare(again.as_fisher(), fisher)
print(f"Spearman {agreement.spearman:.2f}, scale {agreement.scale:.1f}, top tenth shared {agreement.overlap(0.1):.0%}")

# ## Publish it
#
# Put `squisher.safetensors` beside the weights and upload the folder as you always do. `squisher merge` and the mergekit bridge
# look for it there.
