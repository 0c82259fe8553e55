"""An engine process without a model, whose answer to a row is a function of its prompt and its seed.

A row that is lost, doubled, or answered under another's place is therefore seen in the result. What a prompt says can
kill the process, be refused, or never be answered.
"""

import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.info import EngineInfo, EngineStats
from engine.messages import Abort, NewRequest, StepReport, Stop
from engine.outputs import CompletionOutput, RequestOutput
from engine.process import EngineProcess

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


def main(file_descriptor: int) -> None:
    """Answers at most `SEATS` requests a step, in the order that they came."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(file_descriptor)
    config, *messages = map(pickle.loads, connection.recv())
    inbox: SimpleQueue[Any] = SimpleQueue()
    for message in messages:
        inbox.put(message)
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    connection.send(EngineInfo(config.model, "none", "stub", 4096, SEATS, 8192, 32000, 1, 32))
    _serve(connection, inbox, float(os.environ.get(STEP, "0")))


def _receive(connection: Connection, inbox: "SimpleQueue[Any]") -> None:
    while True:
        try:
            batch = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        for message in map(pickle.loads, batch):
            inbox.put(message)


def _serve(connection: Connection, inbox: "SimpleQueue[Any]", step_s: float) -> None:
    asked: dict[int, NewRequest] = {}
    generated = 0
    pause = threading.Event()
    while True:
        for message in _drain(inbox, wait=all(ENDLESS in _text(request.prompt) for request in asked.values())):
            match message:
                case Stop():
                    return
                case list():
                    asked.update((request.index, request) for request in message)
                case Abort():
                    for index in message.indices:
                        asked.pop(index, None)
        seated = [request for request in asked.values() if ENDLESS not in _text(request.prompt)][:SEATS]
        if not seated:
            continue
        pause.wait(step_s)
        if any(POISON in _text(request.prompt) for request in seated):
            sys.stderr.write("the stub engine was given poison\n")
            os._exit(66)
        outputs = [_output(asked.pop(request.index)) for request in seated]
        generated += sum(len(output.outputs[0].token_ids) for output in outputs)
        connection.send(StepReport(outputs, EngineStats(running=len(seated), generated_tokens=generated)))


def _drain(inbox: "SimpleQueue[Any]", *, wait: bool) -> list[Any]:
    messages = [inbox.get()] if wait else []
    while True:
        try:
            messages.append(inbox.get_nowait())
        except Empty:
            return messages


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _output(request: NewRequest) -> RequestOutput:
    text = _text(request.prompt)
    if REFUSED in text:
        return RequestOutput.rejected(request.index, RequestError("The stub refuses this.", code="refused_by_stub"))
    answer = CompletionOutput(0, answer_to(text, request.seed), (7, 8), "stop")
    return RequestOutput(request.index, (1, 2, 3), (answer,))
