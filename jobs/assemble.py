"""The end of a job: its segments become the output file and the error file, and the manifest says so.

The commit records no longer change when this begins, so files and manifest are a function of them and of the ledger:
two assemblers that run at once write the same bytes, also where the store lets the second replace what the first wrote.
In order: segments are checked, files are joined, the manifest is written if there is none, the ledger is told. A crash
between any two is mended by running it again.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, islice

from jobs.errors import InputChanged, ObjectNotFound, PreconditionFailed, RowError
from jobs.failpoints import failpoint
from jobs.joining import join_output
from jobs.layout import JobLayout
from jobs.ledger import Ending, Ledger
from jobs.planner import Plan, PlannedRow, Shard, load_plan, shard_rows
from jobs.records import DeadShard, Manifest, ManifestSegment, ResultFile, SegmentRecord, Usage
from jobs.remaining import write_remaining
from jobs.results import error_line
from jobs.retry import KeptAnswers
from jobs.rows import Row
from jobs.spec import JobSpec
from jobs.spool import Spool
from jobs.storage import ObjectInfo, Stores

log = logging.getLogger(__name__)

_HEADS_AT_ONCE = 16
_DEAD_ATTEMPT, _NEVER_RUN_ATTEMPT = "dead", "unrun"


def assemble(spec: JobSpec, ledger: Ledger, stores: Stores, on_progress: Callable[[], None] = lambda: None) -> None:
    """Finish a job that is `finalizing` or `cancelling`; does nothing in any other state.

    A committed segment that is not in storage any more makes its shard ready again, and the job goes on.
    """
    ending = ledger.ending(spec.id)
    if ending is None:
        return
    from_state = "cancelling" if ending == "cancelled" else "finalizing"
    if (written := _written_manifest(stores, spec.layout)) is not None:
        # Another assembler's, or from before the ledger lost its last second: the files are as it says, and stay so.
        ledger.finish(written, from_state)
        return
    records = ledger.records(spec.id)
    planned = _stored_plan(stores, spec.layout)
    vanished = list(_vanished(records, stores, spec.layout, on_progress))
    if vanished and ending == "completed":
        for shard in vanished:
            log.warning("job %s: the segment of shard %d is gone from storage, it runs again", spec.id, shard)
            ledger.reopen(spec, shard, _segment(records[shard]))
        return
    segments = {
        shard.index: _dead_segment(spec, stores, shard, record) if isinstance(record, DeadShard) else record
        for shard in planned.shards
        if (record := records.get(shard.index)) is not None and shard.index not in vanished
    }
    manifest = _join(spec, stores, planned, segments, ending, on_progress)
    failpoint("job.joined")
    view = ledger.view(spec.id)
    times = {name: getattr(view, name) for name in ("in_progress_at", "started_at", "finalizing_at")}
    manifest = manifest.model_copy(update={**times, "ended_at": ledger.joined_at(spec.id)})
    published = _publish(stores, spec.layout, manifest)
    failpoint("job.published")
    ledger.finish(published, from_state)
    failpoint("job.finished")


def _stored_plan(stores: Stores, layout: JobLayout) -> Plan:
    try:
        return load_plan(stores.read(layout.plan))
    except ObjectNotFound:
        return Plan(0, 0, (), (), in_runs=False)  # cancelled before it was planned


def _segment(record: SegmentRecord | DeadShard) -> SegmentRecord:
    if isinstance(record, DeadShard):
        raise TypeError("a dead shard has no segment")
    return record


def _vanished(
    records: dict[int, SegmentRecord | DeadShard], stores: Stores, layout: JobLayout, on_progress: Callable[[], None]
) -> Iterator[int]:
    """The shards of which a committed object is missing, or is not the one that was committed."""

    def is_whole(item: tuple[int, SegmentRecord | DeadShard]) -> bool:
        shard, record = item
        if isinstance(record, DeadShard):
            return True
        try:
            return all(stores.head(part.url) == part for part in record.objects(layout, shard) if part)
        except ObjectNotFound:
            return False

    items = iter(sorted(records.items()))
    with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
        while some := list(islice(items, 100 * _HEADS_AT_ONCE)):
            for (shard, _), whole in zip(some, pool.map(is_whole, some), strict=True):
                if not whole:
                    yield shard
            on_progress()


def _dead_segment(spec: JobSpec, stores: Stores, shard: Shard, record: DeadShard) -> SegmentRecord:
    """The segment of a shard that no worker survived or finished: an error for each row that no parent answered."""
    kept = KeptAnswers(stores).of(spec, shard)
    with Spool(spec, stores) as spool:
        for planned in shard_rows(spec, stores, shard):
            if (answer := kept.get(planned.index)) is not None:
                spool.keep(planned, answer)
                continue
            error = planned.row if isinstance(planned.row, RowError) else _never_finished(planned.row, record)
            spool.add(planned, error)
        return spool.put_parts(shard.index, 0, _DEAD_ATTEMPT)


def _never_finished(row: Row, shard: DeadShard) -> RowError:
    why = f"; the last try ended with: {shard.fault}" if shard.fault else "."
    return RowError(
        code="engine_error",
        message=f"The shard of this row was tried {shard.tries} times, and no worker finished it{why}",
        line=row.line,
        byte=row.offset,
        custom_id=row.custom_id,
        file=row.file,
    )


def _join(
    spec: JobSpec,
    stores: Stores,
    planned: Plan,
    segments: dict[int, SegmentRecord],
    ending: Ending,
    on_progress: Callable[[], None],
) -> Manifest:
    objects = {shard: record.objects(spec.layout, shard) for shard, record in segments.items()}
    never_run = _never_run(spec, stores, planned, segments, ending, on_progress) if ending != "completed" else {}
    errors = {shard: error for shard, (_, error) in objects.items() if error}
    errors |= {shard: info for shard, (info, _) in never_run.items()}
    output = join_output(spec, stores, segments, on_progress)
    on_progress()
    error_info = stores.concat([error for _, error in sorted(errors.items())], spec.error_url) if errors else None
    error_lines = sum(record.errors.lines for record in segments.values() if record.errors)
    error_lines += sum(lines for _, lines in never_run.values())
    on_progress()
    return Manifest(
        job_id=spec.id,
        spec_fingerprint=spec.fingerprint,
        state=ending,
        rows=planned.rows,
        ok=sum(record.ok for record in segments.values()),
        failed=sum(record.failed for record in segments.values()),
        usage=sum((record.usage for record in segments.values()), Usage()),
        output=output,
        errors=error_info and ResultFile(url=spec.error_url, size=error_info.size, lines=error_lines),
        remaining=_write_remaining(spec, stores, planned, segments) if ending != "completed" else None,
        engines=tuple(sorted({record.engine for record in segments.values() if record.engine})),
        segments=tuple(
            ManifestSegment(shard=shard.index, first_row=shard.first_row, rows=shard.rows, record=segments[shard.index])
            for shard in planned.shards
            if shard.index in segments
        ),
    )


def _never_run(
    spec: JobSpec,
    stores: Stores,
    planned: Plan,
    segments: dict[int, SegmentRecord],
    ending: Ending,
    on_progress: Callable[[], None],
) -> dict[int, tuple[ObjectInfo, int]]:
    """The error lines of the rows that a job did not come to, by the first shard of each run of such, and their number.

    None where the input is no longer the one that was submitted, or was never planned: it is not known to have rows.
    """
    found: dict[int, tuple[ObjectInfo, int]] = {}
    for missing, some in groupby(planned.shards, key=lambda shard: shard.index not in segments):
        if not missing:
            continue
        run = list(some)
        try:
            with stores.writer(spec.layout.segment(run[0].index, 0, _NEVER_RUN_ATTEMPT, ".errors")) as writer:
                for shard in run:
                    for row in shard_rows(spec, stores, shard):
                        writer.write(_never_run_line(spec, row, ending))
                    on_progress()
        except (ObjectNotFound, InputChanged) as error:
            log.warning("job %s: no errors for the rows that were not run: %s", spec.id, error)
            continue
        found[run[0].index] = writer.info, sum(shard.rows for shard in run)
    return found


def _never_run_line(spec: JobSpec, planned: PlannedRow, ending: Ending) -> bytes:
    why = "before the batch was cancelled" if ending == "cancelled" else "before the completion window expired"
    error = RowError(
        code=f"batch_{ending}",
        message=f"This request could not be executed {why}.",
        line=planned.line.number,
        byte=planned.line.offset,
        custom_id=planned.row.custom_id,
        file=planned.row.file,
    )
    return error_line(spec, planned.index, planned.line, planned.row if isinstance(planned.row, Row) else None, error)


def _write_remaining(spec: JobSpec, stores: Stores, planned: Plan, segments: dict[int, SegmentRecord]) -> str | None:
    """The rows that a job which was stopped has not done, as a file that can be submitted.

    None where the input is no longer the one that was submitted: what is done is kept all the same.
    """
    missing = [shard for shard in planned.shards if shard.index not in segments] if planned.shards else None
    try:
        return write_remaining(spec, stores, missing)
    except (ObjectNotFound, InputChanged) as error:
        log.warning("job %s: no file of what is left to do: %s", spec.id, error)
        return None


def _publish(stores: Stores, layout: JobLayout, manifest: Manifest) -> Manifest:
    """Write the manifest, or take over the one that another assembler wrote first."""
    try:
        stores.put_if_absent(layout.manifest, manifest.model_dump_json().encode())
    except PreconditionFailed:
        return Manifest.model_validate_json(stores.read(layout.manifest))
    return manifest


def _written_manifest(stores: Stores, layout: JobLayout) -> Manifest | None:
    try:
        return Manifest.model_validate_json(stores.read(layout.manifest))
    except ObjectNotFound:
        return None
