"""Servers for tests: real processes or threads behind real sockets, on free ports, gone at the end of the block."""

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3.session
import redis
from botocore.config import Config
from moto.server import ThreadedMotoServer

from jobs.local.valkey import valkey_child
from jobs.settings import Settings

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

BUCKET = "pagemill-test"
_READY_S = 20


@dataclass(frozen=True)
class S3Server:
    """An S3 server that answers, with the bucket `BUCKET` in it."""

    endpoint: str
    access_key: str = "ACCESSKEY1"
    secret_key: str = "secretkey12345"
    pid: int | None = None

    def settings(self, **fields: object) -> Settings:
        return Settings(
            s3_endpoint_url=self.endpoint,
            s3_region="us-east-1",
            s3_access_key_id=self.access_key,
            s3_secret_access_key=self.secret_key,
            **fields,
        )

    def environment(self) -> dict[str, str]:
        """The same for a process of its own."""
        return {
            "PAGEMILL_S3_ENDPOINT_URL": self.endpoint,
            "PAGEMILL_S3_REGION": "us-east-1",
            "PAGEMILL_S3_ACCESS_KEY_ID": self.access_key,
            "PAGEMILL_S3_SECRET_ACCESS_KEY": self.secret_key,
        }

    def client(self) -> "S3Client":
        """A plain client, to look at the server beside the code that is tested."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}),
        )


@contextmanager
def moto_s3() -> Iterator[S3Server]:
    """Moto's S3 in memory: it has conditional PUTs and part copies."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        s3 = S3Server(f"http://{host}:{port}")
        s3.client().create_bucket(Bucket=BUCKET)
        yield s3
    finally:
        server.stop()


@contextmanager
def rclone_s3(folder: Path) -> Iterator[S3Server]:
    """`rclone serve s3` on a folder: it ignores `If-None-Match`, and answers part copies without an ETag."""
    keys = S3Server("")
    rclone = Path(sys.executable).with_name("rclone")
    command = [rclone, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{keys.access_key},{keys.secret_key}"]
    with subprocess.Popen([*command, "--config", "/dev/null", folder], stderr=subprocess.PIPE, text=True) as process:
        log = iter(process.stderr or ())
        # Read to its end, so that the server never blocks on a full pipe.
        drain = threading.Thread(target=deque, args=(log, 0))
        try:
            server = S3Server(_address_in(log), pid=process.pid)
            drain.start()
            server.client().create_bucket(Bucket=BUCKET)
            yield server
        finally:
            process.terminate()
            if drain.ident:
                drain.join()


def _address_in(log: Iterator[str]) -> str:
    """The address that rclone logs once it listens."""
    lines = []
    for line in log:
        if found := re.search(r"http://[\d.]+:\d+", line):
            return found.group()
        lines.append(line)
    raise RuntimeError(f"rclone ended before it listened: {''.join(lines)}")


class ValkeyServer:
    """The embedded Valkey, as `pagemill up` runs it, under a test's hand: what it acknowledged survives `kill`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.url = Settings(state_dir=folder, redis_url="").ledger_url
        self.client = redis.Redis.from_url(self.url, decode_responses=True)

    @property
    def data_dir(self) -> Path:
        """Where its append-only files are."""
        return self._folder / "valkey"

    def settings(self, **fields: object) -> Settings:
        return Settings(**{"state_dir": self._folder, "redis_url": self.url, **fields})

    def environment(self) -> dict[str, str]:
        """The same for a process of its own."""
        return {"PAGEMILL_STATE_DIR": str(self._folder), "PAGEMILL_REDIS_URL": self.url}

    def start(self) -> None:
        """Start it, on the data that is there; returns once it answers."""
        child = valkey_child(Settings(state_dir=self._folder))
        if child.ready is None:
            raise RuntimeError("nothing tells when it is ready")
        with (self._folder / "valkey.log").open("ab") as log:
            process = self._process = subprocess.Popen(
                [*child.argv, *self._options], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + _READY_S
        while not child.ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Valkey does not answer: {(self._folder / 'valkey.log').read_text()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def copy_data(self, folder: Path) -> None:
        """What it has acknowledged until now, for `restart_with`."""
        self.wait_until_written()
        shutil.copytree(self.data_dir, folder)

    def restart_with(self, data: Path | None, *, past: Path) -> None:
        """Kill it, and start it with an older copy of its data, or with none. What it had is moved to `past`."""
        self.wait_until_written()
        self.kill()
        self.data_dir.rename(past)
        if data is not None:
            shutil.copytree(data, self.data_dir)
        self.start()

    def wait_until_written(self) -> None:
        """Until all that it acknowledged is in its append-only file: a write may wait for an `fsync` that goes on."""
        deadline = time.monotonic() + _READY_S
        while self.client.info("persistence")["aof_buffer_length"]:
            if time.monotonic() > deadline:
                raise RuntimeError("Valkey does not write its append-only file")
            time.sleep(0.02)

    def restart(self) -> None:
        """Kill it, and start it with what is on disk: with `appendfsync everysec` that may lag by a second or two."""
        assert self.client.execute_command("WAITAOF", 1, 0, 10_000)[0] == 1
        self.kill()
        self.start()


@contextmanager
def valkey(folder: Path, *options: str) -> Iterator[ValkeyServer]:
    """A Valkey on a private UNIX socket, its append-only file in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    server = ValkeyServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.client.close()
        server.kill()
