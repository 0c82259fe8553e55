"""From what a caller wants pooled to a request that the scheduler takes, and back to the caller's output."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from engine.errors import RequestError, not_numbers
from engine.messages import NewRequest
from engine.outputs import PoolingOutput
from engine.pooling.params import PoolingParams, PoolingTask, PoolingType
from engine.pooling.pooler import Pooler, sigmoid
from engine.pooling.prompts import PoolingPromptEncoder, TextPair
from engine.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PoolingModel(NamedTuple):
    """What a model can pool, and how it does unless a request says otherwise.

    Attributes:
        task: The one of the two that the model serves.
        size: Dimensions of its vectors before any are cut off; labels of its head.
        pooling, normalize: The defaults of `PoolingParams`; a head reads the first token (`cls`).
        uses_sigmoid: Scores are the head's logits through a sigmoid, and not the logits themselves.
        lowercase: Texts are put into lower case first.
    """

    task: PoolingTask
    size: int
    pooling: PoolingType
    normalize: bool
    uses_sigmoid: bool = False
    lowercase: bool = False


class PoolingIntake:
    """Checks, encodes and answers the requests that pool, for one model.

    `max_length` is the most tokens that the model takes: what truncation to -1 leaves.
    """

    def __init__(
        self, model: PoolingModel, tokenizer: "PreTrainedTokenizerBase | None", *, vocab_size: int, max_length: int
    ) -> None:
        self._model = model
        self._max_length = max_length
        self._encoder = PoolingPromptEncoder(tokenizer, vocab_size, lowercase=model.lowercase)

    def make_requests(self, news: Sequence[NewRequest]) -> list[Request | PoolingOutput]:
        """Make a request of each whose `params` are `PoolingParams`, or the output that says why that cannot be."""
        made: dict[int, Request | PoolingOutput] = {}
        accepted: list[tuple[NewRequest, Pooler]] = []
        for new in news:
            try:
                accepted.append((new, self._pooler(new)))
            except RequestError as error:
                made[new.index] = PoolingOutput.rejected(new.index, error)
        encoded = self._encoder.encode((new.prompt, self._limit(new)) for new, _ in accepted)
        for (new, pooler), prompt in zip(accepted, encoded, strict=True):
            if isinstance(prompt, RequestError):
                made[new.index] = PoolingOutput.rejected(new.index, prompt)
            else:
                token_ids, token_types = prompt
                made[new.index] = Request.to_pool(
                    new.index,
                    token_ids,
                    pooler,
                    token_types=token_types,
                    salt=new.salt,
                    lora=new.lora,
                    priority=new.priority,
                    group=new.group,
                )
        return [made[new.index] for new in news]

    def _limit(self, new: NewRequest) -> int | None:
        limit = _params(new).truncate_prompt_tokens
        return self._max_length if limit == -1 else limit

    def _pooler(self, new: NewRequest) -> Pooler:
        params, model = _params(new), self._model
        if params.task != model.task:
            raise _wrong_task(params.task)
        if params.task == "score":
            use_sigmoid = model.uses_sigmoid and params.use_activation is not False
            return Pooler(model.pooling, activation=sigmoid if use_sigmoid else None)
        if isinstance(new.prompt, TextPair):
            raise RequestError("An embedding is of one text, not of a pair.", field="prompt")
        if params.dimensions is not None and params.dimensions > model.size:
            raise RequestError(
                f"dimensions is {params.dimensions}, but the model's vectors have {model.size}.", field="dimensions"
            )
        return Pooler(
            params.pooling or model.pooling,
            normalize=model.normalize if params.normalize is None else params.normalize,
            dimensions=params.dimensions,
        )


def pooling_output(request: Request) -> PoolingOutput:
    """Return the output of a request that pooled and has ended: its vector, or why there is none."""
    assert request.pooler is not None
    num_cached_tokens = request.num_cached_tokens or 0
    error = request.error
    if error is None and request.sequences[0].finish_reason == "abort":
        error = aborted()
    if error is None:
        vector = request.pooler.vector(request.num_prompt_tokens)
        if np.isfinite(vector).all():
            return PoolingOutput(request.index, request.prompt_token_ids, vector, num_cached_tokens)
        error = not_numbers("hidden states", code="nan_hidden_states")
    return PoolingOutput.rejected(request.index, error, request.prompt_token_ids)


def aborted() -> RequestError:
    return RequestError("The request was aborted.", code="aborted")


def _params(new: NewRequest) -> PoolingParams:
    return cast(PoolingParams, new.params)


def _wrong_task(task: PoolingTask) -> RequestError:
    if task == "embed":
        return RequestError(
            "The model is a cross-encoder: it scores pairs of texts and gives no embeddings.",
            code="unsupported_task",
            field="task",
            hint="Use score, or load an embedding model.",
        )
    return RequestError(
        "The model has no classification head, so it scores no pairs.",
        code="unsupported_task",
        field="task",
        hint="Embed both texts and compare their vectors, as LLM.score does; or load a cross-encoder.",
    )
