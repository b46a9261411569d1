"""Merge two fine-tunes without data.

Two people fine-tuned the same network on different tasks and published their Squishers. The merged network averages the weights,
each entry weighted by how much it matters to either task. Nobody's data is needed.
"""

import copy
import subprocess

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn

import squisher


# ## Two fine-tunes of one network
#
# The shared network knows digits a little. One fine-tune goes on with the digits as they are, the other with mirrored ones.
def train(model, inputs, labels, steps, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        rows = torch.randint(len(labels), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
    return optimizer


def accuracy(model):
    return {
        name: f"{(model(x[test]).argmax(-1) == labels[test]).float().mean().item():.1%}" for name, x in tasks.items()
    }


torch.manual_seed(0)
data = load_digits()
images, labels = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
tasks = {"plain": images.flatten(1), "mirrored": images.flip(2).flatten(1)}
order = torch.randperm(len(labels))
training, test = order[:1400], order[1400:]

base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
train(base, tasks["plain"][training], labels[training], steps=300, rate=1e-3)
for name, inputs in tasks.items():
    model = copy.deepcopy(base)
    optimizer = train(model, inputs[training], labels[training], steps=300, rate=1e-3)
    save_file(model.state_dict(), f"{name}.safetensors")
    squisher.extract(optimizer, model, batch_size=32).save(f"{name}-squisher.safetensors")
    print(f"fine-tuned on {name} digits: {accuracy(model)}")

# ## One command
#
# The order of `--importance` follows the order of the models. With Hugging Face folders, `squisher.safetensors` beside a model is
# found by itself, and the output folder loads with `from_pretrained`.
files = ["plain.safetensors", "mirrored.safetensors"]
importances = ["--importance", "plain-squisher.safetensors", "--importance", "mirrored-squisher.safetensors"]
subprocess.run(["squisher", "merge", "fisher", *files, *importances, "--out", "merged.safetensors"], check=True)
subprocess.run(["squisher", "merge", "average", *files, "--out", "averaged.safetensors"], check=True)
for name in ("averaged", "merged"):
    model.load_state_dict(load_file(f"{name}.safetensors"))
    print(f"{name}: {accuracy(model)}")

# A Fisher merge is not always better than an average: it helps where the two tasks lean on different parameters. [Results](../results.md)
# has measurements on real tasks.
#
# ## The same in Python
#
# `squisher.merge.fisher` returns a lazy mapping: a merged tensor is computed when it is asked for, so that a 70B merge and this
# one are the same code.
models = [load_file(file) for file in files]
weights = squisher.merge.fisher(models, [squisher.load(f"{name}-squisher.safetensors") for name in tasks])
merged = load_file("merged.safetensors")
print(all(torch.equal(weights[name], merged[name]) for name in weights))

# ## Two recipes, two scales
#
# Had the two used different batch sizes, their accumulators would be on different scales. Both recorded it, so it was corrected
# (`as_fisher`). Where it is not recorded and differs, the merge refuses instead of guessing.
try:
    small = squisher.Importance(dict(squisher.load("plain-squisher.safetensors")), kind="squisher", batch_size=16)
    large = squisher.Importance(dict(squisher.load("mirrored-squisher.safetensors")), kind="squisher", batch_size=1024)
    squisher.merge.fisher(models, [small, large])
except squisher.SquisherError as error:
    print(error)
