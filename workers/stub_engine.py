"""An engine without a model, to measure everything around it: it answers every request with the same few tokens."""

import threading
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.errors import EngineDied
from engine.info import EngineInfo, EngineStats
from engine.messages import NewRequest
from engine.outputs import CompletionOutput, EngineOutput, RequestOutput

_ANSWER = (CompletionOutput(0, "An answer of a few words, as many would be.", tuple(range(8)), "stop"),)
_PROMPT = tuple(range(16))


class StubEngine:
    """The surface of `EngineProcess`, in a thread: a step answers all that has been asked since the last one."""

    def __init__(self, config: EngineConfig, on_outputs: Callable[[list[EngineOutput]], None]) -> None:
        self.died = threading.Event()
        self.death: EngineDied | None = None
        self.pid: int | None = None
        self._config = config
        self._on_outputs = on_outputs
        self._asked: list[NewRequest] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="stub-engine", daemon=True)

    def start(self, timeout_s: float = 600) -> EngineInfo:
        self._thread.start()
        rows = self._config.max_num_seqs or 256
        return EngineInfo(self._config.model, "none", "stub", 4096, rows, 8192, 32000, 1, 32)

    def submit(self, requests: Sequence[NewRequest]) -> None:
        with self._changed:
            self._asked.extend(requests)
            self._changed.notify()

    def abort(self, indices: Sequence[int]) -> None:
        """Their answers come anyway, at the next step."""

    def stats(self) -> EngineStats:
        return EngineStats()

    def stop(self, timeout_s: float = 5) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self.died.set()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._stopped)
                batch, self._asked = self._asked, []
                if not batch:
                    return
            self._on_outputs([RequestOutput(request.index, _PROMPT, _ANSWER) for request in batch])
