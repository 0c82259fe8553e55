"""Celery's consumer, so that no broker's death ends the worker."""

from contextlib import suppress

from celery.utils.threads import bound_open_broker_sockets
from celery.worker.consumer import Consumer

_LAST_ANSWER_S = 5.0


class LastingConsumer(Consumer):
    """Celery's own, but for one order of events.

    The connection for remote commands breaks first, and that on which it waits for tokens is broken as well. kombu then
    stops in the middle of closing the channel. Celery closes it a second time when there is no connection left that
    unacknowledged tokens could be given back on, and ends the worker by an AttributeError.
    """

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        if self.task_consumer is not None:
            bound_open_broker_sockets(self.connection, _LAST_ANSWER_S)
            # It is closed in full, or broken where it reads the last answer: then the next try closes it.
            with suppress(*self.connection_errors):
                self.task_consumer.channel.close()
        super().on_connection_error_after_connected(exc)
