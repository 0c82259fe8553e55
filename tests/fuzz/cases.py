"""An input of any bytes, and what must hold of it: it ends in an error of ours, or every row is run or refused.

How many rows there are is counted here a second time, by other means than the planner's.
"""

import bz2
import gzip
import json
import tempfile
import zlib
from codecs import BOM_UTF8 as BOM
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from jobs.errors import PagemillError, RowError
from jobs.inputs import InputOptions
from jobs.joining import join_output
from jobs.output import Output
from jobs.planner import Planned, plan, raw_lines, shard_rows
from jobs.records import Usage
from jobs.results import Choice, Completion, Embeddings
from jobs.rows import Row
from jobs.settings import Settings
from jobs.spec import JobSpec, OpenAIRows, RecordRows
from jobs.spool import Spool
from jobs.storage import Stores
from jobs.submit import prepare

MAX_LINE_BYTES = 1024
SHAPES = (
    RecordRows(prompt_column="prompt"),
    RecordRows(messages_column="messages"),
    RecordRows(template="{{ prompt }}{% for m in messages|default([]) %}{{ m }}{% endfor %}"),
    RecordRows(messages_template='[{"role": "user", "content": {{ row|tojson }}}]'),
    RecordRows(prompt_column="prompt", embed=True),
    OpenAIRows(),
)
OUTPUTS = (
    Output(),
    Output(compression="gzip"),
    Output(format="parquet"),
    Output(folder=True),
    Output(format="parquet", folder=True),
)
WHERE = "n > 1 and not prompt is null"
KINDS = (".jsonl", ".csv", ".tsv", ".parquet")
PACKING: tuple[tuple[str, Callable[[bytes], bytes]], ...] = (
    ("", bytes),
    (".gz", gzip.compress),
    (".bz2", bz2.compress),
    (".zst", lambda data: pa.compress(data, codec="zstd", asbytes=True)),
    # As they are: archives, whole or not.
    (".gz", bytes),
    (".bz2", bytes),
    (".zst", bytes),
)
PARTS: tuple[dict[str, Any], ...] = (
    {},
    {"limit": 1},
    {"limit": 3},
    {"sample": 2},
    {"where": True},
    {"columns": ("prompt",)},
    {"where": True, "columns": ("n", "prompt"), "sample": 1},
)
SEPARATOR = b"\n\x1d\n"
_CHOICES = 5
_NO_ROWS = "empty_file"
_MAY_FAIL = frozenset(
    {_NO_ROWS, "invalid_csv_header", "truncated_input", "corrupt_input", "decompression_bomb", "usage"}
)


@dataclass(frozen=True)
class Case:
    """Files by name, whose suffixes say what they are, and how a job takes them."""

    files: Sequence[tuple[str, bytes]]
    shape: RecordRows | OpenAIRows = SHAPES[0]
    output: Output = OUTPUTS[0]
    limit: int | None = None
    sample: int | None = None
    where: bool = False
    columns: tuple[str, ...] | None = None
    shard_rows: int = 2


def case_of(data: bytes) -> Case:
    """A case made of any bytes. The first five choose, each modulo the number of choices.

    0 what the files are | 1 how they are packed | 2 the rows' shape | 3 the output | 4 which rows | files ...
    """
    kind, packing, shape, output, part = data[:_CHOICES].ljust(_CHOICES, b"\0")
    name = KINDS[kind % len(KINDS)]
    options = dict(PARTS[part % len(PARTS)])
    if name == ".parquet":
        files = [(name, data[_CHOICES:])]
    else:
        suffix, pack = PACKING[packing % len(PACKING)]
        files = [(name + suffix, pack(file)) for file in data[_CHOICES:].split(SEPARATOR)[:4]]
        options = {key: value for key, value in options.items() if key not in ("where", "columns")}
    return Case(files, SHAPES[shape % len(SHAPES)], OUTPUTS[output % len(OUTPUTS)], **options)


def check(case: Case) -> str:
    """Raises whatever is wrong, AssertionError for a row too many or too few; returns how the planner ended."""
    with tempfile.TemporaryDirectory(prefix="pagemill-fuzz-") as name:
        folder = Path(name)
        sources = []
        for place, (file, data) in enumerate(case.files):
            path = folder / "in" / f"{place}{file}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            sources.append(str(path))
        settings = Settings(state_dir=folder, storage=f"file://{folder}/store", max_shard_rows=case.shard_rows)
        stores = Stores(settings)
        expected = _counted(case)
        try:
            spec = _spec(case, sources, settings, stores, folder)
            planned = plan(spec, stores, settings)
        except PagemillError as error:
            _check_failure(case, error, expected)
            return error.code
        _check_rows(case, spec, planned, stores, expected)
        return "planned"


def _check_failure(case: Case, error: PagemillError, expected: int | None) -> None:
    assert json.dumps(error.as_dict())
    assert error.code in _MAY_FAIL, error
    assert error.code != _NO_ROWS or not expected, error
    # Lines of a whole file are refused one by one: they fail no job.
    assert not (expected and case.files[0][0].startswith(".jsonl")), error


def _spec(case: Case, sources: list[str], settings: Settings, stores: Stores, folder: Path) -> JobSpec:
    suffix = "/" if case.output.folder else case.output.suffix
    spec = prepare(
        sources,
        model="tiny",
        stores=stores,
        settings=settings,
        rows=case.shape,
        input_options=InputOptions(
            limit=case.limit,
            sample=case.sample,
            where=WHERE if case.where else None,
            columns=case.columns,
        ),
        output=f"{folder}/out{suffix}",
        output_format=case.output.name,
        on_bad_row="skip",
        max_line_bytes=MAX_LINE_BYTES,
    )
    assert spec.output == case.output
    return spec


def _check_rows(case: Case, spec: JobSpec, planned: Planned, stores: Stores, expected: int | None) -> None:
    rows = [row for shard in planned.shards for row in shard_rows(spec, stores, shard)]
    assert [row.index for row in rows] == list(range(planned.rows))
    refused = [row.row for row in rows if isinstance(row.row, RowError)]
    assert refused == list(planned.errors)
    assert len(refused) == planned.bad
    assert all(json.dumps(error.model_dump()) for error in refused)
    # With a limit, what lies behind it is not read, and may be no file at all.
    assert planned.rows == (case.limit if expected is None else expected), (planned.rows, expected)
    lines = b"".join(raw_lines(spec, stores, planned.shards))
    assert lines.count(b"\n") == sum(row.line.data is not None for row in rows)
    _check_output(spec, planned, stores)


def _check_output(spec: JobSpec, planned: Planned, stores: Stores) -> None:
    """Rows in are rows out and rows refused, whatever is in them."""
    if planned.schema is not None:
        stores.put(spec.layout.schema, planned.schema.serialize().to_pybytes())
    segments = {}
    failed = 0
    for shard in planned.shards:
        with Spool(spec, stores) as spool:
            for row in shard_rows(spec, stores, shard):
                spool.add(row, row.row if isinstance(row.row, RowError) else _answer(spec, row.row))
            segments[shard.index] = spool.put_parts(shard.index, 0, "a")
            failed += spool.failed
    result = join_output(spec, stores, segments, lambda: None)
    assert failed == planned.bad
    folder = Path(spec.output_url.removeprefix("file://"))
    files = sorted(folder.glob("part-*")) if spec.output.folder else [folder]
    as_lines = isinstance(spec.rows, OpenAIRows) and spec.output.format == "jsonl"
    written = planned.rows - planned.bad if as_lines else planned.rows
    assert result.lines == written == sum(_rows_in_output(spec, file.read_bytes()) for file in files)


def _answer(spec: JobSpec, row: Row) -> Any:
    if row.kind == "embedding":
        return Embeddings((b"\0\0\x80?",) * len(row.prompts), Usage(prompt_tokens=1))
    return Completion((Choice("an answer\u2028", "stop"),), Usage(prompt_tokens=1, completion_tokens=1))


def _rows_in_output(spec: JobSpec, data: bytes) -> int:
    if spec.output.format == "parquet":
        return int(pq.read_table(pa.BufferReader(data)).num_rows)
    lines = (gzip.decompress(data) if spec.output.compression else data).decode().splitlines()
    assert all(type(json.loads(line)) is dict for line in lines)
    return len(lines)


# --- the second count ----------------------------------------------------------------------------------------------


def _counted(case: Case) -> int | None:
    """How many rows the files have that are asked for; None where one of them cannot be read."""
    total = 0
    for name, data in case.files:
        rows = _rows_of(case, name, data)
        if rows is None:
            return None
        total += rows
    most = case.limit if case.limit is not None else case.sample
    return total if most is None else min(total, most)


def _rows_of(case: Case, name: str, data: bytes) -> int | None:
    if name.startswith(".parquet"):
        return _table_rows(case, data)
    text = unpacked(name, data)
    if text is None:
        return None
    if name.startswith(".jsonl"):
        first, *rest = text.split(b"\n")
        lines = [first.removeprefix(BOM), *rest]
        return sum(len(line) > MAX_LINE_BYTES or bool(line.strip()) for line in lines)
    return _csv_rows(text, "\t" if name.startswith(".tsv") else ",")


def _table_rows(case: Case, data: bytes) -> int | None:
    try:
        # Damage in a column that is not read is nobody's.
        columns = case.columns and [*case.columns, *(("n", "prompt") if case.where else ())]
        table = pq.read_table(pa.BufferReader(data), columns=columns, use_threads=False)
        if not case.where:
            return int(table.num_rows)
        return sum(row["n"] is not None and row["n"] > 1 and row["prompt"] is not None for row in table.to_pylist())
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError, TypeError):
        return None


def unpacked(name: str, data: bytes) -> bytes | None:
    """What is in an archive, by other libraries than ours; None where it is none, or not whole."""
    try:
        if name.endswith(".gz"):
            return _gunzipped(data)
        if name.endswith(".bz2"):
            return _unbzipped(data)
        if name.endswith(".zst"):
            return _unzstd(data)
    except (OSError, EOFError, ValueError, zlib.error, zstandard.ZstdError):
        return None
    return data


def _gunzipped(data: bytes) -> bytes | None:
    """All members; Python's own gzip module takes zeros behind them for padding, which is more than we do."""
    if not data:
        return None
    found = b""
    while data:
        member = zlib.decompressobj(zlib.MAX_WBITS | 32)
        found += member.decompress(data) + member.flush()
        if not member.eof:
            return None
        data = member.unused_data
    return found


def _unbzipped(data: bytes) -> bytes | None:
    """All streams; Python's own `bz2.decompress` passes over what stands behind them."""
    if not data:
        return None
    found = b""
    while data:
        stream = bz2.BZ2Decompressor()
        found += stream.decompress(data)
        if not stream.eof:
            return None
        data = stream.unused_data
    return found


def _unzstd(data: bytes) -> bytes | None:
    if not data:
        return None
    found = b""
    while data:
        frame = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        found += frame.decompress(data)
        if not frame.eof:
            return None
        data = frame.unused_data
    return found


def _csv_rows(text: bytes, delimiter: str) -> int:
    """Rows below the header by a state machine of RFC 4180. One that breaks it ends with the line where it does."""
    lines = _lines(text)
    rows = 0
    state, size = "start", 0
    for place, line in enumerate(lines):
        size += len(line) if place else len(line.removeprefix(BOM))
        if len(line) > MAX_LINE_BYTES or size > MAX_LINE_BYTES:
            state = "broken"
        else:
            characters = line.decode(errors="replace")
            state = _after(state, characters.removeprefix("\ufeff") if not place else characters, delimiter)
        if state != "quoted":
            rows += state != "blank"
            state, size = "start", 0
    rows += state == "quoted"
    return max(rows - 1, 0)


def _lines(text: bytes) -> list[bytes]:
    parts = text.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + [part for part in parts[-1:] if part]


def _after(state: str, line: str, delimiter: str) -> str:
    """What a line ends in: `quoted` where the row goes on, else `whole`, `blank` or `broken`."""
    if state == "start" and not line.strip("\r\n"):
        return "blank"
    for place, character in enumerate(line):
        match state:
            case "quoted":
                state = "quote" if character == '"' else "quoted"
            case "start" if character == '"':
                state = "quoted"
            case "quote" if character == '"':
                state = "quoted"
            case _ if character == delimiter:
                state = "start"
            case _ if character in "\r\n":
                return "whole" if not line[place:].strip("\r\n") else "broken"
            case "quote":
                return "broken"
            case _:
                state = "text"
    return "quoted" if state == "quoted" else "whole"
