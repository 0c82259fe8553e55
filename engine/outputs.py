"""What comes back for one request."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import RequestError

# OpenAI's words, and two more: `error` (see RequestOutput.error) and `abort` (the caller's own doing).
FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: Which of the request's continuations this is.
        text: The decoded tokens without special tokens, cut at the stop that ended them.
        token_ids: Every token generated, with the one that ended the request.
        finish_reason: `length` is max_tokens or the model's context, whichever came first.
        stop_reason: The stop string or the id of stop_token_ids that matched; None for the model's own end.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one request. A bad request yields one as well, with `error` set: it never raises, so that
    the rows beside it are not lost.

    Attributes:
        index: The caller's number for the request: its place in the input, from 0.
        prompt_token_ids: The prompt as the model saw it; empty if the prompt could not be encoded.
        outputs: Never empty. With `error` set, the one entry has what was generated before the error.
        num_cached_tokens: How many prompt tokens were found in the prefix cache and not computed.
        error: Why the request could not be served, or None.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int = 0
    error: RequestError | None = None

    @classmethod
    def rejected(cls, index: int, error: RequestError, prompt_token_ids: tuple[int, ...] = ()) -> "RequestOutput":
        """The answer to a request that never ran."""
        return cls(index, prompt_token_ids, (CompletionOutput(0, "", (), "error"),), error=error)
