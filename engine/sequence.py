"""One continuation of a request on its way through the engine. The scheduler owns it and alone changes it."""

from copy import copy
from enum import Enum, auto
from typing import TYPE_CHECKING

from engine.blocks import BlockHash, block_hash, root_hash
from engine.detokenizer import StopStringWatcher
from engine.outputs import FinishReason
from engine.sampling.logprobs import TokenLogprobs
from kernels.reference_inputs import PLACEHOLDER

if TYPE_CHECKING:
    from engine.request import Request
    from engine.structured.grammar import GrammarMatcher


class SequenceStatus(Enum):
    WAITING = auto()  # holds no blocks of the device: not started, or preempted
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A prompt, what was generated after it, and how much of both the KV cache holds.

    `token_ids` is prompt and output together; `num_computed_tokens` of them are in the blocks of `block_ids`, or, while
    it is swapped out, in those of `host_block_ids`. What preemption throws away is only those: the tokens, the seed and
    the stop-string state stay.

    While the token that a step draws is on its way to the host, a placeholder may stand for it at the end of
    `token_ids`, so that the step after it can be planned. Nobody asks for a hash, a count or a text with it.

    A `parked` sequence has been computed to its end and gets no token before its siblings are as far: there is nothing
    to compute of it, and if its blocks are taken away they are not missed until it has its next token.
    """

    __slots__ = (
        "_block_hashes",
        "awaits_token",
        "block_ids",
        "choice",
        "cumulative_logprob",
        "finish_reason",
        "host_block_ids",
        "logprobs",
        "matcher",
        "num_computed_tokens",
        "parked",
        "request",
        "seed",
        "status",
        "stop_reason",
        "stop_watcher",
        "token_ids",
    )

    def __init__(self, request: "Request", choice: int, seed: int, stop_watcher: StopStringWatcher | None) -> None:
        self.request = request
        self.choice = choice
        self.seed = seed
        self.stop_watcher = stop_watcher
        self.matcher: GrammarMatcher | None = None  # of a request with structured output, once it is compiled
        self.token_ids = list(request.prompt_token_ids)
        self.awaits_token = False
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.host_block_ids: list[int] = []
        self.status = SequenceStatus.WAITING
        self.parked = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0  # of the output, where anybody wants to know it
        self._block_hashes: list[BlockHash] = []

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids) - self.awaits_token

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_continuations(self) -> int:
        """How many sequences are in this one: at the end of its prompt all the others are forked off the first."""
        return 1 if self.num_output_tokens else self.request.num_continuations

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that must not be sampled now: those that would end the sequence before `min_tokens`.

        None where the grammar allows nothing else.
        """
        params = self.request.params
        if self.num_output_tokens >= params.min_tokens or (self.matcher and self.matcher.finished):
            return frozenset()
        return self.request.eos_token_ids | frozenset(params.stop_token_ids)

    def block_hashes(self, block_size: int, count: int) -> list[BlockHash]:
        """The hashes of the first `count` blocks, all of which must be full; each is computed once."""
        hashes = self._block_hashes
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else self._root_hash()
            hashes.append(block_hash(parent, self.token_ids[start : start + block_size]))
        return hashes[:count]

    def _root_hash(self) -> BlockHash:
        adapter = self.request.adapter
        return root_hash(self.request.salt, adapter.revision if adapter else b"")

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Note what is known of the token that is appended next."""
        self.logprobs.append(logprobs)
        self.cumulative_logprob += logprobs.logprob

    def append_placeholder(self) -> None:
        """Go on as if the next token were known."""
        self.token_ids.append(PLACEHOLDER)
        self.awaits_token = True

    def take_back_placeholder(self) -> None:
        """Without effect if there is none."""
        if self.awaits_token:
            self.token_ids.pop()
            self.awaits_token = False

    def append_token(self, token_id: int) -> None:
        """Add one sampled token, and finish if it was the last: by a stop token, a stop string, or the length.

        Raises `RequestError` if the grammar cannot take the token, see `GrammarMatcher.consume`.
        """
        self.token_ids.append(token_id)
        self.parked = False
        if self.matcher:
            self.matcher.consume(token_id)
        request = self.request
        # Up to min_tokens the sampler chooses neither of the first two, see `banned_token_ids`. Text it cannot foresee.
        may_stop_at_text = self.num_output_tokens > request.params.min_tokens
        if token_id in request.eos_token_ids:
            self.finish("stop")
        elif token_id in request.params.stop_token_ids:
            self.finish("stop", stop_reason=token_id)
        elif self.stop_watcher and (stop := self.stop_watcher.push(token_id, may_stop=may_stop_at_text)):
            self.finish("stop", stop_reason=stop)
        elif self.num_output_tokens >= request.max_tokens:
            self.finish("length")

    def fork(self, choice: int, seed: int) -> "Sequence":
        """Another continuation that has come as far as this one. It waits, and holds no blocks."""
        child = copy(self)
        child.choice = choice
        child.seed = seed
        child.token_ids = self.token_ids.copy()
        child.logprobs = self.logprobs.copy()
        child.stop_watcher = self.stop_watcher and self.stop_watcher.fork()
        child.matcher = self.matcher and self.matcher.fork()
        child.block_ids = []
        child.host_block_ids = []
        child.num_computed_tokens = 0
        child.status = SequenceStatus.WAITING
        child._block_hashes = self._block_hashes.copy()
        return child

    def finish(self, reason: FinishReason, *, stop_reason: int | str | None = None) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
