"""Servers that all rooms share, started once a session."""

from collections.abc import Iterator

import pytest

from tests import servers
from tests.servers import S3Server


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[S3Server]:
    with servers.moto_s3() as server:
        yield server


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with servers.rclone_s3(tmp_path_factory.mktemp("rclone")) as server:
        yield server
