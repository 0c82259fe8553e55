"""A job's plan as values: its shards, and the rows that cannot run. `plan.jsonl` is a header and one line a shard."""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from jobs.errors import PagemillError, RowError, UnreadableJob
from jobs.formats.jsonl import dumps, iter_lines

FIRST_ERRORS = 100
_FORMAT = 1
_READ_SIZE = 1024 * 1024
_MAX_SPOOLED_LINE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of rows: rows [first_row, first_row + rows) in the bytes [start, end) of the input.

    `first_line` is the number of the line that begins at `start`. `place` is the shard's in the line: the lowest is
    worked on first, and neighbours share prefixes where `jobs.prefixes` has found some. Of `duplicates`, bit i stands
    for row `first_row` + i, and tells that its custom_id stands earlier in the file: the row is refused, which the
    shard's own bytes do not say.
    """

    index: int
    first_row: int
    rows: int
    start: int
    end: int
    first_line: int
    place: int
    duplicates: int = 0

    def is_duplicate(self, row: int) -> bool:
        return bool(self.duplicates >> (row - self.first_row) & 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job is cut: its rows, of which `bad` cannot run, and the first hundred errors in line order.

    `in_runs`: a worker had better take shards that follow each other in line, as they have prefixes in common.
    """

    rows: int
    bad: int
    shards: tuple[Shard, ...]
    first_errors: tuple[RowError, ...]
    in_runs: bool


class RowErrors:
    """Errors in the order they were added: the first hundred in memory, all of them in a temporary file.

    Iterating reads them back; the file is gone with this object.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: list[RowError] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object

    def add(self, error: RowError) -> None:
        self.count += 1
        if len(self.first) < FIRST_ERRORS:
            self.first.append(error)
        self._file.write(dumps(error.model_dump()) + b"\n")

    def __iter__(self) -> Iterator[RowError]:
        self._file.flush()
        for line in iter_lines(self._pieces(), _MAX_SPOOLED_LINE):
            yield RowError.model_validate_json(line.data or b"")

    def _pieces(self) -> Iterator[bytes]:
        # By position, so that iterations do not disturb each other.
        position = 0
        while piece := os.pread(self._file.fileno(), _READ_SIZE, position):
            position += len(piece)
            yield piece


def dump_shard(shard: Shard) -> bytes:
    """The shard as one line of compact JSON, without the newline, and without what is as in most."""
    fields = asdict(shard)
    if duplicates := fields.pop("duplicates"):
        fields["duplicates"] = f"{duplicates:x}"
    if shard.place == shard.index:
        del fields["place"]
    return dumps(fields)


def load_shard(data: bytes | str) -> Shard:
    """The shard that `dump_shard` wrote. Raises UnreadableJob for one that a newer version wrote."""
    fields = json.loads(data)
    try:
        return Shard(**{"place": fields["index"], **fields, "duplicates": int(fields.get("duplicates", "0"), 16)})
    except TypeError as error:
        raise UnreadableJob(f"This version cannot read a shard of the job's plan: {error}") from error


def dump_plan(plan: Plan) -> bytes:
    """The body of `plan.jsonl`."""
    header = {
        "format": _FORMAT,
        "rows": plan.rows,
        "bad": plan.bad,
        "shards": len(plan.shards),
        "errors": [error.model_dump() for error in plan.first_errors],
        "in_runs": plan.in_runs,
    }
    return b"".join(line + b"\n" for line in [dumps(header), *map(dump_shard, plan.shards)])


def load_plan(data: bytes) -> Plan:
    """The plan that `dump_plan` wrote. Raises UnreadableJob for one that a newer version wrote, and PagemillError for
    anything else."""
    try:
        head, *lines = data.splitlines()
        header = json.loads(head)
        if header["format"] > _FORMAT:
            raise UnreadableJob(f"The job's plan has format {header['format']}, and this version reads {_FORMAT}.")
        plan = Plan(
            header["rows"],
            header["bad"],
            tuple(load_shard(line) for line in lines),
            tuple(RowError.model_validate(error) for error in header["errors"]),
            header.get("in_runs", False),
        )
        complete = header["format"] == _FORMAT and header["shards"] == len(plan.shards)
    except (ValueError, KeyError, TypeError) as error:
        raise PagemillError(f"This is not a plan: {error}", code="bad_plan") from error
    if not complete:
        raise PagemillError(
            f"The plan has {len(plan.shards)} of {header['shards']} shards, in format {header['format']}.",
            code="bad_plan",
        )
    return plan
