"""A segment on its way to storage: what is counted, hashed and put is what was added."""

import hashlib
from contextlib import suppress
from pathlib import Path

import pytest

from jobs.errors import RowError
from jobs.ledger import Lease
from jobs.records import Usage
from jobs.results import Choice, Completion, ResultLines
from jobs.settings import Settings
from jobs.storage import Stores
from tests.jobs.ledgers import shards
from tests.jobs.specs import openai_spec
from workers.spool import Spool

ANSWER = Completion((Choice("a", "stop"),), Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1))
REFUSAL = RowError(code="x", message="y")


class Interrupted(Exception):
    """Something else went wrong."""


@pytest.fixture
def lease(tmp_path: Path) -> Lease:
    return Lease(openai_spec(storage_url=f"file://{tmp_path}/store"), shards(3)[2], "attempt", 7)


def test_a_segment_is_put_under_the_attempt_s_own_keys(lease: Lease) -> None:
    stores = Stores(Settings())
    with Spool() as spool:
        spool.add(ResultLines(b"one\n", None), ANSWER)
        spool.add(ResultLines(None, b"two failed\n"), REFUSAL)
        spool.add(ResultLines(b"three\n", None), ANSWER)
        record = spool.put(lease.spec, lease, stores, "an engine")
        assert spool.rows == 3
        assert spool.put(lease.spec, lease, stores, "an engine").output is not None
    assert (record.attempt, record.fence, record.ok, record.failed) == ("attempt", 7, 2, 1)
    assert (record.usage, record.engine) == (
        Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=2),
        "an engine",
    )
    output, errors = record.objects(lease.spec.layout, 2)
    assert output is not None
    assert errors is not None
    assert output.url.endswith("/att/000002/0000000007-attempt.jsonl")
    assert stores.read(output.url) == b"one\nthree\n"
    assert stores.read(errors.url) == b"two failed\n"
    assert record.output is not None
    assert (record.output.lines, record.output.size) == (2, 10)
    assert record.output.sha256 == hashlib.sha256(b"one\nthree\n").hexdigest()


def test_no_object_is_put_for_no_lines(lease: Lease) -> None:
    stores = Stores(Settings())
    with Spool() as spool:
        spool.add(ResultLines(b"one\n", None), ANSWER)
        record = spool.put(lease.spec, lease, stores, "")
    assert record.errors is None
    layout = lease.spec.layout
    assert [info.url for info in stores.list(layout.root)] == [
        layout.record(2, 7, "attempt"),
        layout.segment(2, 7, "attempt"),
    ]


def test_its_files_are_gone_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with suppress(Interrupted), Spool() as spool:
        spool.add(ResultLines(b"one\n", None), ANSWER)
        assert list(tmp_path.iterdir())
        raise Interrupted
    assert list(tmp_path.iterdir()) == []
