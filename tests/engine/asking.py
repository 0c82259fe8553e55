"""An engine process that is asked for one thing at a time, with a future for each answer."""

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import count
from typing import Any

from engine.config import EngineConfig
from engine.messages import NewRequest
from engine.outputs import EngineOutput
from engine.process import EngineProcess


class AskingProcess(EngineProcess):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, self._answer, self._note_start)
        self.started: list[int] = []
        self.begun = threading.Event()
        self._indices = count()
        self._lock = threading.Lock()
        self._futures: dict[int, Future[EngineOutput]] = {}

    def ask(self, *request: Any, **fields: Any) -> "Future[EngineOutput]":
        """Submit a NewRequest of these fields, but for its index: the how-manyeth it is."""
        future: Future[EngineOutput] = Future()
        with self._lock:
            index = next(self._indices)
            self.submit([NewRequest(index, *request, **fields)])
            self._futures[index] = future
        return future

    def _note_start(self, indices: tuple[int, ...]) -> None:
        self.started += indices
        self.begun.set()

    def _answer(self, outputs: Iterable[EngineOutput]) -> None:
        for output in outputs:
            with self._lock:
                future = self._futures.pop(output.index)
            future.set_result(output)
