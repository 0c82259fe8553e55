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

_KEY = re.compile(r"pm:\{([^}]+)\}:(\w+)")
_MAY_FOLLOW: dict[str | None, set[str]] = {
    None: {"validating"},
    # A job that `recover` finds ended goes to its end at once.
    "validating": {"in_progress", "finalizing", "failed", "cancelling", "completed", "cancelled", "expired"},
    # Back from `finalizing`: a committed segment vanished from storage.
    "in_progress": {"finalizing", "cancelling", "failed"},
    "finalizing": {"finalizing", "in_progress", "completed", "expired", "failed"},
    "cancelling": {"cancelled", "failed"},
}


class BrokenPromise(AssertionError):
    """The ledger did what the protocol forbids."""


def commands(data_dir: Path) -> Iterator[list[str]]:
    """The write commands in a Valkey's append-only files, oldest first."""
    for path in sorted(data_dir.glob("appendonlydir/*.incr.aof"), key=lambda path: int(path.name.split(".")[-3])):
        with path.open("rb") as file:
            yield from _parsed(file)


def _parsed(file: BufferedReader) -> Iterator[list[str]]:
    while line := file.readline():
        if line.startswith(b"#"):  # a note of the time
            continue
        words = [file.read(int(file.readline()[1:]) + 2)[:-2].decode() for _ in range(int(line[1:]))]
        yield words


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
    And a job's states follow each other as they may.
    """

    def __init__(self, data_dir: Path) -> None:
        self._jobs: dict[str, _JobHistory] = defaultdict(_JobHistory)
        self._attempts: dict[str, tuple[str, str]] = {}
        self.emptied = 0
        for command in commands(data_dir):
            self._apply(*command)

    def states(self, job_id: str) -> list[str]:
        """All states of a job, in order; from the start again after the server was emptied."""
        return self._jobs[job_id].states

    def commits(self, job_id: str) -> dict[int, list[str]]:
        """The attempts whose records were written, by shard, in order."""
        return {int(shard): attempts for shard, attempts in self._jobs[job_id].commits.items()}

    def _apply(self, verb: str, key: str = "", *args: str) -> None:
        if verb.upper() in ("FLUSHALL", "FLUSHDB"):
            self.emptied += 1
            for job in self._jobs.values():
                job.hashes.clear()
                job.fence = 0
            return
        if verb.upper() in ("DEL", "UNLINK"):
            for name in (key, *args):
                if found := _KEY.fullmatch(name):
                    self._jobs[found[1]].hashes.pop(found[2], None)
            return
        if (found := _KEY.fullmatch(key)) is None:
            return
        job_id, name = found.groups()
        job = self._jobs[job_id]
        match verb.upper():
            case "HSET" | "HMSET" | "HSETNX":
                for item, value in zip(args[::2], args[1::2], strict=True):
                    self._check(job_id, job, name, item, value, adopted=verb.upper() == "HSETNX")
                    job.hashes[name][item] = value
            case "HDEL":
                for item in args:
                    job.hashes[name].pop(item, None)

    def _check(self, job_id: str, job: _JobHistory, name: str, item: str, value: str, *, adopted: bool) -> None:
        match name, item[:2]:
            case "job", _ if item == "state":
                before = job.hashes["job"].get("state")
                if value not in _MAY_FOLLOW.get(before, set()):
                    raise BrokenPromise(f"{job_id}: {before} -> {value}, after {job.states}")
                job.states.append(value)
            case "commit", _:
                self._check_record(job_id, job, item, value, adopted)
            case "own", "a:":
                if self._attempts.setdefault(item, (job_id, value)) != (job_id, value):
                    raise BrokenPromise(f"{job_id}: attempt {item} has two shards: {self._attempts[item]}, {value}")
            case "own", "f:":
                if int(value) <= job.fence:
                    raise BrokenPromise(f"{job_id}: the fence of shard {item} is {value}, after {job.fence}")
                job.fence = int(value)

    def _check_record(self, job_id: str, job: _JobHistory, shard: str, value: str, adopted: bool) -> None:
        if (before := job.hashes["commit"].get(shard)) is not None:
            raise BrokenPromise(f"{job_id}: the record of shard {shard} is replaced: {before} by {value}")
        record = json.loads(value)
        if adopted:
            if job.hashes["job"].get("state") != "validating":
                raise BrokenPromise(f"{job_id}: shard {shard} is taken over by a job that is open")
        elif not record.get("dead") and job.hashes["own"].get(f"s:{shard}") != record["attempt"]:
            raise BrokenPromise(f"{job_id}: shard {shard} is committed by {record['attempt']}, which does not own it")
        job.commits[shard].append(record.get("attempt", "dead"))
