"""Where problems are met: a fleet of a test's own, one that the tests of a file share, jobs without processes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from jobs.ledger import Ledger
from jobs.spec import JobSpec
from tests import servers
from tests.jobs.site import Site
from tests.problems.faulty_worker import FAULT
from tests.servers import BUCKET, S3Server, ValkeyServer
from tests.system.fleet import SHARD_ROWS, Fleet, Process
from tests.system.fleet import fleet as new_fleet


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    with servers.valkey(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def fleet(tmp_path: Path, own_valkey: ValkeyServer) -> Iterator[Fleet]:
    """A Valkey and no process yet."""
    with new_fleet(tmp_path / "fleet", own_valkey) as found:
        yield found


@pytest.fixture
def site(valkey: ValkeyServer, tmp_path: Path) -> Site:
    """Jobs on files, in shards of four rows."""
    settings = valkey.settings(storage=f"file://{tmp_path}/store", max_shard_rows=SHARD_ROWS)
    return Site.of(settings, Ledger(valkey.client))


def site_on(s3: S3Server, valkey: ValkeyServer, folder: Path, **fields: Any) -> Site:
    """Jobs in a bucket, in shards of four rows unless `fields` say otherwise."""
    defaults = {"storage": f"s3://{BUCKET}/{uuid4().hex}", "max_shard_rows": SHARD_ROWS, "state_dir": folder}
    return Site.of(s3.settings(redis_url=valkey.url, **{**defaults, **fields}), Ledger(valkey.client))


def run_to_its_end(site: Site, spec: JobSpec) -> list[str]:
    """The answers of a job that somebody has submitted."""
    site.control.plan(spec.id)
    site.work(spec)
    site.control.assemble(spec.id)
    view = site.ledger.view(spec.id)
    assert view.state == "completed", view
    return [row["response"] for row in site.rows(spec.output_url)]


def lines_of(fleet: Fleet, url: str) -> list[Any]:
    """What a file of JSON lines holds, read as a program would that knows of no line end but `\\n`."""
    data = fleet.stores.read(url)
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.removesuffix(b"\n").split(b"\n")]


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A control worker and a model worker that the tests of a file share, whose engine takes no time."""
    folder = tmp_path_factory.mktemp("mill")
    with servers.valkey(folder / "valkey") as valkey, new_fleet(folder / "fleet", valkey) as fleet:
        fleet.control()
        fleet.worker()
        yield fleet


def faulty(fleet: Fleet, fault: Callable[[], None], **options: Any) -> Process:
    """A worker of the fleet with one of the faults of `faulty_worker`."""
    return fleet.worker(program="tests.problems.faulty_worker", **{FAULT: fault.__name__}, **options)
