"""Whatever bytes a file holds: the planner ends, with an error of ours or with every row run or refused."""

import bz2
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.errors import PagemillError, RowError
from jobs.rows import Row
from tests.jobs.test_formats_text import bench_in, zstd

ROWS = (b'{"prompt":"a"}', b'{"prompt":"b","custom_id":"1"}', b"prompt\n", b"a,b", b'{"prompt":"a","prompt":"b"}')
ODD_ROWS = (b'{"prompt":"\\ud800"}', b'{"prompt":NaN}', b'{"prompt":1e999}', b"[" * 3000, b"9" * 5000)
MARKS = (b"{", b"}", b"\n", b"\r\n", b"\r", b'"', b",", b"\t", b" ", b"\x00", b"\\ud800")
CODES = (b"\xef\xbb\xbf", b"\xff\xfe", "\u2028\u2029\u0085".encode())
pieces = st.sampled_from([*ROWS, *ODD_ROWS, *MARKS, *CODES])
contents = st.one_of(st.binary(max_size=60), st.lists(pieces, max_size=14).map(b"".join))
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstd,
    ".bz2": bz2.compress,
}


def look_at(folder: Path, names: list[str], data: list[bytes], **options: Any) -> None:
    bench = bench_in(folder, rows=2)
    for name, content in zip(names, data, strict=True):
        bench.file(name, content)
    try:
        spec = bench.job(*names, **options).model_copy(update={"max_line_bytes": 1024})
        planned = bench.plan(spec)
    except PagemillError:
        return
    rows = [row.row for row in bench.rows(spec, planned)]
    assert len(rows) == planned.rows == sum(shard.rows for shard in planned.shards)
    assert [row for row in rows if isinstance(row, RowError)] == list(planned.errors)
    assert sum(isinstance(row, Row) for row in rows) + planned.bad == planned.rows
    assert all(json.dumps(error.model_dump()) for error in planned.errors)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv"])
@given(data=st.lists(contents, min_size=1, max_size=3), packing=st.sampled_from(list(PACKED)), sample=st.booleans())
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_is_run_or_refused_row_by_row(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: list[bytes], packing: str, sample: bool
) -> None:
    names = [f"{place}{suffix}{packing}" for place in range(len(data))]
    packed = [PACKED[packing](content) for content in data]
    look_at(tmp_path_factory.mktemp("fuzz"), names, packed, sample=2 if sample else None)


@pytest.mark.parametrize("packing", [".gz", ".zst", ".bz2"])
@given(data=contents, place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
@settings(max_examples=60)
def test_an_archive_with_a_wrong_byte_ends_in_an_error_or_in_rows(
    tmp_path_factory: pytest.TempPathFactory, packing: str, data: bytes, place: float, byte: int
) -> None:
    packed = bytearray(PACKED[packing](data))
    packed[int(place * len(packed))] = byte
    look_at(tmp_path_factory.mktemp("fuzz"), [f"a.jsonl{packing}"], [bytes(packed)])


TABLE = pa.table(
    {
        "prompt": pa.array(["a", None, "c"] * 5).dictionary_encode(),
        "nested": [[{"x": n, "y": str(n)}] for n in range(15)],
        "when": pa.array(range(15), pa.timestamp("us", "UTC")),
    }
)


@given(
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.floats(0, 1)),
    compression=st.sampled_from(["none", "snappy", "zstd"]),
)
@settings(max_examples=300)
def test_a_parquet_file_with_wrong_bytes_ends_in_an_error_or_in_rows(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, int]], cut: float | None, compression: str
) -> None:
    sink = io.BytesIO()
    pq.write_table(TABLE, sink, row_group_size=4, compression=compression)
    data = bytearray(sink.getvalue())
    for place, byte in changes:
        data[int(place * len(data))] = byte
    whole = bytes(data) if cut is None else bytes(data)[: int(cut * len(data))]
    look_at(tmp_path_factory.mktemp("fuzz"), ["a.parquet"], [whole])
