"""Whether a job kept its promises: from its manifest, its objects, and the history of the ledger, and nothing else.

What the ledger says at the end is not asked: it may have been emptied, and it is what is on trial.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jobs.errors import ObjectNotFound
from jobs.records import Manifest, ResultFile, SegmentRecord
from jobs.spec import JobSpec
from jobs.storage import Stores
from tests.system.history import History
from tests.system.stub_engine import answer_to
from workers.render import seed_of

Ending = Literal["completed", "cancelled", "expired"]


def check(
    spec: JobSpec,
    prompts: Sequence[str | None],
    stores: Stores,
    history: History,
    *,
    ending: Ending = "completed",
    errors: Mapping[int, str] | None = None,
) -> Manifest:
    """Every row exactly once and in order, with its own answer, or with the error code that `errors` has for its index.

    A prompt is None where the row has none that can be read.
    Of a job that was stopped: the rows of its committed shards so, each other row in the error file, once, and in the
    file of what remains. One that was stopped before it was planned is not known to have rows, and all of it remains.
    Raises AssertionError with what is wrong; BrokenPromise came up where the history was read.
    """
    manifest = Manifest.model_validate_json(stores.read(spec.layout.manifest))
    _same("the state", manifest.state, ending)
    done = _check_segments(spec, manifest, stores, rows=len(prompts))
    if ending == "completed":
        _same("the rows that are done", done, list(range(len(prompts))))
    expected = dict(errors or {})
    rows = range(len(prompts) if manifest.rows or "in_progress" in history.states(spec.id) else 0)
    _same(
        "rows, answers and errors",
        (manifest.rows, manifest.ok, manifest.failed),
        (len(rows), len([row for row in done if row not in expected]), len([row for row in done if row in expected])),
    )
    _check_output(spec, manifest, prompts, done, expected, stores)
    failed = {index: expected[index] for index in done if index in expected}
    failed |= {index: f"batch_{ending}" for index in rows if index not in done}
    _check_errors(spec, manifest, prompts, failed, stores)
    _check_remaining(manifest, [prompt for index, prompt in enumerate(prompts) if index not in done], stores)
    committed = history.commits(spec.id)
    for segment in manifest.segments:
        if segment.record.attempt != "dead":
            assert segment.record.attempt in committed[segment.shard], "the manifest has what was never committed"
    return manifest


def _check_segments(spec: JobSpec, manifest: Manifest, stores: Stores, rows: int) -> list[int]:
    """The rows of the manifest's segments, whose objects are there as they were put."""
    done: list[int] = []
    shards = [segment.shard for segment in manifest.segments]
    _same("the shards", shards, sorted(set(shards)))
    for segment in manifest.segments:
        _check_objects(spec, segment.shard, segment.record, stores)
        _same(f"the rows of shard {segment.shard}", segment.record.ok + segment.record.failed, segment.rows)
        done.extend(range(segment.first_row, segment.first_row + segment.rows))
    _same("the rows of all segments", done, sorted(set(done)))
    assert not done or done[-1] < rows
    return done


def _check_objects(spec: JobSpec, shard: int, record: SegmentRecord, stores: Stores) -> None:
    for part, info in zip((record.output, record.errors), record.objects(spec.layout, shard), strict=True):
        if part is None or info is None:
            continue
        data = stores.read(info.url)
        _same(info.url, (len(data), hashlib.sha256(data).hexdigest()), (part.size, part.sha256))
        _same(f"the lines of {info.url}", data.count(b"\n"), part.lines)


def _check_output(
    spec: JobSpec,
    manifest: Manifest,
    prompts: Sequence[str | None],
    done: Sequence[int],
    errors: Mapping[int, str],
    stores: Stores,
) -> None:
    data = stores.read(manifest.output.url)
    found = _lines(data)
    _same("size and lines of the output", (len(data), len(found)), (manifest.output.size, manifest.output.lines))
    _same("the prompts of the output", [row.get("prompt") for row in found], [prompts[index] for index in done])
    for index, row in zip(done, found, strict=True):
        code = None if row["error"] is None else row["error"]["code"]
        answer = None if index in errors else answer_to(row["prompt"], seed_of(spec.id, index))
        _same(f"row {index}", (row["response"], code), (answer, errors.get(index)))


def _check_errors(
    spec: JobSpec, manifest: Manifest, prompts: Sequence[str | None], failed: Mapping[int, str], stores: Stores
) -> None:
    """The error file has the rows and codes of `failed`, and is not there where there are none."""
    if not failed:
        _same("the error file", manifest.errors, None)
        assert not _is_there(stores, spec.error_url), "there is an error file, and no error"
        return
    data = stores.read(spec.error_url)
    found = _lines(data)
    _same(
        "the rows of the error file",
        [((row["record"] or {}).get("prompt"), row["error"]["code"]) for row in found],
        [(prompts[index], code) for index, code in sorted(failed.items())],
    )
    _same("the error file", manifest.errors, ResultFile(url=spec.error_url, size=len(data), lines=len(found)))


def _check_remaining(manifest: Manifest, prompts: Sequence[str | None], stores: Stores) -> None:
    """What a job that was stopped has not done can be submitted, in the same order."""
    if manifest.state == "completed":
        _same("the file of what remains", manifest.remaining, None)
        return
    assert manifest.remaining is not None, "there is no file of what remains"
    remaining = [row.get("prompt") for row in _lines(stores.read(manifest.remaining))]
    _same("what remains", remaining, list(prompts))


def _same(what: str, found: object, expected: object) -> None:
    assert found == expected, f"{what}: {found!r}, and not {expected!r}"


def _is_there(stores: Stores, url: str) -> bool:
    try:
        stores.head(url)
    except ObjectNotFound:
        return False
    return True


def _lines(data: bytes) -> list[dict[str, Any]]:
    assert not data or data.endswith(b"\n"), "the last line is cut"
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
