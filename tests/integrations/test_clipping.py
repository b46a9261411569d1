"""What a Trainer's arguments say about clipping, without a Trainer."""

from types import SimpleNamespace

import pytest

from squisher.integrations.trainer_watch import clips
from squisher.integrations.transformers import pollution


@pytest.mark.parametrize(("norm", "clipped"), [(1.0, True), (0.0, False), (0, False), (-1.0, False), (None, False)])
def test_only_a_positive_norm_clips(norm, clipped):
    args = SimpleNamespace(max_grad_norm=norm, label_smoothing_factor=0.0)
    assert clips(args) is clipped
    assert bool(pollution(args, before_clipping=False)) is clipped
