"""Jobs in the ledger as tests want them, and a client whose replies get lost."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import redis

from jobs.ledger import Lease, Ledger
from jobs.records import Manifest, ResultFile, SegmentRecord, Usage, WorkerView
from jobs.shards import Shard
from jobs.spec import JobSpec
from tests.jobs.specs import record_spec

TTL = 60.0
ROWS = 10
"""In each shard of `shards`."""

_numbers = count()


def new_spec(**fields: Any) -> JobSpec:
    job_id = fields.setdefault("id", f"job_{next(_numbers)}")
    files = {"output_url": f"file:///{job_id}.jsonl", "error_url": f"file:///{job_id}.errors.jsonl"}
    return record_spec(**{**files, **fields})


def shards(number: int) -> list[Shard]:
    return [
        Shard(i, ROWS * i, ROWS, start=100 * i, end=100 * i + 100, first_line=ROWS * i + 1, place=i)
        for i in range(number)
    ]


def opened(ledger: Ledger, number: int, spec: JobSpec | None = None) -> JobSpec:
    """A job with so many shards that workers may lease."""
    spec = spec or new_spec()
    assert ledger.create(spec)
    assert ledger.add_shards(spec.id, shards(number)) == "ok"
    assert ledger.open(spec, shards=number, rows=ROWS * number, errors=[], error_count=0) == "ok"
    return spec


def leased(ledger: Ledger, spec: JobSpec, attempt: str = "attempt") -> Lease:
    lease = ledger.lease(spec.model, attempt, TTL)
    assert lease is not None
    return lease


def record_of(lease: Lease, **fields: Any) -> SegmentRecord:
    usage = Usage(prompt_tokens=100, completion_tokens=20, cached_tokens=3)
    return SegmentRecord(
        **{"attempt": lease.attempt, "fence": lease.fence, "ok": ROWS - 1, "failed": 1, "usage": usage, **fields}
    )


def manifest_of(spec: JobSpec, state: str = "completed", **fields: Any) -> Manifest:
    defaults: dict[str, Any] = {
        "rows": 0,
        "ok": 0,
        "failed": 0,
        "usage": Usage(),
        "output": ResultFile(url=spec.output_url, size=0, lines=0),
        "errors": None,
        "remaining": None,
        "engines": (),
        "segments": (),
    }
    return Manifest(job_id=spec.id, spec_fingerprint=spec.fingerprint, state=state, **{**defaults, **fields})


def worker(model: str, **fields: Any) -> WorkerView:
    return WorkerView(
        **{"id": "w", "model": model, "slots": 2, "busy": 0, "host": "h", "pid": 1, "engine": "e", **fields}
    )


def key(job_id: str, name: str) -> str:
    return f"pm:{{{job_id}}}:{name}"


def let_leases_run_out(client: redis.Redis, job_id: str, some: Sequence[int] | None = None) -> None:
    """Time passes: these shards' leases, or all, are over at the next sweep."""
    for shard in client.zrange(key(job_id, "leases"), 0, -1) if some is None else some:
        client.zadd(key(job_id, "leases"), {str(shard): 1}, xx=True)


class LossyRedis(redis.Redis):
    """Loses the replies of scripts while `lossy`: it runs them again, as redis-py does when a connection breaks."""

    lossy = False

    def execute_command(self, *args: Any, **options: Any) -> Any:
        reply = super().execute_command(*args, **options)
        return super().execute_command(*args, **options) if self.lossy and args[0] == "EVALSHA" else reply
