"""Handing in a job: the input is put where workers can read it, then the spec is written, then the ledger is told.

In that order, so that whatever the ledger knows of is in storage. A submit that ends in the middle leaves objects that
no job refers to, and no job that cannot run.
"""

import hashlib
import time
from collections.abc import Sequence
from itertools import islice
from secrets import token_hex

from pydantic import ValidationError
from redis.exceptions import ResponseError

from jobs.broker import PLAN, Tokens
from jobs.errors import (
    IdempotencyConflict,
    LedgerFull,
    ObjectNotFound,
    OutputTaken,
    PreconditionFailed,
    RowError,
    UsageError,
)
from jobs.failpoints import failpoint
from jobs.inputs import InputOptions, find_files, place_files, require_column
from jobs.layout import JobLayout, absolute_url
from jobs.ledger import Ledger
from jobs.lines import read_lines
from jobs.orders import Orders, standing_orders
from jobs.output import Output, OutputFormat, errors_beside, output_of
from jobs.parquet_rows import columns_passed_on
from jobs.planner import MAX_SHARDS
from jobs.pooling import Pooling
from jobs.rows import parse_row
from jobs.sampling import Sampling
from jobs.settings import Settings
from jobs.source import source_of
from jobs.spec import (
    MAX_LINE_BYTES,
    Input,
    InputFile,
    JobSpec,
    OnBadRow,
    OpenAIRows,
    RecordRows,
    Terms,
    job_id_of,
    load_spec,
    new_job_id,
)
from jobs.storage import Stores

_SHARD_BYTES = 1_000
"""What the ledger holds of a shard and of its record."""
_USUAL_SHARD_BYTES = 128 * 1024
"""Of the input: what has the tokens of a shard."""
_ROWS_LOOKED_AT = 20


def prepare(
    source: str | Sequence[str],
    *,
    model: str,
    stores: Stores,
    settings: Settings,
    rows: OpenAIRows | RecordRows,
    input_options: InputOptions = InputOptions(),
    sampling: Sampling = Sampling(),
    pooling: Pooling = Pooling(),
    output: str | None = None,
    output_format: OutputFormat | None = None,
    taken_up: bool = False,
    on_bad_row: OnBadRow | None = None,
    model_aliases: tuple[str, ...] = (),
    lora: str | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    terms: Terms = Terms(),
    idempotency_key: str | None = None,
    job_id: str | None = None,
) -> JobSpec:
    """The spec of a job on `source` (paths, folders, globs, URLs, or `-`), with the input where workers can read it.

    Local files are uploaded where the storage is not local. Raises UsageError for an input that is missing or empty,
    and for an output that could not be written, or whose name contradicts `output_format`; and whatever the storage
    raises. With `taken_up` the output was checked when the run that is taken up began.

    The id follows from the idempotency key, if there is one; `enter` then finds the job that was submitted before.
    """
    if idempotency_key is not None:
        job_id = job_id_of(terms.tenant, idempotency_key)
    job_id = job_id or new_job_id()
    form = output_of(output, output_format)
    # The files of a job that is submitted again must not take the place of those that it runs on.
    layout = JobLayout(settings.storage_url, job_id, submission=f"{token_hex(8)}-" if idempotency_key else "")
    files = find_files([source] if isinstance(source, str) else source, stores)
    url = output_url(output) if output else layout.output(form.suffix)
    if output and not taken_up and not (idempotency_key and _is_there(stores, layout.spec)):
        check_output(url, form, files, stores)
    try:
        return JobSpec(
            **terms.model_dump(),
            id=job_id,
            created_at=int(time.time()),
            storage_url=settings.storage_url,
            model=model,
            model_aliases=model_aliases,
            input=_placed(files, input_options, rows, layout, stores),
            output=form,
            output_url=url,
            error_url=errors_beside(url),
            rows=rows,
            sampling=sampling,
            pooling=pooling,
            lora=lora,
            max_line_bytes=max_line_bytes,
            # OpenAI's batches are all or nothing at validation; a scraped dataset always has a bad line somewhere.
            on_bad_row=on_bad_row or ("fail" if isinstance(rows, OpenAIRows) else "skip"),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _placed(
    files: Sequence[str], options: InputOptions, rows: OpenAIRows | RecordRows, layout: JobLayout, stores: Stores
) -> Input:
    given = place_files(files, options, layout, stores)
    if given.format == "parquet" and isinstance(rows, RecordRows):
        names = columns_passed_on(given).names
        for flag, column in (("--prompt-column", rows.prompt_column), ("--messages-column", rows.messages_column)):
            if column is not None:
                require_column(flag, column, names)
    return given


def enter(spec: JobSpec, ledger: Ledger, stores: Stores, tokens: Tokens) -> JobSpec:
    """Write the spec to storage and the job to the ledger, and wake a planner. May be repeated with the same spec.

    Returns the spec that stands: an earlier one, where the same was submitted before under the same idempotency key.
    Raises IdempotencyConflict where something else was, LedgerFull where there is no room for another job, and
    OutputTaken where a job that has not ended writes the same file. Of a job that is refused nothing is left.
    """
    try:
        ledger.check_room(_ledger_bytes(spec))
        stores.put_if_absent(spec.layout.spec, spec.model_dump_json().encode())
    except PreconditionFailed:
        spec = _submitted_before(spec, stores)
        enter_again(spec, ledger, stores)
    except LedgerFull:
        stores.delete(_placed_files(spec))
        raise
    else:
        failpoint("submit.stored")
        try:
            ledger.create(spec)
        except (OutputTaken, ResponseError):
            # Refused for certain, which a connection that broke is not. The spec goes first: without it, it is no job.
            stores.delete([spec.layout.spec, *_placed_files(spec)])
            raise
    failpoint("submit.entered")
    tokens.send(PLAN, spec.id)
    return spec


def enter_again(spec: JobSpec, ledger: Ledger, stores: Stores) -> Orders:
    """Write a job that storage had before to the ledger, which may have lost it, as its owner wanted it last.

    It is held if it was to be held, and if it was to be cancelled until it is. Raises OutputTaken.
    """
    orders = standing_orders(spec.layout, stores)
    ledger.create(orders.applied_to(spec), paused=orders.paused or orders.cancelled)
    return orders


def first_error(spec: JobSpec, stores: Stores) -> RowError | None:
    """What is wrong with the first row, where all of the first rows are bad: a column may be called otherwise.

    Only for those who wait at a terminal; it is the planner who looks at all rows. None where the files would have to
    be copied before they can be read.
    """
    if not spec.input.is_direct:
        return None
    source = source_of(spec, stores)
    lines = islice(read_lines(spec, stores, source, 0, source.end, 1), _ROWS_LOOKED_AT)
    errors = [row for row in (parse_row(line, spec) for line in lines) if isinstance(row, RowError)]
    return errors[0] if len(errors) == _ROWS_LOOKED_AT else None


def _ledger_bytes(spec: JobSpec) -> int:
    """About how much of the ledger's memory the job will need."""
    return _SHARD_BYTES * (1 + min(spec.input.size // _USUAL_SHARD_BYTES, MAX_SHARDS))


def _placed_files(spec: JobSpec) -> list[str]:
    """The files of the input that were put where workers can read them."""
    return [file.url for file in spec.input.files if file.url.startswith(f"{spec.layout.root}/")]


def _submitted_before(spec: JobSpec, stores: Stores) -> JobSpec:
    """The spec that is in storage under this one's id. The files that were placed for this one are removed."""
    first = load_spec(stores.read(spec.layout.spec), spec.layout.spec)
    same = spec.asks_the_same(first) and _same_input(spec.input, first.input, stores)
    kept = {file.url for file in first.input.files}
    stores.delete(url for url in _placed_files(spec) if url not in kept)
    if not same:
        raise IdempotencyConflict(
            f"Job {first.id} was submitted under this idempotency key, with another input or other options.",
            hint="Use another key for another job.",
        )
    return first


def _same_input(one: Input, other: Input, stores: Stores) -> bool:
    """Whether both have the same rows, byte for byte."""
    if len(one.files) != len(other.files) or one.model_copy(update={"files": other.files}) != other:
        return False
    return all(_same_file(a, b, stores) for a, b in zip(one.files, other.files, strict=True))


def _same_file(one: InputFile, other: InputFile, stores: Stores) -> bool:
    if (one.url, one.etag) == (other.url, other.etag):
        return True
    if one.size != other.size or one.url == other.url:
        return False
    return _digest(one, stores) == _digest(other, stores)


def _digest(file: InputFile, stores: Stores) -> bytes:
    digest = hashlib.sha256()
    for piece in stores.stream(file.url, 0, file.size, file.etag):
        digest.update(piece)
    return digest.digest()


def _is_there(stores: Stores, url: str) -> bool:
    try:
        stores.head(url)
    except ObjectNotFound:
        return False
    return True


def output_url(output: str) -> str:
    """The output's URL, with the slash that tells a folder."""
    url = absolute_url(output)
    return f"{url.rstrip('/')}/" if output.endswith("/") else url


def check_output(url: str, form: Output, inputs: Sequence[str], stores: Stores) -> None:
    """Find out now what would else be found out when all the work is done."""
    if form.folder:
        _check_folder(url, form, stores)
        return
    if url in inputs:
        raise UsageError(f"The output {url} would overwrite the input.", hint="Give the output another name.")
    stores.check_writable(url)


def _check_folder(url: str, form: Output, stores: Stores) -> None:
    """Readers take all files of a folder for one dataset: it has to be ours alone."""
    if not url.rpartition("://")[2].strip("/").count("/") and url.startswith("s3://"):
        raise UsageError(f"The output {url} is a whole bucket.", hint="Name a folder in it.")
    stores.check_writable(f"{url}part-00000{form.suffix}")
    if (there := next(stores.list(url), None)) is not None:
        raise UsageError(
            f"The output folder {url} is not empty: it holds {there.url.removeprefix(url)}.",
            code="output_not_empty",
            hint="Name a folder that does not exist yet.",
        )
