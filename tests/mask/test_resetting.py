import pytest
import torch

from squisher import mask, patch
from squisher.errors import NamingError, SquisherError
from squisher.storage.tensors import chunks_of


def test_inside_the_tuned_and_outside_the_base():
    base = {"a": torch.randn(6, 5), "b": torch.randn(7), "c": torch.tensor([0.0, float("nan")])}
    tuned = {name: tensor + 1 for name, tensor in base.items()}
    masks = {"a": torch.rand(6, 5) < 0.3, "c": torch.tensor([True, False])}
    found = mask.reset_outside(tuned, base, mask.Mask(masks))
    assert torch.equal(found["a"], torch.where(masks["a"], tuned["a"], base["a"]))
    assert torch.equal(found["b"], base["b"])
    assert found["c"].isnan().tolist() == [False, True]
    for name in base:
        assert torch.equal(torch.cat(list(chunks_of(found, name, 4))).nan_to_num(), found[name].flatten().nan_to_num())
    assert set(found) == set(base)


def test_everything_or_nothing_gives_one_of_the_two_back():
    base, tuned = {"a": torch.randn(9)}, {"a": torch.randn(9)}
    for kept, expected in ((True, tuned), (False, base)):
        found = mask.reset_outside(tuned, base, {"a": torch.full((9,), kept)})
        assert torch.equal(found["a"], expected["a"])


@pytest.mark.parametrize(
    ("tuned", "base", "masks", "message"),
    [
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, {}, "'a'.*the base"),
        (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(3)},
            {},
            r"'a'.*\(2,\).*tuned.*\(3,\).*base",
        ),
        (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(2).double()},
            {},
            "float32.*tuned.*float64.*base",
        ),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, {"x": torch.ones(2) > 0}, "The mask has 'x'"),
        (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(2)},
            {"a": torch.ones(3) > 0},
            r"'a'.*\(3,\).*mask",
        ),
    ],
)
def test_what_does_not_fit(tuned, base, masks, message):
    with pytest.raises(NamingError, match=message):
        mask.reset_outside(tuned, base, masks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_mask_that_is_not_boolean_is_refused(tmp_path, dtype):
    base, tuned, numbers = {"a": torch.zeros(3)}, {"a": torch.ones(3)}, {"a": torch.full((3,), 2, dtype=dtype)}
    with pytest.raises(SquisherError, match="'a'.*boolean"):
        mask.reset_outside(tuned, base, numbers)
    with pytest.raises(SquisherError, match="'a'.*boolean"):
        patch.make(base, tuned, tmp_path / "patch.safetensors", mask=numbers)
