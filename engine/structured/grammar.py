"""Grammars: what may follow in an answer that has to have a certain form.

    StructuredOutput ──► compile, in a thread ──► GrammarMatcher, kept as a template ──► fork: one for each sequence
                                                                                            │ each step
                          sampled token ──► consume ◄── sample ◄── mask of the vocabulary ◄─┘

The automata are llguidance's. A matcher moves only by `consume`, so that it outlives preemption: recomputing KV blocks
does not concern it. Compiling is bounded by llguidance's own limits and by the sizes that `StructuredOutput` allows.

llguidance is imported with the first grammar: an engine that is asked for none runs where it is not installed.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from engine.device import Device
from engine.errors import RequestError
from engine.machine import usable_cores
from engine.plan import PlanRow
from engine.structured.output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

# Most take a millisecond; two, so that one which takes a second does not hold up the others.
_COMPILING_THREADS = 2
# The compiler follows references by recursion. At the sizes that are allowed, the usual 8 MiB overflow and take the
# whole process with them. Only pages that are touched take memory.
_COMPILING_STACK_BYTES = 512 * 2**20
_CACHED_GRAMMARS = 512
_MOST_MASK_THREADS = 16
_LONGEST_MESSAGE = 500


class GrammarMatcher:
    """How far one sequence has come in its grammar."""

    __slots__ = ("_field", "automaton", "num_mask_words")

    def __init__(self, automaton: "LLMatcher", num_mask_words: int, field: str) -> None:
        self.automaton = automaton
        self.num_mask_words = num_mask_words
        self._field = field

    def fork(self) -> "GrammarMatcher":
        """A matcher that has come as far, and goes on by itself."""
        return GrammarMatcher(self.automaton.deep_copy(), self.num_mask_words, self._field)

    def consume(self, token_id: int) -> None:
        """Go on by one token.

        Raises `RequestError` (code `invalid_grammar`) if the token may not follow, which sampling under the mask rules
        out, or if the grammar got too large for llguidance's limits on the way here.
        """
        if not self.automaton.consume_token(token_id):
            raise _invalid_grammar(self._field, self.automaton.get_error())

    @property
    def finished(self) -> bool:
        """Whether nothing may follow but the end."""
        return self.automaton.is_stopped()


class GrammarCompiler:
    """Compiles grammars for one model, in threads of its own, and keeps the latest; one thread asks.

    `vocab_size` is the width of the model's logits, padding included; all of `eos_token_ids` end a grammar. Threads
    start, and the tokenizer is prepared, with the first grammar.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._pool = ThreadPoolExecutor(_COMPILING_THREADS, thread_name_prefix="grammar")
        self._prepared: Future[LLTokenizer] | None = None
        self._cache: OrderedDict[StructuredOutput, Future[GrammarMatcher]] = OrderedDict()

    def compile(self, structured_output: StructuredOutput) -> "Future[GrammarMatcher]":
        """Return a matcher at the grammar's beginning, to be forked; the future's error is a `RequestError`."""
        if structured_output in self._cache:
            self._cache.move_to_end(structured_output)
            return self._cache[structured_output]
        # Threads are started by submitting, and take the size that is set then.
        stack_size = threading.stack_size(_COMPILING_STACK_BYTES)
        try:
            if self._prepared is None:
                self._prepared = self._pool.submit(self._prepare)
            future = self._pool.submit(_compile, self._prepared, structured_output)
        finally:
            threading.stack_size(stack_size)
        self._cache[structured_output] = future
        if len(self._cache) > _CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return future

    def _prepare(self) -> "LLTokenizer":
        import llguidance.hf

        tokenizer = self._tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise _unsupported("the model comes with none" if tokenizer is None else "the model's is a slow one")
        eos_token_ids = [token_id for token_id in sorted(self._eos_token_ids) if token_id < len(tokenizer)]
        if not eos_token_ids:
            raise _unsupported("with a token that ends an answer, which the model's does not have")
        try:
            # A tokenizer may know more tokens than the model has logits for; the bits of those are cut off.
            return llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=max(self._vocab_size, len(tokenizer)), eos_token=eos_token_ids
            )
        except ValueError as error:
            raise _unsupported(f"in a form that llguidance reads, which the model's is not ({error})") from error


def _compile(prepared: "Future[LLTokenizer]", structured_output: StructuredOutput) -> GrammarMatcher:
    from llguidance import LLMatcher, LLParserLimits

    field = f"structured_output.{structured_output.kind}"
    try:
        grammar = _grammar(structured_output)
    except ValueError as error:
        raise _invalid_grammar(field, str(error)) from error
    tokenizer = prepared.result()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    # The first mask is the costliest, and shows what only shows in use.
    matcher.compute_bitmask()
    if matcher.is_error():
        raise _invalid_grammar(field, matcher.get_error())
    return GrammarMatcher(matcher, -(-tokenizer.vocab_size // 32), field)


def _grammar(structured_output: StructuredOutput) -> str:
    """The grammar as llguidance takes it; raises `ValueError` for some that are wrong, where others show later."""
    from llguidance import LLMatcher, grammar_from

    if structured_output.json_object:
        return _json_grammar('{"type":"object"}')
    if structured_output.json is not None:
        return _json_grammar(structured_output.json)
    if structured_output.regex is not None:
        return LLMatcher.grammar_from_regex(structured_output.regex)
    if structured_output.choice is not None:
        strings = (json.dumps(text, ensure_ascii=False) for text in structured_output.choice)
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(strings)}")
    assert structured_output.grammar is not None
    return grammar_from("grammar", structured_output.grammar)


def _json_grammar(schema: str | dict[str, Any]) -> str:
    from llguidance import LLMatcher

    # Models write JSON on one line, with a space after commas and colons or with none. Left free, some never stop.
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": " ?"})


class GrammarMask(NamedTuple):
    """What may be sampled in those rows of a step's logits that have a grammar, as `kernels.bitmask` has it."""

    rows: Tensor  # [G] int64
    bitmask: Tensor  # [G, W] int32


class GrammarMasks:
    """Makes the masks of a step, those of its rows in parallel."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._executor: LLExecutor | None = None

    def fill(self, plan_rows: Sequence[PlanRow]) -> GrammarMask | None:
        """Return the masks of the rows that sample; None if none of them has a grammar.

        Takes the host some 50 microseconds a row, in which a GPU may still be busy with the forward pass.
        """
        rows: list[int] = []
        matchers: list[GrammarMatcher] = []
        num_draws: list[int] = []
        first = 0
        for row in plan_rows:
            if row.num_samples and (matcher := row.sequence.matcher):
                rows.extend(range(first, first + row.num_samples))
                matchers.append(matcher)
                num_draws.append(row.num_samples)
            first += row.num_samples
        if not matchers:
            return None
        # Continuations that start at the same prompt's end share a mask.
        bitmask = np.repeat(self._fill(matchers), num_draws, axis=0)
        return GrammarMask(*self._device.upload(np.array(rows), bitmask))

    def _fill(self, matchers: list[GrammarMatcher]) -> np.ndarray:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(min(usable_cores(), torch.get_num_threads(), _MOST_MASK_THREADS))
        bitmask = np.zeros((len(matchers), matchers[0].num_mask_words), dtype=np.int32)
        indexed = [(matcher.automaton, index) for index, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, indexed, bitmask)
        return bitmask


def _unsupported(reason: str) -> RequestError:
    return RequestError(f"Structured output needs a fast tokenizer, {reason}.", field="structured_output")


def _invalid_grammar(field: str, reason: str) -> RequestError:
    # After these come llguidance's inner state and its own stack.
    reason = reason.split("<state>")[0].split("<non-verbose/>")[0].split("<backtrace>")[0].strip()
    if len(reason) > _LONGEST_MESSAGE:
        reason = reason[:_LONGEST_MESSAGE] + " ..."
    return RequestError(f"{field} cannot be followed: {reason}", code="invalid_grammar", field=field)
