"""The ledger's history, from what Valkey itself wrote down: its append-only file.

It has the writes of each script in order, over every restart of the server. Nothing in the product has to cooperate,
and it shows what a script did, not what it answered.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

_KEY = re.compile(r"pm:\{([^}]+)\}:(\w+)")
_MAY_FOLLOW: dict[str | None, set[str]] = {
    None: {"validating"},
    # A job that `recover` finds ended goes to its end at once.
    "validating": {"in_progress", "finalizing", "failed", "cancelling", "completed", "cancelled", "expired"},
    # Back from `finalizing`: a committed segment vanished from storage.
    "in_progress": {"finalizing", "cancelling", "failed"},
    "finalizing": {"in_progress", "completed", "expired", "failed"},
    # A manifest that was there before wins.
    "cancelling": {"cancelled", "failed", "completed", "expired"},
}


class BrokenPromise(AssertionError):
    """The ledger did what the protocol forbids."""


def commands(data_dir: Path, read: dict[Path, int] | None = None) -> Iterator[list[str]]:
    """The write commands in a Valkey's append-only files, oldest first; of a transaction all, or nothing yet.

    `read` is how far each file was read before, in bytes, and moves on: with it, only what was written since comes.
    The files must not be rewritten meanwhile.
    """
    read = {} if read is None else read
    paths = data_dir.glob("appendonlydir/*.incr.aof")
    for path in sorted(paths, key=lambda path: int(path.name.split(".")[-3])):
        with path.open("rb") as file:
            file.seek(read.get(path, 0))
            while (transaction := _transaction(file)) is not None:
                yield from transaction
                read[path] = file.tell()


def _transaction(file: BufferedReader) -> list[list[str]] | None:
    """The next commands that belong together; None where they are not all there."""
    found: list[list[str]] = []
    is_open = False
    while (command := _command(file)) is not None:
        match command[0].upper():
            case "MULTI":
                is_open = True
            case "EXEC":
                return found
            case _:
                found.append(command)
                if not is_open:
                    return found
    return None


def _command(file: BufferedReader) -> list[str] | None:
    line = file.readline()
    while line.startswith(b"#"):  # a note of the time
        line = file.readline()
    words = []
    for _ in range(int(line[1:]) if line.endswith(b"\n") else 0):
        size = file.readline()
        word = file.read(int(size[1:]) + 2) if size.endswith(b"\n") else b""
        if not word.endswith(b"\r\n"):
            return None
        words.append(word[:-2].decode())
    return words or None


@dataclass
class _JobHistory:
    """A job's hashes as they are at one moment, and what must never come again."""

    hashes: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    fence: int = 0
    states: list[str] = field(default_factory=list)
    commits: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


class History:
    """Replays the writes to all jobs, and raises BrokenPromise where one breaks an invariant.

    I1: the record of a shard is written once, and never replaced; only a segment that vanished takes it away.
    I2: it is written by the attempt that owns the shard, or taken over from storage before the job opens.
    I3: an attempt has one shard, once; a job's fence only grows.
    I4: a job that is not stopped is `finalizing` when each of its shards has a record, and each was counted once.
    And a job's states follow each other as they may.
    """

    def __init__(self, data_dir: Path, *past: Path) -> None:
        """`past` are the folders that the server had before and lost: what is in one begins from nothing again."""
        self._data_dir = data_dir
        self._read: dict[Path, int] = {}
        self._jobs: dict[str, _JobHistory] = defaultdict(_JobHistory)
        self._attempts: dict[str, tuple[str, str]] = {}
        self.emptied = 0
        for folder in past:
            for command in commands(folder):
                self._apply(*command)
            self._forget()
        self.read_on()

    def read_on(self) -> None:
        """Take in what has been written since."""
        for command in commands(self._data_dir, self._read):
            self._apply(*command)

    def states(self, job_id: str) -> list[str]:
        """All states of a job, in order; from the start again after the server was emptied."""
        return self._jobs[job_id].states

    def commits(self, job_id: str) -> dict[int, list[str]]:
        """The attempts whose records were written, by shard, in order."""
        return {int(shard): attempts for shard, attempts in self._jobs[job_id].commits.items()}

    def _forget(self) -> None:
        self.emptied += 1
        for job in self._jobs.values():
            job.hashes.clear()
            job.fence = 0

    def _apply(self, verb: str, key: str = "", *args: str) -> None:
        if verb.upper() in ("FLUSHALL", "FLUSHDB"):
            self._forget()
            return
        if verb.upper() in ("DEL", "UNLINK"):
            for name in (key, *args):
                if found := _KEY.fullmatch(name):
                    self._jobs[found[1]].hashes.pop(found[2], None)
            return
        if (found := _KEY.fullmatch(key)) is None:
            return
        job_id, name = found.groups()
        values = self._jobs[job_id].hashes[name]
        match verb.upper():
            case "HSET" | "HMSET" | "HSETNX":
                fields = dict(zip(args[::2], args[1::2], strict=True))
                self._check(job_id, name, fields, adopted=verb.upper() == "HSETNX")
                values.update(fields)
            case "HINCRBY":
                values[args[0]] = str(int(values.get(args[0], 0)) + int(args[1]))
            case "HDEL":
                for item in args:
                    values.pop(item, None)

    def _check(self, job_id: str, name: str, fields: dict[str, str], *, adopted: bool) -> None:
        if name == "job" and "state" in fields:
            self._check_state(job_id, fields)
        elif name == "commit":
            for shard, record in fields.items():
                self._check_record(job_id, shard, json.loads(record), adopted=adopted)
        elif name == "own":
            for item, value in fields.items():
                self._check_owner(job_id, item, value)

    def _check_state(self, job_id: str, fields: dict[str, str]) -> None:
        job = self._jobs[job_id]
        values = job.hashes["job"]
        before, state = values.get("state"), fields["state"]
        if state not in _MAY_FOLLOW.get(before, set()):
            raise BrokenPromise(f"{job_id}: {before} -> {state}, after {job.states}")
        job.states.append(state)
        if state == "finalizing" and "ending" not in fields:
            total, settled, records = int(values["total"]), int(values["settled"]), len(job.hashes["commit"])
            if not total == settled == records:
                raise BrokenPromise(f"{job_id}: settled {settled} times with {records} records of {total} shards")

    def _check_owner(self, job_id: str, item: str, value: str) -> None:
        job = self._jobs[job_id]
        match item[:2]:
            case "a:":
                if self._attempts.setdefault(item, (job_id, value)) != (job_id, value):
                    raise BrokenPromise(f"{job_id}: attempt {item} has two shards: {self._attempts[item]}, {value}")
            case "f:":
                if int(value) <= job.fence:
                    raise BrokenPromise(f"{job_id}: the fence of shard {item} is {value}, after {job.fence}")
                job.fence = int(value)

    def _check_record(self, job_id: str, shard: str, record: dict[str, Any], *, adopted: bool) -> None:
        job = self._jobs[job_id]
        if (before := job.hashes["commit"].get(shard)) is not None:
            raise BrokenPromise(f"{job_id}: the record of shard {shard} is replaced: {before} by {record}")
        if adopted:
            if job.hashes["job"].get("state") != "validating":
                raise BrokenPromise(f"{job_id}: shard {shard} is taken over by a job that is open")
        elif not record.get("dead") and job.hashes["own"].get(f"s:{shard}") != record["attempt"]:
            raise BrokenPromise(f"{job_id}: shard {shard} is committed by {record['attempt']}, which does not own it")
        job.commits[shard].append(record.get("attempt", "dead"))
