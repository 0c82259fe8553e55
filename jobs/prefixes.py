"""In which order a job's shards are best worked on: those whose prompts begin alike, one after the other.

Who asks ten questions about each of many documents has, as a rule, one question's rows after the other's in the file.
What begins alike is then in shards far apart, and a worker has long forgotten a document when it comes up again:

    file      q1: A B C D │ q1: E F G H │ q2: A B C D │ q2: E F G H       each document is computed for each question
    in line   q1: A B C D │ q2: A B C D │ q1: E F G H │ q2: E F G H       and here once

A shard stays a range of the file's rows, and the output has the file's order: only the shards' places change.

The planner looks at prompts in passing. A prompt that is as long as one of the `LENGTHS` has a mark for it, of the 64
characters before: prompts with the same mark have, all but certainly, that much in common. A sample of the marks is
held, by the value of the mark, so that one that is held for a shard is held for all. Were it wrong about a shard, no
row would be: its place is all that follows.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

from jobs.row_fields import Message, Prompt

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
"""In characters, of which a token id has four. What is shorter saves too little; what comes after is not looked at."""
_MARKED = 64
_MOST_MARKS = 1 << 17
# Which length, in the upper bits, and where the marked characters are.
_MARKS = [(level << 32, length - _MARKED, length) for level, length in enumerate(LENGTHS)]
_CHARACTERS_PER_TOKEN = 4
_WORTH_IT = 0.01
"""The share of a job's tokens that an order has to save."""


class Line(NamedTuple):
    """The shards' places in the line, by index.

    `in_runs`: neighbours in it have prefixes in common, so that a worker had better take them one after the other, and
    workers start far apart.
    """

    places: Sequence[int]
    in_runs: bool


class Beginnings:
    """What the prompts of a job begin with, shard by shard. Memory does not grow with the job, but for a few bytes a
    shard."""

    def __init__(self, most_marks: int = _MOST_MARKS) -> None:
        self._most_marks = most_marks
        self._shards: list[array[int]] = []
        self._current: set[int] = set()
        self._held = 0
        self._below = 1 << 32  # of the marks, which are 32 bits, those below this are held
        self._tokens = 0

    def add(self, prompt: Prompt | list[Message]) -> None:
        """Look at a prompt of the current shard. One shorter than the shortest of the `LENGTHS` tells nothing."""
        text = text_of(prompt)
        size = len(text)
        for level, start, length in _MARKS:
            if size < length:
                return
            mark = crc32(text[start:length].encode())
            if mark < self._below:
                self._current.add(level | mark)

    def end_shard(self, tokens: int) -> None:
        """What comes next is of the next shard. This one's prompts and answers are estimated at so many tokens."""
        self._tokens += tokens
        self._shards.append(array("Q", self._current))
        self._held += len(self._current)
        self._current.clear()
        while self._held > self._most_marks:
            self._below //= 2
            self._shards = [array("Q", filter(self._is_held, marks)) for marks in self._shards]
            self._held = sum(map(len, self._shards))

    def line(self) -> Line:
        """Of the orders that suggest themselves, the one in which neighbours have most in common."""
        marks = [frozenset(of_shard) for of_shard in self._shards]
        worth_it = _WORTH_IT * _CHARACTERS_PER_TOKEN * self._tokens
        file_order: Sequence[int] = range(len(marks))
        best, saved = file_order, self._saved(marks, file_order)
        for level in range(len(LENGTHS)):
            order = _by_first_seen(marks, level)
            if (more := self._saved(marks, order)) > saved + worth_it:
                best, saved = order, more
        places = array("Q", file_order)
        for place, shard in enumerate(best):
            places[shard] = place
        return Line(places, in_runs=saved > worth_it)

    def _is_held(self, mark: int) -> bool:
        return mark & 0xFFFF_FFFF < self._below

    def _saved(self, marks: Sequence[frozenset[int]], order: Sequence[int]) -> float:
        """About how many characters a shard need not compute that the one before it in this order has computed."""
        saved = sum(_GAINS[mark >> 32] for one, other in pairwise(order) for mark in marks[one] & marks[other])
        return saved * (1 << 32) / self._below


# Who has a prompt's first 1,024 characters in common has the first 512 in common, which count for themselves.
_GAINS = [length - shorter for shorter, length in pairwise((0, *LENGTHS))]


def _by_first_seen(marks: Sequence[frozenset[int]], level: int) -> list[int]:
    """Each shard where its prompts were first seen: at the mean of the first shards that had its marks of a level."""
    first: dict[int, int] = {}
    where: list[float] = []
    for shard, of_shard in enumerate(marks):
        seen = [first.setdefault(mark, shard) for mark in of_shard if mark >> 32 == level]
        where.append(sum(seen) / len(seen) if seen else shard)
    return sorted(range(len(marks)), key=where.__getitem__)


def text_of(prompt: Prompt | list[Message]) -> str:
    """A text that two prompts have in common as far as they have tokens in common, or messages."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], int):
        ids = [token & 0xFFFF_FFFF for token in prompt[: LENGTHS[-1] // _CHARACTERS_PER_TOKEN]]
        return array("I", ids).tobytes().decode("latin-1")
    text = prompt[0]["content"]
    for message in prompt[1:]:
        text += message["content"]
    return text
