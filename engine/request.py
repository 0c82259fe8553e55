"""One request on its way through the engine. The scheduler owns it and is the only one to change it."""

import sys
from enum import Enum, auto

from engine.blocks import BlockHash, block_hash, root_hash
from engine.detokenizer import StopStringWatcher
from engine.errors import RequestError
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = auto()  # holds no blocks: not started, or preempted
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A prompt, what was generated after it, and how much of both the KV cache holds.

    `token_ids` is prompt and output together; `num_computed_tokens` of them are in the blocks of `block_ids`. What
    preemption throws away is only those two: the tokens, the seed and the stop-string state stay.
    """

    __slots__ = (
        "_block_hashes",
        "_salt",
        "block_ids",
        "eos_token_ids",
        "error",
        "finish_reason",
        "index",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "params",
        "seed",
        "status",
        "stop_reason",
        "stop_watcher",
        "token_ids",
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
        salt: bytes = b"",
    ) -> None:
        self.index = index
        self.params = params
        self.seed = seed
        # The scheduler lowers it to what the context holds.
        self.max_tokens = sys.maxsize if params.max_tokens is None else params.max_tokens
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_watcher = stop_watcher
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # None until it first runs
        self.block_ids: list[int] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: RequestError | None = None
        self._salt = salt
        self._block_hashes: list[BlockHash] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that must not be sampled now: those that would end the request before `min_tokens`."""
        if self.num_output_tokens >= self.params.min_tokens:
            return frozenset()
        return self.eos_token_ids | frozenset(self.params.stop_token_ids)

    def block_hashes(self, block_size: int, count: int) -> list[BlockHash]:
        """The hashes of the first `count` blocks, all of which must be full; each is computed once."""
        hashes = self._block_hashes
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else root_hash(self._salt)
            hashes.append(block_hash(parent, self.token_ids[start : start + block_size]))
        return hashes[:count]

    def append_token(self, token_id: int) -> None:
        """Add one sampled token, and finish if it was the last: by a stop token, a stop string, or the length."""
        self.token_ids.append(token_id)
        # Up to min_tokens the sampler chooses neither of the first two, see `banned_token_ids`. Text it cannot foresee.
        may_stop_at_text = self.num_output_tokens > self.params.min_tokens
        if token_id in self.eos_token_ids:
            self.finish("stop")
        elif token_id in self.params.stop_token_ids:
            self.finish("stop", stop_reason=token_id)
        elif self.stop_watcher and (stop := self.stop_watcher.push(token_id, may_stop=may_stop_at_text)):
            self.finish("stop", stop_reason=stop)
        elif self.num_output_tokens >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, *, stop_reason: int | str | None = None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def fail(self, error: RequestError) -> None:
        self.error = error
        self.finish("error")
