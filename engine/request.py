"""What the engine is asked, and the sequences that answer it."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.detokenizer import StopStringWatcher
from engine.errors import RequestError
from engine.logprobs import TokenLogprobs
from engine.pooling import Pooler
from engine.sampling_params import SamplingParams
from engine.seeds import choice_seed
from engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from engine.lora import LoraAdapter

# Of a request that pools: it samples nothing, and these are asked for nothing.
_POOLING_PARAMS = SamplingParams(max_tokens=1)


class Request:
    """A prompt and its parameters, with one sequence for each continuation that has begun. The scheduler owns it.

    `salt` keeps its KV blocks apart from those of requests with another. `max_tokens` is what `params` says, or less:
    the scheduler lowers it to what the context holds. With a `pooler` the request samples nothing: it ends when its
    prompt is computed, and the pooler has its answer; `token_types` say of each token which text of a pair it is from.
    """

    __slots__ = (
        "_make_stop_watcher",
        "adapter",
        "eos_token_ids",
        "error",
        "index",
        "lora",
        "max_tokens",
        "num_cached_tokens",
        "params",
        "pooler",
        "prompt_logprobs",
        "prompt_token_ids",
        "salt",
        "seed",
        "sequences",
        "token_types",
    )

    def __init__(
        self,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: frozenset[int] = frozenset(),
        make_stop_watcher: Callable[[], StopStringWatcher] | None = None,
        salt: bytes = b"",
        lora: str | None = None,
    ) -> None:
        self.index = index
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.max_tokens = sys.maxsize if params.max_tokens is None else params.max_tokens
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.salt = salt
        self.lora = lora
        self.adapter: LoraAdapter | None = None  # see engine.lora.LoraCache.acquire
        self.num_cached_tokens: int | None = None  # None until it first runs
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.error: RequestError | None = None
        self.pooler: Pooler | None = None
        self.token_types: tuple[int, ...] = ()
        self._make_stop_watcher = make_stop_watcher
        self.sequences: list[Sequence] = []
        self.add_sequence()

    @classmethod
    def to_pool(
        cls,
        index: int,
        prompt_token_ids: list[int],
        pooler: Pooler,
        *,
        token_types: tuple[int, ...] = (),
        salt: bytes = b"",
    ) -> "Request":
        """A request for one vector of its prompt; `token_types` empty: all 0."""
        request = cls(index, prompt_token_ids, _POOLING_PARAMS, seed=0, salt=salt)
        request.pooler = pooler
        request.token_types = token_types
        return request

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @property
    def finished(self) -> bool:
        return not self.unfinished

    def add_sequence(self) -> Sequence:
        """Begin the next continuation: the prompt, with nothing computed."""
        choice = len(self.sequences)
        watcher = self._make_stop_watcher() if self._make_stop_watcher else None
        sequence = Sequence(self, choice, choice_seed(self.seed, choice), watcher)
        self.sequences.append(sequence)
        return sequence

    def abort(self) -> None:
        for sequence in self.unfinished:
            sequence.finish("abort")

    def fail(self, error: RequestError) -> None:
        self.error = error
        for sequence in self.unfinished:
            sequence.finish("error")
