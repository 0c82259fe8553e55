"""Stores that refuse, forget, repeat or cut what AWS would not, and what is left in them by those who died."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
from botocore.exceptions import ClientError

from jobs.assemble import assemble
from jobs.gc import Collector
from jobs.storage import s3 as s3_module
from jobs.storage.base import MIB
from tests.jobs.site import Site, prompts
from tests.problems.conftest import run_to_its_end, site_on
from tests.problems.odd_s3 import Environ, OddS3, odd_s3
from tests.proxy import tcp_proxy
from tests.servers import BUCKET, S3Server, ValkeyServer


@pytest.fixture
def store() -> Iterator[OddS3]:
    with odd_s3() as store:
        yield store


def answers(rows: int) -> list[str]:
    return [f"answer {n}" for n in range(rows)]


def has_checksum(environ: Environ) -> bool:
    """What newer SDKs send of their own accord, and R2, older MinIO, Ceph and others refuse."""
    return (
        any(
            name.startswith(("HTTP_X_AMZ_CHECKSUM", "HTTP_X_AMZ_SDK_CHECKSUM", "HTTP_X_AMZ_TRAILER"))
            for name in environ
        )
        or "aws-chunked" in environ.get("HTTP_CONTENT_ENCODING", "")
        or environ.get("HTTP_X_AMZ_CONTENT_SHA256", "").startswith("STREAMING-")
    )


def test_a_store_that_refuses_checksum_headers_takes_all_that_a_job_sends(
    store: OddS3, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """boto3#4392, gaia PR#3029: since its version 1.36 boto3 adds CRC32 checksums and chunked trailers to uploads, and
    stores that do not know them answer 501, or that the signature is wrong."""
    store.refuses = has_checksum
    with pytest.raises(ClientError, match="NotImplemented"):
        store.server.client().put_object(Bucket=BUCKET, Key="plain-boto3", Body=b"x")
    assert store.seen.pop("refused")
    site = site_on(store.server, valkey, tmp_path)
    spec = site.submit(prompts(10))
    assert run_to_its_end(site, spec) == answers(10)
    with site.stores.writer(f"{spec.layout.root}/large", 20 * MIB) as writer:
        writer.write(b"x" * 9 * MIB)
    assert site.stores.head(writer.info.url).size == 9 * MIB
    site.stores.delete([writer.info.url])
    assert store.seen["refused"] == 0


def test_two_manifests_in_a_store_that_forgot_its_condition_are_the_same(
    store: OddS3, valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """seaweedfs#7153, #8800: If-None-Match was ignored, and later kept by one request at a time: of several at once all
    won. The probe finds the first kind out; this is the second, which no probe is sure to find."""
    store.forgets_condition = lambda environ: environ["PATH_INFO"].endswith("/manifest.json")
    site = site_on(store.server, valkey, tmp_path)
    spec = site.planned(10)
    site.work(spec)
    assert site.stores.supports_conditional_put(spec.layout.manifest)
    written: list[bytes] = []
    put_if_absent = site.stores.put_if_absent

    def keep(url: str, data: bytes) -> object:
        written.append(data)
        return put_if_absent(url, data)

    monkeypatch.setattr(site.stores, "put_if_absent", keep)
    together = threading.Barrier(2)

    def keep_step() -> None:
        with suppress(threading.BrokenBarrierError):
            together.wait(5)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(assemble, spec, site.ledger, site.stores, keep_step) for _ in range(2)]
    assert [run.result() for run in runs] == [None, None]
    assert store.seen["forgotten"] == 2
    one, other = written
    assert one == other == site.stores.read(spec.layout.manifest)
    assert site.ledger.state(spec.id) == "completed"
    assert [row["response"] for row in site.rows(spec.output_url)] == answers(10)


@pytest.mark.parametrize("name", ["job.json", "plan.jsonl", "manifest.json"])
def test_an_own_write_that_was_answered_as_failed_is_no_one_else_s(
    name: str, store: OddS3, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """icechunk#2099, ClickHouse PR#113994: the store had written an object and answered with an error, the client sent
    it again, and took the 412 that came then for a rival's write."""
    store.fails_late = lambda environ: environ["PATH_INFO"].endswith(f"/{name}") and "HTTP_IF_NONE_MATCH" in environ
    site = site_on(store.server, valkey, tmp_path)
    assert run_to_its_end(site, site.submit(prompts(10))) == answers(10)
    assert store.seen["failed late"] == 1


def test_an_input_whose_stream_is_reset_again_and_again_is_read_to_its_end(
    moto_s3: S3Server, valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3#2662, #2495: a stream of boto3's that was reset in the middle was an error, or, to careless readers, a
    shorter file."""
    monkeypatch.setattr(s3_module, "_pause", lambda attempt: None)
    rows = [{"prompt": f"question {n}", "document": "x" * 2000} for n in range(2000)]
    cuts = [random.Random(7).randrange(1_500_000) for _ in range(5)]
    with tcp_proxy(moto_s3.endpoint) as proxy:
        site = site_on(S3Server(proxy.endpoint), valkey, tmp_path, max_shard_rows=1000)
        spec = site.submit(rows)
        proxy.cut_after(*cuts)
        site.control.plan(spec.id)
        assert proxy.connections_cut >= 2
        proxy.cut_after(*cuts)
        assert run_to_its_end(site, spec) == answers(2000)
        assert proxy.connections_cut > len(cuts)
    assert [row["prompt"] for row in site_on(moto_s3, valkey, tmp_path).rows(spec.output_url)] == [
        row["prompt"] for row in rows
    ]


def collector(site: Site) -> Collector:
    """One that takes whatever may go, however young."""
    return Collector(site.settings.storage_url, site.ledger, site.stores, before=time.time() + 3600)


DIES_UPLOADING = """
import os, signal, sys
from jobs.settings import Settings
from jobs.storage import Stores
writer = Stores(Settings()).writer(sys.argv[1], 20 << 20)
writer.write(b"x" * (9 << 20))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_parts_of_an_upload_whose_process_was_killed_are_collected(
    moto_s3: S3Server, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """sync-engine#283, ravel#864: parts of uploads that nobody completed show in no listing of a bucket, and are paid
    for until somebody looks for them."""
    site = site_on(moto_s3, valkey, tmp_path)
    spec = site.submit(prompts(4))
    run_to_its_end(site, spec)
    dead = f"{spec.layout.root}/{uuid4().hex}"
    command = [sys.executable, "-c", DIES_UPLOADING, dead]
    subprocess.run(command, env={**moto_s3.environment(), "PAGEMILL_STATE_DIR": str(tmp_path)}, check=False, timeout=60)
    (write,) = site.stores.unfinished(f"{spec.layout.root}/")
    assert (write.url, write.size) == (dead, 8 * MIB)
    assert not list(site.stores.list(dead))
    assert [garbage.what for garbage in collector(site).collect() if garbage.kind == "write"] == [write]
    assert not list(site.stores.unfinished(f"{spec.layout.root}/"))
    assert len(site.rows(spec.output_url)) == 4
