"""Whether a job kept its promises: from its manifest, its objects, and the history of the ledger, and nothing else.

What the ledger says at the end is not asked: it may have been emptied, and it is what is on trial.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jobs.errors import ObjectNotFound
from jobs.records import Manifest, SegmentRecord
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
    Of a job that was stopped: the rows of its committed shards so, each other row in the error file, once.
    Raises AssertionError with what is wrong; BrokenPromise came up where the history was read.
    """
    manifest = Manifest.model_validate_json(stores.read(spec.layout.manifest))
    assert manifest.state == ending
    done = _check_segments(spec, manifest, stores, rows=len(prompts))
    if ending == "completed":
        assert done == list(range(len(prompts)))
    expected = dict(errors or {})
    assert (manifest.rows, manifest.ok, manifest.failed) == (
        len(prompts),
        len([row for row in done if row not in expected]),
        len([row for row in done if row in expected]),
    )
    _check_output(spec, manifest, prompts, done, expected, stores)
    _check_errors(spec, manifest, prompts, done, expected, stores)
    committed = history.commits(spec.id)
    for segment in manifest.segments:
        if segment.record.attempt != "dead":
            assert segment.record.attempt in committed[segment.shard], "the manifest has what was never committed"
    return manifest


def _check_segments(spec: JobSpec, manifest: Manifest, stores: Stores, rows: int) -> list[int]:
    """The rows of the manifest's segments, whose objects are there as they were put."""
    done: list[int] = []
    shards = [segment.shard for segment in manifest.segments]
    assert shards == sorted(set(shards))
    for segment in manifest.segments:
        _check_objects(spec, segment.shard, segment.record, stores)
        assert segment.record.ok + segment.record.failed == segment.rows
        done.extend(range(segment.first_row, segment.first_row + segment.rows))
    assert done == sorted(set(done)), "a row is in two segments"
    assert not done or done[-1] < rows
    return done


def _check_objects(spec: JobSpec, shard: int, record: SegmentRecord, stores: Stores) -> None:
    for part, info in zip((record.output, record.errors), record.objects(spec.layout, shard), strict=True):
        if part is None or info is None:
            continue
        data = stores.read(info.url)
        assert (len(data), hashlib.sha256(data).hexdigest()) == (part.size, part.sha256), info.url
        assert data.count(b"\n") == part.lines


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
    assert (len(data), len(found)) == (manifest.output.size, manifest.output.lines)
    assert [row.get("prompt") for row in found] == [prompts[index] for index in done]
    for index, row in zip(done, found, strict=True):
        if index in errors:
            assert (row["response"], row["error"]["code"]) == (None, errors[index])
        else:
            assert (row["response"], row["error"]) == (answer_to(row["prompt"], seed_of(spec.id, index)), None)


def _check_errors(
    spec: JobSpec,
    manifest: Manifest,
    prompts: Sequence[str | None],
    done: Sequence[int],
    errors: Mapping[int, str],
    stores: Stores,
) -> None:
    never_run = f"batch_{manifest.state}"
    expected = dict.fromkeys(set(range(len(prompts))) - set(done), never_run)
    expected |= {index: code for index, code in errors.items() if index in done}
    if not expected:
        assert manifest.errors is None
        try:
            stores.head(spec.error_url)
        except ObjectNotFound:
            return
        raise AssertionError("there is an error file, and no error")
    found = _lines(stores.read(spec.error_url))
    assert [((row["record"] or {}).get("prompt"), row["error"]["code"]) for row in found] == [
        (prompts[index], code) for index, code in sorted(expected.items())
    ]


def _lines(data: bytes) -> list[dict[str, Any]]:
    assert not data or data.endswith(b"\n"), "the last line is cut"
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
