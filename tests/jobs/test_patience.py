"""Who waits for a job bears with a server that is away for a while: the job goes on without them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from jobs import connection
from jobs.cli.show import follow
from jobs.connection import Patience
from jobs.follow import follow_results
from jobs.ledger import Ledger
from tests import servers
from tests.jobs.site import Site
from tests.servers import ValkeyServer


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PAUSE_S", 0.02)
    monkeypatch.setattr("jobs.cli.show._REFRESH_S", 0.02)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server that the test may kill."""
    with servers.valkey(tmp_path / "valkey") as server:
        yield server


@pytest.mark.parametrize("how", ["watch", "rows"])
def test_a_server_that_is_killed_and_comes_back_does_not_end_the_wait(
    how: str, own: ValkeyServer, tmp_path: Path
) -> None:
    site = Site.of(own.settings(storage=f"file://{tmp_path}/store", max_shard_rows=4), Ledger(own.client))
    spec = site.planned(8)
    site.work(spec, shards=1)
    other = Ledger(redis.Redis.from_url(own.url, decode_responses=True))

    def wait() -> object:
        if how == "watch":
            return follow(spec.id, other, quiet=True).state
        return b"".join(follow_results(spec, other, site.stores, lambda: None)).count(b"\n")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        own.restart()
        site.work(spec)
        site.control.assemble(spec.id)
        assert waiting.result(30) == ("completed" if how == "watch" else 8)


def test_a_server_that_stays_away_is_an_error_after_all() -> None:
    patience, error = Patience(seconds=0.1), redis.ConnectionError("gone")

    def bear_it() -> None:
        for _ in range(100):
            patience.bear(error)

    with pytest.raises(redis.ConnectionError, match="gone"):
        bear_it()


def test_patience_starts_anew_with_each_answer() -> None:
    patience, error = Patience(seconds=0.03), redis.ConnectionError("gone")
    for _ in range(5):
        patience.bear(error)
        patience.answered()
