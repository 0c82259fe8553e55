"""Rebuilding a ledger that was lost: jobs that storage knows and the ledger does not are entered again.

Each job is entered as `validating` and planned, as after a submit; see `Control.plan` for what that finds in storage. A
recovery that stops in the middle is mended by the sweeper, or by another recovery, which may run beside it and beside
workers. Workers that still hold leases of the lost ledger commit nothing: no attempt of theirs owns a shard any more.

What its owner ordered since the submit is in storage too: a paused job comes back paused, one that was being cancelled
is cancelled, and priority, weight and deadline are the last ones. A job that had failed has failed. Lost is what only
the ledger knew: how often a shard was tried.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from jobs.broker import PLAN, Tokens
from jobs.control import Control
from jobs.errors import ObjectNotFound, UnreadableJob
from jobs.layout import JobLayout, jobs_prefix
from jobs.ledger import Ledger
from jobs.records import JobView
from jobs.spec import JOB_ID_PATTERN, JobSpec, load_spec
from jobs.storage import Stores
from jobs.submit import enter_again

_BATCH = 500
_JOB_ID = re.compile(JOB_ID_PATTERN)


@dataclass(frozen=True, slots=True)
class Unusable:
    """A job that storage has and that cannot be entered, and why."""

    job_id: str
    why: str


def lost_jobs(storage_url: str, ledger: Ledger, stores: Stores) -> Iterator[JobSpec | Unusable]:
    """The jobs below a storage URL that the ledger does not know, by id, which is by age.

    A folder without a spec is of a submit that never came to its end, and is no job.
    """
    names = stores.folders(jobs_prefix(storage_url))
    while some := list(islice(names, _BATCH)):
        for job_id in ledger.unknown(some):
            if (found := _stored_job(storage_url, job_id, stores)) is not None:
                yield found


def _stored_job(storage_url: str, job_id: str, stores: Stores) -> JobSpec | Unusable | None:
    url = JobLayout(storage_url, job_id).spec
    try:
        spec = load_spec(stores.read(url), url)
    except ObjectNotFound:
        return None
    except UnreadableJob as error:
        return Unusable(job_id, error.message)
    if (spec.id, spec.storage_url) != (job_id, storage_url):
        return Unusable(job_id, f"{url} is the spec of job {spec.id} in {spec.storage_url}")
    return spec


def is_lost(job_id: str, storage_url: str, stores: Stores) -> bool:
    """Whether storage has a job of which the caller knows that the ledger has not."""
    return _JOB_ID.fullmatch(job_id) is not None and _is_there(stores, JobLayout(storage_url, job_id).spec)


def recover(spec: JobSpec, ledger: Ledger, stores: Stores, tokens: Tokens, control: Control) -> JobView:
    """Enter one lost job. What had been planned is open again, or has ended, when this returns.

    A job without a plan is left to the control workers, which read its input as after a submit. Raises OutputTaken
    where a job that was submitted since writes the same file.
    """
    orders = enter_again(spec, ledger, stores)
    if any(_is_there(stores, url) for url in (spec.layout.plan, spec.layout.manifest, spec.layout.failure)):
        control.plan(spec.id)
    elif not orders.cancelled:
        tokens.send(PLAN, spec.id)
    if orders.cancelled:
        # Not before the plan: what is committed is kept. A job that has ended is left as it is.
        ledger.cancel(spec.id)
    view = ledger.view(spec.id)
    if view.state in ("finalizing", "cancelling"):
        tokens.assemble(spec.id)
    return view


def _is_there(stores: Stores, url: str) -> bool:
    try:
        stores.head(url)
    except ObjectNotFound:
        return False
    return True
