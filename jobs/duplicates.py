"""Repeated custom_ids in a file of any size, in memory that does not grow with it.

    digests   ... 17 -4 96 | sorted: -9 -4 2 17 30 96 ... | sorted: ...    runs of 131,072, in a temporary file
    parts          all runs from -9 to 2 | all from 3 to 30 | ...          held one at a time, and counted

What is counted twice is a hash of an id. The ids themselves are compared when the input is read again.
"""

import os
import tempfile
from array import array
from bisect import bisect_left

import pyarrow as pa
import pyarrow.compute as pc

_RUN = 1 << 17
_BATCH = 1 << 10
_PARTS = 256
_SIZE = 8
_EDGES = [(part << 56) - (1 << 63) for part in range(1, _PARTS)]


class IdDigests:
    """The 64-bit hashes of all ids seen. Equal ids have equal hashes, and few others do: those are looked at again.

    The hash is Python's own and salted per process, which does not show: what it selects is compared after.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._recent = array("q")
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        self._runs: list[array[int]] = []
        """Where in the file each part of a run begins, and where the last one ends, in hashes."""

    def add(self, custom_id: str) -> None:
        self._names.append(custom_id)
        if len(self._names) == _BATCH:
            self._take_up()

    def repeated(self) -> "array[int]":
        """The hashes that more than one id has, sorted."""
        self._take_up()
        self._end_run()
        found = array("q")
        for part in range(_PARTS):
            hashes = b"".join(self._read(run[part], run[part + 1]) for run in self._runs)
            if len(hashes) <= _SIZE:
                continue  # as nearly all are of a small job
            numbers = _numbers(hashes)
            counts = pc.value_counts(numbers)
            if len(counts) == len(numbers):
                continue
            found.extend(_of(counts.field(0).filter(pc.greater(counts.field(1), 1)).sort()))
        return found

    def _take_up(self) -> None:
        self._recent.extend(map(hash, self._names))
        self._names.clear()
        if len(self._recent) >= _RUN:
            self._end_run()

    def _end_run(self) -> None:
        run = _of(_numbers(self._recent).sort())
        start = self._runs[-1][-1] if self._runs else 0
        edges = [start, *(start + bisect_left(run, edge) for edge in _EDGES), start + len(run)]
        self._runs.append(array("q", edges))
        self._file.write(run)
        self._file.flush()
        self._recent = array("q")

    def _read(self, start: int, end: int) -> bytes:
        return os.pread(self._file.fileno(), (end - start) * _SIZE, start * _SIZE)


def _numbers(data: "bytes | array[int]") -> pa.Array:
    buffer = pa.py_buffer(data)
    return pa.Array.from_buffers(pa.int64(), buffer.size // _SIZE, [None, buffer])


def _of(numbers: pa.Array) -> "array[int]":
    _, data = numbers.buffers()
    found = array("q")
    if data is not None:
        found.frombytes(memoryview(data)[: len(numbers) * _SIZE])
    return found


class Repeats:
    """Tells the repeats of an id from its first appearance, among the ids whose hash is one of `digests`, sorted.

    Of an id is held a second hash beside the first. Ids that have both in common, 127 bits, are taken for the same.
    """

    def __init__(self, digests: "array[int]") -> None:
        self._digests = digests
        self._first = array("q", bytes(_SIZE * len(digests)))
        self._others: set[str] = set()

    def is_repeat(self, custom_id: str) -> bool:
        digest = hash(custom_id)
        place = bisect_left(self._digests, digest)
        if place == len(self._digests) or self._digests[place] != digest:
            return False
        second = hash(f"\0{custom_id}") | 1  # which 0, for an id that was not seen, is not
        if not self._first[place]:
            self._first[place] = second
            return False
        if self._first[place] == second:
            return True
        # Another id than the first one with this hash.
        seen = custom_id in self._others
        self._others.add(custom_id)
        return seen
