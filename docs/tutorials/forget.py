"""Forget a class without retraining.

Selective synaptic dampening shrinks the weights that matter far more to the data to forget than to all data. That takes two
importances on one scale. The one of all data is in the optimizer; only the data to forget need a Fisher.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import squisher

# ## A network that knows ten digits
torch.manual_seed(0)
data = load_digits()
inputs, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
training, test = torch.arange(1400), torch.arange(1400, len(labels))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(600):
    rows = training[torch.randint(len(training), (32,))]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
    optimizer.step()
whole = squisher.extract(optimizer, model, batch_size=32)


def accuracies(model):
    right = model(inputs[test]).argmax(-1) == labels[test]
    sevens = labels[test] == 7
    return right[sevens].float().mean().item(), right[~sevens].float().mean().item()


print("sevens {:.1%}, others {:.1%}".format(*accuracies(model)))

# ## Forget the sevens
#
# The Fisher of the training rows to forget, beside the Squisher of all rows. The batch size brings the Squisher to the scale of a
# Fisher; without it the two could not be compared, and `dampen` would say so.
sevens = training[labels[training] == 7]
forget = squisher.fisher(model, [(inputs[sevens], labels[sevens])])
before = {name: weight.clone() for name, weight in model.state_dict().items()}
results = {}
for select in (1.0, 3.0, 10.0, 30.0):
    dampened = squisher.unlearn.dampen(before, whole, forget, select=select)
    model.load_state_dict(dict(dampened))
    results[select] = accuracies(model)
    changed = sum(count for count, _ in dampened.counts().values())
    print(
        f"select {select:g}: {changed:,} weights dampened; sevens {results[select][0]:.1%}, others {results[select][1]:.1%}"
    )

# ## How selective?
#
# `select` decides, and no number is right everywhere: choose it on rows that are kept and rows that are not. On folders the same is
# `squisher unlearn model --importance squisher.safetensors --forget forget.safetensors --out forgot`. More is on the page on
# [unlearning](../unlearn.md).
best = max(results, key=lambda select: results[select][1] - results[select][0])
print(best, results[best][0] < 0.2 < results[best][1])
