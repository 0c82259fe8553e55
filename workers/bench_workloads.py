"""The work that `pagemill bench engine` measures on, made from real text and the same wherever it is made.

W1  mixed          96 prompts of 32 to 512 tokens (log-normal), 16 to 192 new tokens
W2  shared prefix  96 prompts of one 512-token prefix and 64 tokens of their own, 32 new
W3  long in        48 prompts of 1,024 tokens, 16 new
W4  decode-heavy   64 prompts of 32 tokens, 256 new
W5  tree           200 rows, shuffled: 10 few-shot prefixes of 600 tokens, each with 5 variants of 100 more, each of
                   those with 4 questions of 32 tokens, 24 new; the KV pool holds a quarter of their distinct tokens
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise
from typing import TypeAlias

TokenIds: TypeAlias = list[int]
Encode: TypeAlias = Callable[[str], TokenIds]

_SHORTEST, _LONGEST = 32, 512
_MEDIAN, _SIGMA = 180, 0.7
_PREFIXES, _VARIANTS, _QUESTIONS = 10, 5, 4
# The worked problems of the few-shot prefixes come first in the file, and nothing else reads those.
_FEW_SHOT_PROBLEMS = 100
# By how much the texts of one edition are ahead of the last one's: no multiple of any block size.
_EDITION_SHIFT = 10_007


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt as token ids, and how many tokens to generate after it, whatever they are."""

    prompt: TokenIds
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows in the order of their submission. `kv_tokens`: how many tokens the KV pool is to hold; None: any number."""

    name: str
    title: str
    rows: tuple[Row, ...]
    kv_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.prompt) for row in self.rows)

    @property
    def new_tokens(self) -> int:
        return sum(row.new_tokens for row in self.rows)

    def first(self, num_rows: int) -> "Workload":
        return replace(self, rows=self.rows[:num_rows])


def build_workloads(encode: Encode, *, scale: float = 1.0, edition: int = 0, seed: int = 0) -> dict[str, Workload]:
    """Return W1 to W5 by their names.

    `encode` turns text into token ids. `scale` is the share of each workload's rows that is kept, at least one. Another
    `edition` has prompts of the same lengths from other places of the text, so that an engine that has seen one edition
    finds nothing of another in its prefix cache.
    """
    text = _Text(encode, edition)
    draw = random.Random(seed)
    kept = (_keep(workload, scale) for workload in _all(text, draw))
    return {workload.name: workload for workload in kept}


def _all(text: "_Text", draw: random.Random) -> Iterator[Workload]:
    lengths = [(_log_normal(draw), draw.randint(16, 192)) for _ in range(96)]
    sources = (text.questions, text.documents)
    mixed = (Row(sources[i % 2].take(length), new) for i, (length, new) in enumerate(lengths))
    yield Workload("W1", "mixed", tuple(mixed))
    prefix = text.documents.take(512)
    yield Workload(
        "W2", "shared prefix", tuple(Row(prefix + own, 32) for own in (text.questions.take(64) for _ in range(96)))
    )
    yield Workload("W3", "long in, short out", tuple(Row(text.documents.take(1024), 16) for _ in range(48)))
    yield Workload("W4", "decode-heavy", tuple(Row(text.questions.take(32), 256) for _ in range(64)))
    yield Workload("W5", "tree", tuple(_tree(text, draw)))


def _tree(text: "_Text", draw: random.Random) -> list[Row]:
    rows = []
    for _ in range(_PREFIXES):
        prefix = text.few_shot.take(600)
        for _ in range(_VARIANTS):
            variant = prefix + text.few_shot.take(100)
            rows += [Row(variant + text.questions.take(32), 24) for _ in range(_QUESTIONS)]
    draw.shuffle(rows)
    return rows


def _keep(workload: Workload, scale: float) -> Workload:
    kept = workload.first(max(1, math.ceil(scale * len(workload.rows))))
    if kept.name != "W5":
        return kept
    distinct = distinct_prompt_tokens([row.prompt for row in kept.rows]) + kept.new_tokens
    longest = max(len(row.prompt) + row.new_tokens for row in kept.rows)
    return replace(kept, kv_tokens=max(distinct // 4, longest))


def _log_normal(draw: random.Random) -> int:
    while True:
        length = round(draw.lognormvariate(math.log(_MEDIAN), _SIGMA))
        if _SHORTEST <= length <= _LONGEST:
            return length


def distinct_prompt_tokens(prompts: Sequence[TokenIds]) -> int:
    """Count the nodes of the prompts' prefix tree: the tokens to compute if each shared prefix is computed once."""
    return sum(len(prompt) - shared for prompt, shared in shared_with_an_earlier(prompts))


def shared_with_an_earlier(prompts: Sequence[TokenIds]) -> list[tuple[TokenIds, int]]:
    """Return the prompts in lexicographic order, each with how many of its first tokens the one before begins with.

    No earlier prompt shares more. The last token is never shared: somebody has to compute it to know what follows.
    """
    ordered = sorted(prompts)
    shared = [0, *(_common(one, other) for one, other in pairwise(ordered))]
    return [(prompt, min(length, len(prompt) - 1)) for prompt, length in zip(ordered, shared, strict=True)]


def _common(one: TokenIds, other: TokenIds) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class _Text:
    """The corpus as three endless streams of tokens, each read on from where the last reader stopped."""

    def __init__(self, encode: Encode, edition: int) -> None:
        corpus = files("workers") / "bench_corpus"
        lines = (corpus / "gsm8k_500.jsonl").read_text(encoding="utf-8").splitlines()
        problems = [json.loads(line) for line in lines]
        documents = sorted(file.name for file in corpus.iterdir() if file.name.endswith(".rst"))
        worked = (f"Question: {p['question']}\nAnswer: {p['answer']}" for p in problems[:_FEW_SHOT_PROBLEMS])
        asked = (p["question"] for p in problems[_FEW_SHOT_PROBLEMS:])
        start = edition * _EDITION_SHIFT
        self.few_shot = _Stream(encode("\n\n".join(worked)), start)
        self.questions = _Stream(encode("\n\n".join(asked)), start)
        self.documents = _Stream(
            encode("\n\n".join((corpus / n).read_text(encoding="utf-8") for n in documents)), start
        )


class _Stream:
    """Tokens to take in turn; after the last comes the first."""

    def __init__(self, token_ids: TokenIds, start: int) -> None:
        self._token_ids = token_ids
        self._at = start % len(token_ids)

    def take(self, count: int) -> TokenIds:
        taken: TokenIds = []
        while len(taken) < count:
            part = self._token_ids[self._at : self._at + count - len(taken)]
            taken += part
            self._at = (self._at + len(part)) % len(self._token_ids)
        return taken
