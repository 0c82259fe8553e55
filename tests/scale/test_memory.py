"""What a job takes of memory does not depend on how large its input is. Each stage is in a process of its own."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from uuid import uuid4

import pytest

from engine.config import EngineConfig
from jobs.connection import connect
from jobs.inputs import InputOptions
from jobs.ledger import Ledger
from jobs.planner import SHARDS_OF_A_SIZE
from jobs.records import Part, SegmentRecord, Usage
from jobs.settings import Settings
from jobs.shards import Shard
from jobs.spec import JobSpec, RecordRows
from jobs.submit import enter, prepare
from tests.jobs.site import Site
from tests.jobs.specs import openai_spec
from tests.scale.inputs import write_lines, write_one_group
from tests.scale.mill import peak_bytes
from tests.servers import ValkeyServer
from workers.app import slot_context
from workers.host import EngineHost
from workers.slot import work
from workers.stub_engine import StubProcess

MIB = 1 << 20
MODEL, SLOTS = "stub", 3
LONG_PROMPT = "a prompt that goes on and on, " * 270
LONG_LINE = b'{"custom_id":"row-%09d","prompt":"%d: ' + LONG_PROMPT.encode() + b'"}\n'
SHORT_LINE = b'{"custom_id":"row-%09d","prompt":"%d"}\n'


def site_of(settings: Settings) -> Site:
    return Site.of(settings, Ledger(connect(settings.ledger_url)))


def planned(settings: Settings, job_id: str) -> int:
    site_of(settings).control.plan(job_id)
    return peak_bytes(os.getpid())


def run(settings: Settings, job_id: str) -> int:
    """Answers all shards that are ready, as `pagemill worker` does."""
    site = site_of(settings)
    host = EngineHost(EngineConfig(MODEL, max_num_seqs=64), StubProcess)
    context = slot_context(settings, site.ledger, site.tokens, host, host.start(), MODEL, SLOTS, at_once=1)
    context.heartbeat.start()
    threads = [threading.Thread(target=work, args=(MODEL, context)) for _ in range(SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    context.heartbeat.stop()
    host.stop()
    return peak_bytes(os.getpid())


def assembled(settings: Settings, job_id: str) -> int:
    site_of(settings).control.assemble(job_id)
    return peak_bytes(os.getpid())


def write_long_lines(path: Path, size: int) -> int:
    return write_lines(path, size, LONG_LINE)


def write_large_group(path: Path, size: int) -> int:
    return write_one_group(path, size, LONG_PROMPT)


@pytest.fixture
def site(valkey: ValkeyServer, tmp_path: Path) -> Site:
    # Larger shards than by default, to be quick.
    settings = valkey.settings(storage=f"file://{tmp_path}/store", min_shard_tokens=1 << 16)
    return Site.of(settings, Ledger(valkey.client))


def submitted(site: Site, path: Path) -> JobSpec:
    with path.open("rb") as file:
        form = "parquet" if file.read(4) == b"PAR1" else "jsonl"
    spec = prepare(
        str(path),
        model=MODEL,
        stores=site.stores,
        settings=site.settings,
        rows=RecordRows(prompt_column="prompt"),
        input_options=InputOptions(form),
    )
    return enter(spec, site.ledger, site.stores, site.tokens)


def peaks(site: Site, paths: list[Path], stages: dict[str, Callable[[Settings, str], int]]) -> dict[str, list[int]]:
    """The most memory that the process of each stage has had after each of the files, which are jobs in turn."""
    found: dict[str, list[int]] = {name: [] for name in stages}
    pools = {name: ProcessPoolExecutor(1, get_context("spawn")) for name in stages}
    try:
        for path in paths:
            spec = submitted(site, path)
            for name, stage in stages.items():
                found[name].append(pools[name].submit(stage, site.settings, spec.id).result())
    finally:
        for pool in pools.values():
            pool.shutdown()
    return found


@pytest.mark.parametrize("write", [write_long_lines, write_large_group])
def test_no_stage_takes_more_memory_for_a_file_eight_times_as_large(
    site: Site, tmp_path: Path, write: Callable[[Path, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.formats.parquet.MAX_GROUP_BYTES", 1 * MIB)
    # What is given back is to be gone: Arrow's own pools keep it for a while, and so does malloc below its threshold.
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 * 1024))
    small, large = tmp_path / "small", tmp_path / "large"
    rows = [write(small, 8 * MIB), write(large, 64 * MIB)]
    more = large.stat().st_size - small.stat().st_size
    # Twice the small one first: a process has all its threads and most of their pools of memory then.
    found = peaks(site, [small, small, large], {"plan": planned, "run": run, "assemble": assembled})
    views = [site.ledger.view(job_id) for job_id in site.ledger.job_ids(None)]
    assert {(view.state, view.done) for view in views} == {("completed", count) for count in rows}
    assert all(most[2] - most[1] < more / 3 for most in found.values()), found


def test_planning_holds_nothing_of_its_rows(site: Site, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    rows = write_lines(large, 32 * MIB, SHORT_LINE) - write_lines(small, 8 * MIB, SHORT_LINE)
    found = peaks(site, [small, small, large], {"plan": planned})["plan"]
    assert found[2] - found[1] < 16 * rows, found


def test_ten_million_rows_cost_the_ledger_less_than_100_mb(valkey: ValkeyServer) -> None:
    """Rows so dear that each of the first shards has one alone: no plan has more shards."""
    rows, a_shard, shards = 10_000_000, 1, 0
    while rows > 0:
        shards += min(SHARDS_OF_A_SIZE, -(-rows // a_shard))
        rows -= SHARDS_OF_A_SIZE * a_shard
        a_shard *= 2
    ledger, measured = Ledger(valkey.client), 2_000
    before = valkey.client.info("memory")["used_memory"]
    spec = openai_spec()
    ledger.create(spec)
    ledger.add_shards(
        spec.id, (Shard(n, n * 1000, 1000, n * 400_000, (n + 1) * 400_000, n * 1000, n) for n in range(measured))
    )
    ledger.open(spec, shards=measured + 1, rows=measured * 1000, errors=[], error_count=0)
    part = Part(size=500_000, etag=f"{2**32:x}-{500_000:x}-{2**60:x}", sha256="0" * 64, lines=1000)
    while (lease := ledger.lease(spec.model, uuid4().hex, 60)) is not None:
        record = SegmentRecord(
            attempt=lease.attempt,
            fence=lease.fence,
            ok=999,
            failed=1,
            usage=Usage(prompt_tokens=100_000, completion_tokens=50_000),
            output=part,
            errors=part,
            engine="a-model-of-some-size bfloat16 cuda",
            worker=f"a-host-with-a-name-{uuid4().hex[:12]}",
            failures={"context_length_exceeded": 1},
            started_at=time.time(),
            finished_at=time.time(),
        )
        assert ledger.commit(lease, record) == "ok"
    a_shards_bytes = (valkey.client.info("memory")["used_memory"] - before) / measured
    assert shards * a_shards_bytes < 100_000_000
