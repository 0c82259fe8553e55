"""Driving jobs on: plan what was submitted, assemble what is settled, sweep up what was lost on the way.

Each function looks at the ledger's state and does what that state calls for. It may be called twice, by two processes
at once, or again after a crash in the middle.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from redis.exceptions import LockError
from redis.lock import Lock

from jobs.assemble import assemble
from jobs.attempts import left_in_storage
from jobs.broker import CONTROL_QUEUE, PLAN, Tokens, model_queue, queue_key
from jobs.errors import (
    ObjectNotFound,
    PagemillError,
    PreconditionFailed,
    RowError,
    ServiceUnreachable,
    StorageError,
    UnreadableJob,
)
from jobs.failing import Failure, fail, stored_failure
from jobs.failpoints import failpoint
from jobs.layout import JobLayout
from jobs.ledger import Ledger
from jobs.planner import Plan, Planned, dump_plan, load_plan, plan
from jobs.records import Manifest
from jobs.settings import Settings
from jobs.spec import JobSpec
from jobs.storage import Stores

log = logging.getLogger(__name__)

_LOCK_TTL_S = 60
_MISSED_SWEEPS = 6
"""After so many, people are told that nobody sweeps."""
_TURN = 0.9
"""Of the interval between two sweeps: so long after one, other control workers leave it at that."""
FIRST_TOKENS = 64
"""Tokens sent when a job opens; the sweeper sends more where more slots are free."""


class Control:
    """What a control worker does. Holds the services it needs and no state."""

    def __init__(self, ledger: Ledger, stores: Stores, tokens: Tokens, settings: Settings) -> None:
        self._ledger = ledger
        self._stores = stores
        self._tokens = tokens
        self._settings = settings

    def plan(self, job_id: str) -> None:
        """Cut a submitted job into shards and open it, or fail it with the list of its bad rows.

        In order: plan.jsonl is written, the shards are entered, the job is opened, tokens are sent. A crash between any
        two leaves the job `validating`, and the next call does all of it again to the same effect.

        Storage is believed before the ledger, which may be a new one: a job that has a manifest has ended, and one that
        failed has failed; a plan that is there stands, and whole segments of its shards are taken over.
        """
        with self._left_to_others(job_id), self._only_one(job_id, "plan") as keep_lock:
            if keep_lock is None or self._ledger.state(job_id) != "validating":
                return
            spec = self._ledger.spec(job_id)
            try:
                stored = self._stored(spec.layout.plan)
                if (manifest := self._stored(spec.layout.manifest)) is not None:
                    # A job that was cancelled before it was planned has a manifest and no plan.
                    stored_plan = Plan(0, 0, (), (), in_runs=False) if stored is None else load_plan(stored)
                    self._ledger.restore(Manifest.model_validate_json(manifest), stored_plan)
                    return
                if (failure := stored_failure(spec.layout, self._stores)) is not None:
                    self._fail(spec, failure)
                    return
                planned = self._written_plan(spec, keep_lock) if stored is None else load_plan(stored)
            except (ServiceUnreachable, UnreadableJob):
                raise  # not the job's fault: the sweeper sends it here again
            except PagemillError as error:
                self._fail(spec, Failure(errors=(RowError(code=error.code, message=str(error)),)))
                return
            failpoint("plan.stored")
            if planned is not None and self._ledger.add_shards(job_id, planned.shards) == "ok":
                if stored is not None:
                    left = left_in_storage(self._stores, spec.layout, planned, keep_lock)
                    self._ledger.adopt(job_id, left.segments, left.fence)
                failpoint("plan.added")
                self._ledger.open(
                    spec,
                    shards=len(planned.shards),
                    rows=planned.rows,
                    errors=planned.first_errors,
                    error_count=planned.bad,
                    in_runs=planned.in_runs,
                )
                failpoint("plan.opened")
                self._tokens.work(spec.model, min(len(planned.shards), FIRST_TOKENS))

    def assemble(self, job_id: str) -> None:
        """Join the segments of a job whose shards are settled, or of one that is stopped."""
        with self._left_to_others(job_id), self._only_one(job_id, "fin") as keep_lock:
            if keep_lock is None:
                return
            spec = self._ledger.spec(job_id)
            try:
                assemble(spec, self._ledger, self._stores, keep_lock)
            except (ServiceUnreachable, UnreadableJob):
                raise
            except StorageError as error:
                # Every answer is in storage, and the sweeper sends the job here again: nothing is lost by waiting for
                # someone to mend what is refused.
                log.error("job %s cannot be assembled yet: %s", job_id, error)
                self._ledger.stall(job_id, f"the result cannot be written, and is tried again: {error}")
            except PagemillError as error:
                log.error("job %s cannot be assembled: %s", job_id, error.message)
                state = self._ledger.state(job_id) or ""
                fault = RowError(code=error.code, message=f"{error.message} {error.hint}".rstrip())
                fail(spec, Failure(errors=(fault,)), self._ledger, self._stores, from_state=state)

    def sweep_in_turn(self) -> None:
        """Sweep, unless another control worker has just done so."""
        if self._ledger.claim_sweep(_TURN * self._settings.sweep_every):
            self.sweep()

    def sweep(self) -> None:
        """Take back expired leases, send the tokens that are missing, and drive on jobs that were left standing.

        A job whose deadline has passed is ended.
        """
        self._ledger.announce_sweep(_MISSED_SWEEPS * self._settings.sweep_every)
        # While control workers have tokens to take, what is missing may be among them.
        idle = not self._ledger.client.llen(queue_key(CONTROL_QUEUE))
        ready: Counter[str] = Counter()
        leased: Counter[str] = Counter()
        for job_id in self._ledger.overdue():
            if self._ledger.expire_job(job_id) == "ok":
                log.warning("job %s has expired: it ends with what is done", job_id)
                self._tokens.assemble(job_id)
        for job_id in self._ledger.live_jobs():
            match self._ledger.state(job_id):
                case "validating" if idle and not self._ledger.lock(job_id, "plan", _LOCK_TTL_S).locked():
                    self._tokens.send(PLAN, job_id)
                case "finalizing" | "cancelling" if idle and not self._ledger.lock(job_id, "fin", _LOCK_TTL_S).locked():
                    self._tokens.assemble(job_id)
                case "in_progress":
                    expired, waiting, running = self._ledger.expire(job_id)
                    if expired:
                        log.warning("job %s: %d lease(s) expired, their shards are ready again", job_id, expired)
                    model = self._ledger.model(job_id)
                    ready[model] += waiting
                    leased[model] += running
        self._top_up(ready, leased)

    def _top_up(self, ready: Counter[str], leased: Counter[str]) -> None:
        slots: Counter[str] = Counter()
        for worker in self._ledger.workers():
            slots[worker.model] += worker.slots
        for model, count in ready.items():
            # One token waits even where no worker is: the first to come finds it.
            wanted = min(count, max(slots[model] - leased[model], 1))
            queued = int(self._ledger.client.llen(queue_key(model_queue(model))))
            self._tokens.work(model, wanted - queued)

    def _stored(self, url: str) -> bytes | None:
        try:
            return self._stores.read(url)
        except ObjectNotFound:
            return None

    def _written_plan(self, spec: JobSpec, keep_lock: "KeepLock") -> Plan | None:
        """The plan that is in storage, written now if there is none; None where bad rows fail the job.

        A plan once written stays: another planner's limits may cut elsewhere, and shards of both would have rows twice.
        A retry has its parent's plan.
        """
        if spec.parent is not None and (of_parent := self._stored(spec.parent.layout.plan)) is not None:
            return self._taken_over(spec, spec.parent.layout, of_parent)
        planned = plan(spec, self._stores, self._settings, lambda rows, size: keep_lock())
        if planned.bad and spec.on_bad_row == "fail":
            self._refuse_rows(spec, planned)
            return None
        if planned.schema is not None:
            # One that is there is another planner's, and of the same input.
            with suppress(PreconditionFailed):
                self._stores.put_if_absent(spec.layout.schema, planned.schema.serialize().to_pybytes())
        try:
            self._stores.put_if_absent(spec.layout.plan, dump_plan(planned))
        except PreconditionFailed:
            return load_plan(self._stores.read(spec.layout.plan))
        return planned

    def _taken_over(self, spec: JobSpec, parent: JobLayout, of_parent: bytes) -> Plan:
        """The parent's plan, put after what it refers to."""
        for theirs, ours in ((parent.source, spec.layout.source), (parent.schema, spec.layout.schema)):
            if (found := self._stored(theirs)) is not None:
                self._stores.put(ours, found)
        self._stores.put(spec.layout.plan, of_parent)
        return load_plan(of_parent)

    def _refuse_rows(self, spec: JobSpec, planned: Planned) -> None:
        with self._stores.writer(spec.error_url) as writer:
            for error in planned.errors:
                writer.write(error.model_dump_json(exclude_none=True).encode() + b"\n")
        self._fail(spec, Failure(errors=planned.first_errors, count=planned.bad, url=spec.error_url))

    def _fail(self, spec: JobSpec, failure: Failure) -> None:
        fail(spec, failure, self._ledger, self._stores, from_state="validating")

    @contextmanager
    def _left_to_others(self, job_id: str) -> Iterator[None]:
        """A job that this version cannot read stays as it is, for a newer control worker."""
        try:
            yield
        except UnreadableJob as error:
            log.error("job %s is left to others: %s", job_id, error)
            self._ledger.stall(job_id, f"a control worker has left it to others: {error}")

    @contextmanager
    def _only_one(self, job_id: str, what: str) -> Iterator["KeepLock | None"]:
        """Yields None if another process is at it, else a function that keeps it away a while longer."""
        lock = self._ledger.lock(job_id, what, _LOCK_TTL_S)
        if not lock.acquire():
            yield None
            return
        try:
            yield KeepLock(lock)
        finally:
            try:
                lock.release()
            except LockError:
                log.info("job %s: another process may have done the same (%s) meanwhile", job_id, what)


class KeepLock:
    """Renews a lock when called, at most every quarter of its life."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._renewed = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._renewed < _LOCK_TTL_S / 4:
            return
        self._renewed = time.monotonic()
        try:
            self._lock.reacquire()
        except LockError:
            log.info("%s: the lock ran out; going on, since the work may be repeated", self._lock.name)
