"""An engine without a model, to measure everything around it: it answers every request with the same few tokens."""

import threading
from concurrent.futures import Future

from engine.config import EngineConfig
from engine.errors import EngineDied
from engine.info import EngineInfo, EngineStats
from engine.outputs import CompletionOutput, EngineOutput, RequestOutput
from engine.pooling.params import PoolingParams
from engine.prompts import Prompt
from engine.sampling.params import SamplingParams

_ANSWER = (CompletionOutput(0, "An answer of a few words, as many would be.", tuple(range(8)), "stop"),)
_OUTPUT = RequestOutput(0, tuple(range(16)), _ANSWER)


class StubEngine:
    """The surface of `EngineProcess`, in a thread: a step answers all that has been asked since the last one."""

    def __init__(self, config: EngineConfig) -> None:
        self.died = threading.Event()
        self.pid: int | None = None
        self._config = config
        self._asked: list[Future[EngineOutput]] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="stub-engine", daemon=True)

    def start(self, timeout_s: float = 600) -> EngineInfo:
        self._thread.start()
        rows = self._config.max_num_seqs or 256
        return EngineInfo(self._config.model, "none", "stub", 4096, rows, 8192, 32000, 1, 32)

    def submit(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, *, lora: str | None = None
    ) -> Future[EngineOutput]:
        future: Future[EngineOutput] = Future()
        with self._changed:
            if self._stopped:
                future.set_exception(EngineDied("The engine was stopped."))
                return future
            self._asked.append(future)
            if len(self._asked) == 1:
                self._changed.notify()
        return future

    def abort(self, future: Future[EngineOutput]) -> None:
        """Its answer comes anyway, at the next step."""

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
            for future in batch:
                future.set_result(_OUTPUT)
