"""A job that runs another's failed rows again: `retry --failed`.

The child has the parent's input, cut into the parent's shards, and its rows are the parent's rows: the same ids, the
same seeds. A worker that has one of its shards takes what the parent answered as it is, and asks the engine for the
rest: rows that failed, and rows that the parent did not come to. So the child's segments, its files and its manifest
are those of a job like any other, with every row once, in order; and the parent's are only read.
"""

import json
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from jobs.errors import ObjectNotFound, PagemillError, PreconditionFailed, UsageError
from jobs.formats.compressed import decompressed
from jobs.formats.names import compression_of
from jobs.formats.parquet import ParquetReader, RangedFile
from jobs.layout import JobLayout
from jobs.output import errors_beside, output_of
from jobs.records import JobView, Manifest, SegmentRecord, Usage
from jobs.results import row_id
from jobs.shards import Shard
from jobs.spec import JobSpec, OpenAIRows, Parent, Terms, new_job_id
from jobs.spool import Kept
from jobs.storage import ObjectInfo, Stores
from jobs.submit import check_output, output_url
from jobs.table import answers_in

_OK = 200
_PARENTS_AT_ONCE = 4
_RETRIABLE = ("completed", "cancelled", "expired")


def retry_spec(parent: JobSpec, view: JobView, output: str | None, terms: Terms, stores: Stores) -> JobSpec:
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
    job_id = new_job_id()
    layout = JobLayout(parent.storage_url, job_id)
    form = output_of(output, otherwise=parent.output.name)
    if form.format != parent.output.format:
        raise UsageError(
            f"The output of job {view.id} is {parent.output.name}, and {output} has the name of {form.name}.",
            code="output_format",
            hint="The answers are kept as they are: give a name of the same form.",
        )
    url = output_url(output) if output else layout.output(form.suffix)
    error_url = errors_beside(url)
    theirs = {parent.output_url, parent.error_url, *(file.url for file in parent.input.files)}
    if taken := [mine for mine in (url, error_url) if mine in theirs]:
        raise UsageError(f"{taken[0]} belongs to job {view.id}.", hint="Give the output another name.")
    if output:
        check_output(url, form, [], stores)
    return parent.model_copy(
        update={
            **terms.model_dump(),
            "id": job_id,
            "created_at": int(time.time()),
            "output": form,
            "output_url": url,
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
            return dict(self._answers(spec, shard, output)) if output else {}
        except (ObjectNotFound, PreconditionFailed) as error:
            raise PagemillError(
                f"The result of job {spec.parent.job_id}, whose failed rows are to run again, is gone: {error}",
                code="parent_changed",
            ) from error

    def _read_segments(self, parent: Parent) -> dict[int, SegmentRecord]:
        manifest = Manifest.model_validate_json(self._stores.read(parent.layout.manifest))
        return {segment.shard: segment.record for segment in manifest.segments}

    def _answers(self, spec: JobSpec, shard: Shard, output: ObjectInfo) -> Iterator[tuple[int, Kept]]:
        if spec.output.format == "parquet":
            label = f"the result of job {spec.parent.job_id}" if spec.parent else output.url
            reader = ParquetReader(RangedFile(self._stores, output.url, output.size, output.etag, label), label)
            return _answers_in_table(spec, shard, reader)
        pieces = self._stores.stream(output.url, 0, output.size, output.etag)
        if (compression := compression_of(output.url)) is not None:
            pieces = decompressed(pieces, compression, output.url)
        return _answers_in_lines(spec, shard, (line + b"\n" for line in b"".join(pieces).split(b"\n") if line))


def _answers_in_lines(spec: JobSpec, shard: Shard, lines: Iterator[bytes]) -> Iterator[tuple[int, Kept]]:
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


def _answers_in_table(spec: JobSpec, shard: Shard, reader: ParquetReader) -> Iterator[tuple[int, Kept]]:
    """The same of a table, which has every row of the shard."""
    answers = (answer for _, batch in reader.batches(0, shard.rows) for answer in answers_in(spec, batch))
    for index, answer in zip(range(shard.first_row, shard.first_row + shard.rows), answers, strict=True):
        if not isinstance(spec.rows, OpenAIRows):
            if answer["error"] is None:
                yield index, Kept(answer, _usage(answer["usage"]))
        elif answer["response"] is not None and answer["response"]["status_code"] == _OK:
            yield index, Kept(answer, _usage(json.loads(answer["response"]["body"])["usage"]))


def _usage(usage: dict[str, Any]) -> Usage:
    cached = usage.get("prompt_tokens_details", usage).get("cached_tokens", 0)
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=cached,
    )
