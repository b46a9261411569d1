"""Make a 0.5% patch.

A fine-tune moves every weight, but few of them matter. A mask chooses the half percent that matter most, training moves only
those, and what you publish is a patch of a few kilobytes instead of a copy of the model.
"""

import copy
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn

import squisher

# ## A trained network meets a new task
#
# The base network knows digits as they are. The new task: the same digits, upside down.
torch.manual_seed(0)
data = load_digits()
images, labels = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
upright, turned = images.flatten(1), images.flip(1).flatten(1)
training, test = torch.arange(1400), torch.arange(1400, len(labels))
base = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def train(model, optimizer, inputs, steps):
    for _ in range(steps):
        rows = training[torch.randint(len(training), (32,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
    return optimizer


def accuracy(model):
    return f"{(model(turned[test]).argmax(-1) == labels[test]).float().mean().item():.1%}"


train(base, torch.optim.AdamW(base.parameters(), lr=1e-3), upright, 1000)
save_file(base.state_dict(), "base.safetensors")
print("upside down, before:", accuracy(base))

# ## Which entries matter for the new task?
#
# Sixty-four ordinary steps on a copy fill an accumulator. Its largest entries become the mask.
probe = copy.deepcopy(base)
optimizer = train(probe, torch.optim.AdamW(probe.parameters(), lr=1e-4), turned, 64)
squisher.extract(optimizer, probe, batch_size=32).save("squisher.safetensors")
subprocess.run(["squisher", "mask", "squisher.safetensors", "--keep", "0.005", "--out", "mask.safetensors"], check=True)
mask = squisher.mask.top_k(squisher.load("squisher.safetensors"), keep=0.005)
print(sum(int(m.sum()) for m in mask.values()), "of", sum(m.numel() for m in mask.values()), "entries may move")

# ## Train only those
#
# `mask.compact` gives an optimizer whose state is as small as the mask; `mask.train_only` works with an optimizer you already have.
# So few entries want a larger learning rate.
tuned = copy.deepcopy(base)
train(tuned, squisher.mask.compact(tuned, mask, torch.optim.AdamW, lr=1e-2), turned, 600)
print("upside down, after:", accuracy(tuned))
save_file(tuned.state_dict(), "tuned.safetensors")

# ## Publish the difference
#
# The patch holds the entries that changed and knows which base it belongs to. Applied, it gives the tuned weights to the bit.
subprocess.run(
    ["squisher", "patch", "make", "base.safetensors", "tuned.safetensors", "--out", "patch.safetensors"], check=True
)
subprocess.run(
    ["squisher", "patch", "apply", "base.safetensors", "patch.safetensors", "--out", "again.safetensors"], check=True
)
again = load_file("again.safetensors")
print(all(torch.equal(again[name], value) for name, value in tuned.state_dict().items()))
print({name: f"{Path(name).stat().st_size:,} bytes" for name in ("tuned.safetensors", "patch.safetensors")})
