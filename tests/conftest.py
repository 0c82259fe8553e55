"""What the tests of all rooms share: servers, started once a session, and how hypothesis runs."""

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests import servers
from tests.servers import S3Server, ValkeyServer

# Triton reads this when it is first imported, which may be before tests/kernels/triton is. No other test runs it.
os.environ.setdefault("TRITON_INTERPRET", "1")

# The time that an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("pagemill", deadline=None)
hypothesis.settings.load_profile("pagemill")


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[S3Server]:
    with servers.moto_s3() as server:
        yield server


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with servers.rclone_s3(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with servers.valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def valkey(valkey_server: ValkeyServer) -> ValkeyServer:
    """The session's Valkey, empty."""
    valkey_server.client.flushdb()
    return valkey_server
