"""The engine process's side of `engine.process`: the pipe, and the loop between it and the engine.

Needs no torch by itself, so that something else can stand in the engine's place.
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.info import EngineInfo, EngineStats
from engine.messages import Abort, NewRequest, Started, StepReport, Stop
from engine.outputs import EngineOutput

Message = list[NewRequest] | Abort | Stop


class Core(Protocol):
    """What the loop needs of `engine.core.EngineCore`."""

    info: EngineInfo
    on_start: Callable[[tuple[int, ...]], None]

    def add_requests(self, requests: Iterable[NewRequest]) -> None: ...

    def abort(self, index: int) -> None: ...

    @property
    def has_unfinished(self) -> bool: ...

    def step(self) -> list[EngineOutput]: ...

    def stats(self) -> EngineStats: ...


def serve(file_descriptor: int, build: Callable[[EngineConfig], Core]) -> None:
    """Load the engine and serve the pipe until `Stop`.

    An error in the loop leaves as it is: the traceback goes to stderr, and the exit code is not 0.
    """
    _ignore_termination()
    connection = Connection(file_descriptor)
    config, *messages = map(pickle.loads, connection.recv())
    inbox: SimpleQueue[Message] = SimpleQueue()
    for message in messages:
        inbox.put(message)
    threading.Thread(target=_receive, args=(connection, inbox), name="engine-receive", daemon=True).start()
    try:
        core = build(config)
    except EngineError as error:
        connection.send(error)
        return
    connection.send(core.info)
    core.on_start = lambda indices: connection.send(Started(indices))
    _loop(core, connection, inbox)


def _ignore_termination() -> None:
    # Blocked until now, see engine.process; what is pending is dropped by being ignored before it is unblocked.
    signals = {signal.SIGINT, signal.SIGTERM}
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _receive(connection: Connection, inbox: SimpleQueue[Message]) -> None:
    """The receiver thread: keeps the pipe empty, and ends the process when the owner is gone."""
    while True:
        try:
            batch = connection.recv()
        except (EOFError, OSError):
            # The loop may be deep in a step; nobody is left to hear of it.
            os._exit(1)
        for message in map(pickle.loads, batch):
            inbox.put(message)


def _loop(core: Core, connection: Connection, inbox: SimpleQueue[Message]) -> None:
    while True:
        messages = _drain(inbox, wait=not core.has_unfinished)
        if any(isinstance(message, Stop) for message in messages):
            return
        for message in messages:
            if isinstance(message, list):
                core.add_requests(message)
        for message in messages:
            if isinstance(message, Abort):
                for index in message.indices:
                    core.abort(index)
        if core.has_unfinished:
            connection.send(StepReport(core.step(), core.stats()))


def _drain(inbox: SimpleQueue[Message], *, wait: bool) -> list[Message]:
    messages = [inbox.get()] if wait else []
    while True:
        try:
            messages.append(inbox.get_nowait())
        except Empty:
            return messages
