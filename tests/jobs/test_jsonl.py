"""Lines are bytes between newline bytes, however they arrive; what is written is JSON whatever it holds."""

import json
import math
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.formats.jsonl import Line, dumps, iter_lines

LIMIT = 64
BOM = b"\xef\xbb\xbf"

# Everything that some tool takes for a line end, and what stands around it.
pieces = st.sampled_from(
    [b"\n", b"\r\n", b"\r", b"\x0b", b"\x0c", b"\x1c", b"\x85", b" ", b"\t", b"\x00", b"\xff"]
    + [character.encode() for character in "\u2028\u2029\u0085"]
    + [BOM, b'{"a":1}', b"x" * 70]
)
files = st.lists(pieces, max_size=30).map(b"".join)


def lines_of(data: bytes, *sizes: int) -> list[Line]:
    return list(iter_lines(_cut(data, sizes), LIMIT))


def _cut(data: bytes, sizes: tuple[int, ...]) -> Iterator[bytes]:
    position = 0
    for size in sizes:
        yield data[position : position + size]
        position += size
    yield data[position:]


def plainly(data: bytes) -> list[Line]:
    """The definition, written the slow way."""
    found, offset = [], 0
    for number, raw in enumerate(data.split(b"\n"), 1):
        end = min(offset + len(raw) + 1, len(data))
        content = raw.removeprefix(BOM) if offset == 0 else raw
        if len(raw) > LIMIT:
            found.append(Line(number, offset, end, None))
        elif content.strip():
            found.append(Line(number, offset, end, content.removesuffix(b"\r")))
        offset = end
    return found


@given(files, st.lists(st.integers(0, 40), max_size=12))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, sizes: list[int]) -> None:
    assert lines_of(data, *sizes) == plainly(data)
    assert lines_of(data, *[1] * len(data)) == plainly(data)


@given(files, st.data())
def test_reading_may_begin_at_any_line(data: bytes, draw: st.DataObject) -> None:
    lines = plainly(data)
    if not lines:
        return
    first = draw.draw(st.sampled_from(lines))
    rest = iter_lines([data[first.offset :]], LIMIT, first_number=first.number, offset=first.offset)
    assert list(rest) == [line for line in lines if line.number >= first.number]


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none()), max_size=8))
def test_what_was_written_reads_back(records: list[dict[str, object]]) -> None:
    data = b"".join(dumps(record) + b"\n" for record in records)
    assert [json.loads(line.data or b"") for line in iter_lines([data], 10_000)] == records


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_only_a_newline_ends_a_line(separator: str) -> None:
    text = f'{{"prompt":"one{separator}two"}}'.encode()
    assert [line.data for line in iter_lines([text + b"\n" + text], 100)] == [text, text]


def test_a_lone_carriage_return_stays_and_one_before_the_newline_goes() -> None:
    assert [line.data for line in lines_of(b"a\rb\r\nc\r\r\nd\r")] == [b"a\rb", b"c\r", b"d"]


def test_a_byte_order_mark_is_dropped_at_the_start_only() -> None:
    lines = lines_of(BOM + b"{}\n" + BOM + b"{}\n")
    assert lines == [Line(1, 0, 6, b"{}"), Line(2, 6, 12, BOM + b"{}")]


def test_blank_lines_are_counted_and_left_out() -> None:
    assert lines_of(b"\n  \na\n\r\n\t\nb") == [Line(3, 4, 6, b"a"), Line(6, 10, 11, b"b")]
    assert lines_of(b"") == []
    assert lines_of(b"\n\n") == []


def test_a_line_of_the_limit_is_whole_and_one_byte_more_is_too_long() -> None:
    assert lines_of(b"x" * LIMIT + b"\n" + b"y" * (LIMIT + 1) + b"\nz") == [
        Line(1, 0, LIMIT + 1, b"x" * LIMIT),
        Line(2, LIMIT + 1, 2 * LIMIT + 3, None),
        Line(3, 2 * LIMIT + 3, 2 * LIMIT + 4, b"z"),
    ]


def test_a_huge_line_is_skipped_in_constant_memory() -> None:
    piece = b"x" * 65536

    def huge() -> Iterator[bytes]:
        yield b'{"a":1}\n'
        for _ in range(2000):
            yield bytes(piece)
        yield b'\n{"b":2}\n'

    tracemalloc.start()
    try:
        lines = list(iter_lines(huge(), 1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert [line.data for line in lines] == [b'{"a":1}', None, b'{"b":2}']
    assert lines[1].end - lines[1].offset == 2000 * 65536 + 1


def test_text_is_written_as_it_is_and_lone_surrogates_escaped() -> None:
    assert dumps({"a": ["ü€😀", 1, None]}) == '{"a":["ü€😀",1,null]}'.encode()
    assert dumps("\u2027\u2028\u2029\u202a\x84\x85\x86") == '"\u2027\\u2028\\u2029\u202a\x84\\u0085\x86"'.encode()
    assert dumps({"a": "ü\ud800"}) == b'{"a":"\\u00fc\\ud800"}'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_lacks_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        dumps({"a": value})
