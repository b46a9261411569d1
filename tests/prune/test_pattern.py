import pytest
import torch

from squisher.errors import SquisherError
from squisher.prune.unstructured import keep_pattern, parse_pattern, weights


@pytest.mark.parametrize(("keep", "of"), [(2, 4), (1, 4), (4, 8), (1, 2), (3, 4)])
@pytest.mark.parametrize("shape", [(6, 16), (3, 8, 2, 2)])
def test_the_best_of_every_group(keep, of, shape):
    scores = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(keep)).float()
    mask = keep_pattern(scores, keep, of)
    assert mask.shape == scores.shape
    grouped, chosen = scores.movedim(1, -1).reshape(-1, of), mask.movedim(1, -1).reshape(-1, of)
    for values, kept in zip(grouped.tolist(), chosen.tolist(), strict=True):
        order = sorted(range(of), key=lambda k: (-values[k], k))[:keep]
        assert [k in order for k in range(of)] == kept


def test_what_takes_part():
    model = {"w": torch.rand(3, 8), "b": torch.rand(8), "odd": torch.rand(3, 6), "odder": torch.rand(2, 5)}
    with pytest.raises(SquisherError, match=r"'odd'.*\(3, 6\).*groups of 4.*'odder'"):
        weights(model, model, nm="2:4")
    pruned = weights(model, model, nm="2:4", exclude="odd")
    assert [int((pruned[name] == 0).sum()) for name in model] == [12, 0, 0, 0]
    with pytest.raises(SquisherError, match="vectors"):
        weights(model, model, nm="2:4", exclude="w|odd")
    with pytest.raises(SquisherError, match="NaN"):
        keep_pattern(torch.full((2, 4), float("nan")), 2, 4)
    with pytest.raises(SquisherError, match="'w' hold NaN"):
        weights({"w": torch.full((2, 4), float("nan"))}, {"w": torch.ones(2, 4)}, nm="2:4").counts()


@pytest.mark.parametrize("text", ["4:2", "2:2", "0:4", "2/4", "two:four", "2:4000"])
def test_what_is_no_pattern(text):
    with pytest.raises(SquisherError, match="written N:M"):
        parse_pattern(text)
    assert parse_pattern(" 2:4") == (2, 4)
