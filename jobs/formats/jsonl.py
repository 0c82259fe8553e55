"""JSON Lines, cut by bytes: a line ends at a newline byte and nowhere else.

Text tools also cut at U+2028, U+2029, U+0085 and lone carriage returns, all of which may stand inside a JSON string.
"""

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ASCII = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))

_CR = 13
_PIECE = 256 * 1024


class Line(NamedTuple):
    """One line of a file: `number` counts from 1, and [`offset`, `end`) are its bytes with the line end.

    `data` is the line without its end (LF or CR LF) and without a byte order mark, or None where the line is longer
    than the limit. `file` is the file's place among those of the input. There is no offset where the file is no text
    of JSON lines itself. A row of a table is row `place` of `batch`, which has its columns with their types.
    """

    number: int
    offset: int | None
    end: int
    data: bytes | None
    file: int = 0
    batch: pa.RecordBatch | None = None
    place: int = 0


# Of a named tuple, `__new__` is a Python function, which a file of millions of lines would call for each.
_new = tuple.__new__


def iter_lines(
    chunks: Iterable[bytes], max_line_bytes: int, *, first_number: int = 1, offset: int = 0, file: int = 0
) -> Iterator[Line]:
    """The lines of a file, whose bytes from `offset` on come in pieces of any size.

    Lines of nothing but white space are counted and left out. The last line needs no line end. At most
    `max_line_bytes` and one piece are held: what a longer line has beyond that is skipped as it comes.
    """
    number = first_number
    parts: list[bytes] = []  # the unfinished line, and `held` its length; emptied once it is longer than the limit
    held = 0
    for piece in _small(chunks):
        head, *rest = piece.split(b"\n")
        held += len(head)
        if held <= max_line_bytes:
            parts.append(head)
        else:
            parts = []
        if not rest:
            continue
        end = offset + held + 1
        yield from _line(number, offset, end, parts, held, file)
        number += 1
        offset = end
        tail = rest.pop()
        for data in rest:
            end = offset + len(data) + 1
            if len(data) > max_line_bytes:
                yield Line(number, offset, end, None, file)
            elif data and not data.isspace():
                yield _new(Line, (number, offset, end, data[:-1] if data[-1] == _CR else data, file, None, 0))
            number += 1
            offset = end
        held = len(tail)
        parts = [tail] if held <= max_line_bytes else []
    if held:
        yield from _line(number, offset, offset + held, parts, held, file)


def _small(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that are still in the processor's cache when their lines are looked at."""
    for chunk in chunks:
        if len(chunk) <= _PIECE:
            yield chunk
        else:
            yield from (chunk[start : start + _PIECE] for start in range(0, len(chunk), _PIECE))


def _line(number: int, offset: int, end: int, parts: list[bytes], held: int, file: int) -> Iterator[Line]:
    """The line made of `parts`: none where it is blank, and one without data where the parts were given up."""
    if held and not parts:
        yield Line(number, offset, end, None, file)
        return
    data = b"".join(parts)
    if offset == 0:
        data = data.removeprefix(codecs.BOM_UTF8)
    if data and not data.isspace():
        yield Line(number, offset, end, data.removesuffix(b"\r"), file)


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8, without a line end. Raises ValueError for NaN and infinities, which JSON does not have.

    Where a string holds a lone surrogate, which UTF-8 cannot carry, everything outside ASCII is escaped; else only
    what `one_line` escapes.
    """
    try:
        return one_line(_COMPACT.encode(value).encode())
    except UnicodeEncodeError:
        return _ASCII.encode(value).encode()


def one_line(data: bytes) -> bytes:
    """The same JSON without what readers that cut text at more than newlines, as `str.splitlines` does, take for one.

    U+2028, U+2029 and U+0085 stand in strings alone, and never behind a backslash; a carriage return outside of them.
    """
    # To look for one byte is ten times faster than for two, and most text has neither.
    if b"\xe2" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    if b"\xc2" in data:
        data = data.replace(b"\xc2\x85", b"\\u0085")
    return data.replace(b"\r", b" ") if b"\r" in data else data
