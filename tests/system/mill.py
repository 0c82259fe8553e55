"""`pagemill up` as a real process with its children, and what a test needs to use it, hurt it and look at it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from jobs.broker import model_queue, queue_key
from jobs.connection import connect
from jobs.errors import ServiceUnreachable
from jobs.ledger import Ledger
from jobs.records import JobView, WorkerView
from jobs.settings import Settings

PAGEMILL = [sys.executable, "-m", "jobs.cli"]
DATA = Path(__file__).parents[1] / "data"
MODEL = "demo"

QUICK = {"PAGEMILL_LEASE_TTL": "6", "PAGEMILL_SWEEP_EVERY": "1", "PAGEMILL_MAX_SHARD_ROWS": "8"}
"""Patience for tests: what takes a minute by default takes seconds, and a small job has several shards."""


def wait_until(met: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Polls other processes' state, which has no event to wait for; fails by name."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if found := met():
                return found
        except (RedisError, ServiceUnreachable):
            pass  # the server may be down on purpose
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {timeout_s} s")


@dataclass
class Mill:
    """The services of one machine, for one model."""

    state_dir: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, **QUICK, "PAGEMILL_STATE_DIR": str(self.state_dir), **self.environment}

    @property
    def settings(self) -> Settings:
        return Settings(state_dir=self.state_dir)

    @property
    def ledger(self) -> Ledger:
        return Ledger(connect(self.settings.ledger_url))

    @contextmanager
    def up(self, *options: str, model: str = MODEL) -> Iterator["Mill"]:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        with (self.state_dir / "up.log").open("ab") as log:
            process = subprocess.Popen(
                [*PAGEMILL, "up", "--model", model, *options], env=self.env, stdout=log, stderr=log
            )
        try:
            wait_until(lambda: self.ledger.workers(), 120, "a live worker")
            yield self
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def worker(self) -> WorkerView:
        """The worker that beats now."""
        return wait_until(lambda: [w for w in self.ledger.workers() if _exists(w.pid)], 60, "a live worker")[0]

    def valkey_pid(self) -> int:
        return int(self.ledger.client.info("server")["process_id"])

    def pagemill(self, *arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*PAGEMILL, *arguments], env=self.env, input=stdin, capture_output=True, timeout=280)

    def submit(self, source: Path | str, *options: str) -> str:
        done = self.pagemill("submit", str(source), "--model", MODEL, *options)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def wait_for_work(self, job_id: str, rows: int) -> JobView:
        """Wait until the job is in the middle: so many rows done, and shards left to do."""

        def in_the_middle() -> JobView | None:
            view = self.ledger.view(job_id)
            assert not view.terminal, f"the job was over before the fault: {view}"
            return view if view.state == "in_progress" and view.done + view.in_flight >= rows else None

        return wait_until(in_the_middle, 120, "rows in work")

    def wait_for_end(self, job_id: str, timeout_s: float = 120) -> JobView:
        def ended() -> JobView | None:
            view = self.ledger.view(job_id)
            return view if view.terminal else None

        return wait_until(ended, timeout_s, "the job's end")

    def queue(self) -> str:
        return queue_key(model_queue(MODEL))

    def tries(self, job_id: str) -> dict[str, str]:
        return self.ledger.client.hgetall(f"pm:{{{job_id}}}:tries")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def questions(folder: Path, count: int) -> Path:
    """An input of so many GSM8K questions."""
    path = folder / f"questions-{count}.jsonl"
    lines = (DATA / "gsm8k_test.jsonl").read_bytes().splitlines(keepends=True)[:count]
    path.write_bytes(b"".join(lines))
    return path


def read_jsonl(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.split(b"\n") if line]


def assert_every_row_once(source: Path, rows: list[dict[str, Any]]) -> None:
    """Each input row is in the output, once, in its place, with an answer."""
    asked = [json.loads(line)["question"] for line in source.read_bytes().splitlines()]
    assert [row["question"] for row in rows] == asked
    assert all(row["error"] is None and row["response"] and row["usage"]["completion_tokens"] > 0 for row in rows)
