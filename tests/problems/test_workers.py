"""Workers that hang, are killed, forked or stopped the hard way, and what becomes of their shards."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.broker import make_app, queue_key
from jobs.control import Control
from jobs.recover import lost_jobs, recover
from jobs.spec import JobSpec, Terms
from tests.problems.conftest import faulty
from tests.problems.faulty_worker import IN_A_FORK, forbid_forks, hang, stop_consuming
from tests.system.fleet import END_S, Fleet
from tests.system.mill import wait_until


@pytest.mark.parametrize(("fault", "code"), [(stop_consuming, 0), (hang, 70)], ids=["deaf", "hung"])
def test_a_worker_that_lives_and_takes_nothing_ends_itself(fleet: Fleet, fault: Callable[[], None], code: int) -> None:
    """open-wearables#1543: with `-P threads` a worker whose consumer hung looked alive to everything that watched it:
    the process was there, its threads beat, and the queue grew.

    A minute of it is a second here. Who keeps workers (`pagemill up`, a container's restart policy) starts another;
    the test does so itself.
    """
    fleet.environment["PAGEMILL_STOP_GRACE"] = "1"
    fleet.control()
    hung = faulty(fleet, fault)
    wait_until(fleet.ledger.workers, END_S, "a worker that looks alive")
    job = fleet.submit(rows=4)
    assert hung.wait_for_death() == code
    assert "this worker takes none: it ends" in hung.log.read_text()
    assert fleet.tries(job) == {}
    fleet.worker()
    fleet.finished(job)


def test_an_engine_is_no_fork_of_its_worker(fleet: Fleet) -> None:
    """pytorch#68861, ApeRAG#331: a Celery worker forks, and CUDA cannot be used in a child of a process that had it
    initialised. A child that is forked from this worker ends at once, as its first use of CUDA would end it."""
    fleet.control()
    worker = faulty(fleet, forbid_forks)
    job = fleet.submit(rows=8)
    fleet.finished(job)
    children = [int(pid) for pid in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()]
    (view,) = fleet.ledger.workers()
    assert (view.pid, [view.engine_pid]) == (worker.pid, children)
    os.kill(view.engine_pid, signal.SIGKILL)
    fleet.finished(fleet.submit(rows=8))
    wait_until(lambda: fleet.ledger.workers()[0].engine_restarts == 1, END_S, "the word of another engine")


def test_a_forked_child_of_that_worker_would_be_of_no_use() -> None:
    """What the test above rests on."""
    code = (
        "from tests.problems.faulty_worker import forbid_forks; import os; forbid_forks()\n"
        "if (pid := os.fork()) == 0: os._exit(0)\n"
        "os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=END_S).returncode == IN_A_FORK


def tasks_at_work(fleet: Fleet) -> list[str]:
    """The ids of Celery's tasks that were delivered and are not acknowledged."""
    messages = fleet.ledger.client.hvals(queue_key("unacked"))
    return [json.loads(message)[0]["headers"]["id"] for message in messages]


def test_a_revoked_task_and_a_cancelled_job_leave_the_worker_to_the_others(fleet: Fleet) -> None:
    """celery#10490: with `-P threads` a revoke that terminates raises NotImplementedError in the worker, and the task
    goes on. Here the ledger cancels, and the worker goes on with another job."""
    fleet.control()
    worker = fleet.worker(step_s=1.0)
    unwanted, wanted = fleet.submit(rows=400), fleet.submit(rows=8, terms=Terms(tenant="other"))
    fleet.wait_for(unwanted, lambda view: view.settled, "a shard that is done")
    make_app(fleet.settings).control.revoke(tasks_at_work(fleet), terminate=True, signal="SIGKILL")
    wait_until(lambda: "NotImplementedError" in worker.log.read_text(), END_S, "the revoke at the worker")
    assert fleet.ledger.cancel(unwanted.id) == "ok"
    fleet.wait_for_end(unwanted, "cancelled", timeout_s=15)
    manifest = fleet.check(unwanted, "cancelled")
    assert 0 < manifest.ok < 400
    fleet.finished(wanted)
    assert worker.alive


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGQUIT,)], ids=["twice", "cold"])
def test_a_worker_that_is_stopped_the_hard_way_gives_back_what_it_holds(
    fleet: Fleet, signals: tuple[signal.Signals, ...]
) -> None:
    """celery#10490: a cold shutdown of a worker with threads ended in a traceback, with tasks that ran on."""
    fleet.control()
    stopped = fleet.worker(step_s=0.5)
    job = fleet.submit(rows=40)
    fleet.wait_for(job, lambda view: view.settled, "a shard that is done")
    for number in signals:
        stopped.send(number)
    stopped.wait_for_death(15)
    assert not fleet.view(job).terminal
    assert fleet.owners(job) == {}
    fleet.worker()
    fleet.finished(job)
    assert set(fleet.tries(job).values()) == {1}


def test_a_job_goes_on_elsewhere_after_its_machine_is_lost(fleet: Fleet) -> None:
    """llm-d-batch-gateway#645, datatrove#316: the node with the processor and its queue went away, and what it had
    done went with it. The storage is all that is left here."""
    lost = [fleet.control(), fleet.worker(step_s=0.5)]
    job = fleet.submit(rows=40)
    fleet.wait_for(job, lambda view: view.settled >= 2, "shards that are done")
    for process in lost:
        process.kill()
    kept = fleet.ledger.records(job.id)
    fleet.valkey.kill()
    shutil.rmtree(fleet.valkey.data_dir)
    fleet.valkey.start()
    assert fleet.ledger.job_ids(None) == []
    (found,) = lost_jobs(fleet.settings.storage_url, fleet.ledger, fleet.stores)
    assert isinstance(found, JobSpec)
    control = Control(fleet.ledger, fleet.stores, fleet.tokens, fleet.settings)
    view = recover(found, fleet.ledger, fleet.stores, fleet.tokens, control)
    assert (view.id, view.state, view.settled >= len(kept) >= 2) == (job.id, "in_progress", True)
    fleet.control()
    fleet.worker()
    manifest = fleet.finished(job)
    records = {segment.shard: segment.record for segment in manifest.segments}
    assert {shard: records[shard] for shard in kept} == kept
    assert not fleet.tries(job).keys() & kept.keys()
