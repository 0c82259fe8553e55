"""A report adds up: what the segments say, when they were made, and what that cost."""

import pytest

from jobs.records import EngineLoad, SegmentRecord, Usage
from jobs.report import Report, report
from jobs.spec import JobSpec
from tests.jobs.commands import Command
from tests.jobs.site import Site

MIXED = [{"prompt": f"question {n}"} if n % 5 else {"text": n} for n in range(16)]


def worked(site: Site, plan: list[tuple[str, float, float]]) -> JobSpec:
    """A job whose shards were done by that worker from then to then, one after the other."""
    spec = site.submit(MIXED)
    site.control.plan(spec.id)
    leases = [site.lease(spec) for _ in plan]
    for lease, (worker, start, end) in zip(leases, plan, strict=True):
        assert lease is not None
        times = {"worker": worker, "started_at": start, "finished_at": end}
        assert site.ledger.commit(lease, site.segment(lease).model_copy(update=times)) == "ok"
    return spec


def of(site: Site, spec: JobSpec, price: float | None = None) -> Report:
    return report(spec, site.ledger, site.stores, price)


def test_slots_are_what_was_held_at_once_and_the_tail_is_what_had_nothing_to_hold(site: Site) -> None:
    """Worker a holds two shards for ten seconds, b one for ten; then b alone holds the last one for ten more."""
    spec = worked(site, [("a", 100, 110), ("a", 100, 110), ("b", 100, 110), ("b", 110, 120)])
    work = of(site, spec).work
    assert work is not None
    assert (work.workers, work.slots, work.span, work.worker_seconds) == (2, 3, 20, 30)
    assert work.occupancy == pytest.approx(40 / 60)
    assert (work.tail, work.tail_idle) == (10, pytest.approx(2 / 3))
    assert work.rows_per_second == 16 / 20
    assert work.tokens_per_second == pytest.approx((12 * 3 + 12 * 2) / 20)


def test_how_full_the_engine_was_is_the_mean_over_the_time_of_the_shards(site: Site, pagemill: Command) -> None:
    plan = [("a", 0.0, 30.0, 200.0), ("a", 0.0, 10.0, 100.0)]
    spec = site.submit(MIXED)
    site.control.plan(spec.id)
    assert "seats" not in pagemill("report", spec.id).out
    for worker, start, end, rows in plan:
        lease = site.lease(spec)
        assert lease is not None
        load = EngineLoad(rows=rows, seats=256, tail_idle=0.2 if rows > 100 else 0.4)
        times = {"worker": worker, "started_at": start, "finished_at": end, "load": load}
        site.ledger.commit(lease, site.segment(lease).model_copy(update=times))
    work = of(site, spec).work
    assert work is not None
    assert work.load == EngineLoad(rows=175.0, seats=256, tail_idle=0.25)
    shown = " ".join(pagemill("report", spec.id).out.split())
    assert "175.0 sequences in a step in the mean, of 256 seats: 68% full, and 25% idle with nothing left" in shown
    assert pagemill("report", spec.id, "--json").json["work"]["load"] == {
        "rows": 175.0,
        "seats": 256,
        "tail_idle": 0.25,
    }


def test_a_gpu_hour_is_an_hour_of_a_worker_whatever_it_holds_at_once(site: Site) -> None:
    spec = worked(site, [("a", 0, 3600), ("a", 1800, 5400), ("b", 0, 1800), ("b", 9000, 10800)])
    found = of(site, spec, price=2.0)
    assert found.gpu_hours == pytest.approx(1.5 + 1.0)
    assert found.cost == pytest.approx(5.0)
    assert of(site, spec).cost is None


def test_failures_are_counted_by_code_before_the_end_and_after(site: Site) -> None:
    spec = worked(site, [("a", 0, 1)] * 4)
    before = of(site, spec)
    assert before.failures == {"missing_required_parameter": 4}
    assert (before.rows, before.ok, before.failed) == (16, 12, 4)
    assert before.usage == Usage(prompt_tokens=36, completion_tokens=24)
    site.control.assemble(spec.id)
    after = of(site, spec)
    assert (after.state, after.failures, after.work) == ("completed", before.failures, before.work)
    assert after.phases.finalizing is not None


def test_the_rows_of_a_dead_shard_are_failures_by_code(site: Site) -> None:
    spec = site.submit(MIXED[:4], max_tries=1)
    site.control.plan(spec.id)
    lease = site.lease(spec)
    assert lease is not None
    site.ledger.release(lease, "burnt")
    assert site.lease(spec) is None
    site.control.assemble(spec.id)
    found = of(site, spec)
    assert found.failures == {"engine_error": 3, "missing_required_parameter": 1}
    assert found.work is None


def test_a_job_that_nobody_has_worked_on_has_a_report(site: Site, pagemill: Command) -> None:
    spec = site.submit(MIXED)
    found = of(site, spec)
    assert (found.state, found.rows, found.work, found.gpu_hours) == ("validating", None, None, None)
    assert "nobody yet" in pagemill("report", spec.id).out


def test_a_record_that_says_no_time_is_counted_without_one(site: Site) -> None:
    spec = worked(site, [("a", 0, 1)])
    lease = site.lease(spec)
    assert lease is not None
    record = site.segment(lease)
    old = {"attempt", "fence", "ok", "failed", "usage", "output", "errors", "engine"}
    site.ledger.commit(lease, SegmentRecord.model_validate(record.model_dump(include=old)))
    found = of(site, spec)
    assert found.ok == 6
    assert found.work is not None
    assert found.work.rows_per_second == 4


def test_the_same_report_after_the_ledger_was_lost(site: Site) -> None:
    from jobs.recover import recover

    spec = worked(site, [("a", 0, 1)] * 4)
    site.control.assemble(spec.id)
    before = of(site, spec)
    site.ledger.client.flushall()
    recover(spec, site.ledger, site.stores, site.tokens, site.control)
    assert of(site, spec) == before


def test_the_command_prints_it(site: Site, pagemill: Command) -> None:
    spec = worked(site, [("a", 0, 3600)] * 4)
    site.control.assemble(spec.id)
    shown = pagemill("report", spec.id, "--gpu-hour-price", "3")
    assert shown.code == 0
    for words in ("12 done, 4 failed, of 16", "missing_required_parameter", "a test", "3.00", "1:00:00"):
        assert words in shown.out
    found = pagemill("report", spec.id, "--json", "--gpu-hour-price", "3").json
    assert (found["cost"], found["failures"]) == (3.0, {"missing_required_parameter": 4})
    assert found["usage"]["prompt_tokens"] == 36
    assert pagemill("report", "nothing").code == 2
