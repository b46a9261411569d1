"""Learn two tasks without forgetting.

A network that learns a second task forgets the first, unless the weights that the first one needs are held. Elastic weight
consolidation holds each by its importance, and Adam has measured that importance on the way.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

import squisher

# ## Two tasks
#
# First the digits as they are, then with the pixels shuffled: nothing in the second task reminds the network of the first.
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
# Two lines are new. `tracker.observe()` squares the gradient of the data alone; then `ewc.add_gradient_()` adds the pull back
# towards what past tasks need, without building a graph. In this order: an accumulator that sees the pull squares it into the
# next importance, which then explodes from task to task; see [Continual learning](../continual-learning.md).
def learn(model, inputs, ewc):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tracker = squisher.Tracker(model)
    for _ in range(600):
        rows = training[torch.randint(len(training), (32,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        tracker.observe()
        ewc.add_gradient_()
        optimizer.step()
    return squisher.extract(tracker, model, batch_size=32)


# ## With and without
#
# Strength 0 is ordinary training.
for strength in (0.0, 100.0, 1000.0):
    model = copy.deepcopy(network)
    ewc = squisher.EWC(model, strength=strength)
    for inputs_of_task in tasks.values():
        ewc.consolidate(learn(model, inputs_of_task, ewc))
    print(f"strength {strength:g}: {accuracy(model)}")

# ## How strong?
#
# The strength has the scale of the importances, so no number is right everywhere: try powers of ten on validation data of all
# tasks. Memory and time do not grow with the number of tasks, and `ewc.state_dict()` lets a run stop and go on.
state = ewc.state_dict()
resumed = squisher.EWC(model, strength=1000.0)
resumed.load_state_dict(state)
print(resumed.penalty().item() == ewc.penalty().item(), resumed.tasks)
