"""How many shards a slot has in work: as many as the engine has room for, and no more than it may."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from jobs.spec import JobSpec
from tests.jobs.ledgers import TTL, key, let_leases_run_out, worker
from tests.workers.conftest import Bench, at_work
from tests.workers.stub_engine import INFO, Engines

ROWS = 4
"""In a shard."""
AT_ONCE = 3
NOT_MORE_S = 0.3


@pytest.fixture
def wide(bench: Bench, engines: Engines) -> Callable[..., Bench]:
    """A slot that may have several shards in work, whose engine answers when it is told to."""
    engines.by_hand = True

    def make(at_once: int = AT_ONCE, window: int = 2 * ROWS) -> Bench:
        return replace(bench, context=replace(bench.context, at_once=at_once, window=window))

    return make


def shards_in_work(bench: Bench, spec: JobSpec) -> int:
    return bench.site.ledger.view(spec.id).leased


def test_a_slot_begins_with_the_next_shard_when_all_rows_of_the_last_are_asked(
    wide: Callable[..., Bench], engines: Engines
) -> None:
    bench = wide()
    spec = bench.site.planned(ROWS * 5)
    with at_work(bench, spec):
        engines.last.wait_for(ROWS * AT_ONCE)
        assert not engines.last.has(ROWS * AT_ONCE + 1, NOT_MORE_S)
        assert shards_in_work(bench, spec) == AT_ONCE
        engines.last.step()
        engines.last.wait_for(ROWS * 2)
        engines.last.step()
    view = bench.site.ledger.view(spec.id)
    assert (view.state, view.done) == ("finalizing", ROWS * 5)
    assert set(bench.site.ledger.client.hvals(key(spec.id, "tries"))) == {"1"}


def test_it_does_not_while_rows_of_the_last_are_not_asked(wide: Callable[..., Bench], engines: Engines) -> None:
    bench = wide(window=ROWS - 1)
    spec = bench.site.planned(ROWS * 3)
    with at_work(bench, spec):
        engines.last.wait_for(ROWS - 1)
        assert not engines.last.has(ROWS, NOT_MORE_S)
        assert shards_in_work(bench, spec) == 1
        bench.context.stopping.set()


def test_it_does_not_while_the_engine_has_rows_for_two_steps(wide: Callable[..., Bench], engines: Engines) -> None:
    bench = wide(at_once=8)
    spec = bench.site.planned(ROWS * 8)
    two_steps = 2 * INFO.max_num_seqs
    with at_work(bench, spec):
        engines.last.wait_for(two_steps)
        assert not engines.last.has(two_steps + 1, NOT_MORE_S)
        assert shards_in_work(bench, spec) == two_steps // ROWS
        (index, prompt), *_ = engines.last.in_flight()
        # The first answer makes room.
        engines.last.answer(index, engines.rules(prompt))
        engines.last.wait_for(two_steps - 1 + ROWS)
        bench.context.stopping.set()
    assert shards_in_work(bench, spec) == 0


def test_what_it_takes_beside_others_leaves_the_other_workers_their_share(
    wide: Callable[..., Bench], engines: Engines
) -> None:
    bench = wide(at_once=8)
    bench.site.ledger.announce(worker("tiny", id="another"), TTL)
    spec = bench.site.planned(ROWS * 4)
    with at_work(bench, spec):
        # Of four, each worker could have two.
        engines.last.wait_for(ROWS * 2)
        assert not engines.last.has(ROWS * 2 + 1, NOT_MORE_S)
        bench.site.ledger.withdraw("another")
        engines.last.step()
        engines.last.wait_for(ROWS * 2)
        engines.last.step()
    assert bench.site.ledger.view(spec.id).done == ROWS * 4


def test_what_was_left_to_others_is_taken_when_nothing_else_is_in_work(
    wide: Callable[..., Bench], engines: Engines
) -> None:
    bench = wide()
    bench.site.ledger.announce(worker("tiny", id="another"), TTL)
    spec = bench.site.planned(ROWS * 2)
    with at_work(bench, spec):
        for _ in range(2):
            engines.last.wait_for(ROWS)
            assert not engines.last.has(ROWS + 1, NOT_MORE_S)
            engines.last.step()
    assert bench.site.ledger.view(spec.id).done == ROWS * 2


def test_a_shard_that_may_kill_workers_has_nothing_beside_it(wide: Callable[..., Bench], engines: Engines) -> None:
    bench = wide()
    spec = bench.site.planned(ROWS * 3)
    for _ in range(2):
        assert bench.site.lease(spec) is not None
        let_leases_run_out(bench.site.ledger.client, spec.id)
        bench.site.ledger.expire(spec.id)
    with at_work(bench, spec):
        engines.last.wait_for(ROWS)
        assert not engines.last.has(ROWS + 1, NOT_MORE_S)
        assert bench.site.ledger.client.hgetall(key(spec.id, "tries")) == {"0": "3"}
        engines.last.step()
        engines.last.wait_for(ROWS * 2)
        engines.last.step()
    assert bench.site.ledger.view(spec.id).done == ROWS * 3


def test_a_stop_gives_all_of_them_back(wide: Callable[..., Bench], engines: Engines) -> None:
    bench = wide()
    spec = bench.site.planned(ROWS * 5)
    with at_work(bench, spec):
        engines.last.wait_for(ROWS * AT_ONCE)
        bench.context.stopping.set()
    assert shards_in_work(bench, spec) == 0
    assert set(bench.site.ledger.client.hvals(key(spec.id, "tries"))) == {"0"}
