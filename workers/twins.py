"""Rows of a job that ask for the same thing: one is asked, and its outcome is that of the others too.

    row ── digest of the request ──► asked in this shard, not answered yet: wait for that
                                 ──► answered in this job, by this worker: take that
                                 ──► else: ask

The outcomes of a job lie in a file of the worker's own, so that what is held in memory does not grow with the job. What
this comes to: of a job's identical requests a worker asks one, or one for each shard that it has in work when the first
comes up; each worker for itself, from its start on, and as long as the outcomes take no more than `MAX_BYTES`.
"""

import hashlib
import logging
import pickle
import sqlite3
import threading
from collections import OrderedDict

from jobs.errors import RowError
from jobs.planner import PlannedRow
from jobs.pooling import Pooling
from jobs.results import Outcome
from jobs.rows import Row
from jobs.sampling import Sampling
from jobs.spec import Dedupe, JobSpec

log = logging.getLogger(__name__)

MAX_BYTES = 4 * 1024**3
_CACHE_KIB = 8 * 1024
_JOBS_AT_ONCE = 4


class Outcomes:
    """The outcomes of one job's distinct requests, by digest. Thread-safe; gone with the process, however it ends.

    Whatever is wrong with the file, a full disk above all, costs the outcomes and not the job: rows are asked again.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._lock = threading.Lock()
        self._size = 0
        # Without a name, SQLite's file is a temporary one without a place in any folder.
        self._file: sqlite3.Connection | None = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            self._file.execute(f"PRAGMA {setting}")
        # Nobody else reads it, and what is written need not outlive anything: it is never committed.
        self._file.execute("BEGIN")
        self._file.execute("CREATE TABLE outcomes (request BLOB PRIMARY KEY, outcome BLOB) WITHOUT ROWID")

    def get(self, request: bytes) -> Outcome | None:
        found = self._execute("SELECT outcome FROM outcomes WHERE request = ?", request)
        return None if found is None else pickle.loads(found[0])

    def put(self, request: bytes, outcome: Outcome) -> None:
        """Keep the first outcome of a request."""
        data = pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)
        if self._size + len(data) > MAX_BYTES:
            return
        self._size += len(data)
        self._execute("INSERT OR IGNORE INTO outcomes VALUES (?, ?)", request, data)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _execute(self, statement: str, *values: bytes) -> tuple[bytes, ...] | None:
        with self._lock:
            if self._file is None:
                return None
            try:
                found: tuple[bytes, ...] | None = self._file.execute(statement, values).fetchone()
                return found
            except sqlite3.Error as error:
                log.warning("job %s: identical rows of different shards are asked again: %s", self._job_id, error)
                self._file.close()
                self._file = None
                return None


class JobOutcomes:
    """The outcomes of the jobs that a worker works on; those of a job that it has left long ago are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Outcomes] = OrderedDict()

    def of(self, spec: JobSpec) -> Outcomes | None:
        """None where no row shares an outcome."""
        if spec.dedupe == "off":
            return None
        with self._lock:
            outcomes = self._jobs.pop(spec.id, None) or Outcomes(spec.id)
            self._jobs[spec.id] = outcomes
            if len(self._jobs) > _JOBS_AT_ONCE:
                # An attempt of that job which is still at work asks its rows from here on.
                self._jobs.popitem(last=False)[1].close()
            return outcomes


class Twins:
    """What is asked in one shard, and what was answered in the job before. An error is an outcome too: a request that
    kills the engine has done so once."""

    def __init__(self, dedupe: Dedupe, outcomes: Outcomes | None) -> None:
        self._dedupe = dedupe
        self._outcomes = outcomes
        self._waiting: dict[bytes, list[PlannedRow]] = {}

    def answer(self, row: Row) -> Outcome | None:
        """The outcome of an earlier row that asked for the same."""
        if self._outcomes is None or not self._may_share(row):
            return None
        found = self._outcomes.get(_request(row))
        return None if found is None else _as_of(row, found)

    def wait(self, planned: PlannedRow, row: Row) -> bool:
        """Whether a row that asked for the same is being answered, and this one will be with it. Else this one is."""
        if self._outcomes is None or not self._may_share(row):
            return False
        request = _request(row)
        if request in self._waiting:
            self._waiting[request].append(planned)
            return True
        self._waiting[request] = []
        return False

    def settle(self, row: Row, outcome: Outcome) -> list[tuple[PlannedRow, Outcome]]:
        """The rows that waited for this one's outcome, with theirs."""
        if self._outcomes is None or not self._may_share(row):
            return []
        request = _request(row)
        self._outcomes.put(request, outcome)
        return [(planned, _as_of(planned.row, outcome)) for planned in self._waiting.pop(request)]

    def _may_share(self, row: Row) -> bool:
        if self._dedupe == "exact":
            return isinstance(row.params, Pooling) or _is_determined(row.params)
        return self._dedupe == "all"


def _request(row: Row) -> bytes:
    """A digest of all that decides the answer. `repr` tells `1` from `True` and from `1.0`."""
    asked = repr((row.kind, row.prompts, row.params, row.lora))
    return hashlib.blake2b(asked.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _is_determined(sampling: Sampling) -> bool:
    return sampling.temperature == 0 or sampling.seed is not None


def _as_of(row: Row | RowError, outcome: Outcome) -> Outcome:
    """The outcome as that of another row, whose place an error names."""
    if not isinstance(outcome, RowError):
        return outcome
    offset = row.offset if isinstance(row, Row) else row.byte
    return outcome.model_copy(update={"line": row.line, "byte": offset, "custom_id": row.custom_id, "file": row.file})
