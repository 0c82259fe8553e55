"""The fault matrix, first part: workers that die, freeze or lose what they hold.

Every test: inject one fault, see that it came, and the checker finds every row once, in order, with its own answer.
"""

import signal

from tests.system.fleet import Fleet


def test_01_a_worker_killed_after_it_leased_a_shard(fleet: Fleet) -> None:
    fleet.control()
    doomed = fleet.worker("lease.taken:kill")
    job = fleet.submit()
    assert doomed.wait_for_death() == -signal.SIGKILL
    fleet.worker()
    fleet.finished(job)
    assert sorted(fleet.tries(job).values())[-1] == 2
