"""A Valkey and a fleet of processes for each test of faults: what one test breaks, the next does not meet."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import ValkeyServer
from tests.servers import valkey as valkey_server
from tests.system.fleet import Fleet
from tests.system.fleet import fleet as new_fleet


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def fleet(tmp_path: Path, own_valkey: ValkeyServer) -> Iterator[Fleet]:
    with new_fleet(tmp_path / "fleet", own_valkey) as found:
        yield found
