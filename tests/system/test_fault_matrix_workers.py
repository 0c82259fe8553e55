"""The fault matrix, first part: workers that die, freeze or lose what they hold.

Every test: inject one fault, see that it came, and the checker finds every row once, in order, with its own answer.
What takes a minute by default is scaled: a lease lives for two seconds, a sweep comes twice a second.
"""

import signal
import time
from collections.abc import Iterator

import pytest

from jobs.broker import CONTROL_QUEUE, PLAN, make_app, queue_key
from jobs.gc import Collector
from jobs.ledger import Ledger
from jobs.records import Manifest
from tests.proxy import TcpProxy, tcp_proxy
from tests.servers import ValkeyServer
from tests.system.fleet import LEASE_TTL, SHARD_ROWS, Fleet, Job, Process
from tests.system.history import History
from tests.system.mill import wait_until
from tests.system.stub_worker import DIES_WITH_TOKEN, MODEL

NEVER_S = 1000.0
"""A step that does not end while a test runs."""
UNACKED, UNACKED_INDEX = "pm:bk:unacked", "pm:bk:unacked_index"


def killed(process: Process) -> None:
    assert process.wait_for_death() == -signal.SIGKILL, process.log.read_text()


def attempts_committed(fleet: Fleet, job: Job) -> dict[int, str]:
    """The attempt of each shard, of a job whose shards were all committed once."""
    commits = fleet.history.commits(job.id)
    assert {len(attempts) for attempts in commits.values()} == {1}
    return {shard: attempts[0] for shard, attempts in commits.items()}


def orphans(fleet: Fleet, job: Job, manifest: Manifest) -> set[str]:
    """The objects of attempts that are not the job's result."""
    layout = job.spec.layout
    results = {layout.record(s.shard, s.record.fence, s.record.attempt) for s in manifest.segments}
    results |= {part.url for s in manifest.segments for part in s.record.objects(layout, s.shard) if part}
    found = {item.url for item in fleet.stores.stored(layout.attempts)}
    assert results <= found
    return found - results


def collector(fleet: Fleet) -> Collector:
    """One that takes for old whatever is there now."""
    return Collector(fleet.settings.storage_url, fleet.ledger, fleet.stores, before=time.time() + 1)


# --- 1 to 5: kill -9, from the token to the acknowledgement ---------------------------------------------------------


def test_01_a_worker_killed_after_it_leased_a_shard(fleet: Fleet) -> None:
    fleet.control()
    doomed = fleet.worker("lease.taken:kill", slots=1)
    job = fleet.submit()
    killed(doomed)
    fleet.worker()
    fleet.finished(job)
    assert fleet.tries(job) == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}


def test_02_a_worker_killed_between_the_queue_and_the_note_of_what_it_took(fleet: Fleet) -> None:
    """The token is lost for good, as Celery on Redis loses it: only a sweep can bring the job to a worker."""
    control = fleet.control()
    job = fleet.submit(SHARD_ROWS)
    wait_until(lambda: fleet.valkey.client.llen(fleet.work_queue()) == 1, 10, "its token")
    control.kill()
    killed(fleet.worker(**{DIES_WITH_TOKEN: "yes"}))
    assert fleet.valkey.client.exists(fleet.work_queue(), UNACKED) == 0
    fleet.worker()
    fleet.control()
    fleet.finished(job)
    assert fleet.tries(job) == {0: 1}


@pytest.mark.parametrize(("slots", "shards"), [(4, 4), (None, 8)], ids=["four slots", "as the engine has room"])
def test_03_a_worker_killed_with_four_shards_in_the_engine(slots: int | None, shards: int, fleet: Fleet) -> None:
    """All four run again; what another worker holds of another job stays where it is."""
    fleet.control()
    holder = fleet.worker(step_s=NEVER_S)
    others = fleet.submit(2 * SHARD_ROWS)
    held = wait_until(lambda: len(found := fleet.owners(others)) == 2 and found, 30, "both shards of the other job")
    job = fleet.submit(shards * SHARD_ROWS)
    doomed = fleet.worker(f"row.asked:stop@{4 * SHARD_ROWS}", step_s=NEVER_S, slots=slots)
    doomed.wait_until_stopped()
    assert len(fleet.owners(job)) == 4
    doomed.kill()
    fleet.worker()
    fleet.finished(job)
    assert fleet.tries(job) == {shard: 2 if shard < 4 else 1 for shard in range(shards)}
    assert fleet.owners(others) == held
    holder.send(signal.SIGTERM)
    fleet.finished(others)
    assert fleet.tries(others) == {0: 1, 1: 1}


@pytest.mark.parametrize("point", ["segment.put", "segment.recorded"])
def test_04_a_worker_killed_between_the_segment_and_its_commit(point: str, fleet: Fleet) -> None:
    """What it put is nobody's, is left alone while the job runs, and is collected afterwards."""
    control = fleet.control()
    doomed = fleet.worker(f"{point}:kill", slots=1)
    job = fleet.submit(12)
    killed(doomed)
    assert list(collector(fleet).find()) == []
    fleet.worker()
    manifest = fleet.finished(job)
    lost = orphans(fleet, job, manifest)
    assert len(lost) == (2 if point == "segment.recorded" else 1)
    assert all(f"/{0:06}/" in url for url in lost)
    assert fleet.tries(job)[0] == 2
    control.kill()
    assert {one.what.url for one in collector(fleet).collect()} == lost
    assert orphans(fleet, job, manifest) == set()
    fleet.check(job)


def test_05_a_worker_killed_between_the_commit_and_the_acknowledgement(fleet: Fleet) -> None:
    """Its token comes again, twelve hours later (not scaled: it is made visible by hand), and changes nothing."""
    fleet.control()
    doomed = fleet.worker("shard.committed:kill", slots=1)
    job = fleet.submit(12)
    killed(doomed)
    assert fleet.view(job).settled == 1
    fleet.worker()
    manifest = fleet.finished(job)
    assert len({segment.record.worker for segment in manifest.segments}) == 2
    assert fleet.tries(job) == {0: 1, 1: 1, 2: 1}
    assert redeliver(fleet) == 1
    wait_until_taken(fleet)
    assert fleet.leases_given(job) == 3
    attempts_committed(fleet, job)
    assert fleet.check(job) == manifest


def test_05_a_worker_killed_after_the_last_commit_of_a_job(fleet: Fleet) -> None:
    """Nobody tells a control worker that the job can be assembled: the sweep sees it."""
    fleet.control()
    doomed = fleet.worker("shard.committed:kill")
    job = fleet.submit(SHARD_ROWS)
    killed(doomed)
    fleet.finished(job)
    assert fleet.tries(job) == {0: 1}


def redeliver(fleet: Fleet) -> int:
    """Let the visibility timeout of all that is unacknowledged pass; how many tokens came back to their queues."""
    client = fleet.valkey.client
    old = client.zrange(UNACKED_INDEX, 0, -1)
    client.zadd(UNACKED_INDEX, dict.fromkeys(old, 1), xx=True)
    with make_app(fleet.settings).connection_for_read() as connection:
        connection.default_channel.qos.restore_visible()
    return len(old)


def wait_until_taken(fleet: Fleet) -> None:
    """Until every token is consumed and acknowledged."""
    queues = (fleet.work_queue(), queue_key(CONTROL_QUEUE), UNACKED)
    wait_until(lambda: fleet.valkey.client.exists(*queues) == 0, 30, "no token left")


# --- 6: zombies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", [f"row.asked:stop@{SHARD_ROWS}", "segment.put:stop", "segment.recorded:stop"])
def test_06_a_frozen_worker_comes_back_while_another_has_its_shard(point: str, fleet: Fleet) -> None:
    fleet.control()
    zombie = fleet.worker(point, slots=1)
    job = fleet.submit(SHARD_ROWS)
    zombie.wait_until_stopped()
    first = fleet.owners(job)
    assert first
    fleet.worker(step_s=2)
    wait_until(lambda: (now := fleet.owners(job)) and now != first, 30, "the shard at another worker")
    zombie.send(signal.SIGCONT)
    fleet.finished(job)
    wait_until(lambda: "abandoned (lost)" in zombie.log.read_text(), 10, "what the zombie was told")
    assert attempts_committed(fleet, job) != first
    assert fleet.tries(job) == {0: 2}
    fleet.check(job)


def test_06_a_frozen_worker_comes_back_when_another_has_committed_its_shard(fleet: Fleet) -> None:
    """It is superseded, changes nothing, and is as good a worker as before."""
    fleet.control()
    zombie = fleet.worker("segment.recorded:stop", slots=1)
    job = fleet.submit(12)
    zombie.wait_until_stopped()
    winner = fleet.worker()
    manifest = fleet.finished(job)
    winner.kill()
    zombie.send(signal.SIGCONT)
    wait_until(lambda: "abandoned (superseded)" in zombie.log.read_text(), 10, "what the zombie was told")
    assert fleet.check(job) == manifest
    assert len(orphans(fleet, job, manifest)) == 2
    fleet.finished(fleet.submit(12))
    assert zombie.alive


# --- 7 and 8: replies that are lost ---------------------------------------------------------------------------------


@pytest.fixture
def proxy(own_valkey: ValkeyServer) -> Iterator[TcpProxy]:
    with tcp_proxy(own_valkey.url.partition("?")[0]) as found:
        yield found


def known_script(fleet: Fleet, name: str) -> bytes:
    """How a worker calls a script of the ledger; the server has it, so that the first call is answered, too."""
    script = Ledger(fleet.valkey.client)._scripts[name]
    return fleet.valkey.client.script_load(script.script).encode()


@pytest.mark.parametrize("rows", [SHARD_ROWS, 6 * SHARD_ROWS], ids=["the_only_commit", "one_of_six"])
def test_07_the_reply_to_a_commit_is_lost(rows: int, fleet: Fleet, proxy: TcpProxy) -> None:
    """The commit is asked for again, and is the same: it counts once, and the job is assembled."""
    proxy.drop_reply_to(known_script(fleet, "commit"))
    fleet.control()
    worker = fleet.worker(PAGEMILL_REDIS_URL=proxy.redis_url)
    job = fleet.submit(rows)
    fleet.finished(job)
    wait_until_taken(fleet)
    assert proxy.replies_dropped == 1
    view = fleet.view(job)
    assert view.settled == view.shards == len(attempts_committed(fleet, job))
    assert set(fleet.tries(job).values()) == {1}
    assert "abandoned" not in worker.log.read_text()


def test_07_the_reply_to_a_commit_is_lost_three_times(fleet: Fleet, proxy: TcpProxy) -> None:
    proxy.drop_reply_to(*[known_script(fleet, "commit")] * 3)
    fleet.control()
    fleet.worker(PAGEMILL_REDIS_URL=proxy.redis_url)
    job = fleet.submit(SHARD_ROWS)
    fleet.finished(job)
    # The job may be done long before the worker hears that.
    wait_until_taken(fleet)
    assert proxy.replies_dropped == 3
    assert (fleet.view(job).settled, len(attempts_committed(fleet, job))) == (1, 1)


def test_08_the_reply_to_a_lease_is_lost(fleet: Fleet, proxy: TcpProxy) -> None:
    """The attempt asks again and gets the same shard with the same fence: no lease was given to nobody."""
    proxy.drop_reply_to(known_script(fleet, "lease"))
    fleet.control()
    fleet.worker(PAGEMILL_REDIS_URL=proxy.redis_url)
    job = fleet.submit()
    fleet.finished(job)
    assert proxy.replies_dropped == 1
    assert fleet.leases_given(job) == fleet.view(job).shards == 6
    assert set(fleet.tries(job).values()) == {1}


# --- 9 and 10: tokens -----------------------------------------------------------------------------------------------


def copy_tokens(fleet: Fleet, key: str, times: int) -> None:
    client = fleet.valkey.client
    messages = client.lrange(key, 0, -1)
    assert messages, "there is no token to copy"
    client.rpush(key, *messages * times)


def test_09_every_token_comes_three_times(fleet: Fleet) -> None:
    job = fleet.submit()
    copy_tokens(fleet, queue_key(CONTROL_QUEUE), 2)
    fleet.control()
    wait_until(lambda: fleet.valkey.client.llen(fleet.work_queue()) >= 6, 30, "a token for each shard")
    copy_tokens(fleet, fleet.work_queue(), 2)
    fleet.worker()
    fleet.finished(job)
    for _ in range(3):
        fleet.tokens.send(PLAN, job.id)
        fleet.tokens.assemble(job.id)
    wait_until_taken(fleet)
    assert len(attempts_committed(fleet, job)) == fleet.leases_given(job) == 6
    assert fleet.history.states(job.id) == ["validating", "in_progress", "finalizing", "completed"]
    fleet.check(job)


def test_09_a_token_that_finds_nothing_is_done_within_50_ms(fleet: Fleet) -> None:
    fleet.control()
    fleet.worker(slots=1)
    fleet.finished(fleet.submit(SHARD_ROWS))
    wait_until_taken(fleet)
    began = time.monotonic()
    fleet.tokens.work(MODEL, 100)
    wait_until_taken(fleet)
    assert time.monotonic() - began < 100 * 0.05


@pytest.mark.parametrize("task", ["plan", "work"])
def test_10_all_tokens_are_deleted(task: str, fleet: Fleet) -> None:
    """Neither who plans nor who works is told of the job by a token. A sweep makes up for it."""
    job = fleet.submit()
    if task == "plan":
        assert fleet.valkey.client.delete(queue_key(CONTROL_QUEUE)) == 1
        control = fleet.control()
    else:
        control = fleet.control()
        wait_until(lambda: fleet.valkey.client.llen(fleet.work_queue()) == 6, 30, "a token for each shard")
        control.kill()
        assert fleet.valkey.client.delete(fleet.work_queue()) == 1
        fleet.control()
    fleet.worker()
    fleet.finished(job)
    assert fleet.leases_given(job) == 6


# --- 11: the ledger's server dies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("down_s", [0.2, 2 * LEASE_TTL], ids=["for_a_moment", "for_longer_than_a_lease"])
def test_11_valkey_is_killed_and_comes_back(down_s: float, fleet: Fleet) -> None:
    """Three seconds and 75 are scaled to a tenth of a lease's life and to two of them.

    Workers live on; what was committed stays; what was in work is run again where its lease ran out, and nothing else.
    """
    processes = [fleet.control(), fleet.worker(step_s=0.3), fleet.worker(step_s=0.3)]
    job = fleet.submit(60)
    fleet.wait_for(job, lambda view: view.settled >= 4 and view.leased == 4, "a job in the middle")
    assert fleet.valkey.client.execute_command("WAITAOF", 1, 0, 10_000)[0] == 1
    fleet.valkey.kill()
    down = time.monotonic()
    before = History(fleet.valkey.data_dir).commits(job.id)
    wait_until(lambda: time.monotonic() - down > down_s, 60, "the end of the outage")
    fleet.valkey.start()
    in_work = fleet.tries(job).keys() - before.keys()
    fleet.finished(job)
    assert all(process.alive and "Connection to broker lost" in process.log.read_text() for process in processes)
    committed = attempts_committed(fleet, job)
    assert before == {shard: [committed[shard]] for shard in before}
    again = {shard for shard, tries in fleet.tries(job).items() if tries > 1}
    assert again <= in_work
    fleet.finished(fleet.submit(12))
    assert all(process.alive for process in processes)
