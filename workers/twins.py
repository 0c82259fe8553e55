"""Rows of a job that ask for the same thing: one is asked, and its outcome is that of the others too.

    row ── digest of the request ──► answered in this job: take that
                                 ──► asked, in this shard or another in work, and not answered yet: wait for that
                                 ──► else: ask

The outcomes of a job lie in a file of the worker's own, so that what is held in memory does not grow with the job. What
this comes to: of a job's identical requests each worker asks one, from its start on, and as long as the outcomes take
no more than `MAX_BYTES`.
"""

import hashlib
import logging
import pickle
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from jobs.errors import RowError
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


class SharedRequests:
    """The requests of one job that may stand for several rows, in all shards that a worker has in work. Thread-safe."""

    def __init__(self, job_id: str) -> None:
        self._outcomes = Outcomes(job_id)
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[Listener]] = {}

    def claim(self, request: bytes, listener: "Listener") -> "Outcome | Claim":
        """The outcome, if there is one. `waits`: the listener is called once there is. `asks`: the caller is to ask,
        and to `settle` the request, whatever becomes of it."""
        with self._lock:
            if (outcome := self._outcomes.get(request)) is not None:
                return outcome
            if request in self._waiting:
                self._waiting[request].append(listener)
                return "waits"
            self._waiting[request] = []
            return "asks"

    def settle(self, request: bytes, outcome: Outcome | None) -> None:
        """Tell all that wait. None: who asked has given up, and each is to claim again."""
        with self._lock:
            if outcome is not None:
                self._outcomes.put(request, outcome)
            listeners = self._waiting.pop(request)
        for listener in listeners:
            listener(outcome)

    def close(self) -> None:
        self._outcomes.close()


Listener = Callable[[Outcome | None], None]
Claim = Literal["asks", "waits"]


class SharedByJob:
    """What the jobs share that a worker works on; that of a job that it has left long ago is dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, SharedRequests] = OrderedDict()

    def of(self, spec: JobSpec) -> SharedRequests | None:
        """None where no row shares an outcome."""
        if spec.dedupe == "off":
            return None
        with self._lock:
            shared = self._jobs.pop(spec.id, None) or SharedRequests(spec.id)
            self._jobs[spec.id] = shared
            if len(self._jobs) > _JOBS_AT_ONCE:
                # An attempt of that job which is still at work asks its rows from here on.
                self._jobs.popitem(last=False)[1].close()
            return shared


class Twins:
    """One shard's part in that. An error is an outcome too: a request that kills the engine has done so once."""

    def __init__(self, dedupe: Dedupe, shared: SharedRequests | None) -> None:
        self._dedupe = dedupe
        self._shared = shared
        self._asked: set[bytes] = set()

    def claim(self, row: Row, listener: Listener) -> Outcome | Claim:
        """As `SharedRequests.claim`; a row that may share nothing asks."""
        if self._shared is None or not self._may_share(row):
            return "asks"
        request = _request(row)
        found = self._shared.claim(request, listener)
        if found == "asks":
            self._asked.add(request)
        return found if isinstance(found, str) else as_of(row, found)

    def settle(self, row: Row, outcome: Outcome) -> None:
        if self._shared is not None and self._may_share(row) and (request := _request(row)) in self._asked:
            self._asked.discard(request)
            self._shared.settle(request, outcome)

    def give_up(self) -> None:
        """The shard is abandoned: others ask what it has no outcome of."""
        if self._shared is not None:
            for request in self._asked:
                self._shared.settle(request, None)
        self._asked.clear()

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


def as_of(row: Row | RowError, outcome: Outcome) -> Outcome:
    """The outcome as that of another row, whose place an error names."""
    if not isinstance(outcome, RowError):
        return outcome
    offset = row.offset if isinstance(row, Row) else row.byte
    return outcome.model_copy(update={"line": row.line, "byte": offset, "custom_id": row.custom_id, "file": row.file})
