"""What the attempts of a job left in storage: enough to go on without the ledger that handed out their leases.

A segment is whole where its record is, since that is put after both of its parts, and where they are as it says. Which
of several the lost ledger had committed is not known and does not matter: each is a result of its shard, and the one
of the highest fence is taken by everybody who looks.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from jobs.errors import ObjectNotFound
from jobs.layout import AttemptObject, JobLayout, attempt_object
from jobs.records import SegmentRecord
from jobs.shards import Plan, Shard
from jobs.storage import ObjectInfo, Stores

log = logging.getLogger(__name__)

_FENCE_STEP = 1_000_000
_SHARDS_AT_ONCE = 16
_BATCH = 500

_Found = list[tuple[AttemptObject, ObjectInfo]]


@dataclass(frozen=True, slots=True)
class Left:
    """Whole segments by shard, and a fence above all that were handed out; 0 where no attempt left a trace."""

    segments: dict[int, SegmentRecord]
    fence: int


def left_in_storage(
    stores: Stores, layout: JobLayout, plan: Plan, on_progress: Callable[[], None] = lambda: None
) -> Left:
    """The segments of a job's attempts that are whole and cut as `plan` says."""
    shards = {shard.index: shard for shard in plan.shards}
    segments: dict[int, SegmentRecord] = {}
    highest = -1

    def newest_whole(found: _Found) -> SegmentRecord | None:
        shard = shards.get(found[0][0].shard)
        return None if shard is None else _newest_whole(stores, layout, shard, found)

    with ThreadPoolExecutor(_SHARDS_AT_ONCE) as pool:
        for some in _batches(_by_shard(stores, layout)):
            for found, record in zip(some, pool.map(newest_whole, some), strict=True):
                highest = max(highest, *(named.fence for named, _ in found))
                if record is not None:
                    segments[found[0][0].shard] = record
            on_progress()
    # The lost ledger may have handed out more fences than it left objects of, though never a million more.
    return Left(segments, (highest // _FENCE_STEP + 1) * _FENCE_STEP if highest >= 0 else 0)


def _by_shard(stores: Stores, layout: JobLayout) -> Iterator[_Found]:
    """The attempts' objects, those of one shard together; names that no attempt gives are passed over."""
    named = ((attempt_object(info.url), info) for info in stores.list(layout.attempts))
    known = ((name, info) for name, info in named if name is not None)
    for _, some in groupby(known, key=lambda item: item[0].shard):
        yield list(some)


def _batches(found: Iterator[_Found]) -> Iterator[list[_Found]]:
    batch: list[_Found] = []
    for one in found:
        batch.append(one)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch


def _newest_whole(stores: Stores, layout: JobLayout, shard: Shard, found: _Found) -> SegmentRecord | None:
    listed = {info.url: info for _, info in found}
    records = sorted((item for item in found if item[0].is_record), reverse=True)
    for named, info in records:
        try:
            record = SegmentRecord.model_validate_json(stores.read(info.url))
        except ObjectNotFound:
            continue  # collected meanwhile
        except ValueError as error:
            log.warning("%s is no record, and its segment is left alone: %s", info.url, error)
            continue
        parts = [part for part in record.objects(layout, shard.index) if part]
        whole = all(listed.get(part.url) == part or _is_there(stores, part) for part in parts)
        fits = (record.fence, record.attempt, record.ok + record.failed) == (named.fence, named.attempt, shard.rows)
        if whole and fits:
            return record
    return None


def _is_there(stores: Stores, part: ObjectInfo) -> bool:
    """Asked where the listing says otherwise: some stores list late, or write the ETag another way."""
    try:
        return stores.head(part.url) == part
    except ObjectNotFound:
        return False
