"""Real processes around a stub engine: Valkey, control workers, model workers; each can be killed, stopped and armed.

What a fault test needs to be quick: a worker is up in a second or two, a shard has four rows, and what takes a minute
by default takes a second or two.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.broker import Tokens, make_app, model_queue, queue_key
from jobs.errors import ObjectNotFound
from jobs.failpoints import VARIABLE
from jobs.ledger import Ledger
from jobs.records import JobView, Manifest
from jobs.settings import Settings
from jobs.spec import JobSpec, OpenAIRows, RecordRows
from jobs.storage import Stores
from jobs.submit import enter, prepare
from tests.jobs.ledgers import key
from tests.servers import S3Server, ValkeyServer
from tests.system.checker import Ending, check
from tests.system.history import History
from tests.system.mill import PAGEMILL, wait_until
from tests.system.stub_engine import STEP
from tests.system.stub_worker import MODEL, SLOTS

LEASE_TTL, SWEEP_EVERY = 2.0, 0.5
SHARD_ROWS = 4
RECORDS = RecordRows(prompt_column="prompt")
END_S = 60
"""What any fault may cost: far above what it does cost here, and far below a hang."""


class Process:
    """One process of the fleet."""

    def __init__(self, name: str, argv: list[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as file:
            self._popen = subprocess.Popen(argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.pid = self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def wait_for_death(self, timeout_s: float = END_S) -> int:
        """The exit code; of a failpoint that kills it is -9."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} lives on: {self.log.read_text()}") from None

    @property
    def stopped(self) -> bool:
        """Whether it is by the kernel's word, as by a failpoint that stops it."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def wait_for_line(self, words: str) -> None:
        """Until it has logged that."""
        wait_until(lambda: words in self.log.read_text(), END_S, f"{words!r} in the log of {self.name}")

    def wait_until_stopped(self) -> None:
        wait_until(lambda: self.stopped, END_S, f"a stopped {self.name}")


@dataclass(frozen=True)
class Job:
    """A job that was submitted, and what was asked in it."""

    spec: JobSpec
    prompts: Sequence[str | None]

    @property
    def id(self) -> str:
        return self.spec.id


@dataclass
class Fleet:
    """The services of one test. `redis_url` is how workers reach the ledger: through a proxy, say."""

    folder: Path
    valkey: ValkeyServer
    s3: S3Server | None = None
    storage: str | None = None
    redis_url: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    past: list[Path] = field(default_factory=list)
    """Where the data is that Valkey lost: the history begins there."""

    @property
    def settings(self) -> Settings:
        """The test's own way to the services, past every proxy to the ledger."""
        fields = {"max_shard_rows": SHARD_ROWS, "storage": self.storage or f"file://{self.folder}/store"}
        s3 = {} if self.s3 is None else self.s3.settings().model_dump(exclude_unset=True)
        return self.valkey.settings(**{**s3, **fields})

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.valkey.client)

    @property
    def stores(self) -> Stores:
        return Stores(self.settings)

    @property
    def tokens(self) -> Tokens:
        return Tokens(make_app(self.settings))

    @property
    def history(self) -> History:
        self.valkey.wait_until_written()
        return History(self.valkey.data_dir, *self.past)

    def roll_back(self, data: Path | None) -> None:
        """Kill Valkey, and start it with a copy that `ValkeyServer.copy_data` made, or with nothing."""
        self.past.append(self.folder / f"past-{len(self.past)}")
        self.valkey.restart_with(data, past=self.past[-1])

    def env(self, failpoints: str, more: Mapping[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            **({} if self.s3 is None else self.s3.environment()),
            "PAGEMILL_STATE_DIR": str(self.folder),
            "PAGEMILL_REDIS_URL": self.redis_url or self.valkey.url,
            "PAGEMILL_STORAGE": self.settings.storage,
            "PAGEMILL_MAX_SHARD_ROWS": str(SHARD_ROWS),
            "PAGEMILL_LEASE_TTL": str(LEASE_TTL),
            "PAGEMILL_SWEEP_EVERY": str(SWEEP_EVERY),
            VARIABLE: failpoints,
            **self.environment,
            **more,
        }

    # --- processes ----------------------------------------------------------------------------------------------

    def control(self, failpoints: str = "", **env: str) -> Process:
        """A control worker. It is at work once jobs are planned; nothing waits for that here."""
        return self._start("control", [*PAGEMILL, "worker", "--control"], failpoints, env)

    def worker(
        self,
        failpoints: str = "",
        *,
        step_s: float = 0.0,
        slots: int | None = 2,
        program: str = "tests.system.stub_worker",
        **env: str,
    ) -> Process:
        """A model worker that holds so many shards at once, for None as many as its engine has room for, which takes
        `step_s` for up to eight rows.
        `program` is the module that is run."""
        argv = [sys.executable, "-m", program]
        return self._start("worker", argv, failpoints, {STEP: str(step_s), SLOTS: str(slots or ""), **env})

    def _start(self, kind: str, argv: list[str], failpoints: str, env: Mapping[str, str]) -> Process:
        name = f"{kind}-{len(self.processes)}"
        self.processes.append(Process(name, argv, self.env(failpoints, env), self.folder / f"{name}.log"))
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            process.send(signal.SIGCONT)
            process.kill()

    # --- jobs ---------------------------------------------------------------------------------------------------

    def prepare(
        self,
        rows: int = 24,
        *,
        prompts: Sequence[str | None] | None = None,
        data: bytes | None = None,
        shape: OpenAIRows | RecordRows = RECORDS,
        suffix: str = ".jsonl",
        **options: Any,
    ) -> Job:
        """A job with its input in place, and not entered anywhere. `data` is the input, if it is more than prompts."""
        prompts = prompts or [f"question {n}" for n in range(rows)]
        source = self.folder / f"input-{len(list(self.folder.glob('input-*')))}{suffix}"
        source.write_bytes(data or "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts).encode())
        services = {"stores": self.stores, "settings": self.settings}
        spec = prepare(str(source), rows=shape, **{"model": MODEL, **services, **options})
        return Job(spec, prompts)

    def submit(self, rows: int = 24, **options: Any) -> Job:
        """The same, entered; see `prepare`."""
        return self.enter(self.prepare(rows, **options))

    def enter(self, job: Job) -> Job:
        enter(job.spec, self.ledger, self.stores, self.tokens)
        return job

    def view(self, job: Job) -> JobView:
        return self.ledger.view(job.id)

    def wait_for(self, job: Job, met: Callable[[JobView], Any], what: str, timeout_s: float = END_S) -> JobView:
        """Until the job looks as it should: past the end, it never will."""

        def looks_so() -> JobView | None:
            view = self.view(job)
            assert met(view) or not view.terminal, f"the job ended before: {what}: {view}"
            return view if met(view) else None

        return wait_until(looks_so, timeout_s, f"{what}: {job.id}")

    def wait_for_end(self, job: Job, state: str = "completed", timeout_s: float = END_S) -> JobView:
        try:
            return self.wait_for(job, lambda view: view.state == state, state, timeout_s)
        except AssertionError as error:
            logs = "".join(f"--- {process.name}\n{process.log.read_text()[-3000:]}" for process in self.processes)
            raise AssertionError(f"{error}\n{logs}") from None

    def check(self, job: Job, ending: Ending = "completed", errors: Mapping[int, str] | None = None) -> Manifest:
        """See `checker.check`."""
        return check(job.spec, job.prompts, self.stores, self.history, ending=ending, errors=errors)

    def finished(self, job: Job, timeout_s: float = END_S, errors: Mapping[int, str] | None = None) -> Manifest:
        """The manifest of a job that completes in time and keeps every promise."""
        self.wait_for_end(job, timeout_s=timeout_s)
        return self.check(job, errors=errors)

    def recover(self) -> list[str]:
        """The jobs that `pagemill recover` enters."""
        command = [*PAGEMILL, "recover", "--json"]
        done = subprocess.run(command, env=self.env("", {}), capture_output=True, timeout=END_S)
        assert done.returncode == 0, done.stderr.decode()
        return [view["id"] for view in json.loads(done.stdout)["recovered"]]

    def has_result(self, job: Job) -> bool:
        """Whether anything is where people look for a result."""
        return any(self._is_there(url) for url in (job.spec.layout.manifest, job.spec.output_url))

    def _is_there(self, url: str) -> bool:
        try:
            self.stores.head(url)
        except ObjectNotFound:
            return False
        return True

    def wait_for_signs_of_life(self) -> None:
        """Until there was a sweep and a beat of each model worker: processes are alive, and so are their threads."""
        assert all(process.alive for process in self.processes)
        workers = [process for process in self.processes if process.name.startswith("worker-")]
        self.ledger.client.delete("pm:swept", "pm:workers")
        wait_until(lambda: self.ledger.client.exists("pm:swept"), END_S, "a sweep")
        wait_until(lambda: len(self.ledger.workers()) >= len(workers), END_S, "a beat of each worker")

    def tries(self, job: Job) -> dict[int, int]:
        """How often each shard was leased, less what was given back."""
        found = self.ledger.client.hgetall(key(job.id, "tries"))
        return {int(shard): int(count) for shard, count in found.items()}

    def owners(self, job: Job) -> dict[int, str]:
        """The attempt that holds each shard which is in work."""
        found = self.ledger.client.hgetall(key(job.id, "own"))
        return {int(name[2:]): attempt for name, attempt in found.items() if name.startswith("s:")}

    def leases_given(self, job: Job) -> int:
        """How many leases there were on all shards together, those given back among them."""
        return int(self.ledger.client.hget(key(job.id, "job"), "fence"))

    def work_queue(self) -> str:
        """The Redis list of the tokens for the model."""
        return queue_key(model_queue(MODEL))


@contextmanager
def fleet(folder: Path, valkey: ValkeyServer, **fields: Any) -> Iterator[Fleet]:
    """A fleet without a process yet; what was started in it is gone after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Fleet(folder, valkey, **fields)
    try:
        yield found
    finally:
        found.close()
