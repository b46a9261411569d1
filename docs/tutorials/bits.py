"""Give bits to the tensors that need them.

A quantised model need not have the same width everywhere. The loss of rounding a tensor is ½ Σ F·(w − Q(w))², to second order, and F
is what the optimizer has averaged on the way. So a plan of widths under a budget costs no data and no gradients.
"""

import copy
import json
import subprocess

import torch
from sklearn.datasets import load_digits
from torch import nn

import squisher

# ## A model and its importance
#
# Digits, and a network that is larger than it has to be.
torch.manual_seed(0)
data = load_digits()
inputs, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
training, test = torch.arange(1400), torch.arange(1400, len(labels))
layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(400):
    rows = training[torch.randint(len(training), (32,))]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
    optimizer.step()
importance = squisher.extract(optimizer, model)


def accuracy(weights):
    rounded = copy.deepcopy(model)
    rounded.load_state_dict(dict(weights))
    return (rounded(inputs[test]).argmax(-1) == labels[test]).float().mean().item()


weights = model.state_dict()
print(f"not rounded: {accuracy(weights):.1%}")

# ## What each tensor loses at each width
#
# One pass over the weights; biases are not quantised.
found = squisher.quantize.sensitivity(weights, importance, bits=(2, 3, 4, 8), group=64)
for name, losses in found.losses.items():
    print(name, {bits: f"{loss:.1e}" for bits, loss in losses.items()})

# ## The best plan under a budget
#
# The budget is a mean over the weights, and the scale and offset of every group of 64 count in it: 2 bits take 2.5. `plan.gap` is 0
# where no other assignment can be better. `simulate` rounds as the plan says, so that it can be tried before anything is quantised.
plan = squisher.quantize.allocate(found, bits_per_weight=2.75)
uniform = found.uniform(2)
print("uniform:", f"{uniform.bits_per_weight:.2f} bits, loss {uniform.loss:.1e}")
print("planned:", f"{plan.bits_per_weight:.2f} bits, loss {plan.loss:.1e}", plan.bits, plan.gap == 0)
for name, chosen in (("uniform", uniform), ("planned", plan)):
    print(f"{name}: {accuracy(squisher.quantize.simulate(weights, chosen.bits)):.1%}")
print(plan.loss <= uniform.loss)

# ## From a folder, for another tool
#
# The same as a command. `--format llama.cpp` writes the file of `llama-quantize --tensor-type-file`, `--format mlx` the sensitivities
# of `mlx_lm.dynamic_quant`; see [Quantisation](../quantize.md).
torch.save(weights, "model.pt")
importance.save("squisher.safetensors")
command = "squisher quantize model.pt --importance squisher.safetensors --bits-per-weight 2.75 --out plan.json"
subprocess.run(command.split(), check=True)
with open("plan.json") as file:
    written = json.load(file)
print({name: row["bits"] for name, row in written["tensors"].items()} == plan.bits)
