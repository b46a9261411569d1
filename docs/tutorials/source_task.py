"""Find the best source task.

You have little data for a task, and many networks that others fine-tuned. Which one should you start from? Networks that lean on
the same parameters solve related tasks: the distance between their importances says which is near.
"""

import subprocess

import torch
from sklearn.datasets import load_digits
from torch import nn

import squisher

# ## Six tasks in two families
#
# Digits as they are, and white on black; in each family three questions: odd or even, below five or not, with a closed loop or
# without. All start from the body of the same trained network, as fine-tunes do; each has a head of its own.
torch.manual_seed(0)
data = load_digits()
inputs, digit = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
views = {"plain": inputs, "inverted": 1 - inputs}
questions = {"odd": digit % 2, "large": digit // 5, "loop": torch.isin(digit, torch.tensor([0, 6, 8, 9])).long()}


class Network(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.body(x))


def train(model, inputs, labels):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(500):
        rows = torch.randint(len(labels), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
    return optimizer


shared = Network(10)
train(shared, inputs, digit)

# ## One importance a task
#
# An ordinary fine-tune each, and its recycled optimizer.
files = []
for view, seen in views.items():
    for question, labels in questions.items():
        model = Network(2)
        model.body.load_state_dict(shared.body.state_dict())
        optimizer = train(model, seen, labels)
        files.append(f"{view}-{question}.safetensors")
        squisher.extract(optimizer, model, batch_size=32).save(files[-1])

# ## Near and far
#
# Heads start at random and say nothing about the body: they are excluded. The table is symmetric, and 0 for a task and itself.
subprocess.run(["squisher", "similarity", *files, "--by", "full", "--exclude", "head"], check=True)

# ## The answer
#
# For one target, the others in order: the nearest first. The two other questions about the same view come first.
importances = {name.removesuffix(".safetensors"): squisher.load(name) for name in files}
target = importances.pop("plain-odd")
for name, distance in squisher.embed.rank(target, importances, exclude="head"):
    print(f"{name}: {distance:.2f}")
