"""`make bench-check`: what counts as slower, and where nothing can be said."""

import pytest

from tests.bench.check import Ratios, judge
from tests.bench.machine import processor

HERE = "some processor avx2"


def ratios(*, on: str = HERE, threads: int = 2, **values: float) -> Ratios:
    return Ratios(on, threads, values)


def test_a_slice_more_than_a_tenth_slower_fails_and_is_named() -> None:
    verdict = judge(ratios(W1=1.0, W2=2.0), ratios(W1=0.95, W2=1.79))
    assert (verdict.slower, verdict.judged) == (True, True)
    assert verdict.lines[-1] == "Slower by more than 10%: W2."
    assert verdict.lines[1] == "W2: 1.790 tokens a GFLOP of calibration, stored 2.000: 90%"


@pytest.mark.parametrize("ratio", [0.901, 1.0, 3.0])
def test_a_tenth_less_or_anything_more_passes(ratio: float) -> None:
    verdict = judge(ratios(W1=1.0), ratios(W1=ratio))
    assert (verdict.slower, verdict.judged) == (False, True)


@pytest.mark.parametrize("other", [{"on": "another processor"}, {"threads": 4}])
def test_on_another_machine_it_says_that_it_cannot_judge(other: dict) -> None:
    verdict = judge(ratios(W1=1.0), ratios(W1=0.1, **other))
    assert (verdict.slower, verdict.judged) == (False, False)
    assert any(line.startswith("Not judged: stored on some processor") for line in verdict.lines)


def test_a_workload_without_a_stored_ratio_is_shown_and_passes() -> None:
    verdict = judge(ratios(W1=1.0), ratios(W1=1.0, W9=0.5))
    assert not verdict.slower
    assert "nothing stored" in verdict.lines[1]


def test_the_processor_has_a_name() -> None:
    assert len(processor()) > 5
