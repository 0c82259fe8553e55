"""Whatever bytes files hold, and however a job takes them: an error of ours ends it, or each row is run or refused."""

import bz2
import gzip
import io
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.cases import OUTPUTS, SHAPES, Case, check
from tests.jobs.test_formats_text import zstd

ROWS = (
    *(
        b'{"prompt":"a"}',
        b'{"prompt":"b","custom_id":"1"}',
        b'{"prompt":"a","prompt":"b"}',
        b'{"prompt":[1,2],"n":1.5}',
    ),
    *(b'{"messages":[{"role":"user","content":"a"}]}', b'{"prompt":"a","x":{"y":[{"z":null}]}}', b"prompt\n", b"a,b"),
    b'{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":{"model":"tiny","messages":[]}}',
    b'{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"model":"tiny","prompt":"a"}}',
)
ODD_ROWS = (
    *(b'{"prompt":"\\ud800"}', b'{"prompt":"a","\\ud800":1}', b'{"prompt":NaN}', b'{"prompt":"a","x":1e999}'),
    *(b'{"prompt":"a","x":%s}' % (b"9" * 30), b"[" * 3000, b"9" * 5000, b" " * 2000, b'{"prompt":"a","error":1}'),
    *(b'{"prompt":"a","n":-1}', b'{"prompt":"a","max_tokens":1e3}', b"null", b'"a"', b'"a\nb"', b'"a"b', b'x"y"'),
)
MARKS = (b"{", b"}", b"\n", b"\n", b"\r\n", b"\r", b'"', b",", b"\t", b" ", b"\x00", b"\\ud800")
CODES = (b"\xef\xbb\xbf", b"\xff\xfe", "\u2028\u2029\u0085".encode(), "é".encode("latin-1"), b"\xed\xa0\x80")
pieces = st.sampled_from([*ROWS, *ODD_ROWS, *MARKS, *CODES])
contents = st.one_of(st.binary(max_size=60), st.lists(pieces, max_size=14).map(b"".join))
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstd,
    ".bz2": bz2.compress,
}
parts = st.sampled_from([{}, {}, {"limit": 1}, {"limit": 4}, {"sample": 2}])
jobs = st.builds(dict, shape=st.sampled_from(SHAPES), output=st.sampled_from(OUTPUTS), shard_rows=st.integers(1, 4))


@st.composite
def texts(draw: st.DrawFn, suffix: str) -> Case:
    """Up to three files, each compressed in its own way, in one member or two."""
    files = []
    for data in draw(st.lists(contents, min_size=1, max_size=3)):
        packing = draw(st.sampled_from(list(PACKED)))
        cut = draw(st.integers(0, len(data)))
        members = [data[:cut], data[cut:]] if packing and draw(st.booleans()) else [data]
        files.append((f"{suffix}{packing}", b"".join(map(PACKED[packing], members))))
    return Case(files, **draw(jobs), **draw(parts))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv"])
@given(data=st.data())
@settings(max_examples=50)
def test_any_text_is_run_or_refused_row_by_row(suffix: str, data: st.DataObject) -> None:
    check(data.draw(texts(suffix)))


@pytest.mark.parametrize("packing", [".gz", ".zst", ".bz2"])
@given(
    data=contents,
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=2),
    cut=st.one_of(st.none(), st.floats(0, 1)),
    tail=st.sampled_from([b"", b"\x00", b"tail", gzip.compress(b""), bz2.compress(b""), zstd(b"")]),
)
@settings(max_examples=50)
def test_an_archive_with_wrong_bytes_ends_in_an_error_or_in_rows(
    packing: str, data: bytes, changes: list[tuple[float, int]], cut: float | None, tail: bytes
) -> None:
    check(Case([(f".jsonl{packing}", damaged(PACKED[packing](data), changes, cut) + tail)]))


def damaged(data: bytes, changes: list[tuple[float, int]], cut: float | None) -> bytes:
    changed = bytearray(data)
    for place, byte in changes:
        changed[int(place * len(changed))] = byte
    return bytes(changed) if cut is None else bytes(changed)[: int(cut * len(changed))]


TABLE = pa.table(
    {
        "prompt": pa.array(["a", None, "c"] * 5).dictionary_encode(),
        "n": pa.array([*range(14), None]),
        "nested": [[{"x": n, "y": str(n)}] for n in range(15)],
        "when": pa.array(range(15), pa.timestamp("us", "UTC")),
    }
)


def table_bytes(compression: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(TABLE, sink, row_group_size=4, compression=compression)
    return sink.getvalue()


@given(
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    cut=st.one_of(st.none(), st.none(), st.floats(0, 1)),
    compression=st.sampled_from(["none", "snappy", "zstd"]),
    job=jobs,
    part=parts,
    where=st.booleans(),
    columns=st.sampled_from([None, ("prompt", "n"), ("prompt", "nested", "n")]),
)
@settings(max_examples=100)
def test_a_parquet_file_with_wrong_bytes_ends_in_an_error_or_in_rows(
    changes: list[tuple[float, int]],
    cut: float | None,
    compression: str,
    job: dict[str, object],
    part: dict[str, int],
    where: bool,
    columns: tuple[str, ...] | None,
) -> None:
    data = damaged(table_bytes(compression), changes, cut)
    check(Case([(".parquet", data)], **job, **part, where=where, columns=columns))  # type: ignore[arg-type]
