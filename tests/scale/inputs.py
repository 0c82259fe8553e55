"""Inputs of any size, written in one pass: rows of about 417 bytes, each with an id and a prompt of its own."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_TEXT = (
    "How many of the seven books on the second shelf would be left if Ada took every other one of them home, and put "
    "back the two that she had read: first in the order of their titles, then in that of their authors' names? "
)
PROMPT = f"{_TEXT}{_TEXT[:140]}"
RECORD = f'{{"custom_id":"row-%09d","prompt":"%d: {PROMPT}","source":"shelf"}}\n'.encode()
REQUEST = (
    '{"custom_id":"row-%09d","method":"POST","url":"/v1/chat/completions","body":{"model":"stub","messages":'
    f'[{{"role":"user","content":"%d: {PROMPT[:-100]}"}}],"max_tokens":16}}}}\n'
).encode()
_SCHEMA = pa.schema([("custom_id", pa.string()), ("prompt", pa.string()), ("source", pa.string())])
_BATCH = 1_000


def write_lines(path: Path, size: int, line: bytes) -> int:
    """At least `size` bytes of such lines; returns their number."""
    written = rows = 0
    with path.open("wb") as file:
        for first in count(step=_BATCH):
            if written >= size:
                break
            written += file.write(b"".join(line % (number, number) for number in range(first, first + _BATCH)))
            rows += _BATCH
    return rows


def write_one_group(path: Path, size: int, prompt: str = PROMPT) -> int:
    """Parquet of records with at least `size` bytes of prompts, all in one row group; returns their number.

    Uncompressed, and without dictionaries, which would make it tiny. The writer wants a whole group at once: this takes
    its size in memory.
    """
    rows = -(-size // len(prompt) // _BATCH) * _BATCH
    table = pa.Table.from_batches(_batches(rows, prompt), _SCHEMA)
    pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False)
    return rows


def _batches(rows: int, prompt: str) -> Iterator[pa.RecordBatch]:
    for first in range(0, rows, _BATCH):
        numbers = range(first, first + _BATCH)
        ids, prompts = [f"row-{number:09}" for number in numbers], [f"{number}: {prompt}" for number in numbers]
        yield pa.record_batch([ids, prompts, ["shelf"] * _BATCH], schema=_SCHEMA)
