"""Sites for jobs, in each kind of store."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from jobs.ledger import Ledger
from tests.jobs.commands import Command, commands
from tests.jobs.site import Site
from tests.servers import BUCKET, S3Server, ValkeyServer

SHARD_ROWS = 4


@pytest.fixture
def site(valkey: ValkeyServer, tmp_path: Path) -> Site:
    """Jobs on files, in shards of four rows."""
    settings = valkey.settings(storage=f"file://{tmp_path}/store", max_shard_rows=SHARD_ROWS)
    return Site.of(settings, Ledger(valkey.client))


@pytest.fixture
def pagemill(
    site: Site, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Command]:
    """The command line in this process, on the services of the file's own `site`."""
    yield from commands(site, valkey, monkeypatch, capfdbinary)


@pytest.fixture(params=["file", "moto", "rclone"])
def any_site(request: pytest.FixtureRequest, valkey: ValkeyServer, tmp_path: Path) -> Site:
    """The same on files and on two S3 servers that differ."""
    if request.param == "file":
        return request.getfixturevalue("site")
    s3: S3Server = request.getfixturevalue(f"{request.param}_s3")
    settings = s3.settings(
        redis_url=valkey.url, storage=f"s3://{BUCKET}/{uuid4().hex}", max_shard_rows=SHARD_ROWS, state_dir=tmp_path
    )
    return Site.of(settings, Ledger(valkey.client))
