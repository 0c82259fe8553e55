"""A broker that dies at the worst moment, as seen by the consumer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery.worker.consumer import Consumer

from jobs.broker import Tokens, make_app, model_queue
from tests import servers
from tests.proxy import TcpProxy, tcp_proxy
from tests.servers import ValkeyServer
from workers.consumer import LastingConsumer


@contextmanager
def waiting(valkey: ValkeyServer, kind: type[Consumer]) -> Iterator[tuple[TcpProxy, Consumer]]:
    """Through a proxy, a consumer with a token that is not acknowledged, which waits for the next, and for commands."""
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
        consumer.connection_errors, consumer.channel_errors = connection.connection_errors, connection.channel_errors
        yield proxy, consumer


@pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning")
def test_a_broker_that_is_gone_while_a_token_is_waited_for_does_not_end_the_worker(valkey: ValkeyServer) -> None:
    with waiting(valkey, Consumer) as (proxy, consumer), proxy.refusing(), pytest.raises(AttributeError):
        consumer.on_connection_error_after_connected(ConnectionError())
    with waiting(valkey, LastingConsumer) as (proxy, consumer), proxy.refusing():
        consumer.on_connection_error_after_connected(ConnectionError())
        assert consumer.connection is None


@pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning")
def test_a_broker_that_takes_no_token_back_does_not_end_the_worker(tmp_path: Path) -> None:
    """As one that is a replica now."""
    with servers.valkey(tmp_path) as valkey, waiting(valkey, LastingConsumer) as (_, consumer):
        valkey.client.replicaof("127.0.0.1", 1)
        consumer.on_connection_error_after_connected(ConnectionError())
        assert consumer.connection is None
