"""Tokens in, tokens out: a continuous-batching engine with a paged KV cache. No Redis, no S3, no HTTP in here.

from engine import LLM, SamplingParams

llm = LLM("demo")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
    print(output.outputs[0].text)
"""

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDied, EngineError, ModelNotFound, ModelNotSupported, RequestError
from engine.info import EngineInfo, EngineStats
from engine.outputs import CompletionOutput, PoolingOutput, RequestOutput, ScoreOutput, TokenLogprob
from engine.pooling.params import PoolingParams
from engine.pooling.prompts import TextPair
from engine.process import EngineProcess
from engine.sampling.params import SamplingParams
from engine.structured.output import StructuredOutput

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDied",
    "EngineError",
    "EngineInfo",
    "EngineProcess",
    "EngineStats",
    "ModelNotFound",
    "ModelNotSupported",
    "PoolingOutput",
    "PoolingParams",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutput",
    "TextPair",
    "TokenLogprob",
]


def __getattr__(name: str) -> Any:
    # LLM brings torch. The owner of an EngineProcess needs none, and is spared the memory and the seconds.
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
