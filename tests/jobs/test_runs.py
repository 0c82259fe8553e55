"""A job that is worked on in runs: who gets which part of the line, and that nothing stays behind."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from jobs.ledger import Lease, Ledger
from jobs.spec import JobSpec
from tests.jobs.ledgers import ROWS, TTL, key, let_leases_run_out, manifest_of, new_spec, record_of, shards, worker
from tests.jobs.site import Site
from tests.servers import ValkeyServer

_attempts = count()


@pytest.fixture
def ledger(valkey: ValkeyServer) -> Ledger:
    ledger = Ledger(valkey.client)
    for name in "abc":
        ledger.announce(worker("tiny", id=name), TTL)
    return ledger


def in_runs(ledger: Ledger, number: int, *, runs: bool = True) -> JobSpec:
    """A job of so many shards; the first in line is the last of the file."""
    spec = new_spec()
    assert ledger.create(spec)
    assert ledger.add_shards(spec.id, [replace(s, place=number - 1 - s.index) for s in shards(number)]) == "ok"
    assert ledger.open(spec, shards=number, rows=ROWS * number, errors=[], error_count=0, in_runs=runs) == "ok"
    return spec


def lease(ledger: Ledger, name: str) -> Lease | None:
    return ledger.lease("tiny", f"attempt-{next(_attempts)}", TTL, worker=name)


def places(ledger: Ledger, names: str) -> Iterator[int | None]:
    """The places in line of what these workers get, one after the other."""
    for name in names:
        found = lease(ledger, name)
        yield None if found is None else found.shard.place


def test_without_runs_all_take_the_first_in_line(ledger: Ledger) -> None:
    in_runs(ledger, 6, runs=False)
    assert list(places(ledger, "abacbaa")) == [0, 1, 2, 3, 4, 5, None]


def test_each_worker_goes_on_from_what_it_had(ledger: Ledger) -> None:
    in_runs(ledger, 12)
    # b begins in the middle of what follows a's first, c in the middle of what follows b's.
    assert list(places(ledger, "abcabcabc")) == [0, 6, 3, 1, 7, 4, 2, 8, 5]


def test_who_is_through_with_its_run_takes_half_of_the_longest(ledger: Ledger) -> None:
    in_runs(ledger, 12)
    assert list(places(ledger, "ab")) == [0, 6]
    assert list(places(ledger, "aaaaa")) == [1, 2, 3, 4, 5]
    # b has 7 to 11 left.
    assert list(places(ledger, "aaabbab")) == [9, 10, 11, 7, 8, None, None]


def test_one_worker_takes_the_line_as_it_is(ledger: Ledger) -> None:
    in_runs(ledger, 5)
    assert list(places(ledger, "aaaaaa")) == [0, 1, 2, 3, 4, None]


def test_a_worker_without_a_name_takes_the_first_in_line(ledger: Ledger) -> None:
    in_runs(ledger, 5)
    assert list(places(ledger, "a")) == [0]
    assert [found.shard.place for _ in range(2) if (found := ledger.lease("tiny", f"x{_}", TTL))] == [1, 2]


def test_what_is_put_back_before_all_runs_is_taken_before_a_run_is_cut(ledger: Ledger) -> None:
    in_runs(ledger, 8)
    first = lease(ledger, "a")
    assert first is not None
    assert list(places(ledger, "aba")) == [1, 5, 2]
    ledger.give_back(first)
    assert list(places(ledger, "c")) == [0]


def test_a_run_begins_with_the_shard_that_was_handed_out_should_it_be_put_back(ledger: Ledger) -> None:
    in_runs(ledger, 8)
    assert list(places(ledger, "ab")) == [0, 4]
    second = lease(ledger, "a")
    assert second is not None
    ledger.give_back(second)
    assert list(places(ledger, "a")) == [second.shard.place]


def test_what_a_run_left_behind_is_not_forgotten(ledger: Ledger) -> None:
    spec = in_runs(ledger, 6)
    assert list(places(ledger, "aaab")) == [0, 1, 2, 4]
    let_leases_run_out(ledger.client, spec.id)
    ledger.expire(spec.id)
    assert set(places(ledger, "ababab")) == {0, 1, 2, 3, 4, 5}
    assert list(places(ledger, "ab")) == [None, None]


def test_the_run_of_a_worker_that_is_gone_is_that_of_the_one_before(ledger: Ledger) -> None:
    in_runs(ledger, 9)
    assert list(places(ledger, "ab")) == [0, 5]
    ledger.withdraw("b")
    # Were b there, its run would be 6 to 8, and c would have the second half of 1 to 4.
    assert list(places(ledger, "cac")) == [4, 1, 6]


def test_a_job_whose_shards_share_prefixes_is_planned_to_be_worked_on_in_runs(ledger: Ledger, site: Site) -> None:
    prompts = [f"{letter * 600}: question {number}" for number in range(2) for letter in "abcdefgh"]
    spec = site.submit([{"prompt": prompt} for prompt in prompts])
    site.control.plan(spec.id)
    assert [site.ledger.lease("tiny", name, TTL, worker=name) is not None for name in "ab"] == [True, True]
    # What asks about a to d, and what asks about e to h.
    assert site.ledger.client.hgetall(key(spec.id, "at")) == {"a": "0", "b": "2"}


def test_a_job_that_has_ended_keeps_no_places(ledger: Ledger) -> None:
    spec = in_runs(ledger, 1)
    found = lease(ledger, "a")
    assert found is not None
    assert ledger.client.exists(key(spec.id, "at"))
    assert ledger.commit(found, record_of(found)) == "ok"
    assert ledger.finish(manifest_of(spec), "finalizing") == "ok"
    assert not ledger.client.exists(key(spec.id, "at"))


def test_more_than_one_has_need_of_is_handed_out_while_each_other_worker_could_have_as_many(ledger: Ledger) -> None:
    in_runs(ledger, 10, runs=False)

    def beside(held: int) -> Lease | None:
        return ledger.lease("tiny", f"attempt-{next(_attempts)}", TTL, worker="a", left_to_each=held)

    # Of ten and of nine more than four for each of the two others are there, and of eight not.
    assert [beside(held) is not None for held in (4, 4, 4, 3, 0)] == [True, True, False, True, True]
