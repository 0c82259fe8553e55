"""What comes back for one request."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from engine.errors import RequestError
from engine.packed import packed

if TYPE_CHECKING:
    import numpy as np

# OpenAI's words, and two more: `error` (see RequestOutput.error) and `abort` (the caller's own doing).
FinishReason = Literal["stop", "length", "error", "abort"]


@packed
@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token at one position, as the model gave it before any rule of the request.

    Attributes:
        logprob: The natural logarithm of the probability.
        rank: 1 plus the number of tokens that were likelier.
        text: The token's own text; U+FFFD stands for bytes that are not a whole character.
        utf8: The token's bytes. Those of all tokens of a text together are the text's, but for special tokens and for
            a space that a decoder takes off the beginning.
        top: For the token that stands at the position: as many of the likeliest as were asked for, in falling order,
            of equals the lowest id first.
    """

    token_id: int
    logprob: float
    rank: int
    text: str
    utf8: bytes
    top: tuple["TokenLogprob", ...] = ()


@packed
@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: Which of the request's continuations this is.
        text: The decoded tokens, without special tokens unless those are asked for, cut at the stop that ended them.
        token_ids: Every token generated, with the one that ended the request.
        finish_reason: `length` is max_tokens or the model's context, whichever came first.
        stop_reason: The stop string or the id of stop_token_ids that matched; None for the model's own end.
        logprobs: One entry for each of `token_ids`; None if they were not asked for.
        cumulative_logprob: The sum over `token_ids`, known where `logprobs` or `best_of` were asked for. Of a beam: the
            log-probability that the search worked with.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None


@packed
@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one request. A bad request yields one as well, with `error` set: it never raises, so that
    the rows beside it are not lost.

    Attributes:
        index: The caller's number for the request: its place in the input, from 0.
        prompt_token_ids: The prompt as the model saw it; empty if the prompt could not be encoded.
        outputs: Never empty. With `error` set, the entries have what was generated before the error.
        num_cached_tokens: How many prompt tokens were found in the prefix cache and not computed.
        error: Why the request could not be served, or None.
        prompt_logprobs: One entry for each of `prompt_token_ids`, None for the first, which follows nothing; fewer if
            the request ended before its prompt was computed. None if they were not asked for, or it never ran.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int = 0
    error: RequestError | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @classmethod
    def rejected(cls, index: int, error: RequestError, prompt_token_ids: tuple[int, ...] = ()) -> "RequestOutput":
        """The answer to a request that never ran."""
        return cls(index, prompt_token_ids, (CompletionOutput(0, "", (), "error"),), error=error)


def _no_data() -> "np.ndarray":
    # Here, since a worker that runs no model is installed without numpy, and imports this file.
    import numpy as np

    return np.empty(0, np.float32)


# Not compared by value: arrays do not compare to one truth.
@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """The answer to one request for an embedding or a score; one with `error` set where it cannot be served.

    Attributes:
        index: The caller's number for the request: its place in the input, from 0.
        prompt_token_ids: The prompt as the model saw it; empty if the prompt could not be encoded.
        data: Float32: the embedding, `[dimensions]`; or what a classification head says, `[num_labels]`. Empty with
            an error.
        num_cached_tokens: How many prompt tokens were found in the prefix cache and not computed.
        error: Why the request could not be served, or None.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    data: "np.ndarray" = field(default_factory=_no_data)
    num_cached_tokens: int = 0
    error: RequestError | None = None

    @classmethod
    def rejected(cls, index: int, error: RequestError, prompt_token_ids: tuple[int, ...] = ()) -> "PoolingOutput":
        """The answer to a request that has no vector."""
        return cls(index, prompt_token_ids, error=error)


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How well two texts go together, or why that cannot be said.

    Attributes:
        index: The pair's place in the input, from 0.
        score: A cross-encoder's score, between 0 and 1 if the model uses a sigmoid; or the cosine of two embeddings,
            -1 to 1. None with an error.
        num_prompt_tokens: Tokens that were computed for it.
        error: Why there is no score, or None.
    """

    index: int
    score: float | None
    num_prompt_tokens: int
    error: RequestError | None = None


EngineOutput: TypeAlias = RequestOutput | PoolingOutput
