"""How fast a model is on this machine, in a minute: what `pagemill estimate` goes by."""

import socket
import time
from collections.abc import Sequence
from itertools import count

from engine import LLM, SamplingParams
from engine.info import EngineInfo
from jobs.profile import DecodeRate, Profile

_PROMPT_TOKENS = 256
_ANSWER_TOKENS = 24
_FEW_STEPS = 4


def measure(llm: LLM, model: str) -> Profile:
    """Measures prefill by prompts of 256 tokens with one-token answers, and decode at up to four sizes of the batch.

    Prompts are token ids that differ from the first on, so that the prefix cache has nothing to give.
    """
    info = llm.info
    prompts = _Prompts(info)
    length = min(_PROMPT_TOKENS, info.max_model_len // 2)
    rows = max(1, _FEW_STEPS * info.max_num_batched_tokens // length)
    _seconds(llm, prompts.some(1, length), 2)  # what is compiled or allocated at first use
    prefill = rows * length / _seconds(llm, prompts.some(rows, length), 1)
    answer = min(_ANSWER_TOKENS, info.max_model_len // 4)
    sizes = sorted({max(1, info.max_num_seqs // part) for part in (1, 4, 16)} | {1})
    return Profile(
        model=model,
        dtype=info.precision,
        device=info.device,
        host=socket.gethostname(),
        measured_at=int(time.time()),
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        block_size=info.block_size,
        kv_tokens=(info.num_kv_blocks - 1) * info.block_size,
        prefill_tokens_per_second=prefill,
        decode=tuple(DecodeRate(rows=size, tokens_per_second=_decode(llm, prompts, size, answer)) for size in sizes),
    )


def _decode(llm: LLM, prompts: "_Prompts", rows: int, answer: int) -> float:
    """Tokens a second beyond the first of each row, whose step is its prompt's."""
    short = 8
    first = _seconds(llm, prompts.some(rows, short), 1)
    whole = _seconds(llm, prompts.some(rows, short), answer)
    return rows * (answer - 1) / max(whole - first, 1e-6)


def _seconds(llm: LLM, prompts: Sequence[Sequence[int]], answer: int) -> float:
    began = time.monotonic()
    llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
    return time.monotonic() - began


class _Prompts:
    """Prompts of token ids of which no two begin alike."""

    def __init__(self, info: EngineInfo) -> None:
        self._vocab_size = info.vocab_size
        self._numbers = count(1)

    def some(self, rows: int, length: int) -> list[list[int]]:
        return [self._next(length) for _ in range(rows)]

    def _next(self, length: int) -> list[int]:
        number = next(self._numbers)
        head = [number % self._vocab_size, number // self._vocab_size % self._vocab_size]
        return (head + [(number * 31 + place * 7) % self._vocab_size for place in range(length)])[:length]
