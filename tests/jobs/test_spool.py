"""A segment on its way to storage: what is counted, hashed and put is what was added."""

import gzip
import hashlib
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs.errors import ObjectNotFound, RowError
from jobs.formats.jsonl import Line, dumps
from jobs.ledger import Lease
from jobs.output import Output
from jobs.planner import PlannedRow
from jobs.records import Usage
from jobs.results import Choice, Completion
from jobs.rows import parse_row
from jobs.settings import Settings
from jobs.spool import Spool
from jobs.storage import Stores
from jobs.table import result_schema
from tests.jobs.ledgers import shards
from tests.jobs.specs import record_spec

ANSWER = Completion((Choice("a", "stop"),), Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1))
REFUSAL = RowError(code="x", message="y")


class Interrupted(Exception):
    """Something else went wrong."""


@pytest.fixture
def stores() -> Stores:
    return Stores(Settings())


def lease_in(folder: Path, **fields: Any) -> Lease:
    spec = record_spec(storage_url=f"file://{folder}/store", **fields)
    return Lease(spec, shards(3)[2], "attempt", 7, 1)


@pytest.fixture
def lease(tmp_path: Path) -> Lease:
    return lease_in(tmp_path)


def planned(lease: Lease, index: int) -> PlannedRow:
    data = dumps({"prompt": f"question {index}"})
    line = Line(index + 1, 0, len(data) + 1, data)
    return PlannedRow(index, line, parse_row(line, lease.spec))


def test_a_segment_is_put_under_the_attempt_s_own_keys(lease: Lease, stores: Stores) -> None:
    began = time.time()
    with Spool(lease.spec, stores) as spool:
        for index, outcome in enumerate((ANSWER, REFUSAL, ANSWER)):
            spool.add(planned(lease, index), outcome)
        record = spool.put(lease, "an engine", "a worker")
        assert spool.rows == 3
        assert spool.put(lease, "an engine", "a worker").finished_at == record.finished_at
    assert (record.worker, record.failures) == ("a worker", {"x": 1})
    assert record.started_at is not None
    assert record.finished_at is not None
    assert began <= record.started_at <= record.finished_at <= time.time()
    assert (record.attempt, record.fence, record.ok, record.failed) == ("attempt", 7, 2, 1)
    assert (record.usage, record.engine) == (
        Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=2),
        "an engine",
    )
    output, errors = record.objects(lease.spec.layout, 2)
    assert output is not None
    assert errors is not None
    assert output.url.endswith("/att/000002/0000000007-attempt.jsonl")
    assert errors.url.endswith("/att/000002/0000000007-attempt.errors.jsonl")
    data = stores.read(output.url)
    assert [line[:12] for line in data.splitlines()] == [b'{"prompt":"q'] * 3
    assert b'"code":"x"' in stores.read(errors.url)
    assert record.output is not None
    assert (record.output.lines, record.output.size) == (3, len(data))
    assert record.output.sha256 == hashlib.sha256(data).hexdigest()


def test_no_object_is_put_for_no_lines(lease: Lease, stores: Stores) -> None:
    with Spool(lease.spec, stores) as spool:
        spool.add(planned(lease, 0), ANSWER)
        record = spool.put(lease, "")
    assert record.errors is None
    layout = lease.spec.layout
    assert [info.url for info in stores.list(layout.root)] == [
        layout.record(2, 7, "attempt"),
        layout.segment(2, 7, "attempt"),
    ]


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_compressed_segment_is_whole_by_itself_and_the_same_bytes_for_the_same_rows(
    compression: Any, tmp_path: Path, stores: Stores
) -> None:
    lease = lease_in(tmp_path, output=Output(compression=compression))
    found = []
    for _ in range(2):
        with Spool(lease.spec, stores) as spool:
            spool.add(planned(lease, 0), ANSWER)
            output, _ = spool.put(lease, "").objects(lease.spec.layout, 2)
        assert output is not None
        assert output.url.endswith(lease.spec.output.suffix)
        found.append(stores.read(output.url))
    assert found[0] == found[1]
    if compression == "gzip":
        assert found[0][4:8] == bytes(4), "the time of day is in it"
    opened = (
        gzip.decompress(found[0])
        if compression == "gzip"
        else pa.CompressedInputStream(BytesIO(found[0]), "zstd").read()
    )
    assert opened.startswith(b'{"prompt":"question 0","response":"a"')
    assert opened.endswith(b"}\n")


@pytest.mark.parametrize("form", [Output(), Output(compression="gzip"), Output(format="parquet")])
def test_its_files_are_gone_when_it_ends(
    form: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: Stores
) -> None:
    lease = lease_in(tmp_path / "site", output=form)
    stores.put(lease.spec.layout.schema, result_schema(lease.spec).serialize().to_pybytes())
    folder = tmp_path / "spool"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with suppress(Interrupted), Spool(lease.spec, stores) as spool:
        spool.add(planned(lease, 0), ANSWER)
        assert list(folder.iterdir())
        raise Interrupted
    assert list(folder.iterdir()) == []


def test_no_table_is_begun_without_its_columns(tmp_path: Path, stores: Stores) -> None:
    """Else all columns of the input would be left out."""
    lease = lease_in(tmp_path, output=Output(format="parquet"))
    with pytest.raises(ObjectNotFound):
        Spool(lease.spec, stores)
