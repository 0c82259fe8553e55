"""Word of a job wakes those who wait for it, and whoever misses it misses nothing but time."""

from collections.abc import Callable, Iterator
from threading import Thread

import pytest
import redis

from jobs import news as news_module
from jobs.ledger import Ledger
from jobs.news import News
from tests.jobs.ledgers import leased, manifest_of, new_spec, opened, record_of
from tests.servers import ValkeyServer

WAIT_S = 20


@pytest.fixture
def ledger(valkey: ValkeyServer) -> Ledger:
    return Ledger(valkey.client)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda seconds: monkeypatch.setattr(news_module, "_PATIENCE_S", seconds)


@pytest.fixture
def limited(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    """A user of the server with no right to any channel."""
    valkey.client.execute_command("ACL", "SETUSER", "limited", "on", "nopass", "~*", "+@all", "resetchannels")
    client = redis.Redis.from_url(valkey.url, decode_responses=True, username="limited", password="x")
    yield client
    client.close()
    valkey.client.execute_command("ACL", "DELUSER", "limited")


def returns_when(wait: Callable[[], None], act: Callable[[], object]) -> bool:
    """Whether a wait that lasts ends by the act."""
    waiting = Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    act()
    waiting.join(WAIT_S)
    return not waiting.is_alive()


def test_a_commit_and_the_end_of_a_job_are_heard(ledger: Ledger, patience: Callable[[float], None]) -> None:
    patience(10 * WAIT_S)
    spec = opened(ledger, 1)
    lease = leased(ledger, spec)
    with News(ledger, spec.id) as news:
        assert returns_when(news.wait, lambda: ledger.commit(lease, record_of(lease)))
        assert returns_when(news.wait, lambda: ledger.finish(manifest_of(spec), "finalizing"))


def test_what_was_said_before_the_wait_is_heard_and_all_of_it_at_once(
    ledger: Ledger, patience: Callable[[float], None]
) -> None:
    patience(10 * WAIT_S)
    spec = opened(ledger, 2)
    with News(ledger, spec.id) as news:
        for lease in [leased(ledger, spec, f"attempt-{n}") for n in range(2)]:
            ledger.commit(lease, record_of(lease))
        news.wait()
        patience(0.05)
        assert returns_when(lambda: news._channel.get_message(timeout=0.2), lambda: None)


def test_other_jobs_are_not_heard(ledger: Ledger, patience: Callable[[float], None]) -> None:
    patience(10 * WAIT_S)
    mine, other = opened(ledger, 1, new_spec(priority=1)), opened(ledger, 1)
    my_lease, other_lease = leased(ledger, mine, "a"), leased(ledger, other, "b")
    with News(ledger, mine.id) as news:
        ledger.commit(other_lease, record_of(other_lease))
        assert returns_when(news.wait, lambda: ledger.commit(my_lease, record_of(my_lease)))


def test_word_that_is_lost_with_the_connection_costs_some_time(
    ledger: Ledger, patience: Callable[[float], None]
) -> None:
    patience(0.3)
    spec = opened(ledger, 2)
    first, second = leased(ledger, spec, "a"), leased(ledger, spec, "b")
    with News(ledger, spec.id) as news:
        ledger.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        ledger.commit(first, record_of(first))
        for _ in range(3):  # the connection is gone, is there again, and nothing is said
            news.wait()
        patience(10 * WAIT_S)
        assert returns_when(news.wait, lambda: ledger.commit(second, record_of(second)))


def test_who_has_no_right_to_channels_commits_and_waits_all_the_same(
    limited: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news_module, "_POLL_S", 0.01)
    ledger = Ledger(limited)
    spec = opened(ledger, 1)
    lease = leased(ledger, spec)
    with News(ledger, spec.id) as news:
        news.wait()
        assert ledger.commit(lease, record_of(lease)) == "ok"
        news.wait()
    assert ledger.state(spec.id) == "finalizing"
