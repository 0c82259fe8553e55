"""Redis restarts empty under a worker that is at work."""

from jobs.recover import recover
from jobs.spec import JobSpec
from tests.jobs.site import Site, prompts
from tests.workers.conftest import WINDOW, Bench
from tests.workers.stub_engine import Engines
from tests.workers.test_slot import at_work, lines, tries

ROWS = 20


def lose_redis_and_recover(site: Site, spec: JobSpec) -> None:
    site.ledger.client.flushall()
    recover(spec, site.ledger, site.stores, site.tokens, site.control)


def test_rows_that_were_committed_are_not_asked_again_and_the_output_is_the_same(
    bench: Bench, engines: Engines
) -> None:
    """Two of five shards are committed, the third is in the engine, and everything in Redis is gone."""
    site = bench.site
    calm = site.planned(ROWS)
    bench.work(calm)
    site.control.assemble(calm.id)
    engines.asked.clear()

    spec = site.submit(prompts(ROWS))
    site.control.plan(spec.id)
    engines.by_hand = True
    with at_work(bench, spec):
        # A shard of four rows passes a window of three in two steps.
        for step in (WINDOW, 4 - WINDOW) * 2:
            engines.last.wait_for(step)
            engines.last.step()
        engines.last.wait_for(WINDOW)
        committed = site.ledger.records(spec.id)
        lose_redis_and_recover(site, spec)
        # The next beat finds the lease lost, and the slot gives up its rows and goes on with the new ledger.
        engines.last.wait_until_empty()
        engines.by_hand = False
    bench.work(spec)
    assert site.ledger.state(spec.id) == "finalizing"
    assert len(committed) == 2
    assert {shard: site.ledger.records(spec.id)[shard] for shard in committed} == committed
    assert [engines.asked.count(f"question {n}") for n in range(8)] == [1] * 8
    assert all(engines.asked.count(f"question {n}") in (1, 2) for n in range(8, ROWS))
    site.control.assemble(spec.id)
    assert site.stores.read(spec.output_url) == site.stores.read(calm.output_url)


def test_a_worker_commits_nothing_with_a_lease_of_the_lost_ledger(bench: Bench, engines: Engines) -> None:
    """It is done with its rows before any beat tells it."""
    site = bench.site
    spec = site.planned(4)
    engines.by_hand = True
    bench.context.heartbeat.stop()
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        site.ledger.client.flushall()
        engines.by_hand = False
        engines.last.step()
    assert site.ledger.records(spec.id) == {}
    assert site.ledger.state(spec.id) is None
    recover(spec, site.ledger, site.stores, site.tokens, site.control)
    # Its segment was whole in storage, so nobody computes it again.
    assert site.ledger.state(spec.id) == "finalizing"
    assert tries(site, spec) == {}
    assert len(lines(site, spec)) == 4
