"""One attempt at one shard: its rows go through the engine, and its segment is put and committed."""

import errno
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple, TypeVar, cast

from redis.exceptions import RedisError

from engine.errors import EngineDied, RequestError
from engine.outputs import EngineOutput
from jobs.errors import InputChanged, PagemillError, RowError, ServiceUnreachable, StorageError
from jobs.failing import Failure, fail
from jobs.failpoints import failpoint
from jobs.ledger import Lease
from jobs.planner import PlannedRow, shard_rows
from jobs.records import SegmentRecord
from jobs.results import Outcome
from jobs.rows import Row
from jobs.spool import Kept, Spool
from workers.context import SlotContext
from workers.heartbeat import Held
from workers.host import Call
from workers.load import LoadMeter
from workers.render import EngineRequest, outcome_of, requests_for, row_error
from workers.twins import Twins, as_of

log = logging.getLogger(__name__)

_RETRY_S, _MAX_RETRY_S = 0.5, 15.0
_REFUSAL_PATIENCE_S = 600.0
_FAULT_REST_S = 15.0
_OF_THE_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
# Rows are read and asked for some at a time: enough that a thread is woken for many, few enough that the engine's first
# does not wait long.
_ROWS_AT_ONCE = 64

T = TypeVar("T")

Signal = Literal["ended"]
"""The lease is no longer ours, or the worker stops: whatever is being waited for, stop waiting."""


class ShardAbandoned(Exception):
    """This attempt ends without a commit: `why` is what the heartbeat, the commit or the worker said."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class TwinSettled(NamedTuple):
    """A row that waited for its twin need not wait any more. Without an outcome, it is to be asked after all."""

    planned: PlannedRow
    outcome: Outcome | None


@dataclass(slots=True)
class AskedRow:
    """A row in the engine: a call for each of its prompts, of which `open` are not answered yet."""

    planned: PlannedRow
    row: Row
    calls: list[Call] = field(default_factory=list)
    open: int = 0

    def began_at(self) -> float | None:
        """When the engine began with the first of its prompts, by the monotonic clock."""
        return min((call.began_at for call in self.calls if call.began_at is not None), default=None)


class Attempt:
    """One attempt at one shard.

    In order: rows are answered and spooled, the segment is put, the record is committed. A stop before the commit
    leaves at most an object that nobody refers to, and the shard runs again.
    """

    def __init__(self, lease: Lease, context: SlotContext, on_all_asked: Callable[[], None]) -> None:
        """`on_all_asked` is called when the engine has been asked for the last row."""
        self._lease = lease
        self._context = context
        self._on_all_asked = on_all_asked
        self._events: SimpleQueue[list[Call] | TwinSettled | Signal] = SimpleQueue()
        self._ended: str | None = None
        self._asked: dict[int, AskedRow] = {}
        self._row_of: dict[Call, AskedRow] = {}
        self._settled: dict[int, tuple[PlannedRow, Outcome | Kept]] = {}
        self._kept: dict[int, Kept] = {}
        self._next_row = lease.shard.first_row
        self._rows_read = 0
        self._load = LoadMeter(context.host)
        self._twins = Twins(lease.spec.dedupe, context.shared.of(lease.spec))
        self._waiting: set[int] = set()
        self._look_at = math.inf if lease.spec.max_row_seconds is None else 0.0
        self._rows = self._rows_from(0)
        self._machine_failed = False

    def run(self) -> bool:
        """Whether the next attempt may follow at once: not where this machine has a fault, which it would meet too."""
        context, lease = self._context, self._lease
        context.stopping.listen(self._stop)
        try:
            self._answer_and_commit()
        except ShardAbandoned as abandoned:
            log.info("job %s shard %d: abandoned (%s)", lease.job_id, lease.shard.index, abandoned.why)
            if abandoned.why == "stopping":
                self._give_back()
        finally:
            context.heartbeat.drop(lease)
            context.stopping.forget(self._stop)
            context.host.abort([call for asked in self._asked.values() for call in asked.calls])
            self._twins.give_up()
        return not self._machine_failed

    def _answer_and_commit(self) -> None:
        first_row = self._lease.shard.first_row
        try:
            self._context.heartbeat.hold(Held(self._lease, lambda: self._next_row - first_row, self._end))
            with self._persistently(lambda: Spool(self._lease.spec, self._context.stores)) as spool:
                self._kept = self._persistently(lambda: self._context.kept.of(self._lease.spec, self._lease.shard))
                self._answer_rows(spool)
                self._commit(self._put(spool))
        except (PagemillError, OSError) as error:
            log.error("job %s shard %d: %s", self._lease.job_id, self._lease.shard.index, error)
            self._persistently(partial(self._give_up, error))

    # --- rows ---------------------------------------------------------------------------------------------------

    def _answer_rows(self, spool: Spool) -> None:
        exhausted = False
        while not exhausted or self._asked or self._waiting:
            # First, to make room: what is settled counts until it is written.
            self._spool_settled(spool)
            while not exhausted and (room := self._context.window - len(self._asked) - len(self._settled)) > 0:
                self._raise_if_ended()
                rows = self._persistently(partial(self._read_rows, min(room, _ROWS_AT_ONCE)))
                self._ask(rows)
                if exhausted := not rows:
                    self._on_all_asked()
            if self._asked or self._waiting:
                self._await_answers()
        self._spool_settled(spool)
        if spool.rows != self._lease.shard.rows:
            raise PagemillError(
                f"Only {spool.rows} of {self._lease.shard.rows} rows were answered.", code="short_segment"
            )

    def _read_rows(self, count: int) -> list[PlannedRow]:
        """The next rows of the shard, none at its end. After a store did not answer, the input is opened again at the
        same row.
        """
        try:
            rows = list(islice(self._rows, count))
        except ServiceUnreachable:
            self._rows = self._rows_from(self._rows_read)
            raise
        self._rows_read += len(rows)
        return rows

    def _rows_from(self, first: int) -> Iterator[PlannedRow]:
        return islice(shard_rows(self._lease.spec, self._context.stores, self._lease.shard), first, None)

    def _ask(self, rows: Iterable[PlannedRow]) -> None:
        wanted: list[tuple[AskedRow, EngineRequest]] = []
        for planned in rows:
            if (outcome := self._known(planned)) is not None:
                self._settled[planned.index] = (planned, outcome)
                continue
            row = cast(Row, planned.row)
            match self._twins.claim(row, partial(self._twin_settled, planned)):
                case "asks":
                    wanted += self._requests_for(planned, row)
                case "waits":
                    self._waiting.add(planned.index)
                case outcome:
                    self._settled[planned.index] = (planned, outcome)
        calls = self._context.host.submit((request for _, request in wanted), self._events.put)
        for (asked, _), call in zip(wanted, calls, strict=True):
            asked.calls.append(call)
            asked.open += 1
            self._row_of[call] = asked
        for _ in calls:
            failpoint("row.asked")

    def _known(self, planned: PlannedRow) -> Outcome | Kept | None:
        """The outcome of a row that was not good, or that a parent of the job has answered."""
        return planned.row if isinstance(planned.row, RowError) else self._kept.get(planned.index)

    def _requests_for(self, planned: PlannedRow, row: Row) -> Iterator[tuple[AskedRow, EngineRequest]]:
        try:
            requests = requests_for(self._lease.spec.origin, planned.index, row, self._lease.spec.priority)
        except RequestError as error:
            self._settle(planned, row, row_error(row, error.code, str(error), error.field))
            return
        asked = self._asked[planned.index] = AskedRow(planned, row)
        for request in requests:
            yield asked, request

    def _await_answers(self) -> None:
        """Wait until there are some, and take all that are there."""
        if (wait_s := self._look_at - time.monotonic()) <= 0:
            self._end_slow_rows()
            return
        with suppress(Empty):
            event = self._events.get(timeout=None if wait_s == math.inf else wait_s)
            while True:
                self._take(event)
                event = self._events.get_nowait()

    def _take(self, event: "list[Call] | TwinSettled | Signal") -> None:
        if event == "ended":
            self._raise_if_ended()
            return
        if isinstance(event, TwinSettled):
            self._take_twin(event)
            return
        for call in event:
            asked = self._row_of.pop(call, None)
            if asked is None:
                continue  # it took too long, and this is what the engine says to that
            asked.open -= 1
            if not asked.open:
                del self._asked[asked.planned.index]
                self._settle(asked.planned, asked.row, self._outcome(asked))

    def _settle(self, planned: PlannedRow, row: Row, outcome: Outcome) -> None:
        self._settled[planned.index] = (planned, outcome)
        self._twins.settle(row, outcome)

    def _twin_settled(self, planned: PlannedRow, outcome: Outcome | None) -> None:
        """The shard that asked for this row's twin calls this, from its own thread."""
        self._events.put(TwinSettled(planned, outcome))

    def _take_twin(self, event: "TwinSettled") -> None:
        planned, outcome = event
        self._waiting.discard(planned.index)
        if outcome is None:
            self._ask([planned])
        else:
            self._settled[planned.index] = (planned, as_of(planned.row, outcome))

    def _end_slow_rows(self) -> None:
        """Take rows from the engine that it has had for too long. What it has not begun with has all its time left."""
        limit, now = self._lease.spec.max_row_seconds, time.monotonic()
        if limit is None:
            return
        self._look_at = now + limit
        for index, asked in list(self._asked.items()):
            began_at = asked.began_at()
            if began_at is None or all(call.answer is not None for call in asked.calls):
                continue
            if began_at + limit > now:
                self._look_at = min(self._look_at, began_at + limit)
                continue
            self._context.host.abort(asked.calls)
            for call in asked.calls:
                self._row_of.pop(call, None)
            del self._asked[index]
            message = f"This row took longer than {limit:g} s."
            self._settle(asked.planned, asked.row, row_error(asked.row, "row_timeout", message))

    def _outcome(self, asked: AskedRow) -> Outcome:
        outputs: list[EngineOutput] = []
        for call in asked.calls:
            match call.answer:
                case None | EngineDied():
                    raise ShardAbandoned("stopping")
                case RequestError() as error:
                    return row_error(asked.row, error.code, str(error), error.field)
                case output:
                    outputs.append(output)
        return outcome_of(asked.row, outputs)

    def _spool_settled(self, spool: Spool) -> None:
        """Write what is settled as far as there is no gap: the segment is in row order."""
        while (found := self._settled.pop(self._next_row, None)) is not None:
            planned, outcome = found
            if isinstance(outcome, Kept):
                spool.keep(planned, outcome)
            else:
                spool.add(planned, outcome)
            self._next_row += 1

    # --- the end ------------------------------------------------------------------------------------------------

    def _put(self, spool: Spool) -> SegmentRecord:
        """Put the segment. A store that refuses it is asked again for a while: someone may give back the permission or
        the quota that is missing, and the answers are dearer than the wait."""
        context, lease = self._context, self._lease
        deadline = time.monotonic() + _REFUSAL_PATIENCE_S
        load = self._load.read()
        while True:
            try:
                return self._persistently(lambda: spool.put(lease, context.engine_name, context.worker_id, load))
            except StorageError as error:
                if time.monotonic() >= deadline:
                    raise
                log.error("job %s shard %d: %s; trying again", lease.job_id, lease.shard.index, error)
                self._persistently(partial(context.ledger.complain, lease, str(error)))
                self._raise_if_ended()
                context.stopping.wait(_MAX_RETRY_S)

    def _commit(self, record: SegmentRecord) -> None:
        failpoint("segment.recorded")
        verdict = self._persistently(lambda: self._context.ledger.commit(self._lease, record))
        failpoint("shard.committed")
        if verdict != "ok":
            raise ShardAbandoned(verdict)
        # Only for speed: were this lost, the sweeper would find the job `finalizing`.
        with suppress(RedisError):
            if self._context.ledger.state(self._lease.job_id) == "finalizing":
                self._context.tokens.assemble(self._lease.job_id)

    def _give_back(self) -> None:
        try:
            self._context.ledger.give_back(self._lease)
        except RedisError as error:
            log.warning("job %s shard %d: not given back: %s", self._lease.job_id, self._lease.shard.index, error)

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, InputChanged):
            failure = Failure(errors=(RowError(code=error.code, message=str(error)),))
            fail(self._lease.spec, failure, self._context.ledger, self._context.stores, from_state="in_progress")
        elif isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
            self._machine_failed = True
            self._context.ledger.give_back(self._lease, f"worker {self._context.worker_id}: {error}")
        else:
            self._context.ledger.release(self._lease, str(error), _FAULT_REST_S)

    def _persistently(self, act: Callable[[], T]) -> T:
        """Do it again until the service answers: work that is done is not thrown away because a server restarts."""
        delay = _RETRY_S
        while True:
            try:
                return act()
            except (RedisError, ServiceUnreachable) as error:
                log.warning("job %s shard %d: %s; trying again", self._lease.job_id, self._lease.shard.index, error)
                self._raise_if_ended()
                self._context.stopping.wait(delay)
                delay = min(delay * 2, _MAX_RETRY_S)

    def _end(self, why: str) -> None:
        """Heartbeat and stop call this, from their threads."""
        self._ended = self._ended or why
        self._events.put("ended")

    def _stop(self) -> None:
        self._end("stopping")

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise ShardAbandoned(self._ended)
