"""Workers that hang, are killed, forked or stopped the hard way, and what becomes of their shards."""

from collections.abc import Callable

import pytest

from tests.problems.conftest import faulty
from tests.problems.faulty_worker import hang, stop_consuming
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
