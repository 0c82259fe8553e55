"""What the engine is asked, and the sequences that answer it."""

import sys
from typing import TYPE_CHECKING

from engine.detokenizer import StopStringWatcher
from engine.errors import RequestError
from engine.pooling.pooler import Pooler
from engine.sampling.beam import BeamSearch
from engine.sampling.logprobs import TokenLogprobs
from engine.sampling.params import SamplingParams
from engine.sampling.seeds import choice_seed
from engine.sampling.token_rules import token_rules
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

    Of requests that wait, those of the highest `priority` start first. Those of one `group` are expected to be answered
    at similar length.
    """

    __slots__ = (
        "adapter",
        "beams",
        "eos_token_ids",
        "error",
        "group",
        "index",
        "lora",
        "max_tokens",
        "num_cached_tokens",
        "params",
        "pooler",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "salt",
        "seed",
        "sequences",
        "token_rules",
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
        stop_watcher: StopStringWatcher | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
        salt: bytes = b"",
        lora: str | None = None,
        priority: int = 0,
        group: str = "",
    ) -> None:
        self.index = index
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.max_tokens = sys.maxsize if params.max_tokens is None else params.max_tokens
        # A grammar ends with one of these, and allows nothing after it.
        self.eos_token_ids = frozenset() if params.ignore_eos and not params.structured_output else eos_token_ids
        self.token_rules = token_rules(params, bad_words)
        self.salt = salt
        self.lora = lora
        self.priority = priority
        self.group = group
        self.adapter: LoraAdapter | None = None  # see engine.lora.LoraCache.acquire
        self.num_cached_tokens: int | None = None  # None until it first runs
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.error: RequestError | None = None
        self.pooler: Pooler | None = None
        self.token_types: tuple[int, ...] = ()
        self.beams = BeamSearch(self, params.beam_width) if params.beam_width else None
        self.sequences = [Sequence(self, 0, choice_seed(seed, 0), stop_watcher)]

    @classmethod
    def to_pool(
        cls,
        index: int,
        prompt_token_ids: list[int],
        pooler: Pooler,
        *,
        token_types: tuple[int, ...] = (),
        salt: bytes = b"",
        lora: str | None = None,
        priority: int = 0,
        group: str = "",
    ) -> "Request":
        """A request for one vector of its prompt; `token_types` empty: all 0."""
        request = cls(
            index, prompt_token_ids, _POOLING_PARAMS, seed=0, salt=salt, lora=lora, priority=priority, group=group
        )
        request.pooler = pooler
        request.token_types = token_types
        return request

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_continuations(self) -> int:
        """How many sequences the prompt is continued by. A beam search begins with one, and forks as it goes."""
        return 1 if self.params.beam_width else self.params.num_choices

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are wanted that no step has computed yet."""
        wanted = 0 if self.params.prompt_logprobs is None else self.num_prompt_tokens - 1
        return len(self.prompt_logprobs) < wanted

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @property
    def finished(self) -> bool:
        return not self.unfinished

    def fork(self, parent: Sequence) -> Sequence:
        """Begin the next continuation where `parent`, one of the sequences, has come to. It holds no blocks."""
        choice = len(self.sequences)
        child = parent.fork(choice, choice_seed(self.seed, choice))
        self.sequences.append(child)
        return child

    def abort(self) -> None:
        for sequence in self.unfinished:
            sequence.finish("abort")

    def fail(self, error: RequestError) -> None:
        self.error = error
        for sequence in self.unfinished:
            sequence.finish("error")
