"""Every application takes an importance with a codec: lazily decoded, it gives what the decoded values in memory give."""

import pytest
import torch
from torch import nn

import squisher


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 70), nn.ReLU(), nn.Linear(70, 30))


WEIGHTS = [{n: t.detach() for n, t in network(seed).state_dict().items()} for seed in range(3)]


@pytest.fixture(params=["log8", "rank1"])
def pairs(request, tmp_path):
    """Three importances: as loaded from a file, and decoded in memory."""
    out = []
    for k in range(3):
        generator = torch.Generator().manual_seed(k)
        tensors = {n: torch.exp(3 * torch.randn(t.shape, generator=generator) - 20) for n, t in WEIGHTS[0].items()}
        squisher.Importance(tensors, unit="example").save(tmp_path / f"{k}.safetensors", codec=request.param)
        lazy = squisher.load(tmp_path / f"{k}.safetensors")
        out.append((lazy, squisher.Importance({n: lazy[n] for n in lazy}, unit="example")))
    return out


def consolidated(importance):
    model = network(0)
    ewc = squisher.EWC(model, strength=2.0)
    ewc.consolidate(importance)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    return {"penalty": ewc.penalty().detach()}


APPLICATIONS = {
    "merge.fisher": lambda a, b, c: squisher.merge.fisher(WEIGHTS[:2], [a, b]),
    "merge.fisher, normalized": lambda a, b, c: squisher.merge.fisher(WEIGHTS[:2], [a, b], normalize="l2"),
    "merge.ubgm": lambda a, b, c: squisher.merge.ubgm(WEIGHTS[2], WEIGHTS[:2], c, [a, b]),
    "prune.weights": lambda a, b, c: squisher.prune.weights(WEIGHTS[0], a, sparsity=0.5),
    "mask.top_k": lambda a, b, c: squisher.mask.top_k(a, keep=0.1),
    "embed": lambda a, b, c: {"distance": torch.tensor(squisher.embed.distance(a, b))},
    "EWC": lambda a, b, c: consolidated(a),
    "compare": lambda a, b, c: {"spearman": torch.tensor(squisher.compare(a, b).spearman)},
    "combine": lambda a, b, c: squisher.Importance.combine([a, b], weights="equal"),
    "unlearn": lambda a, b, c: squisher.unlearn.dampen(WEIGHTS[0], a, b),
}


@pytest.mark.parametrize("application", APPLICATIONS)
def test_application(pairs, application):
    lazy, decoded = (APPLICATIONS[application](*side) for side in zip(*pairs, strict=True))
    assert set(lazy) == set(decoded)
    for name in decoded:
        torch.testing.assert_close(lazy[name], decoded[name], rtol=1e-6, atol=0)


def test_health_says_what_a_codec_is_good_for(pairs):
    lazy, decoded = pairs[0]
    (found,) = [d for d in squisher.examine(lazy).diagnoses if d.code == "codec"]
    assert found.severity == "info"
    assert found.numbers["spearman"] == lazy.provenance.codec.spearman
    assert lazy.provenance.codec.name in found.sentence
    assert not [d for d in squisher.examine(decoded).diagnoses if d.code == "codec"]
