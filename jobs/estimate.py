"""What a job will be, before it runs: its rows in the model's own tokens, and the time that they take by measurement.

All rows are read and checked, as the planner does. Their tokens are counted in all of them, or, of a large input, in
whole shards that are evenly spread over it; what is counted so is scaled up, and the estimate says so.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from jobs.errors import RowError
from jobs.planner import Plan, plan, shard_rows
from jobs.pooling import Pooling
from jobs.profile import Capacity, Profile
from jobs.row_fields import Prompt
from jobs.rows import Row
from jobs.settings import Settings
from jobs.shards import Shard
from jobs.spec import JobSpec
from jobs.storage import Stores

Encode = Callable[[Sequence[Prompt]], Sequence[Sequence[int] | Exception]]
"""The token ids of prompts, or why a prompt has none."""

_BATCH = 256
_DEFAULT_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Longest:
    """The row with the longest prompt."""

    row: int
    line: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts in tokens. `histogram` counts rows by the power of two that their length reaches at most.

    `shared` is the share of tokens that stand in whole blocks of `block_size` which an earlier row began with as well:
    what a prefix cache without limit would save. `refused` rows could not be encoded. `rows` were looked at; `total` is
    of all rows of the job.
    """

    rows: int
    refused: int
    total: int
    mean: float
    median: int
    p99: int
    longest: Longest
    histogram: dict[int, int]
    shared: float
    block_size: int


@dataclass(frozen=True, slots=True)
class Fit:
    """How many rows of mean length the KV pool holds at once, and how many are too long for it or for the model.

    Both are of the rows that were looked at. `basis` says where the size of the pool comes from.
    """

    kv_tokens: int
    rows_at_once: int
    too_long: int
    basis: str


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds on one worker like the one that was measured, and what that says of GPU hours."""

    prefill: float
    decode: float
    total: float
    gpu_hours: float
    basis: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """`answer_tokens` is of all rows: the expected ones if the caller said so, else their limits; None without any."""

    rows: int
    bad_rows: int
    first_errors: tuple[RowError, ...]
    shards: int
    sampled: bool
    prompts: Prompts | None
    answer_tokens: int | None
    answers_are_limits: bool
    fit: Fit | None
    duration: Duration | None

    def as_dict(self) -> dict[str, Any]:
        errors = [error.model_dump(exclude_none=True) for error in self.first_errors]
        return {**asdict(self), "first_errors": errors}


def estimate(
    spec: JobSpec,
    stores: Stores,
    limits: Settings,
    encode: Encode,
    *,
    profile: Profile | None,
    capacity: Capacity | None = None,
    max_rows: int,
    mean_answer: int | None = None,
    on_progress: Callable[[int, int], None] = lambda rows, size: None,
) -> Estimate:
    """Reads the whole input, and encodes at most about `max_rows` of its rows. Without a profile no time is claimed.

    What fits is by `capacity`, and by the profile's own where none is given.
    Raises what the planner raises.
    """
    planned = plan(spec, stores, limits, on_progress)
    shards = _spread(planned, max_rows)
    capacity = capacity or (profile.capacity if profile else None)
    count = _Count(capacity.block_size if capacity else _DEFAULT_BLOCK, mean_answer)
    rows = (found for shard in shards for found in shard_rows(spec, stores, shard))
    good = ((found.index, found.row) for found in rows if isinstance(found.row, Row))
    while some := list(islice(good, _BATCH)):
        count.add(some, encode)
    scale = (planned.rows - planned.bad) / max(count.rows, 1)
    prompts = count.prompts(scale)
    answers = None if count.unlimited else round(count.answers * scale)
    fit = None if prompts is None or capacity is None else _fit(prompts, count, capacity)
    duration = None
    if prompts is not None and answers is not None and profile is not None and fit is not None and fit.rows_at_once:
        duration = _duration(planned, prompts, answers, fit, profile)
    return Estimate(
        rows=planned.rows,
        bad_rows=planned.bad,
        first_errors=planned.first_errors,
        shards=len(planned.shards),
        sampled=len(shards) < len(planned.shards),
        prompts=prompts,
        answer_tokens=answers,
        answers_are_limits=mean_answer is None,
        fit=fit,
        duration=duration,
    )


def _spread(planned: Plan, max_rows: int) -> Sequence[Shard]:
    """All shards, or so many of them, evenly spread, that they have about `max_rows` rows."""
    if planned.rows <= max_rows:
        return planned.shards
    wanted = max(1, len(planned.shards) * max_rows // planned.rows)
    return [planned.shards[i * len(planned.shards) // wanted] for i in range(wanted)]


class _Count:
    """What is counted over rows. Holds 4 bytes a row, and 8 a block of prompt."""

    def __init__(self, block_size: int, mean_answer: int | None) -> None:
        self._block_size = block_size
        self._mean_answer = mean_answer
        self._lengths = array("I")
        self._seen: set[int] = set()
        self._shared = 0
        self._longest = Longest(0, 0, 0)
        self._refused = 0
        self.rows = 0
        self.answers = 0
        self.unlimited = False

    def add(self, rows: Sequence[tuple[int, Row]], encode: Encode) -> None:
        prompts = [(index, row, prompt) for index, row in rows for prompt in row.prompts]
        encoded = encode([prompt for _, _, prompt in prompts])
        for (index, row, _), ids in zip(prompts, encoded, strict=True):
            if isinstance(ids, Exception):
                self._refused += 1
                continue
            self._lengths.append(len(ids))
            self._shared += self._block_size * self._seen_blocks(ids)
            if len(ids) > self._longest.tokens:
                self._longest = Longest(index, row.line, len(ids))
        for _, row in rows:
            self.rows += 1
            self._add_answer(row)

    def _add_answer(self, row: Row) -> None:
        if isinstance(row.params, Pooling):
            return
        tokens = self._mean_answer or row.params.max_tokens
        if tokens is None:
            self.unlimited = True
        else:
            self.answers += tokens * (row.params.n or 1)

    def _seen_blocks(self, ids: Sequence[int]) -> int:
        """How many blocks the prompt begins with that another began with; the others are remembered.

        A block's name is a hash over it and all before it, so after one that is new all are. The last token is always
        computed, and in no block.
        """
        found, parent = 0, b""
        for start in range(0, (len(ids) - 1) // self._block_size * self._block_size, self._block_size):
            block = array("I", ids[start : start + self._block_size]).tobytes()
            parent = hashlib.blake2b(parent + block, digest_size=8).digest()
            name = int.from_bytes(parent, "little")
            found += name in self._seen
            self._seen.add(name)
        return found

    def prompts(self, scale: float) -> Prompts | None:
        """`scale` is how many rows of the job stand behind each that was counted."""
        if not self._lengths:
            return None
        lengths = sorted(self._lengths)
        total = sum(lengths)
        powers = Counter(1 << (length - 1).bit_length() for length in lengths)
        return Prompts(
            rows=self.rows,
            refused=self._refused,
            total=round(total * scale),
            mean=total / len(lengths),
            median=lengths[len(lengths) // 2],
            p99=lengths[min(len(lengths) * 99 // 100, len(lengths) - 1)],
            longest=self._longest,
            histogram=dict(sorted(powers.items())),
            shared=self._shared / total,
            block_size=self._block_size,
        )

    def longer_than(self, tokens: int) -> Iterator[int]:
        return (length for length in self._lengths if length > tokens)

    @property
    def mean_answer(self) -> float:
        return self.answers / max(self.rows, 1)


def _fit(prompts: Prompts, count: _Count, capacity: Capacity) -> Fit:
    """What rows share is held once, and each holds the rest and, at its end, its whole answer."""
    own = prompts.mean * (1 - prompts.shared) + count.mean_answer
    at_once = capacity.kv_tokens / max(own, capacity.block_size)
    return Fit(
        kv_tokens=capacity.kv_tokens,
        rows_at_once=max(1, min(int(at_once), capacity.max_num_seqs)) if capacity.kv_tokens else 0,
        too_long=sum(1 for _ in count.longer_than(capacity.max_model_len - 1)),
        basis=capacity.basis,
    )


def _duration(planned: Plan, prompts: Prompts, answers: int, fit: Fit, profile: Profile) -> Duration:
    prefill = prompts.total * (1 - prompts.shared) / profile.prefill_tokens_per_second
    rows = min(fit.rows_at_once, max(planned.rows - planned.bad, 1))
    decode = answers / profile.decode_tokens_per_second(rows)
    return Duration(prefill, decode, prefill + decode, (prefill + decode) / 3600, profile.basis)
