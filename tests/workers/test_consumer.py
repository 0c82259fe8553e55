"""A broker that dies at the worst moment, as seen by the consumer."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from celery.worker.consumer import Consumer

from jobs.broker import Tokens, make_app, model_queue
from tests.proxy import tcp_proxy
from tests.servers import ValkeyServer
from workers.consumer import LastingConsumer


@contextmanager
def cut_off(valkey: ValkeyServer, kind: type[Consumer]) -> Iterator[Consumer]:
    """A consumer with a token that is not acknowledged, which waits for the next one, and for remote commands, when its
    broker is gone."""
    with tcp_proxy(valkey.url.partition("?")[0]) as proxy:
        app = make_app(valkey.settings(redis_url=proxy.redis_url))
        Tokens(app).work("a", 1)
        connection = app.connection_for_read()
        tasks = app.amqp.TaskConsumer(connection, queues=[app.amqp.queues[model_queue("a")]])
        tasks.register_callback(lambda body, message: None)
        tasks.consume()
        connection.drain_events(timeout=10)
        assert tasks.channel.qos._delivered
        app.control.mailbox.Node("worker@here", channel=connection.channel()).listen(callback=lambda *_: None)
        tasks.channel._brpop_start()
        # Nothing else of a consumer has a part in this.
        app.conf.worker_enable_prefetch_count_reduction = False
        consumer = kind.__new__(kind)
        consumer.app, consumer.connection, consumer.task_consumer = app, connection, tasks
        consumer.connection_errors = connection.connection_errors
        with proxy.refusing():
            yield consumer


@pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning")
def test_a_broker_that_is_gone_while_a_token_is_waited_for_does_not_end_the_worker(valkey: ValkeyServer) -> None:
    with cut_off(valkey, Consumer) as consumer, pytest.raises(AttributeError):
        consumer.on_connection_error_after_connected(ConnectionError())
    with cut_off(valkey, LastingConsumer) as consumer:
        consumer.on_connection_error_after_connected(ConnectionError())
        assert consumer.connection is None
