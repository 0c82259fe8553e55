"""Handing in a job: the input is put where workers can read it, then the spec is written, then the ledger is told.

In that order, so that whatever the ledger knows of is in storage. A submit that ends in the middle leaves objects that
no job refers to, and no job that cannot run.
"""

import sys
import time

from pydantic import ValidationError

from jobs.broker import PLAN, Tokens
from jobs.errors import ObjectNotFound, UsageError
from jobs.layout import JobLayout, absolute_url, errors_beside
from jobs.ledger import Ledger
from jobs.pooling import Pooling
from jobs.sampling import Sampling
from jobs.settings import Settings
from jobs.spec import Input, InputFile, JobSpec, OnBadRow, OpenAIRows, RecordRows, new_job_id
from jobs.storage import Stores
from jobs.storage.file import path_of

_STDIN = "-"


def prepare(
    source: str,
    *,
    model: str,
    stores: Stores,
    settings: Settings,
    rows: OpenAIRows | RecordRows,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    pooling: Pooling = Pooling(),  # noqa: B008
    output: str | None = None,
    on_bad_row: OnBadRow | None = None,
    model_aliases: tuple[str, ...] = (),
    lora: str | None = None,
    job_id: str | None = None,
) -> JobSpec:
    """The spec of a job on `source` (a path, a URL, or `-`), with the input where workers can read it.

    A local file is uploaded where the storage is not local. Raises UsageError for an input that is missing, a folder,
    or empty, and for an output that could not be written; and whatever the storage raises.
    """
    job_id = job_id or new_job_id()
    layout = JobLayout(settings.storage_url, job_id)
    output_url = absolute_url(output) if output else layout.output
    if output:
        _check_output(output_url, source, stores)
    try:
        return JobSpec(
            id=job_id,
            created_at=int(time.time()),
            storage_url=settings.storage_url,
            model=model,
            model_aliases=model_aliases,
            input=Input(files=(_place_input(source, layout, stores),)),
            output_url=output_url,
            error_url=errors_beside(output_url),
            rows=rows,
            sampling=sampling,
            pooling=pooling,
            lora=lora,
            # OpenAI's batches are all or nothing at validation; a scraped dataset always has a bad line somewhere.
            on_bad_row=on_bad_row or ("fail" if isinstance(rows, OpenAIRows) else "skip"),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def enter(spec: JobSpec, ledger: Ledger, stores: Stores, tokens: Tokens) -> None:
    """Write the spec to storage and the job to the ledger, and wake a planner. May be repeated with the same spec."""
    stores.put_if_absent(spec.layout.spec, spec.model_dump_json().encode())
    ledger.create(spec)
    tokens.send(PLAN, spec.id)


def _check_output(url: str, source: str, stores: Stores) -> None:
    """Find out now what would else be found out when all the work is done."""
    if url == absolute_url(source):
        raise UsageError(f"The output {url} would overwrite the input.", hint="Give the output another name.")
    stores.check_writable(url)


def _place_input(source: str, layout: JobLayout, stores: Stores) -> InputFile:
    if source == _STDIN:
        with stores.writer(layout.input) as writer:
            while piece := sys.stdin.buffer.read(1 << 20):
                writer.write(piece)
        return _pinned(layout.input, stores)
    url = absolute_url(source)
    if url.startswith("file://"):
        path = path_of(url)
        if path.is_dir():
            raise UsageError(f"{source} is a folder.", hint="Give one JSONL file.")
        if not path.exists():
            raise UsageError(f"There is no file {source}.", code="input_not_found")
        if not layout.storage_url.startswith("file://"):
            stores.put_file(layout.input, path)
            url = layout.input
    return _pinned(url, stores)


def _pinned(url: str, stores: Stores) -> InputFile:
    try:
        info = stores.head(url)
    except ObjectNotFound as error:
        raise UsageError(f"There is no object {url}.", code="input_not_found") from error
    if info.size == 0:
        raise UsageError(f"{url} is empty.", code="empty_file", hint="Each line is to be a JSON object.")
    return InputFile(url=info.url, size=info.size, etag=info.etag)
