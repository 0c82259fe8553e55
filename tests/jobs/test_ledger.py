"""The ledger's promises one by one, on a real Valkey."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.connection import connect
from jobs.errors import RowError, ServiceUnreachable, UsageError
from jobs.ledger import Ledger
from jobs.records import DeadShard
from tests.jobs.ledgers import (
    TTL,
    key,
    leased,
    let_leases_run_out,
    manifest_of,
    new_spec,
    opened,
    record_of,
    shards,
    worker,
)
from tests.servers import ValkeyServer


@pytest.fixture
def ledger(valkey: ValkeyServer) -> Ledger:
    return Ledger(valkey.client)


def test_a_job_is_created_once(ledger: Ledger) -> None:
    spec = new_spec()
    assert ledger.create(spec)
    assert not ledger.create(spec)
    assert ledger.job_ids(10) == ledger.live_jobs() == [spec.id]
    assert ledger.spec(spec.id) == spec


def test_more_shards_than_fit_one_command_are_entered(ledger: Ledger) -> None:
    spec = opened(ledger, 1201)
    assert ledger.view(spec.id).shards == ledger.client.zcard(key(spec.id, "ready")) == 1201


def test_nothing_is_leased_before_the_plan_is_complete(ledger: Ledger) -> None:
    spec = new_spec()
    ledger.create(spec)
    ledger.add_shards(spec.id, shards(3))
    assert ledger.lease(spec.model, "attempt", TTL) is None


def test_the_job_that_had_the_fewest_shards_comes_first_then_the_oldest(ledger: Ledger) -> None:
    large = opened(ledger, 5, new_spec(created_at=2))
    small = opened(ledger, 2, new_spec(created_at=3))
    old = opened(ledger, 1, new_spec(created_at=1))
    order = [leased(ledger, large, f"attempt-{n}").job_id for n in range(6)]
    assert order == [old.id, large.id, small.id, large.id, small.id, large.id]


def test_models_do_not_share_jobs(ledger: Ledger) -> None:
    opened(ledger, 1, new_spec(model="another"))
    assert ledger.lease("tiny", "attempt", TTL) is None


def test_a_repeated_lease_is_as_fresh_as_a_new_one(ledger: Ledger) -> None:
    spec = opened(ledger, 2)
    first = leased(ledger, spec)
    let_leases_run_out(ledger.client, spec.id)
    assert leased(ledger, spec) == first
    assert ledger.expire(spec.id) == (0, 1, 1)


def test_a_lease_that_ran_out_may_commit_until_another_attempt_has_the_shard(ledger: Ledger) -> None:
    spec = opened(ledger, 2)
    slow, late = leased(ledger, spec, "slow"), leased(ledger, spec, "late")
    let_leases_run_out(ledger.client, spec.id)
    assert ledger.commit(slow, record_of(slow)) == "ok"
    ledger.expire(spec.id)
    assert ledger.commit(late, record_of(late)) == "lost"
    heir = leased(ledger, spec, "heir")
    assert heir.fence > late.fence
    assert ledger.commit(heir, record_of(heir)) == "ok"
    assert ledger.commit(late, record_of(late)) == "superseded"
    assert ledger.records(spec.id) == {0: record_of(slow), 1: record_of(heir)}


def test_an_expiry_is_limited_so_that_the_server_is_not_held_up(ledger: Ledger) -> None:
    spec = opened(ledger, 3)
    for n in range(3):
        leased(ledger, spec, f"attempt-{n}")
    let_leases_run_out(ledger.client, spec.id)
    assert ledger.expire(spec.id, limit=2) == (2, 2, 1)
    assert ledger.expire(spec.id, limit=2) == (1, 3, 0)
    assert not ledger.client.exists(key(spec.id, "own"), key(spec.id, "leases"))


def test_a_shard_that_was_given_back_was_not_tried(ledger: Ledger) -> None:
    spec = opened(ledger, 1, new_spec(max_tries=1))
    for n in range(3):
        assert ledger.give_back(leased(ledger, spec, f"attempt-{n}"))
    assert leased(ledger, spec).shard.index == 0


def test_a_shard_that_failed_rests_twice_as_long_after_each_try(ledger: Ledger) -> None:
    spec = opened(ledger, 1)
    rests = []
    for n in range(3):
        assert ledger.release(leased(ledger, spec, f"attempt-{n}"), "the disk is full", rest=60)
        assert ledger.expire(spec.id) == (0, 0, 1)
        seconds, microseconds = ledger.client.time()
        due = ledger.client.zscore(f"pm:{{{spec.id}}}:leases", "0")
        rests.append(round(due / 1000 - seconds - microseconds / 1e6))
        ledger.client.zadd(f"pm:{{{spec.id}}}:leases", {"0": 0})
        assert ledger.expire(spec.id) == (1, 1, 0)
    assert rests == [60, 120, 240]


def test_a_shard_that_was_tried_too_often_is_settled_as_dead(ledger: Ledger) -> None:
    spec = opened(ledger, 1, new_spec(max_tries=2))
    for n in range(2):
        assert ledger.release(leased(ledger, spec, f"attempt-{n}"), "the worker ran out of memory")
    assert ledger.lease(spec.model, "one more", TTL) is None
    assert ledger.records(spec.id) == {0: DeadShard(dead=True, tries=2, fault="the worker ran out of memory")}
    assert ledger.state(spec.id) == "finalizing"
    assert ledger.faults(spec.id) == {0: "the worker ran out of memory"}


def test_a_finished_job_leaves_its_history_and_nothing_else(ledger: Ledger) -> None:
    spec = opened(ledger, 1)
    lease = leased(ledger, spec)
    ledger.beat([(lease, 3)], TTL)
    assert ledger.view(spec.id).in_flight == 3
    ledger.commit(lease, record_of(lease))
    manifest = manifest_of(spec, ok=9, failed=1, usage=record_of(lease).usage)
    assert ledger.finish(manifest, from_state="finalizing") == "ok"
    assert set(ledger.client.keys(f"*{spec.id}*")) == {key(spec.id, name) for name in ("job", "commit", "tries")}
    view = ledger.view(spec.id)
    assert (view.state, view.done, view.failed, view.in_flight) == ("completed", 9, 1, 0)
    assert (view.usage.prompt_tokens, view.usage.completion_tokens, view.usage.cached_tokens) == (100, 20, 3)
    assert view.ended_at is not None


def test_the_errors_of_a_job_are_shown_with_their_places(ledger: Ledger) -> None:
    spec = new_spec()
    ledger.create(spec)
    errors = (RowError(code="invalid_json_line", message="no JSON", line=7, byte=99),)
    ledger.fail(spec.id, errors, error_count=12, error_url="file:///errors", from_state="validating")
    view = ledger.view(spec.id)
    assert (view.state, view.errors, view.error_count, view.error_url) == ("failed", errors, 12, "file:///errors")
    assert ledger.cancel(spec.id) == "failed"


def test_a_job_that_nobody_drives_on_says_so(ledger: Ledger) -> None:
    spec = new_spec()
    ledger.create(spec)
    assert "start `pagemill worker --control`" in str(ledger.view(spec.id).reason)
    ledger.announce_sweep(TTL)
    assert ledger.view(spec.id).reason is None


def test_a_job_that_waits_says_what_for(ledger: Ledger) -> None:
    spec = opened(ledger, 1)
    assert "no live worker serves the model 'tiny'" in str(ledger.view(spec.id).reason)
    ledger.announce(worker("another"), TTL)
    assert "no live worker" in str(ledger.view(spec.id).reason)
    ledger.announce(worker("tiny"), TTL)
    assert "start `pagemill worker --control`" in str(ledger.view(spec.id).reason)
    ledger.announce_sweep(TTL)
    assert ledger.view(spec.id).reason == "waiting for a free slot of 1 worker(s)"
    lease = leased(ledger, spec)
    assert ledger.view(spec.id).reason is None
    ledger.release(lease, "the bucket refuses")
    assert ledger.view(spec.id).reason == "shard 0 is tried again: the bucket refuses"


def test_workers_are_known_as_long_as_they_speak(ledger: Ledger) -> None:
    one, two = worker("tiny", id="1"), worker("tiny", id="2")
    ledger.announce(one, TTL)
    ledger.announce(two, TTL)
    assert ledger.workers() == [one, two]
    ledger.withdraw("1")
    assert ledger.workers() == [two]
    ledger.client.pexpire("pm:worker:2", 0)
    assert ledger.workers() == []
    assert ledger.client.smembers("pm:workers") == set()


def test_what_is_on_disk_survives_a_killed_server(valkey: ValkeyServer) -> None:
    ledger = Ledger(connect(valkey.url))
    spec = opened(ledger, 2)
    lease = leased(ledger, spec)
    valkey.restart()
    assert ledger.beat([(lease, 5)], TTL) == ["ok"]
    assert ledger.commit(lease, record_of(lease)) == "ok"
    assert ledger.view(spec.id).settled == 1


def test_an_unknown_job_is_an_error(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="no job 'nothing'"):
        ledger.view("nothing")
    with pytest.raises(UsageError, match="no job 'nothing'"):
        ledger.spec("nothing")


@pytest.mark.parametrize("url", ["http://host:1/0", "host:6379", "redis://host:port/0", ""])
def test_what_is_no_redis_url_is_said_to_be_none(url: str) -> None:
    with pytest.raises(UsageError, match="is no Redis URL"):
        connect(url)


def test_an_unreachable_server_is_named_without_its_password() -> None:
    with pytest.raises(ServiceUnreachable) as caught:
        connect("redis://me:secret@127.0.0.1:1/0")
    assert "redis://me:***@127.0.0.1:1/0" in caught.value.message
    assert "secret" not in caught.value.message
    assert "PAGEMILL_REDIS_URL" in caught.value.hint


def test_refused_credentials_are_told_from_an_unreachable_server(valkey: ValkeyServer) -> None:
    valkey.client.config_set("requirepass", "right")
    try:
        for url in (valkey.url, valkey.url.replace("unix://", "unix://:wrong@")):
            with pytest.raises(ServiceUnreachable, match="refuses the credentials") as caught:
                connect(url)
            assert "wrong" not in caught.value.message.replace("username-password pair", "")
        assert connect(valkey.url.replace("unix://", "unix://:right@")).ping()
    finally:
        valkey.client.auth("right")
        valkey.client.config_set("requirepass", "")


def test_a_cluster_is_refused(tmp_path: Path) -> None:
    with cluster(tmp_path) as url, pytest.raises(UsageError, match="Redis Cluster"):
        connect(url)


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    server = ValkeyServer(folder, "--cluster-enabled", "yes")
    server.start()
    try:
        yield server.url
    finally:
        server.kill()


def test_a_job_has_started_when_a_worker_has_its_first_shard(ledger: Ledger) -> None:
    spec = opened(ledger, 2)
    assert ledger.view(spec.id).started_at is None
    leased(ledger, spec, "first")
    started = ledger.view(spec.id).started_at
    assert started is not None
    ledger.client.hset(key(spec.id, "job"), "started_at", started - 100)
    leased(ledger, spec, "second")
    assert ledger.view(spec.id).started_at == started - 100
