"""The stub worker, in which a fault of Celery, of its Redis transport or of the platform is certain to show."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from runpy import run_module
from typing import Any

from celery import Celery
from kombu.transport.redis import Channel, QoS

import workers.app
import workers.watch
from jobs import broker
from jobs.settings import Settings

FAULT = "PAGEMILL_TEST_FAULT"
"""The variable that names the fault."""
LOST = "a message is lost here"
IN_A_FORK = 99
"""The exit code of a child that is forked from a worker that `forbid_forks`."""


def redeliver_soon() -> None:
    """The broker hands out a message again that is not acknowledged within a second."""

    def make_app(of: Settings) -> Celery:
        app = broker.make_app(of)
        app.conf.broker_transport_options |= {"visibility_timeout": 1, "unacked_restore_interval": 1}
        return app

    workers.app.make_app = make_app


def stop_with_a_message_in_hand() -> None:
    """The worker is told to stop just as it has taken a message from the queue, and its connection breaks: the message
    is in no queue any more, and in no list of what is not acknowledged."""

    def append(*_: Any) -> None:
        sys.stderr.write(f"{LOST}\n")
        os.kill(os.getpid(), signal.SIGTERM)
        raise ConnectionResetError("The connection broke as the worker stopped.")

    QoS.append = append


def stop_consuming() -> None:
    """The consumer no longer asks the broker for messages; all other threads of the process go on."""
    _be_impatient()
    Channel._brpop_start = lambda *_, **__: None


def hang() -> None:
    """The consumer's thread waits for ever; all others go on."""
    _be_impatient()
    Channel._brpop_start = lambda *_, **__: threading.Event().wait()


def _be_impatient() -> None:
    workers.watch._LOOK_EVERY_S = 0.1


def forbid_forks() -> None:
    """A forked child is of no use, as where the parent has a CUDA context: it ends at once."""
    os.register_at_fork(after_in_child=lambda: os._exit(IN_A_FORK))


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault for fault in (redeliver_soon, stop_with_a_message_in_hand, stop_consuming, hang, forbid_forks)
}

if __name__ == "__main__":
    FAULTS[os.environ[FAULT]]()
    run_module("tests.system.stub_worker", run_name="__main__")
