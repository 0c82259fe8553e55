"""The public face: prompts in, answers out, in the order of the prompts."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

from engine.build import build_engine
from engine.config import EngineConfig
from engine.info import EngineInfo, EngineStats
from engine.messages import NewRequest
from engine.outputs import EngineOutput, PoolingOutput, RequestOutput, ScoreOutput
from engine.pooling.params import PoolingParams
from engine.pooling.prompts import PoolingPrompt, TextPair
from engine.pooling.scoring import cosine_scores, head_scores
from engine.prompts import Message, Prompt
from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEFAULT_PARAMS = SamplingParams()
_DEFAULT_POOLING = PoolingParams()
_DEFAULT_SCORING = PoolingParams(task="score")
_Params: TypeAlias = SamplingParams | PoolingParams
# Requests of an iterator in the engine, beyond those that run: enough that a long answer at the head of the order does
# not drain the batch behind it, few enough that a file of any length needs no more memory than a short one. Those of a
# list are in memory anyway, and the engine is told of all at once: it orders them.
_WINDOW_BATCHES = 4


class LLM:
    """A model in this process. `options` are the fields of `EngineConfig`; what they say wrong is a `ConfigError`.

    Raises `ModelNotFound` or `ModelNotSupported` as well. Not thread-safe.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._core = build_engine(EngineConfig(model, **options))
        self._indices = count()
        # Of the requests in the engine that somebody waits for: the answer, or None as long as there is none.
        self._answers: dict[int, EngineOutput | None] = {}

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        return self._core.tokenizer

    @property
    def info(self) -> EngineInfo:
        return self._core.info

    def stats(self) -> EngineStats:
        return self._core.stats()

    @overload
    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Iterable[SamplingParams] = ...,
        *,
        lora: str | Iterable[str | None] | None = ...,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Iterator[Prompt],
        params: SamplingParams | Iterable[SamplingParams] = ...,
        *,
        lora: str | Iterable[str | None] | None = ...,
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: str | Sequence[Prompt] | Iterator[Prompt],
        params: SamplingParams | Iterable[SamplingParams] = _DEFAULT_PARAMS,
        *,
        lora: str | Iterable[str | None] | None = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer each prompt, in order; `params` is one for all, or one for each.

        So is `lora`: an adapter's folder in PEFT's format, or its hub id with an optional `@revision`; None for the
        model alone. It takes an engine with `max_loras`.

        A prompt is a string, a list of token ids, or a list of chat messages. A string alone is one prompt. For a
        sequence of prompts the answers come as a list. For an iterator they come as an iterator: prompts are drawn as
        room arises, a few batches ahead, and nothing grows with their number.

        A prompt that cannot be served yields an output with `error` set, and the others go on.
        """
        return cast(list[RequestOutput] | Iterator[RequestOutput], self._answer(prompts, params, lora))

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Iterable[SamplingParams] = _DEFAULT_PARAMS,
        *,
        lora: str | Iterable[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation, a list of `{"role": ..., "content": ...}`, through the model's chat template.

        A list of messages alone is one conversation. `params` and `lora` are as for `generate`.
        """
        if conversations and isinstance(conversations[0], Mapping):
            return self.generate([cast(Sequence[Message], conversations)], params, lora=lora)
        return self.generate(cast(Sequence[Sequence[Message]], conversations), params, lora=lora)

    @overload
    def embed(
        self,
        prompts: str | Sequence[Prompt],
        params: PoolingParams | Iterable[PoolingParams] = ...,
        *,
        lora: str | Iterable[str | None] | None = ...,
    ) -> list[PoolingOutput]: ...

    @overload
    def embed(
        self,
        prompts: Iterator[Prompt],
        params: PoolingParams | Iterable[PoolingParams] = ...,
        *,
        lora: str | Iterable[str | None] | None = ...,
    ) -> Iterator[PoolingOutput]: ...

    def embed(
        self,
        prompts: str | Sequence[Prompt] | Iterator[Prompt],
        params: PoolingParams | Iterable[PoolingParams] = _DEFAULT_POOLING,
        *,
        lora: str | Iterable[str | None] | None = None,
    ) -> list[PoolingOutput] | Iterator[PoolingOutput]:
        """Give the vector of each prompt, in order, by an embedding model or a decoder.

        Prompts, errors, lists, iterators and `lora` are as for `generate`.
        """
        return cast(list[PoolingOutput] | Iterator[PoolingOutput], self._answer(prompts, params, lora))

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], params: PoolingParams | None = None
    ) -> list[ScoreOutput]:
        """Say how well each query goes with its document: two lists of one length, or one query with every document.

        A cross-encoder reads both texts at once, and `params` are of the task `score`. Any other model embeds each
        text once, the score is the cosine of two vectors, and `params` are of the task `embed`.
        """
        documents = [documents] if isinstance(documents, str) else documents
        queries = [queries] * len(documents) if isinstance(queries, str) else queries
        if len(queries) != len(documents):
            raise ValueError(f"{len(queries)} queries, but {len(documents)} documents")
        pairs = list(zip(queries, documents, strict=True))
        if "score" in self.info.tasks:
            prompts = [TextPair(*pair) for pair in pairs]
            outputs = self._answer(prompts, params or _DEFAULT_SCORING, None)
            return head_scores(cast(list[PoolingOutput], outputs))
        texts = list(dict.fromkeys([*queries, *documents]))
        return cosine_scores(pairs, dict(zip(texts, self.embed(texts, params or _DEFAULT_POOLING), strict=True)))

    def _answer(
        self,
        prompts: str | Sequence[PoolingPrompt] | Iterator[PoolingPrompt],
        params: _Params | Iterable[_Params],
        lora: str | Iterable[str | None] | None,
    ) -> list[EngineOutput] | Iterator[EngineOutput]:
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sequence):
            return self._run(prompts, params, lora, window=_WINDOW_BATCHES * self._core.info.max_num_seqs)
        if isinstance(params, Sequence) and len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} parameters")
        if isinstance(lora, Sequence) and not isinstance(lora, str) and len(lora) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(lora)} adapters")
        return list(self._run(prompts, params, lora, window=len(prompts)))

    def _run(
        self,
        prompts: Iterable[PoolingPrompt],
        params: _Params | Iterable[_Params],
        lora: str | Iterable[str | None] | None,
        *,
        window: int,
    ) -> Iterator[EngineOutput]:
        if isinstance(params, SamplingParams | PoolingParams):
            pairs = zip(prompts, repeat(params), strict=False)
        else:
            pairs = zip(prompts, params, strict=True)
        if lora is None or isinstance(lora, str):
            questions = zip(pairs, repeat(lora), strict=False)
        else:
            questions = zip(pairs, lora, strict=True)
        pending: deque[int] = deque()
        try:
            for place in count():
                new = [
                    NewRequest(next(self._indices), prompt, param, lora=adapter)
                    for (prompt, param), adapter in islice(questions, window - len(pending))
                ]
                pending.extend(request.index for request in new)
                self._answers.update((request.index, None) for request in new)
                self._core.add_requests(new)
                if not pending:
                    return
                answer = self._wait_for(pending.popleft())
                yield replace(answer, index=place)
        finally:
            for index in pending:
                self._core.abort(index)
                del self._answers[index]

    def _wait_for(self, index: int) -> EngineOutput:
        while (answer := self._answers[index]) is None:
            for output in self._core.step():
                # What an abandoned iterator left behind has no place here any more.
                if output.index in self._answers:
                    self._answers[output.index] = output
        del self._answers[index]
        return answer
