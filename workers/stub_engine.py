"""An engine without a model, to measure everything around it: it answers every request with the same few tokens.

It is a process behind a pipe as the engine is, with the engine's own loop.
"""

from collections.abc import Callable, Iterable

from engine.config import EngineConfig
from engine.info import EngineInfo, EngineStats
from engine.messages import NewRequest
from engine.outputs import CompletionOutput, EngineOutput, RequestOutput
from engine.process import EngineProcess
from engine.process_loop import serve

_ANSWER_TOKENS = 8


class StubProcess(EngineProcess):
    _child_main = "workers.stub_engine"


class StubCore:
    """The surface of `EngineCore`: a step answers as many requests as there are seats."""

    def __init__(self, config: EngineConfig) -> None:
        self._seats = config.max_num_seqs or 256
        self.info = EngineInfo(config.model, "none", "stub", 4096, self._seats, 8192, 32000, 1, 32)
        self.on_start: Callable[[tuple[int, ...]], None] = lambda indices: None
        self._asked: dict[int, NewRequest] = {}
        self._generated = 0

    def add_requests(self, requests: Iterable[NewRequest]) -> None:
        self._asked.update((request.index, request) for request in requests)

    def abort(self, index: int) -> None:
        """Its answer comes anyway, at the next step."""

    @property
    def has_unfinished(self) -> bool:
        return bool(self._asked)

    def step(self) -> list[EngineOutput]:
        seated = list(self._asked)[: self._seats]
        self.on_start(tuple(seated))
        for index in seated:
            del self._asked[index]
        self._generated += len(seated) * _ANSWER_TOKENS
        return [_answer_to(index) for index in seated]

    def stats(self) -> EngineStats:
        return EngineStats(generated_tokens=self._generated)


def main(file_descriptor: int) -> None:
    serve(file_descriptor, StubCore)


def _answer_to(index: int) -> RequestOutput:
    text = f"An answer of a few words, the {index}th."
    return RequestOutput(index, tuple(range(16)), (CompletionOutput(0, text, tuple(range(_ANSWER_TOKENS)), "stop"),))
