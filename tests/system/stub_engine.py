"""An engine process without a model, whose answer to a row is a function of its prompt and its seed.

A row that is lost, doubled, or answered under another's place is therefore seen in the result. What a prompt says can
kill the process, be refused, or never be answered.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.info import EngineInfo, EngineStats
from engine.messages import NewRequest
from engine.outputs import CompletionOutput, EngineOutput, RequestOutput
from engine.process import EngineProcess
from engine.process_loop import serve

POISON = "poison"
REFUSED = "refused"
ENDLESS = "endless"
SEATS = 8
STEP = "PAGEMILL_TEST_STEP_S"
"""The variable that says how long a step takes."""


class StubProcess(EngineProcess):
    _child_main = "tests.system.stub_engine"


def stub_config() -> EngineConfig:
    return EngineConfig("stub", max_num_seqs=SEATS)


def answer_to(prompt: str, seed: int | None) -> str:
    return f"answer to {prompt!r} with seed {seed}"


class StubCore:
    """The surface of `EngineCore`: a step answers up to `SEATS` requests, in the order that they came."""

    def __init__(self, config: EngineConfig) -> None:
        self.info = EngineInfo(config.model, "none", "stub", 4096, SEATS, 8192, 32000, 1, 32)
        self.on_start: Callable[[tuple[int, ...]], None] = lambda indices: None
        self._asked: dict[int, NewRequest] = {}
        self._stats = EngineStats()
        self._step_s = float(os.environ.get(STEP, "0"))
        self._clock = threading.Event()

    def add_requests(self, requests: Iterable[NewRequest]) -> None:
        self._asked.update((request.index, request) for request in requests)

    def abort(self, index: int) -> None:
        self._asked.pop(index, None)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._seated())

    def step(self) -> list[EngineOutput]:
        seated = self._seated()
        self.on_start(tuple(request.index for request in seated))
        self._clock.wait(self._step_s)
        if any(POISON in _text(request.prompt) for request in seated):
            sys.stderr.write("the stub engine was given poison\n")
            os._exit(66)
        outputs = [_output(self._asked.pop(request.index)) for request in seated]
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        self._stats = EngineStats(running=len(seated), generated_tokens=self._stats.generated_tokens + tokens)
        return list(outputs)

    def stats(self) -> EngineStats:
        return self._stats

    def _seated(self) -> list[NewRequest]:
        return [request for request in self._asked.values() if ENDLESS not in _text(request.prompt)][:SEATS]


def main(file_descriptor: int) -> None:
    serve(file_descriptor, StubCore)


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _output(request: NewRequest) -> RequestOutput:
    text = _text(request.prompt)
    if REFUSED in text:
        return RequestOutput.rejected(request.index, RequestError("The stub refuses this.", code="refused_by_stub"))
    answer = CompletionOutput(0, answer_to(text, request.seed), (7, 8), "stop")
    return RequestOutput(request.index, (1, 2, 3), (answer,))
