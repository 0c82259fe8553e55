"""Planning: one pass over the input that cuts it into shards and finds every row that cannot run.

    input   | row 0 ... row 99 | row 100 ... | ...     a shard ends where a row ends; together they are the whole file
            start            end = start

What is held does not grow with the file, but for one small value a shard: custom_ids, and the errors beyond the first
hundred, are on disk. Only where ids may repeat is the input read a second time.
"""

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import pyarrow as pa

from jobs.duplicates import IdDigests, Repeats
from jobs.errors import InputChanged, PagemillError, RowError
from jobs.formats.jsonl import Line
from jobs.lines import read_lines
from jobs.parquet_rows import Rows, columns_passed_on, lines_of, read_batches
from jobs.pooling import Pooling
from jobs.prefixes import LENGTHS, Beginnings
from jobs.quick_check import Good, answer_tokens, quick_check
from jobs.row_fields import Message, Prompt, shown
from jobs.rows import Row, parse_row
from jobs.settings import Settings
from jobs.shards import Plan, RowErrors, Shard, dump_plan, dump_shard, load_plan, load_shard
from jobs.source import Source, source_of
from jobs.spec import JobSpec
from jobs.staging import prepare_source
from jobs.storage import Store
from jobs.table import schema_finder
from jobs.table_check import table_check

__all__ = [
    "Plan",
    "Planned",
    "PlannedRow",
    "Shard",
    "dump_plan",
    "dump_shard",
    "load_plan",
    "load_shard",
    "plan",
    "raw_lines",
    "shard_rows",
]

SHARDS_OF_A_SIZE = 2_000
"""After so many shards, the next ones may be twice as large, and so on: the ledger holds each one."""
MAX_SHARDS = 5 * SHARDS_OF_A_SIZE
"""About how many a hundred million rows are cut into; ten times as many rows are not twice as many shards."""

_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Row `index` of the job: the line it stands on, and the row or why it is none."""

    index: int
    line: Line
    row: Row | RowError


@dataclass(frozen=True, slots=True)
class Planned(Plan):
    """A plan fresh from the input, with all of its errors in line order, and the columns of a Parquet output."""

    errors: RowErrors
    schema: pa.Schema | None


def plan(
    spec: JobSpec, stores: Store, limits: Settings, on_progress: Callable[[int, int], None] = lambda rows, size: None
) -> Planned:
    """Cuts the job's input into shards and checks each of its rows. The same input and limits give the same plan.

    Where shards cannot be parts of the files as they are, a copy is made first, and stays the one for this job.

    `on_progress` hears the rows and bytes read so far, every few megabytes. Raises InputChanged where the input is
    not the version that the job was submitted with, and PagemillError: `empty_file` where it has no row,
    `too_many_columns` where a table cannot hold them.
    """
    source = prepare_source(spec, stores, limits.max_copy_bytes, lambda size: on_progress(0, size))
    cutter = _Cutter(spec, source, limits)
    look = _Look(spec, cutter)

    def on_read(positions: int) -> None:
        on_progress(cutter.rows, positions)

    if spec.input.format == "parquet":
        look.at_tables(read_batches(spec, stores, source, 0, source.end, on_read))
    else:
        look.at_lines(read_lines(spec, stores, source, 0, source.end, 1, on_read))
    if cutter.rows == 0:
        raise PagemillError("The input has no rows.", code="empty_file", hint="Each line is to be a JSON object.")
    shards, in_runs = cutter.finish()
    errors = look.errors
    if repeated := look.digests.repeated():
        again = _read(spec, stores, source, _whole(source), lambda size: on_progress(cutter.rows, source.end))
        rows = islice(again, spec.input.limit)
        shards, errors = _with_duplicates(spec, rows, shards, errors, Repeats(repeated))
    schema = None if look.finder is None else look.finder.schema()
    return Planned(cutter.rows, errors.count, tuple(shards), tuple(errors.first), in_runs, errors, schema)


def shard_rows(spec: JobSpec, stores: Store, shard: Shard) -> Iterator[PlannedRow]:
    """The rows of a shard as the planner saw them, repeats of a custom_id refused.

    Raises InputChanged where the input is no longer the version that was planned.
    """
    count = 0
    for planned in _read(spec, stores, source_of(spec, stores), shard, lambda size: None):
        count += 1
        if shard.duplicates and isinstance(planned.row, Row) and shard.is_duplicate(planned.index):
            planned = replace(planned, row=_duplicate(planned.row))
        yield planned
    if count != shard.rows:
        raise InputChanged(f"Shard {shard.index} has {count} rows, and {shard.rows} were planned.")


def raw_lines(spec: JobSpec, stores: Store, shards: Sequence[Shard] | None) -> Iterator[bytes]:
    """The bytes of these shards' lines, of all lines for None, each with a line end; but for those that are too long.

    Raises InputChanged as `shard_rows` does.
    """
    source = source_of(spec, stores)
    for shard in [_whole(source)] if shards is None else shards:
        for line in read_lines(spec, stores, source, shard.start, shard.end, shard.first_line):
            if line.data is not None:
                yield line.data + b"\n"


def _whole(source: Source) -> Shard:
    return Shard(index=0, first_row=0, rows=0, start=0, end=source.end, first_line=1, place=0)


def _read(
    spec: JobSpec, stores: Store, source: Source, part: Shard, on_read: Callable[[int], None]
) -> Iterator[PlannedRow]:
    lines = read_lines(spec, stores, source, part.start, part.end, part.first_line, on_read)
    for index, line in enumerate(lines, part.first_row):
        yield PlannedRow(index, line, parse_row(line, spec))


class _Look:
    """The first look at all rows that a job has: what `plan` learns of them."""

    def __init__(self, spec: JobSpec, cutter: "_Cutter") -> None:
        self._spec = spec
        self._cutter = cutter
        self.digests = IdDigests()
        self.errors = RowErrors()
        self.finder = schema_finder(spec)

    def at_lines(self, lines: Iterator[Line]) -> None:
        cut, look_at, hold = self._cutter.add, self._cutter.look_at, self.digests.add
        # A table's columns are found in the rows themselves, all of them.
        look = quick_check(self._spec) if self.finder is None else _nothing
        limit = self._spec.input.limit
        for line in lines if limit is None else islice(lines, limit - self._cutter.rows):
            data = line.data or b""
            good = look(data) or self._closely(line)
            if good is None:
                cut(line, 0)
                continue
            custom_id, tokens, prompt = good
            if prompt is not None and len(data) > LENGTHS[0]:
                look_at(prompt)
            cut(line, len(data) // _BYTES_PER_TOKEN + tokens)
            if custom_id is not None:
                hold(custom_id)

    def at_tables(self, tables: Iterator[Rows]) -> None:
        spec, cutter = self._spec, self._cutter
        look = table_check(spec, columns_passed_on(spec.input))
        limit = math.inf if spec.input.limit is None else spec.input.limit
        for rows in tables:
            if cutter.rows >= limit:
                return
            rows = rows.first(int(min(limit - cutter.rows, len(rows.numbers))))
            good = look(rows.batch)
            if good is None:
                self.at_lines(lines_of(rows, spec.max_line_bytes))
                continue
            for number, custom_id, size, prompt in zip(
                rows.numbers, good.custom_ids, good.sizes, good.prompts, strict=False
            ):
                if prompt:
                    cutter.look_at(prompt)
                line = Line(number + 1, None, number + 1, None, rows.file)
                cutter.add(line, size // _BYTES_PER_TOKEN + good.tokens)
                if custom_id is not None:
                    self.digests.add(custom_id)

    def _closely(self, line: Line) -> Good | None:
        """As `quick_check`, of any row; one that is not good is put down."""
        row = parse_row(line, self._spec)
        if self.finder is not None:
            self.finder.add(line, row)
        if isinstance(row, RowError):
            self.errors.add(row)
            return None
        prompt = None if isinstance(row.params, Pooling) else row.prompts[0]
        return row.custom_id, answer_tokens(row.params), prompt


def _nothing(data: bytes) -> None:
    """A quick look that sees nothing."""


class _Cutter:
    """Cuts after the row with which a shard has enough tokens or rows; never makes an empty shard.

    What is enough is doubled every `SHARDS_OF_A_SIZE` shards: a large job has larger shards more than it has many.
    """

    def __init__(self, spec: JobSpec, source: Source, limits: Settings) -> None:
        self._source = source
        self._limit = spec.input.limit
        self._max_tokens = limits.min_shard_tokens
        self._max_rows = limits.max_shard_rows
        self._shards: list[Shard] = []
        self._start, self._first_row, self._first_line = 0, 0, 1
        self._full_at = self._max_rows
        self._last: Line | None = None
        self._tokens = 0
        self._beginnings = Beginnings()
        self._by_prefix = limits.shard_order == "prefix"
        self.look_at: Callable[[Prompt | list[Message]], None] = (
            self._beginnings.add if self._by_prefix else lambda prompt: None
        )
        """To be called with the prompt of the row that is added next, if it has one."""
        self.rows = 0

    def add(self, line: Line, tokens: int) -> None:
        self.rows += 1
        self._last = line
        self._tokens += tokens
        if self._tokens >= self._max_tokens or self.rows >= self._full_at:
            self._cut(line)

    def finish(self) -> tuple[list[Shard], bool]:
        """The shards with their places, and whether workers had better take them in runs.

        Where all rows were asked for, the last one has the blank lines at the end of the file too.
        """
        if self._last is not None and self.rows > self._first_row:
            self._cut(self._last)
        if self._limit is None:
            self._shards[-1] = replace(self._shards[-1], end=self._source.end)
        if not self._by_prefix:
            return self._shards, False
        line = self._beginnings.line()
        shards = [replace(shard, place=place) for shard, place in zip(self._shards, line.places, strict=True)]
        return shards, line.in_runs

    def _cut(self, last: Line) -> None:
        end = self._source.starts[last.file] + last.end
        self._shards.append(
            Shard(
                index=len(self._shards),
                first_row=self._first_row,
                rows=self.rows - self._first_row,
                start=self._start,
                end=end,
                first_line=self._first_line,
                place=len(self._shards),
            )
        )
        self._beginnings.end_shard(self._tokens)
        self._start, self._first_row, self._first_line = end, self.rows, last.number + 1
        self._tokens = 0
        if len(self._shards) % SHARDS_OF_A_SIZE == 0:
            self._max_tokens *= 2
            self._max_rows *= 2
        self._full_at = self.rows + self._max_rows


def _with_duplicates(
    spec: JobSpec, everything: Iterable[PlannedRow], shards: list[Shard], errors: RowErrors, repeats: Repeats
) -> tuple[list[Shard], RowErrors]:
    """The shards with their duplicates, and the errors with one for each of them, in line order."""
    found = RowErrors()
    first_rows = [shard.first_row for shard in shards]
    in_shard: defaultdict[int, int] = defaultdict(int)
    for planned in everything:
        row = planned.row
        if isinstance(row, Row) and row.custom_id is not None and repeats.is_repeat(row.custom_id):
            found.add(_duplicate(row))
            place = bisect_right(first_rows, planned.index) - 1
            in_shard[place] |= 1 << planned.index - first_rows[place]
    merged = RowErrors()
    order = {file.label: place for place, file in enumerate(spec.input.files)}
    for error in heapq.merge(
        errors, found, key=lambda error: (order[error.file] if error.file else 0, error.line or 0)
    ):
        merged.add(error)
    return [replace(shard, duplicates=in_shard[shard.index]) for shard in shards], merged


def _duplicate(row: Row) -> RowError:
    return RowError(
        code="duplicate_custom_id",
        message=f"The custom_id {shown(row.custom_id)} is that of an earlier row too: it must be unique in the file.",
        param="custom_id",
        line=row.line,
        byte=row.offset,
        custom_id=row.custom_id,
        file=row.file,
    )
