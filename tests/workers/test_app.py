"""The small sums of a worker."""

import pytest

from workers import app
from workers.app import Rate, slots_for


@pytest.mark.parametrize(("rows", "slots"), [(1, 2), (8, 2), (128, 2), (256, 3), (1024, 9)])
def test_slots_hold_enough_shards_for_two_batches_and_one_that_ends(rows: int, slots: int) -> None:
    assert slots_for(rows) == slots


def test_a_rate_is_of_the_time_since_it_was_last_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.0, 104.0, 108.0])
    monkeypatch.setattr(app.time, "monotonic", lambda: next(clock))
    rate = Rate()
    assert rate.of(50) == 25.0
    assert rate.of(50) == 0.0
    # A restarted engine counts from zero.
    assert rate.of(10) == 0.0
