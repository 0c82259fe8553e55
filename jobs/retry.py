"""A job that runs another's failed rows again: `retry --failed`.

The child has the parent's input, cut into the parent's shards, and its rows are the parent's rows: the same ids, the
same seeds. A worker that has one of its shards takes what the parent answered as it is, and asks the engine for the
rest: rows that failed, and rows that the parent did not come to. So the child's segments, its files and its manifest
are those of a job like any other, with every row once, in order; and the parent's are only read.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jobs.errors import ObjectNotFound, PagemillError, PreconditionFailed, UsageError
from jobs.formats.compressed import decompressed
from jobs.formats.names import compression_of
from jobs.layout import JobLayout
from jobs.output import errors_beside
from jobs.records import JobView, Manifest, SegmentRecord, Usage
from jobs.results import row_id
from jobs.shards import Shard
from jobs.spec import JobSpec, OpenAIRows, Parent, Terms, new_job_id
from jobs.storage import ObjectInfo, Stores

_PARENTS_AT_ONCE = 4
_RETRIABLE = ("completed", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class Kept:
    """What the parent answered to a row: its line in the output, as it is."""

    line: bytes
    usage: Usage


def retry_spec(parent: JobSpec, view: JobView, output_url: str | None, terms: Terms, stores: Stores) -> JobSpec:
    """The spec of a job that runs the failed rows of one that has ended.

    Raises UsageError where the parent has not ended, has no result or no failed row, or where the output is one of
    its files.
    """
    if view.state not in _RETRIABLE:
        why = "has no result: its input was refused" if view.state == "failed" else f"is {view.state}"
        hint = "Mend the input, and submit it again." if view.terminal else f"`pagemill watch {view.id}` waits for it."
        raise UsageError(f"Job {view.id} {why}.", code="not_retriable", hint=hint)
    if view.error_url is None and view.remaining_url is None:
        raise UsageError(f"Job {view.id} has no failed row.", code="nothing_to_retry")
    if parent.output.format != "jsonl":
        raise UsageError(
            f"The output of job {view.id} is {parent.output.format}: its rows cannot be merged.",
            code="output_format",
            hint=f"Submit the rows in {view.error_url} as a job of their own.",
        )
    job_id = new_job_id()
    layout = JobLayout(parent.storage_url, job_id)
    output_url = output_url or layout.output(parent.output.suffix)
    error_url = errors_beside(output_url)
    theirs = {parent.output_url, parent.error_url, *(file.url for file in parent.input.files)}
    if taken := [url for url in (output_url, error_url) if url in theirs]:
        raise UsageError(f"{taken[0]} belongs to job {view.id}.", hint="Give the output another name.")
    stores.check_writable(output_url)
    return parent.model_copy(
        update={
            **terms.model_dump(),
            "id": job_id,
            "created_at": int(time.time()),
            "output_url": output_url,
            "error_url": error_url,
            "parent": Parent(job_id=parent.id, storage_url=parent.storage_url, origin=parent.origin),
        }
    )


class KeptAnswers:
    """What the parents of retries answered, shard by shard. Thread-safe."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._segments = lru_cache(_PARENTS_AT_ONCE)(self._read_segments)

    def of(self, spec: JobSpec, shard: Shard) -> dict[int, Kept]:
        """The answers to rows of the shard, by row; none where the job is no retry, or the parent did not come to it.

        Raises PagemillError (`parent_changed`) where the parent's result is no longer what its manifest says.
        """
        if spec.parent is None:
            return {}
        try:
            record = self._segments(spec.parent).get(shard.index)
            if record is None or record.output is None:
                return {}
            output, _ = record.objects(spec.parent.layout, shard.index)
            return dict(_answers(spec, shard, self._lines(output))) if output else {}
        except (ObjectNotFound, PreconditionFailed) as error:
            raise PagemillError(
                f"The result of job {spec.parent.job_id}, whose failed rows are to run again, is gone: {error}",
                code="parent_changed",
            ) from error

    def _read_segments(self, parent: Parent) -> dict[int, SegmentRecord]:
        manifest = Manifest.model_validate_json(self._stores.read(parent.layout.manifest))
        return {segment.shard: segment.record for segment in manifest.segments}

    def _lines(self, output: ObjectInfo) -> Iterator[bytes]:
        pieces = self._stores.stream(output.url, 0, output.size, output.etag)
        if (compression := compression_of(output.url)) is not None:
            pieces = decompressed(pieces, compression, output.url)
        yield from (line + b"\n" for line in b"".join(pieces).split(b"\n") if line)


def _answers(spec: JobSpec, shard: Shard, lines: Iterator[bytes]) -> Iterator[tuple[int, Kept]]:
    """Those of the output lines of a shard that are answers, each with its row."""
    rows = range(shard.first_row, shard.first_row + shard.rows)
    if isinstance(spec.rows, OpenAIRows):
        places = {row_id(spec, index): index for index in rows}
        for line in lines:
            answered = json.loads(line)
            yield places[answered["id"]], Kept(line, _usage(answered["response"]["body"]["usage"]))
        return
    for index, line in zip(rows, lines, strict=True):
        record = json.loads(line)
        if record["error"] is None:
            yield index, Kept(line, _usage(record["usage"]))


def _usage(usage: dict[str, Any]) -> Usage:
    cached = usage.get("prompt_tokens_details", usage).get("cached_tokens", 0)
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=cached,
    )
