"""What an engine process and its owner say to each other, and what the loop is told."""

from dataclasses import dataclass

from engine.info import EngineStats
from engine.outputs import EngineOutput
from engine.packed import packed
from engine.pooling.params import PoolingParams
from engine.pooling.prompts import PoolingPrompt
from engine.sampling.params import SamplingParams


@packed
@dataclass(frozen=True, slots=True)
class NewRequest:
    """`index` is the caller's, unique among the requests in the engine. Only requests of one `salt` share KV blocks.

    `lora` names an adapter: a folder in PEFT's format, or a hub id with an optional `@revision`. `seed` comes before
    that of `params`, so that requests which differ in nothing else can share those. `priority` and `group` are as in
    `engine.request.Request`.
    """

    index: int
    prompt: PoolingPrompt
    params: SamplingParams | PoolingParams
    salt: bytes = b""
    lora: str | None = None
    seed: int | None = None
    priority: int = 0
    group: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """End now; what is in flight is lost."""


@dataclass(frozen=True, slots=True)
class Started:
    """The requests with which the engine begins in the step that it is about to run, by index."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """All that one step finished, in one message, and the engine's numbers after it."""

    outputs: list[EngineOutput]
    stats: EngineStats
