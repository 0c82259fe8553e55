"""A place for jobs without processes: a real ledger, a real store, real queues; tests do the workers' part."""

import json
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from jobs.broker import Tokens, make_app, queue_key
from jobs.control import Control
from jobs.errors import RowError
from jobs.formats.jsonl import dumps
from jobs.ledger import Lease, Ledger
from jobs.output import errors_beside
from jobs.planner import PlannedRow, shard_rows
from jobs.records import SegmentRecord, Usage
from jobs.results import Choice, Completion
from jobs.settings import Settings
from jobs.spec import Input, InputFile, JobSpec, RecordRows
from jobs.spool import Spool
from jobs.storage import Stores
from jobs.submit import enter
from tests.jobs.ledgers import TTL
from tests.jobs.specs import openai_spec


@dataclass(frozen=True)
class Site:
    """Jobs on one storage prefix."""

    settings: Settings
    ledger: Ledger
    stores: Stores
    tokens: Tokens

    @classmethod
    def of(cls, settings: Settings, ledger: Ledger) -> "Site":
        return cls(settings, ledger, Stores(settings), Tokens(make_app(settings)))

    @property
    def control(self) -> Control:
        return Control(self.ledger, self.stores, self.tokens, self.settings)

    def spec(self, data: bytes | list[Any], **fields: Any) -> JobSpec:
        """A job on these bytes, or on these values, one a line."""
        if isinstance(data, list):
            data = b"".join(dumps(value) + b"\n" for value in data)
        name = uuid4().hex[:8]
        info = self.stores.put(f"{self.settings.storage_url}/{name}.jsonl", data)
        output = f"{self.settings.storage_url}/{name}-out.jsonl"
        return openai_spec(
            **{
                "id": f"job_{name}",
                "rows": RecordRows(prompt_column="prompt"),
                "input": Input(files=(InputFile(url=info.url, size=info.size, etag=info.etag),)),
                "storage_url": self.settings.storage_url,
                "output_url": output,
                "error_url": errors_beside(output),
                **fields,
            }
        )

    def submit(self, data: bytes | list[Any], **fields: Any) -> JobSpec:
        spec = self.spec(data, **fields)
        enter(spec, self.ledger, self.stores, self.tokens)
        return spec

    def planned(self, rows: int, **fields: Any) -> JobSpec:
        """A job of so many good rows whose shards are ready."""
        spec = self.submit(prompts(rows), **fields)
        self.control.plan(spec.id)
        return spec

    def queued(self, queue: str) -> list[tuple[str, str]]:
        """The tokens in a queue, oldest first: task and arguments."""
        messages = self.ledger.client.lrange(queue_key(queue), 0, -1)
        headers = [json.loads(message)["headers"] for message in reversed(messages)]
        return [(header["task"], header["argsrepr"]) for header in headers]

    def lease(self, spec: JobSpec) -> Lease | None:
        return self.ledger.lease(spec.model, uuid4().hex, TTL)

    def work(self, spec: JobSpec, shards: int = 1_000_000) -> None:
        """Does what workers do, for so many shards."""
        for _ in range(shards):
            if (lease := self.lease(spec)) is None:
                return
            assert self.ledger.commit(lease, self.segment(lease)) == "ok"

    def segment(self, lease: Lease) -> SegmentRecord:
        with Spool(lease.spec, self.stores) as spool:
            for planned in shard_rows(lease.spec, self.stores, lease.shard):
                spool.add(planned, answer(planned))
            return spool.put(lease, "a test")

    def rows(self, url: str) -> list[Any]:
        return [json.loads(line) for line in self.stores.read(url).splitlines()]


def prompts(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {n}"} for n in range(count)]


def answer(planned: PlannedRow) -> Completion | RowError:
    if isinstance(planned.row, RowError):
        return planned.row
    return Completion((Choice(f"answer {planned.index}", "stop"),), Usage(prompt_tokens=3, completion_tokens=2))
