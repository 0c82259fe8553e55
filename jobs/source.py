"""Where the rows of a job lie: its files behind each other, as one range of positions that shards are cut from.

    files      | a.jsonl        | b.jsonl | c.jsonl               |
    positions  0            1000      1300                     2100      of bytes; of rows where the files are Parquet

Lines do not cross from one file to the next. Where the files themselves cannot be read from any position, because they
are compressed or are no JSON lines, the planner makes a copy that can, and the positions are that copy's.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from jobs.errors import InputChanged, PreconditionFailed
from jobs.formats.jsonl import Line, iter_lines
from jobs.spec import Input, JobSpec
from jobs.storage import Store

_MASK = (1 << 64) - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15


class Extent(NamedTuple):
    """What one file of the input became: the positions [`start`, `start` + `size`) of the object at `url`."""

    url: str
    etag: str
    start: int
    size: int


class Piece(NamedTuple):
    """The positions [`start`, `end`) of file number `file`, counted from that file's beginning."""

    file: int
    start: int
    end: int


class Source(BaseModel):
    """The objects that rows are read from, one extent a file of the input."""

    model_config = ConfigDict(frozen=True)

    extents: tuple[Extent, ...]
    keep: int | None = None
    """Of the rows, those whose `sample_key` is at most this; all for None."""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The position at which each file begins, and the end of the last one."""
        return tuple(accumulate((extent.size for extent in self.extents), initial=0))

    @property
    def end(self) -> int:
        return self.starts[-1]

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """The parts of files that the positions [start, end) are; none is empty."""
        for file in range(max(bisect_right(self.starts, start) - 1, 0), len(self.extents)):
            first = self.starts[file]
            if first >= end:
                return
            piece = Piece(file, max(start - first, 0), min(end - first, self.extents[file].size))
            if piece.start < piece.end:
                yield piece


def source_of(spec: JobSpec, stores: Store) -> Source:
    """Where the rows of a planned job lie."""
    if spec.input.is_direct:
        return direct(spec.input)
    return Source.model_validate_json(stores.read(spec.layout.source))


def direct(given: Input) -> Source:
    """The files of the input themselves."""
    return Source(
        extents=tuple(
            Extent(file.url, file.etag, 0, file.size if file.rows is None else file.rows) for file in given.files
        )
    )


def read_text_lines(
    spec: JobSpec,
    stores: Store,
    source: Source,
    start: int,
    end: int,
    first_line: int,
    on_read: Callable[[int], None],
) -> Iterator[Line]:
    """The lines at the positions [start, end) that are asked for; at `start` is number `first_line` of its file.

    `on_read` hears how many positions were read, every few megabytes. Raises InputChanged.
    """
    for piece in source.pieces(start, end):
        extent = source.extents[piece.file]
        before = source.starts[piece.file] + piece.start - start
        chunks = pinned_chunks(stores, extent, piece, lambda size, before=before: on_read(before + size))  # type: ignore[misc]
        lines = iter_lines(
            chunks,
            spec.max_line_bytes,
            first_number=first_line if piece.start else 1,
            offset=piece.start,
            file=piece.file,
        )
        if source.keep is not None:
            lines = _sampled(lines, source.starts[piece.file], spec.input.sample_seed, source.keep)
        yield from lines if spec.input.format == "jsonl" else (line._replace(offset=None) for line in lines)


def _sampled(lines: Iterator[Line], first: int, seed: int, keep: int) -> Iterator[Line]:
    return (line for line in lines if sample_key(first + line.end, seed) <= keep)


def sample_key(position: int, seed: int) -> int:
    """A number that looks drawn at random from 64 bits, and that no other position has with this seed.

    The output function of SplitMix64 (Steele, Lea and Flood 2014), which is a bijection.
    """
    value = (position + seed * _GOLDEN_RATIO) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def pinned_chunks(stores: Store, extent: Extent, piece: Piece, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    """The bytes of a piece of a file. Raises InputChanged where the file is gone or is another by now."""
    size = 0
    try:
        for chunk in stores.stream(extent.url, extent.start + piece.start, extent.start + piece.end, extent.etag):
            yield chunk
            size += len(chunk)
            on_bytes(size)
    except PreconditionFailed as error:
        raise InputChanged(
            f"{extent.url} has changed since the job was submitted.",
            hint="Submit the job again, and leave its input alone while it runs.",
        ) from error
