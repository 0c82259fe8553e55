"""The two kinds of worker: one serves a model, the other plans, assembles and sweeps. Both are Celery workers."""

import gc
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from celery import Celery, signals
from celery.bootsteps import StartStopStep
from celery.worker import WorkController

from engine.config import EngineConfig
from engine.info import EngineInfo
from engine.process import EngineProcess
from jobs.broker import ASSEMBLE, CONTROL_QUEUE, PLAN, WORK, Tokens, make_app, model_queue, queue_key
from jobs.connection import connect
from jobs.control import Control
from jobs.ledger import FairShare, Ledger
from jobs.records import WorkerView
from jobs.retry import KeptAnswers
from jobs.settings import Settings
from jobs.storage import Stores
from jobs.sweeper import Sweeper
from workers.consumer import LastingConsumer
from workers.context import SlotContext, Stopping
from workers.heartbeat import Heartbeat
from workers.host import EngineHost, MakeEngine
from workers.slot import work
from workers.watch import ConsumerWatch

log = logging.getLogger(__name__)

_EXIT_STUCK = 70
_CONTROL_SLOTS = 4
_USUAL_SHARD_ROWS = 256
# Where they have few rows, and the engine has room.
SHARDS_OF_A_SLOT = 8
# The engine orders the rows that it has by their prefixes: as a rule all of a shard. The planner limits its tokens, and
# so the memory that they take.
_ROWS_TO_ORDER = 1024
_ENGINE_STOP_S = 1.0


def serve_model(
    settings: Settings,
    config: EngineConfig,
    *,
    served_name: str,
    slots: int | None,
    make_engine: MakeEngine = EngineProcess,
) -> int:
    """Run a worker for one model until it is told to stop; returns its exit code.

    Raises ServiceUnreachable before, and the engine's own error if the model cannot be loaded.
    """
    ledger = Ledger(connect(settings.ledger_url))
    # As if asked to stop from outside: shards are given back, and whoever keeps workers starts another.
    host = EngineHost(config, make_engine, on_hopeless=lambda: os.kill(os.getpid(), signal.SIGTERM))
    info = host.start()
    try:
        # Who says how many shards are to be in work means it.
        at_once = 1 if slots else SHARDS_OF_A_SLOT
        slots = slots or slots_for(info.max_num_seqs)
        app = make_app(settings)
        context = slot_context(settings, ledger, Tokens(app), host, info, served_name, slots, at_once)

        @app.task(name=WORK)
        def run_shards(model: str) -> None:
            work(model, context)

        context.heartbeat.start()
        settle_in()
        log.info("serving %s (%s on %s) with %d slots", served_name, info.precision, info.device, slots)
        try:
            return _run(app, settings, ledger, model_queue(served_name), slots, context.stopping.set)
        finally:
            context.heartbeat.stop()
    finally:
        host.stop(_ENGINE_STOP_S)


def serve_control(settings: Settings) -> int:
    """Run a worker that plans, assembles and sweeps, until it is told to stop; returns its exit code."""
    ledger = Ledger(connect(settings.ledger_url))
    app = make_app(settings)
    control = Control(ledger, Stores(settings), Tokens(app), settings)
    app.task(name=PLAN)(control.plan)
    app.task(name=ASSEMBLE)(control.assemble)
    sweeper = Sweeper(control.sweep_in_turn, settings.sweep_every)
    sweeper.start()
    try:
        return _run(app, settings, ledger, CONTROL_QUEUE, _CONTROL_SLOTS, lambda: None)
    finally:
        sweeper.stop()


def settle_in() -> None:
    """Leave alone what is there when work begins, which stays for good: the garbage collector would go through all of
    it for every few thousand rows.
    """
    gc.collect()
    gc.freeze()


def slots_for(max_num_seqs: int) -> int:
    """How many shards to hold at once: enough rows for two full batches, and one shard that is ending."""
    return max(2, math.ceil(2 * max_num_seqs / _USUAL_SHARD_ROWS) + 1)


def slot_context(
    settings: Settings,
    ledger: Ledger,
    tokens: Tokens,
    host: EngineHost,
    info: EngineInfo,
    served_name: str,
    slots: int,
    at_once: int,
) -> SlotContext:
    worker_id = f"{socket.gethostname()}-{uuid4().hex[:12]}"
    rate = Rate()
    stores = Stores(settings)

    def describe(busy: int) -> WorkerView:
        return WorkerView(
            id=worker_id,
            model=served_name,
            slots=slots,
            busy=busy,
            host=socket.gethostname(),
            pid=os.getpid(),
            engine=_engine_name(info),
            engine_pid=host.engine_pid,
            engine_restarts=host.restarts,
            tokens_per_second=rate.of(host.stats().generated_tokens),
        )

    return SlotContext(
        ledger=ledger,
        stores=stores,
        tokens=tokens,
        host=host,
        heartbeat=Heartbeat(ledger, settings.lease_ttl, describe),
        stopping=Stopping(),
        lease_ttl=settings.lease_ttl,
        kept=KeptAnswers(stores),
        share=FairShare(settings.tenant_weights, settings.priority_patience),
        window=max(_ROWS_TO_ORDER, 2 * info.max_num_seqs),
        at_once=at_once,
        engine_name=_engine_name(info),
        worker_id=worker_id,
    )


def _engine_name(info: EngineInfo) -> str:
    return f"{info.model} {info.precision} {info.device}"


class Rate:
    """Tokens per second between two looks at a counter."""

    def __init__(self) -> None:
        self._count, self._at = 0, time.monotonic()

    def of(self, count: int) -> float:
        now = time.monotonic()
        # A restarted engine counts from zero.
        rate = max(0, count - self._count) / max(now - self._at, 1e-3)
        self._count, self._at = count, now
        return round(rate, 1)


def _run(app: Celery, settings: Settings, ledger: Ledger, queue: str, slots: int, on_stop: Callable[[], None]) -> int:
    def end_in_time() -> None:
        # Slots answer within a step; should one not, leases and not patience are what recovers its shard.
        deadline = threading.Timer(settings.stop_grace, os._exit, [_EXIT_STUCK])
        deadline.daemon = True
        deadline.start()

    def stop(**_: Any) -> None:
        watch.stop()
        on_stop()
        end_in_time()

    def end_deaf() -> None:
        # Celery may not hear the signal either.
        end_in_time()
        os.kill(os.getpid(), signal.SIGTERM)

    class StopSlots(StartStopStep):
        """Tells the slots whyever Celery stops: it waits for its threads, and cannot terminate them. A cold shutdown
        raises for that reason, and sends no signal."""

        requires = ("celery.worker.components:Pool",)

        def close(self, _: WorkController) -> None:
            stop()

    watch = ConsumerWatch(lambda: int(ledger.client.llen(queue_key(queue))), slots, end_deaf)
    signals.task_prerun.connect(watch.began, weak=False)
    signals.task_postrun.connect(watch.ended, weak=False)
    signals.worker_shutting_down.connect(stop, weak=False)
    app.steps["worker"].add(StopSlots)
    # What is logged is set up already, and Celery would set the level of all of it to its own.
    signals.setup_logging.connect(lambda **_: None, weak=False)
    worker = app.Worker(
        hostname=f"{queue}-{os.getpid()}@{socket.gethostname()}",
        pool_cls="threads",
        consumer_cls=LastingConsumer,
        concurrency=slots,
        queues=[queue],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        loglevel=logging.WARNING,
        quiet=True,
    )
    watch.start()
    worker.start()
    return int(worker.exitcode or 0)
