"""Engines without a model: they answer by rule, in steps, and die when they are told to or are asked for poison."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineDied, EngineError
from engine.info import EngineInfo, EngineStats
from engine.messages import NewRequest
from engine.outputs import CompletionOutput, EngineOutput, RequestOutput

CONFIG = EngineConfig("stub")
INFO = EngineInfo("stub", "float32", "cpu", 100, 8, 64, 1000, 50, 16)
POISON = "poison"

OnOutputs = Callable[[list[EngineOutput]], None]
OnStart = Callable[[tuple[int, ...]], None]


def text_of(prompt: Any) -> str:
    """What a prompt says: itself, or its last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def answer_to(prompt: Any) -> RequestOutput:
    text = f"answer to {text_of(prompt)}"
    return RequestOutput(0, (1, 2, 3), (CompletionOutput(0, text, (7, 8), "stop"),), num_cached_tokens=1)


@dataclass
class Engines:
    """Makes engines, as EngineHost wants it, and holds what the test says of all of them.

    A step takes all that was asked since the last and answers it at once, unless there is poison among it: then the
    engine dies. Steps run by themselves, or when the test says `step`.
    """

    by_hand: bool = False
    made: list["StubEngine"] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    most_in_flight: int = 0
    do_not_start: list[EngineError] = field(default_factory=list)
    on_start: Callable[[], None] = lambda: None
    started: threading.Condition = field(default_factory=threading.Condition)
    rules: Callable[[Any], EngineOutput] = answer_to

    def __call__(self, config: EngineConfig, on_outputs: OnOutputs, on_start: OnStart) -> "StubEngine":
        self.made.append(StubEngine(self, on_outputs, on_start))
        return self.made[-1]

    def wait_for(self, count: int) -> None:
        """Until so many have been made, and the last of them runs."""
        with self.started:
            assert self.started.wait_for(lambda: len(self.made) >= count and self.last.pid is not None, 20)

    @property
    def last(self) -> "StubEngine":
        return self.made[-1]


class StubEngine:
    """The surface of EngineProcess."""

    def __init__(self, engines: Engines, on_outputs: OnOutputs, on_start: OnStart) -> None:
        self.engines = engines
        self.died = threading.Event()
        self.death: EngineDied | None = None
        self.pid: int | None = None
        self._on_outputs = on_outputs
        self._on_start = on_start
        self._accepting = True
        self._changed = threading.Condition()
        self._in_flight: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, timeout_s: float = 600) -> EngineInfo:
        self.engines.on_start()
        if self.engines.do_not_start:
            self.died.set()
            raise self.engines.do_not_start.pop(0)
        self.pid = 1000 + len(self.engines.made)
        self._thread.start()
        with self.engines.started:
            self.engines.started.notify_all()
        return INFO

    def submit(self, requests: Sequence[NewRequest]) -> None:
        with self._changed:
            if self._accepting:
                self.engines.asked += [text_of(request.prompt) for request in requests]
                self._in_flight.update((request.index, request.prompt) for request in requests)
                self.engines.most_in_flight = max(self.engines.most_in_flight, len(self._in_flight))
                self._changed.notify_all()

    def abort(self, indices: Sequence[int]) -> None:
        with self._changed:
            ended = [index for index in indices if self._in_flight.pop(index, None) is not None]
            self._changed.notify_all()
        self._on_outputs([RequestOutput(index, (), (CompletionOutput(0, "", (), "abort"),)) for index in ended])

    def stats(self) -> EngineStats:
        return EngineStats()

    def stop(self, timeout_s: float = 5) -> None:
        if self.pid is not None:
            self.die()

    def begin(self, *prompts: str) -> None:
        """Begin with these prompts, or with as many of those in flight as there are seats."""
        wanted = [index for index, prompt in self.in_flight() if not prompts or text_of(prompt) in prompts]
        self._on_start(tuple(wanted[: INFO.max_num_seqs]))

    def step(self) -> None:
        """Answer all that is in flight, or die of it."""
        with self._changed:
            batch = dict(self._in_flight)
            poisoned = any(POISON in text_of(prompt) for prompt in batch.values())
            if not poisoned:
                self._in_flight.clear()
        if poisoned:
            self.die()
            return
        self._on_outputs([replace(self.engines.rules(prompt), index=index) for index, prompt in batch.items()])

    def die(self) -> None:
        with self._changed:
            self._in_flight.clear()
            self._accepting = False
            self._changed.notify_all()
        self.death = EngineDied("The stub died.")
        self.died.set()

    def wait_for(self, count: int) -> None:
        """Until so many requests are in flight."""
        with self._changed:
            assert self.has(count, within_s=10), self._in_flight

    def has(self, count: int, within_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self._in_flight) >= count, within_s)

    def wait_until(self, so: Callable[[list[str]], bool]) -> bool:
        """Until it is so of the prompts in flight; whether it came to that."""
        with self._changed:
            return self._changed.wait_for(lambda: so([text_of(prompt) for prompt in self._in_flight.values()]), 10)

    def wait_until_empty(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._in_flight, 10), self._in_flight

    def in_flight(self) -> list[tuple[int, Any]]:
        """What was asked for, each with the index to answer it by."""
        with self._changed:
            return list(self._in_flight.items())

    def answer(self, index: int, output: EngineOutput) -> None:
        with self._changed:
            del self._in_flight[index]
        self._on_outputs([replace(output, index=index)])

    def _run(self) -> None:
        while self._accepting:
            with self._changed:
                self._changed.wait_for(lambda: not self._accepting or (self._in_flight and not self.engines.by_hand))
            self.step()
