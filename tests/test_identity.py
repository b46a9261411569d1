"""What the accumulator is, by simulation at frozen weights (lr = 0), batches drawn with replacement.

With per-example gradients of mean μ and variance s², B·v̂ converges to s² + B·μ²: the empirical Fisher s² + μ² wherever the
mean gradient vanishes. With labels sampled from the model the mean gradient vanishes everywhere: it converges to the Fisher.
"""

import math

import pytest
import torch
from torch import nn

import squisher

N, FEATURES, CLASSES, BATCH, STEPS, BETA2 = 60, 4, 3, 8, 6_000, 0.999


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    inputs = torch.randn(N, FEATURES)
    labels = torch.randint(0, CLASSES, (N,))
    return nn.Linear(FEATURES, CLASSES), inputs, labels


def per_example_gradients(model, inputs, labels):
    rows = []
    for x, y in zip(inputs, labels, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    model.zero_grad()
    return torch.stack(rows)


def squisher_of(model, inputs, draw_labels, seed):
    """Adam with lr = 0 over batches drawn with replacement; nothing moves, only v."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, BETA2))
    for _ in range(STEPS):
        chosen = torch.randint(0, N, (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), draw_labels(chosen, generator)).backward()
        optimizer.step()
    imp = squisher.extract(optimizer, model, batch_size=BATCH).as_fisher()
    return torch.cat([imp[name].flatten() for name in imp]).double()


def sampling_error(batch_gradients):
    """One standard deviation of B·v̂, from the spread of B·g² and the number of steps that the average holds."""
    effective = (1 + BETA2) * (1 - BETA2**STEPS) / ((1 - BETA2) * (1 + BETA2**STEPS))
    return (BATCH * batch_gradients.square()).std(0) / math.sqrt(effective)


def test_data_labels_converge_to_variance_plus_batch_times_squared_mean(problem):
    model, inputs, labels = problem
    gradients = per_example_gradients(model, inputs, labels)
    mean, variance = gradients.mean(0), gradients.var(0, correction=0)
    result = squisher_of(model, inputs, lambda chosen, generator: labels[chosen], seed=1)
    batches = gradients[torch.randint(0, N, (20_000, BATCH))].mean(1)
    error = sampling_error(batches)
    assert ((result - (variance + BATCH * mean**2)).abs() < 5 * error).all()
    # It is not the empirical Fisher: the difference (B − 1)·μ² is far outside the sampling error, and never negative.
    empirical = squisher.fisher(model, [(inputs, labels)], labels="data", method="loop")
    flat = torch.cat([empirical[name].flatten() for name in empirical]).double()
    assert torch.allclose(flat, variance + mean**2, rtol=1e-4)
    assert ((result - flat) / error).max() > 10
    assert (result - flat > -5 * error).all()


def test_sampled_labels_converge_to_the_exact_fisher(problem):
    model, inputs, _ = problem
    probabilities = model(inputs).softmax(-1).detach()

    def draw(chosen, generator):
        return torch.multinomial(probabilities[chosen], 1, generator=generator).squeeze(1)

    result = squisher_of(model, inputs, draw, seed=2)
    exact = squisher.fisher(model, [inputs], labels="exact", method="loop")
    expected = torch.cat([exact[name].flatten() for name in exact]).double()
    by_class = torch.stack([per_example_gradients(model, inputs, torch.full((N,), c)) for c in range(CLASSES)])
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(0, N, (20_000, BATCH), generator=generator)
    drawn = torch.stack([draw(row, generator) for row in chosen])
    error = sampling_error(by_class[drawn, chosen].mean(1))
    assert ((result - expected).abs() < 5 * error).all()
