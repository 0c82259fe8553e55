"""From a request that has ended to what its asker gets."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.detokenizer import decode
from engine.outputs import CompletionOutput, RequestOutput, TokenLogprob
from engine.request import Request
from engine.sampling.logprobs import TokenLogprobs
from engine.sampling.token_bytes import TokenBytes
from engine.sequence import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AnswerWriter:
    """Writes the outputs of one model's requests. Without a tokenizer there are token ids, and no text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer) if tokenizer else None

    def output(self, request: Request) -> RequestOutput:
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None:
            prompt_logprobs = (None, *self._public(request.prompt_logprobs))
        return RequestOutput(
            index=request.index,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple(self._completion(*place) for place in enumerate(_best(request))),
            num_cached_tokens=request.num_cached_tokens or 0,
            error=request.error,
            prompt_logprobs=prompt_logprobs,
        )

    def _completion(self, index: int, sequence: Sequence) -> CompletionOutput:
        assert sequence.finish_reason is not None
        params = sequence.request.params
        knows_logprob = params.num_logprobs is not None or params.beam_width is not None
        return CompletionOutput(
            index=index,
            text=self._text(sequence),
            token_ids=tuple(sequence.output_token_ids),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=None if params.logprobs is None else tuple(self._public(sequence.logprobs)),
            cumulative_logprob=sequence.cumulative_logprob if knows_logprob else None,
        )

    def _text(self, sequence: Sequence) -> str:
        if self._tokenizer is None:
            return ""
        if sequence.stop_watcher and sequence.stop_watcher.stopped_text is not None:
            return sequence.stop_watcher.stopped_text
        params = sequence.request.params
        token_ids = sequence.output_token_ids
        if sequence.finish_reason == "stop" and not params.include_stop_str_in_output:
            token_ids.pop()
        return decode(self._tokenizer, token_ids, skip_special_tokens=params.skip_special_tokens)

    def _public(self, positions: Iterable[TokenLogprobs]) -> Iterable[TokenLogprob]:
        for token_id, logprob, rank, top in positions:
            ranks = [1 + sum(other > value for _, other in top) for _, value in top]
            alternatives = (self._entry(*pair, rank) for pair, rank in zip(top, ranks, strict=True))
            yield self._entry(token_id, logprob, rank, tuple(alternatives))

    def _entry(self, token_id: int, logprob: float, rank: int, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        utf8 = self._token_bytes.of(token_id) if self._token_bytes else b""
        return TokenLogprob(token_id, logprob, rank, utf8.decode(errors="replace"), utf8, top)


def _best(request: Request) -> list[Sequence]:
    """The answers to return, in their order: all of them, or of `best_of` the best."""
    if request.params.num_choices == request.params.n:
        return request.sequences
    return sorted(request.sequences, key=_mean_logprob, reverse=True)[: request.params.n]


def _mean_logprob(sequence: Sequence) -> float:
    return sequence.cumulative_logprob / sequence.num_output_tokens if sequence.num_output_tokens else -math.inf
