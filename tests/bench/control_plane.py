"""How fast jobs are taken in and handed out in shards: submits, plans, leases, beats and commits a second.

    python -m tests.bench.control_plane [--jobs 100] [--shards 20]

The jobs have mixed priorities and tenants, and rows of a few bytes: what is measured is what a job and a shard cost,
not what rows do. Valkey and the store, a folder, are real; one process does everything, one thing after another. The
CPU time is that process's and Valkey's together.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psutil

from jobs.formats.jsonl import dumps
from jobs.ledger import Lease, Ledger
from jobs.records import Part, SegmentRecord
from jobs.spec import RecordRows, Terms
from jobs.submit import enter, prepare
from tests.jobs.site import Site
from tests.servers import valkey

MODEL = "stub"
ROWS = 10
"""In a shard."""
TTL = 600.0


class Meter:
    """Prints what so many of one kind of step took."""

    def __init__(self, *processes: psutil.Process) -> None:
        self._processes = processes

    @contextmanager
    def measured(self, what: str, count: int) -> Iterator[None]:
        began, cpu = time.perf_counter(), self._cpu()
        yield
        seconds, spent = time.perf_counter() - began, self._cpu() - cpu
        sys.stdout.write(f"{count:>7,} {what:<9}{count / seconds:>9,.0f}/s{spent / count * 1e6:>9,.0f} µs CPU\n")
        sys.stdout.flush()

    def _cpu(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


def record_of(lease: Lease) -> SegmentRecord:
    part = Part(size=4096, etag="0" * 32, sha256="0" * 64, lines=ROWS)
    return SegmentRecord(attempt=lease.attempt, fence=lease.fence, ok=ROWS, failed=0, output=part)


def run(site: Site, meter: Meter, jobs: int, shards: int) -> None:
    source = site.settings.state_dir / "input.jsonl"
    source.write_bytes(b"".join(dumps({"prompt": f"question {n}"}) + b"\n" for n in range(ROWS * shards)))
    ids = []
    with meter.measured("submits", jobs):
        for n in range(jobs):
            spec = prepare(
                str(source),
                model=MODEL,
                stores=site.stores,
                settings=site.settings,
                rows=RecordRows(prompt_column="prompt"),
                terms=Terms(priority=n % 10, tenant=f"tenant-{n % 7}"),
            )
            ids.append(enter(spec, site.ledger, site.stores, site.tokens).id)
    with meter.measured("plans", jobs):
        for job_id in ids:
            site.control.plan(job_id)
    leases = []
    with meter.measured("leases", jobs * shards):
        while (lease := site.ledger.lease(MODEL, uuid4().hex, TTL)) is not None:
            leases.append(lease)
    if len(leases) != jobs * shards:
        raise SystemExit(f"{len(leases)} of {jobs * shards} shards were handed out")
    with meter.measured("beats", len(leases)):
        site.ledger.beat([(lease, 1) for lease in leases], TTL)
    with meter.measured("commits", len(leases)):
        verdicts = {site.ledger.commit(lease, record_of(lease)) for lease in leases}
    if verdicts != {"ok"}:
        raise SystemExit(f"commits gave {verdicts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--shards", type=int, default=20, help="of each job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder, valkey(Path(folder)) as server:
        settings = server.settings(storage=f"file://{folder}/store", max_shard_rows=ROWS)
        ledger = Ledger(server.client)
        meter = Meter(psutil.Process(), psutil.Process(int(server.client.info("server")["process_id"])))
        run(Site.of(settings, ledger), meter, options.jobs, options.shards)


if __name__ == "__main__":
    main()
