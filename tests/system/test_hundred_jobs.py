"""A hundred jobs at once, through real processes: who asked for more haste is served first, and nobody is forgotten."""

from pathlib import Path

from jobs.spec import Terms
from tests.system.checker import check
from tests.system.fleet import Fleet
from tests.system.history import commands
from tests.system.mill import wait_until

JOBS = 100
PRIORITIES = (0, 9, -3, 5)
PATIENCE = {"PAGEMILL_PRIORITY_PATIENCE": "3600"}
"""No priority gets a turn out of line here, however slow the machine is."""


def shards_in_order_of_their_leases(data_dir: Path) -> list[str]:
    """The job of each shard that was handed out, in that order, as Valkey wrote it down."""
    return [
        command[1].removeprefix("pm:{").partition("}")[0]
        for command in commands(data_dir)
        if command[0].upper() == "HSET" and command[1].endswith("}:own") and command[2].startswith("s:")
    ]


def test_a_hundred_jobs_are_begun_by_priority_and_all_of_them_end(fleet: Fleet) -> None:
    jobs = [fleet.submit(rows=8, terms=Terms(priority=PRIORITIES[n % len(PRIORITIES)])) for n in range(JOBS)]
    fleet.control()
    wait_until(lambda: all(fleet.view(job).state == "in_progress" for job in jobs), 120, "a hundred planned jobs")
    for _ in range(2):
        fleet.worker(**PATIENCE)
    wait_until(lambda: all(fleet.view(job).state == "completed" for job in jobs), 120, "a hundred completed jobs")
    history = fleet.history
    for job in jobs:
        check(job.spec, job.prompts, fleet.stores, history)
    priority = {job.id: job.spec.priority for job in jobs}
    served = [priority[job_id] for job_id in shards_in_order_of_their_leases(fleet.valkey.data_dir)]
    assert len(served) == 2 * JOBS
    assert served == sorted(served, reverse=True)
