"""The arithmetic of batches: what a step had, over micro-batches and steps."""

import pytest
import torch

from squisher.integrations.recording import BatchCounts, examples_in, over_processes, tokens_in


def test_means_over_steps_and_short_ones():
    counts = BatchCounts()
    assert counts.mean_tokens is None
    for examples, tokens in ((8, 60), (8, 40), (3, 20)):
        counts.add(examples, tokens, full=8)
    assert (counts.steps, counts.examples, counts.tokens, counts.short_steps) == (3, 19, 120, 1)
    assert counts.mean_tokens == 40
    assert counts.largest == 8


def test_without_a_known_full_step_the_largest_is_one():
    counts = BatchCounts()
    for examples in (6, 6, 2, 6):
        counts.add(examples, None, full=None)
    assert (counts.largest, counts.short_steps) == (6, 1)


def test_a_step_is_the_sum_of_its_micro_batches():
    assert over_processes([4, 4, 2], [torch.tensor(7), 5, 0]) == (10, 12)
    assert over_processes([4, 4], [7, None]) == (8, None)
    assert over_processes([4, None], [7, 7]) is None
    assert over_processes([], []) is None


def test_one_step_without_a_count_leaves_no_mean():
    counts = BatchCounts()
    counts.add(4, 10, full=None)
    counts.add(4, None, full=None)
    counts.add(4, 10, full=None)
    assert counts.tokens is None
    assert counts.mean_tokens is None
    assert (counts.steps, counts.short_steps) == (3, 0)


def test_the_state_goes_on_and_nonsense_starts_afresh():
    counts = BatchCounts()
    counts.add(4, 10, full=8)
    again = BatchCounts.from_state(counts.state())
    assert again == counts
    again.add(8, 20, full=8)
    assert (again.steps, again.tokens, counts.steps) == (2, 30, 1)
    for nonsense in (None, {}, {"steps": 1}, [1]):
        assert BatchCounts.from_state(nonsense) == BatchCounts()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(5, 3), 5),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ({"pixel_values": torch.zeros(7, 3), "labels": torch.zeros(6)}, 6),
        ({"weight": torch.tensor(1.0), "x": torch.zeros(3)}, 3),
        ([{"a": torch.zeros(2)}], 2),
        ("text", None),
        (torch.tensor(1.0), None),
        ({}, None),
    ],
)
def test_examples(batch, expected):
    assert examples_in(batch) == expected


def test_tokens_that_carry_a_loss():
    labels = torch.tensor([[5, 6, -100, 7], [-100, 8, 9, -100]])
    assert tokens_in({"labels": labels}, shifted=False) == 5
    assert tokens_in({"labels": labels}, shifted=True) == 4  # the 5 stands first and is never predicted
    assert tokens_in({"labels": labels, "shift_labels": labels}, shifted=True) == 5
    assert tokens_in({"labels": torch.tensor([0, 2, 1])}, shifted=True) == 3
    assert tokens_in({"labels": torch.tensor([0.5, 2.0])}, shifted=False) is None
    assert tokens_in({"input_ids": labels}, shifted=False) is None
    assert tokens_in((labels, labels), shifted=False) is None
