"""Inputs of any size, written in one pass."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.formats.jsonl import dumps

_TEXT = (
    "How many of the seven books on the second shelf would be left if Ada took every other one of them home, and put "
    "back the two that she had read: first in the order of their titles, then in that of their authors' names? "
)
_ANSWER_LIMIT = 16
_BATCH = 10_000


def record(number: int) -> dict[str, Any]:
    """A row of about 417 bytes, with a custom_id of its own."""
    return {"custom_id": f"row-{number:09}", "prompt": f"{number}: {_TEXT}{_TEXT[:140]}", "source": "shelf"}


def request(number: int) -> dict[str, Any]:
    """An OpenAI line of about 417 bytes."""
    body = {
        "model": "stub",
        "messages": [{"role": "user", "content": f"{number}: {_TEXT}{_TEXT[:24]}"}],
        "max_tokens": _ANSWER_LIMIT,
    }
    return {"custom_id": f"row-{number:09}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def write_lines(path: Path, size: int, row: Callable[[int], dict[str, Any]]) -> int:
    """JSON lines of at least `size` bytes; returns their number."""
    written = 0
    with path.open("wb") as file:
        for number in count():
            if written >= size:
                return number
            written += file.write(dumps(row(number)) + b"\n")
    raise AssertionError("counting has ended")


def write_one_group(path: Path, size: int) -> int:
    """Parquet of records of at least `size` bytes, all in one row group; returns their number.

    Uncompressed, and without dictionaries, which would make it tiny. The writer wants a whole group at once: this takes
    its size in memory.
    """
    rows = -(-size // len(dumps(record(0))))
    schema = pa.schema([("custom_id", pa.string()), ("prompt", pa.string()), ("source", pa.string())])
    table = pa.Table.from_batches(_batches(rows, schema), schema)
    pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False)
    return rows


def _batches(rows: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    numbers = iter(range(rows))
    while some := list(islice(numbers, _BATCH)):
        yield pa.RecordBatch.from_pylist([record(number) for number in some], schema=schema)
