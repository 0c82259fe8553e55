"""CSV and TSV as JSON lines, for everything after to be as with JSON lines.

    1 | id,text              |                                     the header, as a blank line
    2 | 7,"two               | {"id":"7","text":"two\\nlines"}
    3 | lines"               |                                     blank: line numbers are those of the CSV
    4 | 8,a,b                | ["invalid_csv","This row has 3 fields, ..."]

All values are strings: nothing in a CSV tells "007" from 7. Quoting is RFC 4180's; a row that breaks it is refused, and
reading goes on at the next line. A line ends with LF or CR LF. A blank line is no row.
"""

import codecs
import csv
from collections.abc import Iterable, Iterator

from pydantic_core import to_json

from jobs.errors import PagemillError

REFUSED = b"["
"""How the line of a refused row begins: it is the code and the message, and no object."""

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class _TooLong(Exception):
    """A row has more bytes than a row may have."""


def csv_to_jsonl(chunks: Iterable[bytes], delimiter: str, max_row_bytes: int, name: str) -> Iterator[bytes]:
    """The lines of the JSON lines file, each with its end, for the bytes of a CSV file. `name` is for errors.

    A row of more than `max_row_bytes` is refused like one with broken quotes: at most that much is held. Raises
    PagemillError (`invalid_csv_header`) where the first row does not name the columns.
    """
    csv.field_size_limit(max(csv.field_size_limit(), max_row_bytes))
    feed = _Feed(_raw_lines(chunks, max_row_bytes), max_row_bytes)
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    while True:
        first = feed.number
        feed.begin_row()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except (csv.Error, _TooLong) as error:
            line = _refusal(f"{error}".capitalize(), columns, name)
        else:
            if feed.bad_bytes:
                line = _refusal("It is not UTF-8", columns, name)
            elif not fields:
                line = b""
            elif columns is None:
                columns, line = _header(fields, name), b""
            elif len(fields) != len(columns):
                line = _refusal(f"It has {len(fields)} fields, and the header has {len(columns)}", columns, name)
            else:
                line = to_json(dict(zip(columns, fields, strict=True)))
        yield line + b"\n" * (feed.number - first)


def _header(fields: list[str], name: str) -> list[str]:
    repeated = next((field for place, field in enumerate(fields) if field in fields[:place]), None)
    if repeated is not None:
        raise _no_header(name, f"the column {repeated!r} stands there twice")
    return fields


def _refusal(why: str, columns: list[str] | None, name: str) -> bytes:
    if columns is None:
        raise _no_header(name, why)
    return to_json(["invalid_csv", f"This row cannot be read. {why}."])


def _no_header(name: str, why: str) -> PagemillError:
    return PagemillError(
        f"The first row of {name} does not name the columns: {why}.",
        code="invalid_csv_header",
        hint="The first row is the header, in UTF-8, with each column's name once.",
    )


class _Feed:
    """The lines for the csv module, which takes as many as a row has; counts them, and stops a row without an end."""

    def __init__(self, lines: Iterator[bytes | None], max_row_bytes: int) -> None:
        self._lines = lines
        self._max_row_bytes = max_row_bytes
        self._size = 0
        self.number = 0
        self.bad_bytes = False

    def begin_row(self) -> None:
        self._size = 0
        self.bad_bytes = False

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        if self.number == 1 and line is not None:
            if line.startswith(_UTF16):
                self.bad_bytes = True
            line = line.removeprefix(codecs.BOM_UTF8)
        self._size += self._max_row_bytes + 1 if line is None else len(line)
        if line is None or self._size > self._max_row_bytes:
            raise _TooLong(f"it is longer than {self._max_row_bytes} bytes, or a quote in it is never closed")
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.bad_bytes = True
            return line.decode(errors="replace")


def _raw_lines(chunks: Iterable[bytes], max_bytes: int) -> Iterator[bytes | None]:
    """The lines with their ends; None for one that is longer than the limit, which is not held."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        *whole, tail = chunk.split(b"\n")
        for part in whole:
            size += len(part) + 1
            held.append(part + b"\n")
            yield b"".join(held) if size <= max_bytes else None
            held, size = [], 0
        size += len(tail)
        if size <= max_bytes:
            held.append(tail)
        else:
            held = []
    if size:
        yield b"".join(held) if size <= max_bytes else None
