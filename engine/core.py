"""The engine: prompts in, outputs out, one step at a time."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, cast

from engine.answers import AnswerWriter
from engine.detokenizer import StopStringWatcher
from engine.errors import RequestError
from engine.info import EngineInfo, EngineStats
from engine.loop import StepLoop
from engine.lora import LoraCache
from engine.messages import NewRequest
from engine.outputs import CompletionOutput, EngineOutput, PoolingOutput, RequestOutput
from engine.pooling.intake import PoolingIntake, aborted, pooling_output
from engine.pooling.params import PoolingParams
from engine.prompts import Prompt, PromptEncoder
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.sampling.seeds import derive_seed
from engine.sampling.token_rules import encode_bad_words
from engine.structured.grammar import GrammarCompiler
from engine.structured.queue import GrammarQueue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# With nothing to run: messages may come in while an adapter is loaded or a grammar compiled.
_LONGEST_WAIT_S = 0.05


class RequestScheduler(Protocol):
    """What the core needs of `engine.scheduler.Scheduler`, or of `engine.encoder.scheduler.EncoderScheduler`."""

    def add(self, request: Request) -> None: ...

    def abort(self, index: int) -> Request | None: ...

    def fail(self, request: Request, error: RequestError) -> None: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_wanted(self) -> int: ...

    @property
    def has_unfinished(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None: ...


class EngineCore:
    """One model's requests, from prompt to output. Not thread-safe: one thread adds, aborts and steps.

    `on_start` is called before a step with the indices of the requests that start in it.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        loop: StepLoop,
        info: EngineInfo,
        *,
        tokenizer: "PreTrainedTokenizerBase | None",
        eos_token_ids: frozenset[int],
        seed: int,
        adapters: LoraCache | None = None,
        pooling: PoolingIntake | None = None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.on_start: Callable[[tuple[int, ...]], None] = lambda indices: None
        self._loop = loop
        self._answers = AnswerWriter(tokenizer)
        self._encoder = PromptEncoder(tokenizer, info.vocab_size)
        self._pooling = pooling
        # A tokenizer, or a list of its tokens, may name some that the model does not have.
        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < info.vocab_size)
        self._seed = seed
        self._adapters = adapters
        self._grammars = GrammarQueue(GrammarCompiler(tokenizer, info.vocab_size, self._eos_token_ids))
        self._unencoded: deque[NewRequest] = deque()
        self._undelivered: list[EngineOutput] = []

    def add_requests(self, requests: Iterable[NewRequest]) -> None:
        """Queue requests. One that cannot be served is answered by a later `step`, with its error."""
        self._unencoded.extend(requests)

    def _encode_some(self) -> None:
        """Keep as many requests ready to start as the scheduler wants. They are encoded a batch at a time."""
        batch_size = self.info.max_num_seqs
        # Of grammars no more than a batch is compiled ahead: each may take megabytes.
        while self._unencoded and len(self._grammars) < min(self.scheduler.num_wanted, batch_size):
            requests = [self._unencoded.popleft() for _ in range(min(batch_size, len(self._unencoded)))]
            # In runs, so that requests of both kinds keep their order.
            for pools, run in groupby(requests, lambda request: isinstance(request.params, PoolingParams)):
                take_in = self._take_in_to_pool if pools else self._take_in_to_generate
                take_in(list(run))

    def _take_in_to_pool(self, requests: list[NewRequest]) -> None:
        if self._pooling is None:
            error = RequestError("This engine pools nothing.", code="unsupported_task", field="task")
            self._undelivered.extend(PoolingOutput.rejected(request.index, error) for request in requests)
            return
        for made in self._pooling.make_requests(requests):
            if isinstance(made, PoolingOutput):
                self._undelivered.append(made)
                continue
            try:
                self._check_adapter(made.lora)
                self.scheduler.add(made)
            except RequestError as error:
                self._undelivered.append(PoolingOutput.rejected(made.index, error, made.prompt_token_ids))

    def _take_in_to_generate(self, requests: list[NewRequest]) -> None:
        if "generate" not in self.info.tasks:
            error = _generates_nothing(self.info)
            self._undelivered.extend(RequestOutput.rejected(request.index, error) for request in requests)
            return
        encoded = self._encoder.encode(cast(Prompt, request.prompt) for request in requests)
        for request, token_ids in zip(requests, encoded, strict=True):
            if isinstance(token_ids, RequestError):
                self._undelivered.append(RequestOutput.rejected(request.index, token_ids))
                continue
            try:
                made = self._make_request(request, token_ids)
                if made.params.structured_output:
                    self._grammars.add(made)
                else:
                    self.scheduler.add(made)
            except RequestError as error:
                self._undelivered.append(RequestOutput.rejected(request.index, error, tuple(token_ids)))

    def _take_in_with_grammar(self) -> None:
        for request, error in self._grammars.take():
            try:
                if error:
                    raise error
                self.scheduler.add(request)
            except RequestError as reason:
                self._undelivered.append(RequestOutput.rejected(request.index, reason, request.prompt_token_ids))

    def abort(self, index: int) -> None:
        """End a request now; the next `step` returns what it has. Without effect if it has ended."""
        if request := self.scheduler.abort(index):
            self._undelivered.append(self._output(request))
        elif request := self._grammars.remove(index):
            request.abort()
            self._undelivered.append(self._output(request))
        elif new := next((request for request in self._unencoded if request.index == index), None):
            self._unencoded.remove(new)
            if isinstance(new.params, PoolingParams):
                self._undelivered.append(PoolingOutput.rejected(index, aborted()))
            else:
                self._undelivered.append(RequestOutput(index, (), (CompletionOutput(0, "", (), "abort"),)))

    @property
    def has_unfinished(self) -> bool:
        """Whether another `step` has something to do or to return."""
        return bool(
            self.scheduler.has_unfinished
            or self._loop.in_flight
            or self._unencoded
            or self._grammars
            or self._undelivered
        )

    def step(self) -> list[EngineOutput]:
        """Run one step, and return the requests that ended since the last."""
        self._encode_some()
        self._take_in_with_grammar()
        self._take_adapters()
        finished = self._loop.step(self.on_start)
        if finished is None:
            self._wait()
        outputs = self._undelivered + [self._output(request) for request in finished or ()]
        self._undelivered = []
        return outputs

    def _take_adapters(self) -> None:
        for request, error in self._adapters.take_loaded() if self._adapters else ():
            self.scheduler.fail(request, error)
            self._undelivered.append(self._output(request))

    def _wait(self) -> None:
        """With nothing else to do: wait until a grammar is compiled or an adapter loaded, but not for long."""
        if self._undelivered:
            return
        if self._grammars:
            self._grammars.wait(_LONGEST_WAIT_S)
        elif self._adapters:
            self._adapters.wait(_LONGEST_WAIT_S)

    def stats(self) -> EngineStats:
        """A snapshot; requests that are not encoded yet, or whose grammar is not compiled, are waiting as well."""
        stats = self.scheduler.stats()
        return replace(stats, waiting=stats.waiting + len(self._grammars) + len(self._unencoded))

    def _make_request(self, new: NewRequest, token_ids: list[int]) -> Request:
        params = cast(SamplingParams, new.params)
        stop_watcher = None
        if params.stop_strings:
            if self.tokenizer is None:
                raise RequestError("The model comes without a tokenizer, so it has no text to stop at.", field="stop")
            stop_watcher = StopStringWatcher(
                self.tokenizer,
                params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        params.check_vocabulary(self.info.vocab_size)
        self._check_adapter(new.lora)
        return Request(
            new.index,
            token_ids,
            params,
            seed=self._seed_of(new, params),
            eos_token_ids=self._eos_token_ids,
            stop_watcher=stop_watcher,
            bad_words=self._encode_bad_words(params),
            salt=new.salt,
            lora=new.lora,
            priority=new.priority,
            group=new.group,
        )

    def _seed_of(self, new: NewRequest, params: SamplingParams) -> int:
        given = params.seed if new.seed is None else new.seed
        return derive_seed(self._seed, new.index) if given is None else given

    def _encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise RequestError("The model comes without a tokenizer, so it knows no words.", field="bad_words")
        words = encode_bad_words(self.tokenizer, params.bad_words)
        return tuple(word for word in words if max(word) < self.info.vocab_size)

    def _check_adapter(self, name: str | None) -> None:
        if name is None:
            return
        if not isinstance(name, str) or not name:
            raise RequestError(f"lora must be the name of an adapter, not {name!r}.", code="invalid_lora", field="lora")
        if self._adapters is None:
            raise RequestError(
                f"Adapter {name} is asked for, but the engine runs without adapters.",
                code="invalid_lora",
                field="lora",
                hint="Set max_loras to how many may be in memory at a time.",
            )

    def _output(self, request: Request) -> EngineOutput:
        if request.pooler:
            return pooling_output(request)
        return self._answers.output(request)


def _generates_nothing(info: EngineInfo) -> RequestError:
    if "score" in info.tasks:
        what, instead = "a cross-encoder", "score"
    else:
        what, instead = "an embedding model", "embed"
    return RequestError(
        f"{info.model} is {what}: it generates no text.",
        code="unsupported_task",
        hint=f"Use {instead}, or load a model with a language head.",
    )
