"""A job's output as a table, whose columns are fixed before its first row: what a Parquet output consists of.

Records: the input's columns as they are, then those of the answer, null where the row failed. OpenAI rows: the four
fields of a batch line, with the response's body as JSON text. Either way each row of the input is a row of the table,
in the same order, and `error` says why one has no answer.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
from pydantic_core import from_json

from jobs.errors import ObjectNotFound, PagemillError, RowError
from jobs.formats.arrow_types import cast, without_nulls
from jobs.formats.json_columns import JsonColumns, column_of, encoder_of, json_text_field, without_surrogates
from jobs.formats.json_values import json_field
from jobs.formats.jsonl import Line, dumps
from jobs.parquet_rows import columns_passed_on
from jobs.results import (
    Completion,
    Embeddings,
    Outcome,
    answer_columns,
    error_line,
    output_line,
    passes_through,
    usage_columns,
)
from jobs.rows import Row, object_of, result_columns
from jobs.spec import JobSpec, RecordRows
from jobs.storage import Store

_ERROR = pa.struct([("code", pa.string()), ("message", pa.string()), ("param", pa.string())])
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens")
_TOKEN = [("token", pa.string()), ("logprob", pa.float64()), ("bytes", pa.list_(pa.uint8()))]
_VECTOR = pa.list_(pa.float32())
_BATCH_LINE = pa.schema(
    [
        ("id", pa.string()),
        ("custom_id", pa.string()),
        ("response", pa.struct([("status_code", pa.int32()), ("request_id", pa.string()), ("body", pa.string())])),
        ("error", pa.struct([("code", pa.string()), ("message", pa.string())])),
    ]
)
_JSON_BATCH_LINE = pa.schema(
    [
        *(_BATCH_LINE.field(name) for name in ("id", "custom_id")),
        ("response", pa.struct([*_BATCH_LINE.field("response").type.fields[:2], json_text_field("body")])),
        _BATCH_LINE.field("error"),
    ]
)
_TOKEN_BYTES = 64
"""About what one token's log-probability takes."""


def result_schema(spec: JobSpec) -> pa.Schema:
    """The columns that the job itself writes; `result_columns` of records, with their types."""
    if not isinstance(spec.rows, RecordRows):
        return _BATCH_LINE
    several = spec.sampling.n is not None and spec.sampling.n > 1
    logprobs = pa.list_(pa.struct([*_TOKEN, ("top_logprobs", pa.list_(pa.struct(_TOKEN)))]))
    types = {
        "embedding": pa.string() if spec.pooling.encoding_format == "base64" else _VECTOR,
        "response": pa.list_(pa.string()) if several else pa.string(),
        "finish_reason": pa.list_(pa.string()) if several else pa.string(),
        "logprobs": pa.list_(logprobs) if several else logprobs,
        "usage": pa.struct([(name, pa.int64()) for name in _COUNTS]),
        "error": _ERROR,
    }
    return pa.schema([(name, types[name]) for name in result_columns(spec)])


def output_schema(spec: JobSpec, stores: Store) -> pa.Schema:
    """The columns of a planned job's output. Raises ObjectNotFound where nobody has planned it, or they are gone."""
    if spec.input.format == "parquet":
        return _with_results(spec, columns_passed_on(spec.input))
    return pa.ipc.read_schema(pa.py_buffer(stores.read(spec.layout.schema)))


def _with_results(spec: JobSpec, passed_on: pa.Schema) -> pa.Schema:
    """The input's columns and ours. OpenAI rows pass nothing on, and nobody a column of the name of one of ours."""
    ours = result_schema(spec)
    if not isinstance(spec.rows, RecordRows):
        return ours
    passed = [field for field in passed_on if field.name not in ours.names]
    return pa.schema([*(field.with_type(without_nulls(field.type)) for field in passed), *ours])


def answers_in(spec: JobSpec, batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """What each row of an output holds beside the columns of the input, as `OutputTable.keep` takes it."""
    for answer in batch.select(result_schema(spec).names).to_pylist():
        if isinstance(vector := answer.get("embedding"), list):
            answer["embedding"] = array("f", vector).tobytes()
        yield answer


def json_columns(spec: JobSpec, stores: Store) -> pa.Schema | None:
    """The columns that readers find in a folder of JSON lines; None where there are too many, or no plan yet."""
    if not isinstance(spec.rows, RecordRows):
        return _JSON_BATCH_LINE
    try:
        columns = output_schema(spec, stores)
    except ObjectNotFound:
        return None
    return pa.schema([json_field(field) for field in columns]) if spec.input.format == "parquet" else columns


def schema_finder(spec: JobSpec) -> "SchemaFinder | None":
    """What finds the columns of a job's output; None where it has none, or they are the input's own."""
    has_columns = spec.output.format == "parquet" or spec.output.folder
    return SchemaFinder(spec) if has_columns and spec.input.format != "parquet" else None


class SchemaFinder:
    """Finds the columns of a job's output while its input is read."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._columns: JsonColumns | None = JsonColumns()

    def add(self, line: Line, row: Row | RowError) -> None:
        """Raises PagemillError (`too_many_columns`) where the output is Parquet; JSON lines can do without."""
        if self._columns is None or not isinstance(self._spec.rows, RecordRows):
            return
        if (record := _passed_on(line, row)) is not None:
            try:
                self._columns.add(record)
            except PagemillError:
                if self._spec.output.format == "parquet":
                    raise
                self._columns = None

    def schema(self) -> pa.Schema | None:
        """None where there are too many."""
        return None if self._columns is None else _with_results(self._spec, self._columns.schema())


class OutputTable:
    """Rows of the output, collected until they are taken as one batch."""

    def __init__(self, spec: JobSpec, schema: pa.Schema) -> None:
        self._spec = spec
        self._schema = schema
        ours = result_schema(spec)
        passed = [field for field in schema if field.name not in ours.names]
        self._passed = _TableRows(passed) if spec.input.format == "parquet" else _JsonRows(passed)
        self._ours = list(ours)
        self._answers: list[dict[str, Any]] = []
        self.size = 0
        """About how many bytes are held."""

    def add(self, index: int, line: Line, row: Row | RowError, outcome: Outcome) -> None:
        """Row `index` of the job, which is `line` of the input, and what it came to."""
        if isinstance(self._spec.rows, RecordRows):
            self._passed.add(line, row)
            self._answers.append(self._answer(outcome))
        else:
            self._answers.append(_batch_line(self._spec, index, line, row, outcome))
        self.size += len(line.data or b"") + _size(outcome)

    def keep(self, line: Line, row: Row | RowError, answer: dict[str, Any]) -> None:
        """A row whose answer is one that `answers_in` found in the same job's or another's output."""
        if isinstance(self._spec.rows, RecordRows):
            self._passed.add(line, row)
        self._answers.append(answer)
        self.size += 2 * len(line.data or b"")

    @property
    def rows(self) -> int:
        return len(self._answers)

    def take(self) -> pa.Table:
        """The rows that were added since the last time."""
        columns = [*self._passed.take(), *(self._column(field) for field in self._ours)]
        self._answers, self.size = [], 0
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _answer(self, outcome: Outcome) -> dict[str, Any]:
        if isinstance(outcome, Embeddings) and self._spec.pooling.encoding_format != "base64":
            return {"embedding": outcome.vectors[0], **usage_columns(outcome)}
        return answer_columns(self._spec, outcome)

    def _column(self, field: pa.Field) -> pa.Array:
        values = [answer[field.name] for answer in self._answers]
        return _vectors(values) if field.type == _VECTOR else pa.array(values, field.type)


class _JsonRows:
    """The input's columns of rows that are JSON objects."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        self._fields = [(field, encoder_of(field)) for field in fields]
        self._records: list[dict[str, Any] | None] = []

    def add(self, line: Line, row: Row | RowError) -> None:
        self._records.append(_passed_on(line, row))

    def take(self) -> list[pa.ChunkedArray]:
        records, self._records = self._records, []
        return [pa.chunked_array([column_of(records, *field)]) for field in self._fields]


class _TableRows:
    """The input's columns of rows that are rows of a table: slices of it, so that no value is touched."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        self._fields = fields
        self._slices: list[tuple[pa.RecordBatch, int, int]] = []

    def add(self, line: Line, row: Row | RowError) -> None:
        if line.batch is None:
            raise ValueError("a row of a table without its columns")
        if self._slices:
            batch, start, end = self._slices[-1]
            if batch is line.batch and end == line.place:
                self._slices[-1] = (batch, start, end + 1)
                return
        self._slices.append((line.batch, line.place, line.place + 1))

    def take(self) -> list[pa.ChunkedArray]:
        batches = [batch.slice(start, end - start) for batch, start, end in self._slices]
        self._slices = []
        return [
            pa.chunked_array([cast(batch.column(field.name), field.type) for batch in batches], field.type)
            for field in self._fields
        ]


def _passed_on(line: Line, row: Row | RowError) -> dict[str, Any] | None:
    """The record whose columns stand in the table; None for a line that has none to pass on."""
    if isinstance(row, Row):
        record: dict[str, Any] | None = row.record
    elif passes_through(row) and line.data is not None:
        record = object_of(line.data)
    else:
        record = None
    if record is not None and line.data is not None and (b"\\ud" in line.data or b"\\uD" in line.data):
        return dict(without_surrogates(record))
    return record


def _batch_line(spec: JobSpec, index: int, line: Line, row: Row | RowError, outcome: Outcome) -> dict[str, Any]:
    given = row if isinstance(row, Row) else None
    if isinstance(outcome, RowError):
        data = error_line(spec, index, line, given, outcome)
    else:
        data = output_line(spec, index, line, given, outcome) or b""
    fields: dict[str, Any] = from_json(data)
    response = fields["response"]
    return (
        fields if response is None else {**fields, "response": {**response, "body": dumps(response["body"]).decode()}}
    )


def _vectors(values: list[bytes | None]) -> pa.Array:
    """Float32 numbers as they come from the engine, little-endian, as lists; nothing is made of them in between."""
    offsets = pa.array(accumulate((len(value or b"") // 4 for value in values), initial=0), pa.int32())
    data = pa.py_buffer(b"".join(value for value in values if value is not None))
    numbers = pa.Array.from_buffers(pa.float32(), data.size // 4, [None, data])
    return pa.ListArray.from_arrays(offsets, numbers, mask=pa.array([value is None for value in values], pa.bool_()))


def _size(outcome: Outcome) -> int:
    match outcome:
        case Completion(choices):
            tokens = sum(1 + len(token.top) for choice in choices for token in choice.logprobs or ())
            return sum(len(choice.text) for choice in choices) + _TOKEN_BYTES * tokens
        case Embeddings(vectors):
            return sum(map(len, vectors))
        case RowError():
            return len(outcome.message)
