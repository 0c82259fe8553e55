"""What a row is. The planner and the workers read lines with the same `parse_row`, so that they never disagree."""

import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic_core import from_json

from jobs.errors import RowError
from jobs.formats.csv_rows import REFUSED
from jobs.formats.json_keys import count_kept, repeated_key
from jobs.formats.jsonl import Line, dumps
from jobs.formats.names import compression_of_bytes
from jobs.openai_rows import MAX_CUSTOM_ID, Request, read_request
from jobs.pooling import Pooling
from jobs.row_fields import (
    SHOWN,
    Kind,
    Message,
    Prompt,
    RowRefused,
    read_messages,
    read_prompt,
    read_sampling,
    refuse_lone_surrogates,
    shown,
)
from jobs.sampling import Sampling
from jobs.spec import JobSpec, OpenAIRows, RecordRows
from jobs.templates import render, render_json

MAX_DEPTH = 64

# The parameters that a record may set for itself. Not all: a column called `n` is more likely to be data.
SAMPLING_COLUMNS = {
    name: name
    for name in (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    )
}


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a job.

    `line` and `offset` are its place in the input, in `file` where there are several. `source` is the line as it was
    read and `record` the object in it. `kind` says whether the prompt is put through the model's chat template:
    messages are; a plain prompt of a record is, as one user message; a prompt of a completions request, token ids and
    what is embedded are not. There is one prompt, but for an embedding, which may have several. A record's `custom_id`
    column counts where it is a string of at most 512 characters. `lora` names the adapter that is to answer, if any.
    """

    line: int
    offset: int | None
    custom_id: str | None
    kind: Kind
    prompts: tuple[Prompt, ...]
    params: Sampling | Pooling
    lora: str | None
    record: dict[str, Any]
    source: bytes
    file: str | None = None


def parse_row(line: Line, spec: JobSpec) -> Row | RowError:
    """The row on a line, or what is wrong with the line and where."""
    if line.data is None:
        return RowError(
            code="line_too_long",
            message=f"This line is longer than {spec.max_line_bytes} bytes.",
            line=line.number,
            byte=line.offset,
            file=_file(line, spec),
        )
    custom_id: str | None = None
    try:
        if spec.input.format != "jsonl" and line.data.startswith(REFUSED):
            raise RowRefused(*json.loads(line.data))
        record, has_surrogates = _parse_object(line.data)
        custom_id = _custom_id(record)
        request = _read(record, spec)
        if has_surrogates:
            refuse_lone_surrogates(custom_id, request.prompts, request.params.model_dump())
    except RowRefused as refused:
        return RowError(
            code=refused.code,
            message=_sayable(refused.message),
            param=refused.param and _sayable(refused.param),
            line=line.number,
            byte=line.offset,
            custom_id=custom_id and _sayable(custom_id),
            file=_file(line, spec),
        )
    return Row(line.number, line.offset, custom_id, *request, record, line.data, _file(line, spec))


def _file(line: Line, spec: JobSpec) -> str | None:
    files = spec.input.files
    return files[line.file].label if len(files) > 1 else None


def _sayable(text: str) -> str:
    """The text in characters that UTF-8 has: names and ids in an error come from the row, lone surrogates and all."""
    return text.encode(errors="replace").decode()


def result_columns(spec: JobSpec) -> tuple[str, ...]:
    """The columns that a job's records get in the output; a record that has one of them already is refused."""
    if isinstance(spec.rows, RecordRows) and spec.rows.embed:
        return ("embedding", "usage", "error")
    logprobs = () if spec.sampling.logprobs is None else ("logprobs",)
    return ("response", "finish_reason", *logprobs, "usage", "error")


def object_of(data: bytes) -> dict[str, Any] | None:
    """The JSON object that these bytes are, None where they are none within the limits of a row."""
    try:
        return _parse_object(data)[0]
    except RowRefused:
        return None


def as_json_line(line: bytes, spec: JobSpec) -> bytes:
    """The line of a row of CSV as one of JSON lines that makes the same request. One that is refused stays so."""
    record = object_of(line)
    if record is None or not isinstance(spec.rows, RecordRows):
        return line
    cells = {name: None if record[name] == "" else _parsed(record[name]) for name in SAMPLING_COLUMNS if name in record}
    column = spec.rows.messages_column
    if column is not None and column in record:
        cells[column] = _without_nulls(_parsed(record[column]))
    return dumps({**record, **cells}) + b"\n"


def _read(record: dict[str, Any], spec: JobSpec) -> Request:
    match spec.rows:
        case OpenAIRows():
            return read_request(_without_nulls(record) if spec.input.format == "parquet" else record, spec)
        case RecordRows() as shape:
            return _read_record(record, shape, spec)


def _read_record(record: dict[str, Any], shape: RecordRows, spec: JobSpec) -> Request:
    for name in result_columns(spec):
        if name in record:
            raise RowRefused(
                "column_collision", f"The column '{name}' is written by pagemill: rename it in the input.", name
            )
    if shape.embed:
        return Request("embedding", (_prompt(record, shape),), spec.pooling, spec.lora)
    fields = _parsed_cells(record) if spec.input.format in ("csv", "tsv") else record
    sampling = read_sampling(fields, SAMPLING_COLUMNS, spec.sampling)
    if shape.messages_column is not None or shape.messages_template is not None:
        return Request("chat", (_messages(record, shape, spec),), sampling, spec.lora)
    prompt = _prompt(record, shape)
    system = _system(record, shape)
    if isinstance(prompt, str):
        return Request("chat", ((*system, {"role": "user", "content": prompt}),), sampling, spec.lora)
    if system:
        message = "A prompt of token ids does not go with the job's system message."
        raise RowRefused("invalid_value", message, shape.prompt_column)
    return Request("completion", (prompt,), sampling, spec.lora)


def _prompt(record: dict[str, Any], shape: RecordRows) -> str | list[int]:
    if shape.template is not None:
        return read_prompt(render(shape.template, "template", record), "template")
    column = shape.prompt_column or ""
    return read_prompt(_column(record, column), column)


def _system(record: dict[str, Any], shape: RecordRows) -> tuple[Message, ...]:
    if shape.system_template is not None:
        return ({"role": "system", "content": render(shape.system_template, "system_template", record)},)
    return () if shape.system is None else ({"role": "system", "content": shape.system},)


def _messages(record: dict[str, Any], shape: RecordRows, spec: JobSpec) -> tuple[Message, ...]:
    if shape.messages_template is not None:
        name = "messages_template"
        return read_messages(render_json(shape.messages_template, name, record), name)
    column = shape.messages_column or ""
    value = _column(record, column)
    if spec.input.format != "jsonl":
        value = _without_nulls(_parsed(value))
    return read_messages(value, column)


def _parsed_cells(record: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a CSV's row: numbers and lists are written as in JSON, and an empty cell sets none."""
    return {name: _parsed(record[name]) for name in SAMPLING_COLUMNS if record.get(name, "") != ""}


def _parsed(value: Any) -> Any:
    """The JSON that a string holds; the value itself where it is no string, or holds none."""
    try:
        return from_json(value, allow_inf_nan=False) if type(value) is str else value
    except ValueError:
        return value


def _without_nulls(value: Any) -> Any:
    """A value of a table, whose structs all have all fields, as JSON would have it: without those that are not set."""
    if type(value) is dict:
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if type(value) is list else value


def _column(record: dict[str, Any], name: str) -> Any:
    if record.get(name) is None:
        raise RowRefused("missing_required_parameter", f"Missing required column: '{name}'.", name)
    return record[name]


def _custom_id(record: dict[str, Any]) -> str | None:
    value = record.get("custom_id")
    return value if type(value) is str and len(value) <= MAX_CUSTOM_ID else None


def _parse_object(data: bytes) -> tuple[dict[str, Any], bool]:
    """The JSON object in `data`, and whether its strings may hold lone surrogates. Raises RowRefused."""
    has_surrogates = False
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError:
        # The fast parser also refuses lone surrogates, which are JSON and may stand in columns that pass through.
        value = _parse_slowly(data)
        has_surrogates = True
    # Brackets inside strings count too: a cheap bound first, the exact depth only where that is not enough.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise _not_json(f"It nests more than {MAX_DEPTH} levels deep.")
    if type(value) is not dict:
        raise RowRefused("not_an_object", "This line is JSON, but not an object.")
    if (key := repeated_key(data, *count_kept(value))) is not None:
        raise RowRefused("duplicate_key", f"The key {shown(key)} stands twice in one object.", key[:SHOWN])
    return value, has_surrogates


def _parse_slowly(data: bytes) -> Any:
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _not_json(f"Byte {error.start} is not UTF-8{_likely(data)}.") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at character {error.pos}.") from None
    except RecursionError:
        raise _not_json(f"It nests more than {MAX_DEPTH} levels deep.") from None
    except ValueError:
        raise _not_json("It holds a number that is too long, or is not one in JSON.") from None


def _likely(data: bytes) -> str:
    """What the file may be instead of JSON lines, where its first line begins like that."""
    kind = "UTF-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else compression_of_bytes(data)
    return f": the line begins as {kind} does" if kind else ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _not_json(why: str) -> RowRefused:
    return RowRefused("invalid_json_line", f"This line is not parseable as valid JSON. {why}")


def _depth(value: Any) -> int:
    """How many arrays and objects stand inside each other."""
    depth = 0
    level = [value]
    while level := [item for item in level if type(item) is dict or type(item) is list]:
        depth += 1
        level = [item for box in level for item in (box.values() if type(box) is dict else box)]
    return depth
