"""Hold old tasks without touching the gradient.

The penalty of elastic weight consolidation is usually added to the loss. Then Adam squares its gradient too, and an importance that
is recycled from Adam has the penalty in it. Do what AdamW did to weight decay: step on the data alone, then pull the weights back.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

import squisher

# ## Two tasks
#
# The digits as they are, then with the pixels shuffled.
torch.manual_seed(0)
data = load_digits()
inputs, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
tasks = {"plain": inputs, "shuffled": inputs[:, torch.randperm(64)]}
training, test = torch.arange(1400), torch.arange(1400, len(labels))
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(model):
    return {
        name: f"{(model(x[test]).argmax(-1) == labels[test]).float().mean().item():.1%}" for name, x in tasks.items()
    }


# ## The training loop
#
# One line is new: `ewc.pull_(optimizer)` after the step. It is the exact minimiser of the penalty and the distance to where the step
# ended, so that no strength makes it diverge. The optimizer's state is that of the data alone: `extract` needs no tracker.
def learn(model, inputs, ewc, metric):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(600):
        rows = training[torch.randint(len(training), (32,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()
        ewc.pull_(optimizer, metric)
    return squisher.extract(optimizer, model, batch_size=32), optimizer


# ## How strong?
#
# With `metric="adam"` the pull is divided by √v̂ + ε as Adam's own step is, so that the strength is that of the penalty in the
# gradient. With `metric="plain"` it is not divided, and the strength is another one.
for metric, strengths in (("adam", (0.0, 1e3, 1e9)), ("plain", (1e4, 1e6, 1e12))):
    for strength in strengths:
        model = copy.deepcopy(network)
        ewc = squisher.EWC(model, strength=strength)
        for inputs_of_task in tasks.values():
            importance, optimizer = learn(model, inputs_of_task, ewc, metric)
            ewc.consolidate(importance)
        print(f"{metric}, strength {strength:g}: {accuracy(model)}")

# `strength_like` translates: the plain strength whose pull is as long as the step that Adam makes of the gradient.
print(f"1e3 in the gradient is {ewc.strength_like(None, 1e3, optimizer):.2g} in the plain metric")
print(all(torch.isfinite(p).all() for p in model.parameters()))
