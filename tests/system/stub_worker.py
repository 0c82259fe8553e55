"""`pagemill worker` with the stub for an engine: the same Celery app, slots, host and pipe, in a process of its own."""

import os
import signal
import sys
from typing import Any

from kombu.transport.redis import QoS
from redis.exceptions import RedisError

from jobs.cli.logs import log_to_stderr
from jobs.errors import EXIT_UNREACHABLE, ServiceUnreachable
from jobs.settings import settings
from tests.system.stub_engine import StubProcess, stub_config
from workers.app import serve_model

MODEL = "stub"
SLOTS = "PAGEMILL_TEST_SLOTS"
"""The variable that says how many shards it holds at once; empty: as many as the engine has room for."""
DIES_WITH_TOKEN = "PAGEMILL_TEST_DIES_WITH_TOKEN"
"""If set, the process is killed when it has taken a token from the queue, and has not noted it as unacknowledged."""


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    log_to_stderr(as_json=False)
    if os.environ.get(DIES_WITH_TOKEN):
        QoS.append = _die
    slots = int(os.environ[SLOTS] or 0) or None
    try:
        sys.exit(serve_model(settings(), stub_config(), served_name=MODEL, slots=slots, make_engine=StubProcess))
    except (ServiceUnreachable, RedisError):
        sys.exit(EXIT_UNREACHABLE)
