"""How full the engine was while a shard was in work, by its own counters."""

import pytest

from engine.info import EngineStats
from jobs.records import EngineLoad, SegmentRecord
from tests.workers.conftest import Bench
from tests.workers.stub_engine import INFO, StubEngine
from workers.load import LoadMeter


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[EngineStats]:
    """What the engine says of itself, one look after the other; the last stays."""
    looks: list[EngineStats] = []
    monkeypatch.setattr(StubEngine, "stats", lambda engine: looks.pop(0) if len(looks) > 1 else looks[0])
    return looks


def test_seats_that_are_empty_while_nobody_waits_are_the_tails(bench: Bench, counted: list[EngineStats]) -> None:
    counted += [EngineStats(steps=10, step_rows=50, tail_steps=1, tail_step_rows=2)]
    counted += [EngineStats(steps=20, step_rows=100, tail_steps=5, tail_step_rows=18)]
    load = LoadMeter(bench.context.host).read()
    assert load is not None
    assert load.tail_idle == (4 * 8 - 16) / (10 * 8), "four steps of eight seats, half of them empty"


def test_the_load_is_the_rows_of_the_steps_between_two_looks(bench: Bench, counted: list[EngineStats]) -> None:
    counted += [EngineStats(steps=10, step_rows=50), EngineStats(steps=14, step_rows=75)]
    assert LoadMeter(bench.context.host).read() == EngineLoad(rows=6.25, seats=INFO.max_num_seqs)


@pytest.mark.parametrize(
    "after",
    [EngineStats(steps=10, step_rows=50), EngineStats(steps=3, step_rows=9), EngineStats(steps=11, step_rows=12)],
    ids=["no step", "counted anew", "counted anew, and further"],
)
def test_an_engine_that_did_nothing_or_was_started_again_has_none(
    after: EngineStats, bench: Bench, counted: list[EngineStats]
) -> None:
    counted += [EngineStats(steps=10, step_rows=50), after]
    assert LoadMeter(bench.context.host).read() is None


def test_the_record_of_a_shard_has_the_load(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, counted: list[EngineStats]
) -> None:
    counted += [EngineStats(), EngineStats(steps=2, step_rows=6)]
    spec = bench.site.planned(4)
    bench.work(spec)
    record = bench.site.ledger.record(spec.id, 0)
    assert isinstance(record, SegmentRecord)
    assert record.load == EngineLoad(rows=3.0, seats=INFO.max_num_seqs)
