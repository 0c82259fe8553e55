"""Waiting until something happens to a job: the ledger publishes that it did, and nothing depends on hearing it."""

import time
from types import TracebackType
from typing import Self

from redis import exceptions

from jobs.ledger import Ledger

_PATIENCE_S = 5.0
_POLL_S = 0.5


class News:
    """Word of one job, from when the `with` block begins: a shard was committed, or the job has ended.

    Whoever waits looks at the job after each `wait`, and before the first: word may come late, double, for nothing, or
    get lost with a connection.
    """

    def __init__(self, ledger: Ledger, job_id: str) -> None:
        self._channel = ledger.client.pubsub(ignore_subscribe_messages=True)
        self._name = f"pm:news:{job_id}"
        self._subscribed = False

    def wait(self) -> None:
        """Returns at the next word, or after some seconds without one."""
        if not self._subscribed:
            time.sleep(_POLL_S)
            return
        try:
            # One look answers all that was said until now.
            heard = self._channel.get_message(timeout=_PATIENCE_S)
            while heard is not None:
                heard = self._channel.get_message(timeout=0)
        except (exceptions.ConnectionError, exceptions.TimeoutError):
            # The next wait connects and subscribes again; what was said meanwhile shows at the look between.
            time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        try:
            self._channel.subscribe(self._name)
            # The server's answer: from here on nothing is said unheard.
            self._channel.get_message(timeout=_PATIENCE_S)
            self._subscribed = True
        except exceptions.ResponseError:
            # A user without the right to subscribe looks now and then.
            self._channel.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
