"""A bounded share of `make test-crash`; each accident once for each kind of output."""

import pytest

from tests import crash


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash")
    crash.make_sources(folder, 64)
    return folder


@pytest.mark.parametrize("name", ["mask", "merge", "patch apply", "report", "shards", "fisher"])
def test_accidents_leave_all_or_nothing(sources, name):
    assert sum(crash.check(sources, [name], rounds=3, seed=0).values()) == 3


def test_the_harness_sees_a_writer_that_is_not_careful(sources, monkeypatch):
    monkeypatch.setattr(
        crash, "command", lambda name, folder, _: (folder / "out.html").write_text(str(crash.time.time())) and 0
    )
    with pytest.raises(AssertionError, match="neither whole nor absent"):
        crash.check(sources, ["report"], rounds=3, seed=0)
    monkeypatch.setattr(crash, "command", lambda name, folder, _: int(not (folder / ".x.partial").write_text("x")))
    with pytest.raises(AssertionError, match="left behind"):
        crash.check(sources, ["report"], rounds=1, seed=0)
