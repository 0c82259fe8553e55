"""The services of one machine: `pagemill up` runs all of them."""

import logging
import signal
import sys
import threading
from contextlib import ExitStack
from typing import Annotated

import typer

from jobs.cli.logs import log_to_stderr
from jobs.cli.options import EngineOptions, JsonLogs, Model, with_groups
from jobs.connection import connect
from jobs.errors import UsageError
from jobs.local.alone import alone_in
from jobs.local.supervisor import Child, Supervisor
from jobs.local.valkey import valkey_child
from jobs.settings import Settings, settings

log = logging.getLogger(__name__)

_PAGEMILL = [sys.executable, "-m", "jobs.cli"]


def children(
    config: Settings, model: str, engine: EngineOptions, *, workers: int = 1, json_logs: bool = False
) -> list[Child]:
    """The processes that serve one model on this machine, beside the ledger's server."""
    logs = ["--json"] if json_logs else []
    env = {"PAGEMILL_STATE_DIR": str(config.state_dir)}
    for name in ("redis_url", "storage"):
        env[f"PAGEMILL_{name.upper()}"] = getattr(config, name)
    serve = [*_PAGEMILL, "worker", "--model", model, *engine.argv, *logs]
    return [
        Child("control", [*_PAGEMILL, "worker", "--control", *logs], env),
        *(Child(f"worker-{n}", serve, env) for n in range(workers)),
    ]


@with_groups
def up(
    model: Model,
    engine: EngineOptions,
    workers: Annotated[int, typer.Option(min=1, help="How many workers for the model; one a GPU.")] = 1,
    json: JsonLogs = False,
) -> None:
    """Run all services here until Ctrl-C: Valkey (unless PAGEMILL_REDIS_URL is set), control and workers."""
    log_to_stderr(as_json=json)
    config = settings()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        if config.redis_url:
            connect(config.redis_url).close()
        else:
            stack.enter_context(alone_in(config.state_dir))
        supervisor = stack.enter_context(Supervisor(config.state_dir / "log", grace=config.stop_grace))
        if not config.redis_url:
            supervisor.start(valkey_child(config))
        for child in children(config, model, engine, workers=workers, json_logs=json):
            supervisor.start(child)
        log.info("up: model %s, storage %s, logs in %s", model, config.storage_url, config.state_dir / "log")
        while not stop.is_set():
            if supervisor.failed.wait(0.2):
                raise supervisor.failure or UsageError("A service failed.")
