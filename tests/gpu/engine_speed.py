"""Tokens a second of the engine on random weights, and of Transformers' continuous batching on a sample of the work.

The work is nano-vllm's benchmark: 256 prompts of 100 to 1,024 random tokens, answers of as many, temperature 0.6, all
of it drawn with seed 0. The sample is such work with every length divided by eight, so that slower engines finish too:
as many rows at once, and prompt to answer in the same proportion. Both engines are compared on that.
"""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from engine import LLM, SamplingParams
from tests.gpu.cases import Case, Found, LeftOut, Setting

_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
QWEN = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    **_NO_SPECIAL_TOKENS,
)
LLAMA = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    **_NO_SPECIAL_TOKENS,
)
_NUM_ROWS = 256
_SHORTEST, _LONGEST = 100, 1024
_HIGHEST_TOKEN = 10_000
_SAMPLE = 8
# What a part of a shape's work must at least have left to be worth starting, in seconds.
_WORTH_STARTING = 10.0


class Row(NamedTuple):
    """A prompt, and how many tokens are generated after it."""

    prompt: list[int]
    new_tokens: int


@dataclass
class Shape:
    """A model without a meaning, and what has been measured with it."""

    name: str
    config: PreTrainedConfig
    bar: float | None
    sample_rate: float | None = field(default=None)

    def folder(self, setting: Setting) -> Path:
        return setting.folder / self.name.replace(" ", "-")


_Measure = Callable[[Setting, Shape], Found | None]


def cases(setting: Setting) -> list[Case]:
    """For each shape its weights, the engine, and Transformers."""
    found = []
    for shape in (Shape("Qwen3 0.6B", QWEN, 20_000.0), Shape("Llama 3.1 8B", LLAMA, None)):
        found += [
            Case(f"{shape.name}: random weights", _case(_write_weights, setting, shape)),
            Case(f"{shape.name}: pagemill", _case(_measure_engine, setting, shape)),
            Case(f"{shape.name}: Transformers' continuous batching", _case(_measure_transformers, setting, shape)),
            Case(f"{shape.name}: memory given back", _case(_forget_weights, setting, shape)),
        ]
    return found


def _case(measure: _Measure, setting: Setting, shape: Shape) -> Callable[[], Found | None]:
    def run() -> Found | None:
        if setting.seconds_left < _WORTH_STARTING:
            raise LeftOut("no time was left")
        try:
            return measure(setting, shape)
        finally:
            gc.collect()
            if setting.device.type == "cuda":
                torch.cuda.empty_cache()

    return run


def rows(shortened: int = 1, seed: int = 0) -> list[Row]:
    """The benchmark's rows, all lengths divided by `shortened`."""
    draw = random.Random(seed)
    prompts = [
        [draw.randint(0, _HIGHEST_TOKEN) for _ in range(draw.randint(_SHORTEST, _LONGEST) // shortened)]
        for _ in range(_NUM_ROWS)
    ]
    return [Row(prompt, draw.randint(_SHORTEST, _LONGEST) // shortened) for prompt in prompts]


def _write_weights(setting: Setting, shape: Shape) -> None:
    torch.manual_seed(0)
    with setting.device:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=setting.dtype)
    model.save_pretrained(shape.folder(setting))


def _forget_weights(setting: Setting, shape: Shape) -> None:
    for file in shape.folder(setting).glob("*.safetensors"):
        file.unlink()


def _measure_engine(setting: Setting, shape: Shape) -> Found:
    began = perf_counter()
    with _engine(setting, shape) as llm:
        loaded = perf_counter()
        # What is compiled or captured on first use is no part of a long job.
        _generate(llm, rows(_SAMPLE, seed=1))
        warmed = perf_counter()
        sample = rows(_SAMPLE, seed=2)
        shape.sample_rate = sum(row.new_tokens for row in sample) / _generate(llm, sample)
        work = rows()
        tokens = sum(row.new_tokens for row in work)
        steps = llm.stats().steps
        seconds = _generate(llm, work)
        steps = llm.stats().steps - steps
    figures = {
        "output tokens/s": tokens / seconds,
        "on the sample": shape.sample_rate,
        "ms a step": 1e3 * seconds / steps,
        "s to load": loaded - began,
        "s to warm up": warmed - loaded,
    }
    if shape.bar is None:
        return Found(f"{tokens} tokens", figures)
    return Found(f"{tokens} tokens", figures, f">= {shape.bar:,.0f} on an H200", tokens / seconds >= shape.bar)


@contextmanager
def _engine(setting: Setting, shape: Shape) -> Iterator[LLM]:
    llm = LLM(
        str(shape.folder(setting)),
        device=str(setting.device),
        dtype=str(setting.dtype).removeprefix("torch."),
        max_num_seqs=_NUM_ROWS,
        max_model_len=2 * _LONGEST,
        swap_space=0,
    )
    try:
        yield llm
    finally:
        del llm


def _generate(llm: LLM, work: list[Row]) -> float:
    """Seconds for all rows."""
    params = [SamplingParams(temperature=0.6, max_tokens=row.new_tokens, ignore_eos=True) for row in work]
    began = perf_counter()
    outputs = llm.generate([row.prompt for row in work], params)
    seconds = perf_counter() - began
    for output, row in zip(outputs, work, strict=True):
        if output.error is not None or len(output.outputs[0].token_ids) != row.new_tokens:
            raise AssertionError(f"request {output.index} has not {row.new_tokens} tokens: {output.error}")
    return seconds


def _measure_transformers(setting: Setting, shape: Shape) -> Found:
    folder = shape.folder(setting)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=setting.dtype).to(setting.device).eval()
    _answer(setting, model, rows(_SAMPLE, seed=1)[:16])
    finished, tokens, seconds = _answer(setting, model, rows(_SAMPLE, seed=2))
    rate = tokens / seconds
    figures = {"output tokens/s on the sample": rate}
    detail = "" if finished == _NUM_ROWS else f"stopped with {finished} of {_NUM_ROWS} rows finished"
    if shape.sample_rate is None:
        return Found(detail or "pagemill has no figure to compare", figures)
    ratio = shape.sample_rate / rate
    return Found(detail, {**figures, "times as fast is pagemill": ratio}, ">= 5 times", ratio >= 5)


def _answer(setting: Setting, model: PreTrainedModel, work: list[Row]) -> tuple[int, int, float]:
    """Rows that finished before the deadline, their tokens, and the seconds that this took."""
    config = GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=-1, pad_token_id=0)
    finished = tokens = 0
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        began = perf_counter()
        for row in work:
            manager.add_request(row.prompt, max_new_tokens=row.new_tokens)
        while finished < len(work) and setting.seconds_left > 0:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished += 1
                tokens += len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("Transformers' generation thread has ended before the last answer")
        seconds = perf_counter() - began
    if not tokens:
        raise LeftOut("no time was left for one answer")
    return finished, tokens, seconds
