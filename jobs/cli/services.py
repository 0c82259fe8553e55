"""The services of one machine: `pagemill up` runs all of them, `pagemill beat` the clock alone."""

import logging
import signal
import sys
import threading
from typing import Annotated

import typer

from jobs.broker import make_app
from jobs.cli.options import EngineOptions, Model, with_groups
from jobs.cli.show import stderr
from jobs.errors import UsageError
from jobs.ledger import connect
from jobs.local.supervisor import Child, Supervisor
from jobs.local.valkey import is_running, valkey_child
from jobs.settings import Settings, settings

_PAGEMILL = [sys.executable, "-m", "jobs.cli"]


def children(config: Settings, model: str, engine: EngineOptions, workers: int = 1) -> list[Child]:
    """The processes that serve one model on this machine, beside the ledger's server."""
    env = {"PAGEMILL_STATE_DIR": str(config.state_dir)}
    for name in ("redis_url", "storage"):
        env[f"PAGEMILL_{name.upper()}"] = getattr(config, name)
    serve = [*_PAGEMILL, "worker", "--model", model, *engine.argv]
    return [
        Child("control", [*_PAGEMILL, "worker", "--control"], env),
        Child("beat", [*_PAGEMILL, "beat"], env),
        *(Child(f"worker-{n}", serve, env) for n in range(workers)),
    ]


@with_groups
def up(
    model: Model,
    engine: EngineOptions,
    workers: Annotated[int, typer.Option(min=1, help="How many workers for the model; one a GPU.")] = 1,
) -> None:
    """Run all services here until Ctrl-C: Valkey (unless PAGEMILL_REDIS_URL is set), control, beat and workers."""
    config = settings()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with Supervisor(config.state_dir / "log", grace=config.stop_grace) as supervisor:
        if config.redis_url:
            connect(config.redis_url).close()
        else:
            if is_running(config):
                raise UsageError(f"Another `pagemill up` runs in {config.state_dir}.", hint="Set PAGEMILL_STATE_DIR.")
            supervisor.start(valkey_child(config))
        for child in children(config, model, engine, workers):
            supervisor.start(child)
        stderr.print(f"pagemill is up: model {model}, storage {config.storage_url}, logs in {config.state_dir / 'log'}")
        while not stop.is_set():
            if supervisor.failed.wait(0.2):
                raise supervisor.failure or UsageError("A service failed.")


def beat() -> None:
    """Run the clock that makes control workers sweep. Two are harmless."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = settings()
    connect(config.ledger_url).close()
    app = make_app(config)
    # The schedule is one fixed interval: there is nothing to remember in a file.
    app.Beat(scheduler_cls="celery.beat:Scheduler", loglevel=logging.WARNING, quiet=True).run()
