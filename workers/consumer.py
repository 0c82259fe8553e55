"""Celery's consumer, so that no broker's death ends the worker."""

from contextlib import suppress

from celery.utils.threads import bound_open_broker_sockets
from celery.worker.consumer import Consumer

_LAST_ANSWER_S = 5.0


class LastingConsumer(Consumer):
    """Celery's own, but for one order of events.

    kombu closes the channel of the tokens, which fails at the answer that it still waits for; then all channels, which
    fails at that of the remote commands and does not come to this one again. Celery closes it once more when there is
    no connection left on which unacknowledged tokens could be given back, and ends the worker by an AttributeError.
    """

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        if self.task_consumer is not None:
            bound_open_broker_sockets(self.connection, _LAST_ANSWER_S)
            # Whether this closes it, or fails at that answer: there is none to wait for when it is tried again.
            with suppress(*self.connection_errors, *self.channel_errors):
                self.task_consumer.channel.close()
        super().on_connection_error_after_connected(exc)
