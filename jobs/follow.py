"""The output of a job while it grows: the lines of each shard as soon as that shard and all before it are settled."""

from collections.abc import Callable, Iterator

from jobs.connection import UNANSWERED, Patience
from jobs.errors import ObjectNotFound
from jobs.ledger import Ledger
from jobs.reading import json_lines
from jobs.records import JobView, Manifest, SegmentRecord
from jobs.spec import JobSpec
from jobs.storage import ObjectInfo, Stores

_CHUNK = 256 * 1024


def follow_results(spec: JobSpec, ledger: Ledger, stores: Stores, wait: Callable[[], None]) -> Iterator[bytes]:
    """The lines of the output file in input order, in pieces that end at a line's end; it ends with the job.

    `wait` is called whenever the next shard is not settled; a ledger that does not answer is waited for, for some
    minutes. What is yielded is what the output file will hold, but for one case: of a segment that vanishes from
    storage after it was read, the job's second answer is not seen here.
    """
    shard = 0
    patience = Patience()
    while True:
        try:
            # Looked at first: what is committed by then is seen below.
            view = ledger.view(spec.id)
            record = ledger.record(spec.id, shard)
        except UNANSWERED as error:
            patience.bear(error)
            continue
        patience.answered()
        if isinstance(record, SegmentRecord) and (info := _whole(record, spec, shard, stores)) is not None:
            yield from _lines(info, spec, stores)
            shard += 1
        elif view.terminal:
            yield from _rest(view, spec, shard, stores)
            return
        else:
            wait()


def _whole(record: SegmentRecord, spec: JobSpec, shard: int, stores: Stores) -> tuple[ObjectInfo, ...] | None:
    """The segment's output object, if it has one; None where it has vanished, and its shard will run again."""
    output, _ = record.objects(spec.layout, shard)
    if output is None:
        return ()
    try:
        return (output,) if stores.head(output.url) == output else None
    except ObjectNotFound:
        return None


def _rest(view: JobView, spec: JobSpec, first: int, stores: Stores) -> Iterator[bytes]:
    """The shards that only the manifest tells of: those that no worker finished, and what comes after them."""
    if view.state == "failed":
        return
    manifest = Manifest.model_validate_json(stores.read(spec.layout.manifest))
    for segment in manifest.segments:
        if segment.shard >= first:
            output, _ = segment.record.objects(spec.layout, segment.shard)
            yield from _lines((output,) if output else (), spec, stores)


def _lines(objects: tuple[ObjectInfo, ...], spec: JobSpec, stores: Stores) -> Iterator[bytes]:
    for info in objects:
        held = b""
        for piece in json_lines(info, spec.output, stores, _CHUNK):
            head, newline, tail = piece.rpartition(b"\n")
            if newline:
                yield held + head + newline
                held = tail
            else:
                held += piece
