"""The engine in a process of its own, so that a fault of the device or a lack of memory kills it and not its owner."""

import threading
from concurrent.futures import Future

from engine.config import EngineConfig
from engine.info import EngineInfo, EngineStats
from engine.outputs import RequestOutput
from engine.prompts import Prompt
from engine.sampling_params import SamplingParams


class EngineProcess:
    def __init__(self, config: EngineConfig) -> None:
        self.died = threading.Event()

    def start(self, timeout_s: float = 600) -> EngineInfo:
        raise NotImplementedError

    def submit(self, prompt: Prompt, params: SamplingParams) -> "Future[RequestOutput]":
        raise NotImplementedError

    def abort(self, future: "Future[RequestOutput]") -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def stop(self, timeout_s: float = 5) -> None:
        raise NotImplementedError

    @property
    def pid(self) -> int | None:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        raise NotImplementedError
