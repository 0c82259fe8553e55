"""When a worker is told to end because it takes nothing, and above all when it is not."""

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from workers.watch import ConsumerWatch


class Watched:
    """A consumer of two slots under watch. `tokens` wait for it; None: the broker does not answer."""

    def __init__(self) -> None:
        self.tokens: int | None = 0
        self.watch = ConsumerWatch(self._waiting, 2, pytest.fail)

    def _waiting(self) -> int:
        if self.tokens is None:
            raise RedisConnectionError("The broker is down.")
        return self.tokens

    def is_deaf_after(self, seconds: int) -> bool:
        """Whether it is found so within that time. A look is taken every five seconds."""
        return any(self.watch.is_deaf() for _ in range(seconds // 5))


@pytest.fixture
def consumer() -> Watched:
    return Watched()


def test_a_consumer_that_takes_nothing_for_a_minute_is_deaf(consumer: Watched) -> None:
    consumer.tokens = 1
    assert not consumer.is_deaf_after(60)
    assert consumer.is_deaf_after(5)


def test_a_consumer_for_which_nothing_waits_is_not(consumer: Watched) -> None:
    assert not consumer.is_deaf_after(1000)
    consumer.tokens = 1
    assert not consumer.is_deaf_after(60)


def test_a_consumer_whose_slots_are_all_taken_is_not(consumer: Watched) -> None:
    consumer.tokens = 1
    consumer.watch.began()
    consumer.watch.began()
    assert not consumer.is_deaf_after(1000)
    consumer.watch.ended()
    assert not consumer.is_deaf_after(60)
    assert consumer.is_deaf_after(5)


def test_a_consumer_that_takes_a_token_now_and_then_is_not(consumer: Watched) -> None:
    consumer.tokens = 1
    for _ in range(20):
        assert not consumer.is_deaf_after(60)
        consumer.watch.began()
        consumer.watch.ended()


def test_time_without_a_broker_does_not_count(consumer: Watched) -> None:
    consumer.tokens = 1
    assert not consumer.is_deaf_after(60)
    consumer.tokens = None
    assert not consumer.is_deaf_after(1000)
    consumer.tokens = 1
    assert not consumer.is_deaf_after(60)
    assert consumer.is_deaf_after(5)
