import pytest
import torch

from squisher import prune
from squisher.errors import NamingError, SquisherError
from squisher.storage.tensors import chunks_of

WEIGHTS = {
    "a": torch.randn(6, 5),
    "b": torch.randn(7).to(torch.bfloat16),
    "c": torch.randn(3).double(),
    "n": torch.ones(2),
}
FISHER = {"a": torch.rand(6, 5), "b": torch.rand(7), "c": torch.rand(3)}


def test_half_theta_squared_f():
    scores = prune.scores(WEIGHTS, FISHER)
    assert list(scores) == ["a", "b", "c"]
    for name in scores:
        expected = 0.5 * WEIGHTS[name].double() ** 2 * FISHER[name].double()
        torch.testing.assert_close(scores[name].double(), expected, rtol=1e-6, atol=0)
        assert scores[name].dtype == scores.dtype(name) == (torch.float64 if name == "c" else torch.float32)
        assert scores.shape(name) == WEIGHTS[name].shape


def test_the_others():
    assert torch.equal(prune.scores(WEIGHTS, FISHER, "magnitude")["a"], WEIGHTS["a"].abs())
    assert torch.equal(prune.scores(WEIGHTS, FISHER, "importance")["a"], FISHER["a"])
    assert set(prune.scores(WEIGHTS, None, "magnitude")) == set(WEIGHTS)


def test_noise_depends_on_seed_and_name_alone():
    weights = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    first = prune.scores(weights, None, "random", seed=1)
    assert torch.equal(first["a"], torch.cat(list(chunks_of(first, "a", 7))))
    assert torch.equal(first["a"], prune.scores({"a": torch.ones(1000)}, None, "random", seed=1)["a"])
    assert not torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], prune.scores(weights, None, "random", seed=2)["a"])
    assert 0.45 < first["a"].mean() < 0.55


def test_what_does_not_fit():
    with pytest.raises(NamingError, match="'aa'.*the model"):
        prune.scores(WEIGHTS, {"aa": torch.rand(1)})
    with pytest.raises(NamingError, match=r"'a'.*\(5, 6\).*\(6, 5\)"):
        prune.scores(WEIGHTS, {"a": torch.rand(5, 6)})
    with pytest.raises(SquisherError, match=r"'fischer'.*'fisher'"):
        prune.scores(WEIGHTS, FISHER, "fischer")
    with pytest.raises(SquisherError, match="fisher needs an importance"):
        prune.scores(WEIGHTS)
    with pytest.raises(KeyError, match="no tensor named 'n'"):
        prune.scores(WEIGHTS, FISHER)["n"]


def test_scores_beyond_the_type_are_refused():
    weights, large = {"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([3e38, 2e38])}
    with pytest.raises(SquisherError, match="'w' is more than float32 holds"):
        prune.scores(weights, large)["w"]
    wide = prune.scores(weights, {"w": large["w"].double()})["w"]
    torch.testing.assert_close(wide, torch.tensor([6e38, 1e38], dtype=torch.float64))
    assert prune.scores(weights, {"w": torch.tensor([1e38, 2e38])})["w"].tolist() == pytest.approx([2e38, 1e38])
