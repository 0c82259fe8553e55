"""The fault matrix, rows 28 to 33: stops, cancellations, clocks that jump, sweepers in number, deploys, full disks.

Every test: inject one fault, see that it came, and the checker finds every row once, in order, with its own answer.
What takes a minute by default is scaled: a lease lives for two seconds, a beat comes three times in that, a sweep comes
twice a second, and a worker with a fault of its own rests for half a second.
"""

import json
import signal
import time
from collections.abc import Callable

import pytest

from jobs import orders
from jobs.broker import ASSEMBLE, CONTROL_QUEUE, PLAN, model_queue, queue_key
from jobs.records import WorkerView
from tests.jobs.ledgers import key
from tests.servers import ValkeyServer
from tests.system.fleet import END_S, SHARD_ROWS, Fleet, Job, Process
from tests.system.history import commands
from tests.system.hurt_worker import CLOCK, DISK_FULL, FAULTS
from tests.system.mill import wait_until
from tests.system.stub_engine import ENDLESS
from tests.system.stub_worker import MODEL

NEVER_S = 1000.0
"""A step that does not end while a test runs."""
HOUR_S = 3600
GRACE = "PAGEMILL_STOP_GRACE"
EXIT_STUCK = 70


def hurt_worker(fleet: Fleet, *, step_s: float = 0.0) -> Process:
    return fleet.worker(step_s=step_s, program="tests.system.hurt_worker", **{FAULTS: str(fleet.folder)})


def cancel(fleet: Fleet, job: Job) -> str:
    """As `pagemill cancel` does it."""
    reply = orders.cancel(job.id, fleet.ledger, fleet.stores)
    fleet.tokens.assemble(job.id)
    return reply


def wait_until_opened(fleet: Fleet, *jobs: Job) -> None:
    for job in jobs:
        fleet.wait_for(job, lambda view: view.state == "in_progress", "an opened job")


# --- 28: stops under load ---------------------------------------------------------------------------------------


def test_28_a_worker_under_load_stops_within_its_grace_and_no_try_counts(fleet: Fleet) -> None:
    """All its slots wait for a step that does not end; past the grace it would end itself with another code."""
    fleet.control()
    worker = fleet.worker(step_s=NEVER_S, **{GRACE: "20"})
    job = fleet.submit()
    fleet.wait_for(job, lambda view: view.leased == 2, "a busy worker")
    worker.send(signal.SIGTERM)
    assert worker.wait_for_death() == 0
    assert fleet.view(job).leased == 0
    assert set(fleet.tries(job).values()) == {0}
    fleet.worker()
    fleet.finished(job)
    assert set(fleet.tries(job).values()) == {1}
    assert fleet.leases_given(job) > len(fleet.tries(job))


def test_28_a_worker_that_cannot_stop_ends_itself_after_its_grace(fleet: Fleet, own_valkey: ValkeyServer) -> None:
    """The ledger is frozen, so that no shard can be given back. Those that were held are taken back, and count."""
    fleet.control()
    worker = fleet.worker(step_s=NEVER_S, **{GRACE: "1"})
    job = fleet.submit()
    fleet.wait_for(job, lambda view: view.leased == 2, "a busy worker")
    own_valkey.send(signal.SIGSTOP)
    worker.send(signal.SIGTERM)
    assert worker.wait_for_death() == EXIT_STUCK
    own_valkey.send(signal.SIGCONT)
    fleet.worker()
    fleet.finished(job)
    assert sorted(fleet.tries(job).values()) == [1, 1, 1, 1, 2, 2]


# --- 29: cancel at each state -----------------------------------------------------------------------------------


def test_29_cancelled_while_it_is_planned(fleet: Fleet) -> None:
    """The plan is written, and the planner stands still before it enters it."""
    planner = fleet.control("plan.stored:stop")
    fleet.worker()
    job = fleet.submit()
    planner.wait_until_stopped()
    assert cancel(fleet, job) == "ok"
    planner.send(signal.SIGCONT)
    fleet.wait_for_end(job, "cancelled")
    assert fleet.check(job, ending="cancelled").segments == ()
    assert fleet.history.states(job.id) == ["validating", "cancelling", "cancelled"]
    assert fleet.tries(job) == {}


def test_29_cancelled_while_it_runs(fleet: Fleet) -> None:
    """The worker is told at its next beat, and holds nothing when it says so at the one after. What was done is kept,
    and the rest stands in a file."""
    fleet.control()
    worker = fleet.worker()
    job = fleet.submit(prompts=[f"question {n}" if n < 8 else f"{ENDLESS} question {n}" for n in range(24)])
    fleet.wait_for(job, lambda view: view.done == 8 and view.leased == 2, "the middle of the job")
    assert cancel(fleet, job) == "ok"
    fleet.wait_for_end(job, "cancelled")
    wait_until(lambda: busy_after_cancel(fleet)[1:], END_S, "beats after the cancellation")
    assert busy_after_cancel(fleet)[1] == 0
    assert worker.log.read_text().count("abandoned (stop)") == 2
    manifest = fleet.check(job, ending="cancelled")
    assert manifest.ok == 8
    left = [json.loads(row)["prompt"] for row in fleet.stores.read(job.spec.layout.remaining).splitlines()]
    done = {row for s in manifest.segments for row in range(s.first_row, s.first_row + s.rows)}
    assert left == [prompt for row, prompt in enumerate(job.prompts) if row not in done]
    fleet.finished(fleet.submit(8))


def busy_after_cancel(fleet: Fleet) -> list[int]:
    """How many shards the worker said at each beat that it holds, from the job's cancellation on."""
    fleet.valkey.wait_until_written()
    written = iter(commands(fleet.valkey.data_dir))
    next(command for command in written if command[2:4] == ["state", "cancelling"])
    said = (command for command in written if command[0] == "SET" and command[1].startswith("pm:worker:"))
    return [WorkerView.model_validate_json(command[2]).busy for command in said]


@pytest.mark.parametrize("point", ["job.joined", "job.published"])
def test_29_a_job_whose_rows_are_all_done_is_not_cancelled_any_more(fleet: Fleet, point: str) -> None:
    """Before its manifest is written, and after: what is done is what its owner gets."""
    assembler = fleet.control(f"{point}:stop")
    fleet.worker()
    job = fleet.submit()
    assembler.wait_until_stopped()
    assert cancel(fleet, job) == "finalizing"
    assembler.send(signal.SIGCONT)
    assert fleet.finished(job).ok == 24
    assert cancel(fleet, job) == "completed"
    assert fleet.history.states(job.id) == ["validating", "in_progress", "finalizing", "completed"]


def test_29_the_end_that_is_in_the_manifest_stands(fleet: Fleet) -> None:
    """The job is cancelled, its manifest says so, and the assembler dies before the ledger knows."""
    fleet.control()
    job = fleet.submit()
    wait_until_opened(fleet, job)
    fleet.processes[0].kill()
    doomed = fleet.control("job.published:kill")
    assert cancel(fleet, job) == "ok"
    assert doomed.wait_for_death() == -signal.SIGKILL
    assert fleet.view(job).state == "cancelling"
    written = fleet.stores.read(job.spec.layout.manifest)
    fleet.ledger.client.delete(key(job.id, "lock:fin"))  # what else runs out in a minute
    fleet.control()
    fleet.wait_for_end(job, "cancelled")
    fleet.check(job, ending="cancelled")
    assert fleet.stores.read(job.spec.layout.manifest) == written


# --- 30: clocks -------------------------------------------------------------------------------------------------


def test_30_a_clock_that_jumps_an_hour_ahead_and_an_hour_back_changes_nothing(fleet: Fleet) -> None:
    """Leases, beats and sweeps go by the server's clock, and waits by one that does not jump. Nothing here is due at a
    time of day: schedules do not exist yet."""
    fleet.control()
    hurt_worker(fleet, step_s=0.3)
    job = fleet.submit(96)
    done = 0
    for jump in (HOUR_S, -HOUR_S):
        done = fleet.wait_for(job, lambda view: view.done > done, "rows done").done + 2 * SHARD_ROWS  # noqa: B023
        (fleet.folder / CLOCK).write_text(str(jump))
    manifest = fleet.finished(job)
    finished = [segment.record.finished_at - time.time() for segment in manifest.segments]
    assert (min(finished) < 60 - HOUR_S, max(finished) > HOUR_S - 60) == (True, True)
    assert set(fleet.tries(job).values()) == {1}
    assert fleet.leases_given(job) == len(manifest.segments)


# --- 31: sweepers in number -------------------------------------------------------------------------------------


def test_31_control_workers_that_come_and_go_plan_and_assemble_each_job_once(fleet: Fleet) -> None:
    """Every token comes three times; one worker dies when it has opened a job, one is told to stop. Ticks of schedules
    do not exist yet."""
    planner = fleet.control("plan.opened:kill")
    jobs = [fleet.submit(16)]
    assert planner.wait_for_death() == -signal.SIGKILL
    leaving = fleet.control()
    jobs += [fleet.submit(16), fleet.submit(16)]
    for job in jobs:
        for task in (PLAN, PLAN, ASSEMBLE, ASSEMBLE):
            assert fleet.tokens.send(task, job.id)
    wait_until_opened(fleet, *jobs)
    others = [fleet.control(), fleet.control()]
    leaving.send(signal.SIGTERM)
    fleet.worker()
    for job in jobs:
        fleet.wait_for(job, lambda view: view.done, "a row that is done")
        assert fleet.tokens.send(ASSEMBLE, job.id)
        fleet.finished(job)
        assert fleet.history.states(job.id) == ["validating", "in_progress", "finalizing", "completed"]
        assert set(fleet.tries(job).values()) == {1}
    assert leaving.wait_for_death() == 0
    assert all(other.alive for other in others)


# --- 32: rolling deploys ----------------------------------------------------------------------------------------


def test_32_tokens_of_an_unknown_task_are_dropped_and_the_sweeper_sends_others(fleet: Fleet) -> None:
    """What a newer version sends, to a model's workers and to control workers, in the place of what these know."""
    control = fleet.control()
    job = fleet.submit()
    wait_until_opened(fleet, job)
    control.send(signal.SIGSTOP)
    queue = model_queue(MODEL)
    fleet.ledger.client.delete(queue_key(queue))
    for name in (queue, CONTROL_QUEUE):
        assert fleet.tokens.send("pm.of_the_future", job.id, queue=name)
    worker = fleet.worker()
    wait_until(lambda: not fleet.ledger.client.llen(queue_key(queue)), END_S, "a token taken")
    control.send(signal.SIGCONT)
    fleet.finished(job)
    for process in (worker, control):
        assert "pm.of_the_future" in process.log.read_text()
        assert process.alive
    assert set(fleet.tries(job).values()) == {1}


def test_32_a_job_of_a_newer_version_is_left_to_newer_workers(fleet: Fleet) -> None:
    """They say so, try no shard of it, and go on with others. So does the sweeper, whose tokens are all there are."""
    fleet.control()
    newer, known = fleet.submit(), fleet.submit()
    client, queue = fleet.ledger.client, fleet.work_queue()
    wait_until(lambda: client.llen(queue) == 2 * 24 / SHARD_ROWS, END_S, "a token for each shard")
    make_readable = make_unreadable(fleet, newer)
    client.delete(queue)
    worker = hurt_worker(fleet)
    fleet.finished(known)
    faults = wait_until(lambda: fleet.ledger.faults(newer.id), END_S, "a word of the newer job")
    assert "of_the_future" in next(iter(faults.values()))
    assert set(fleet.tries(newer).values()) == {0}
    assert (worker.alive, fleet.ledger.state(newer.id)) == (True, "in_progress")
    make_readable()
    fleet.finished(newer)
    assert set(fleet.tries(newer).values()) == {1}


def test_32_a_job_of_a_newer_version_is_planned_by_newer_control_workers(fleet: Fleet) -> None:
    control = fleet.control()
    fleet.worker()
    fleet.finished(fleet.submit(4))
    control.send(signal.SIGSTOP)
    newer = fleet.submit()
    make_readable = make_unreadable(fleet, newer)
    control.send(signal.SIGCONT)
    fleet.finished(fleet.submit(4))
    wait_until(lambda: "left to others" in control.log.read_text(), END_S, "a word of the newer job")
    assert (control.alive, fleet.ledger.state(newer.id)) == (True, "validating")
    make_readable()
    fleet.finished(newer)


def make_unreadable(fleet: Fleet, job: Job) -> Callable[[], None]:
    """Let the ledger have the job as a newer version would write it. Returns what makes it an older one's again."""
    client, name = fleet.ledger.client, key(job.id, "job")
    ours = str(client.hget(name, "spec"))
    client.hset(name, "spec", json.dumps({**json.loads(ours), "of_the_future": True}))
    return lambda: client.hset(name, "spec", ours) and None


# --- 33: full disks ---------------------------------------------------------------------------------------------


def test_33_a_full_disk_costs_no_try_and_publishes_nothing(fleet: Fleet) -> None:
    """The kernel refuses what the worker writes down of a shard, more often than a shard may be tried."""
    fleet.control()
    (fleet.folder / DISK_FULL).touch()
    worker = hurt_worker(fleet)
    job = fleet.submit(16)
    leases = 4 * (job.spec.max_tries + 1)
    wait_until(lambda: fleet.leases_given(job) > leases, END_S, "a shard refused again and again")
    reason = fleet.view(job).reason or ""
    assert ("is tried again" in reason, "No space left on device" in reason) == (True, True)
    assert list(fleet.stores.stored(job.spec.layout.attempts)) == []
    (fleet.folder / DISK_FULL).unlink()
    manifest = fleet.finished(job)
    assert worker.alive
    assert set(fleet.tries(job).values()) == {1}
    assert len(list(fleet.stores.stored(job.spec.layout.attempts))) == 2 * len(manifest.segments)


def test_33_another_worker_takes_what_one_with_a_full_disk_gives_back(fleet: Fleet) -> None:
    fleet.control()
    (fleet.folder / DISK_FULL).touch()
    hurt_worker(fleet)
    job = fleet.submit()
    wait_until(lambda: fleet.ledger.faults(job.id), END_S, "a shard given back")
    fleet.worker()
    fleet.finished(job)
    assert set(fleet.tries(job).values()) == {1}
