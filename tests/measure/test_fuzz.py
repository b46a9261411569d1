"""A bounded share of the random networks; `make fuzz` runs thousands."""

from __future__ import annotations

import pytest

from tests.fuzz_fisher import outcome


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(4))
def test_no_random_network_is_measured_wrongly(part):
    ends = {seed: outcome(seed) for seed in range(25 * part, 25 * (part + 1))}
    assert not {seed: end for seed, end in ends.items() if end.startswith("WRONG")}
    assert {"fast", "loop"} <= set(ends.values())
