"""What requests say of single tokens: biases, penalties, and what must not be generated at all.

A request's rules are compiled once, and for each step they become flat lists of places in the logits, those of all rows
together: a row without rules costs nothing, a row with penalties as much as it has different tokens.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device import Device
from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine.sequence import Sequence


class TokenCounts:
    """The different tokens of a growing sequence, and how often each occurs in its output."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._places: dict[int, int] = {}
        # Nothing is allocated before the first token is counted, which in most sequences none ever is.
        self._token_ids = np.empty(0, dtype=np.int64)
        self._counts = np.empty(0, dtype=np.float32)

    def update(self, token_ids: list[int]) -> None:
        """Count what `token_ids`, prompt and output together, has more than at the last call."""
        for position in range(self._num_counted, len(token_ids)):
            place = self._place_of(token_ids[position])
            if position >= self._num_prompt_tokens:
                self._counts[place] += 1
        self._num_counted = len(token_ids)

    def _place_of(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._counts):
                self._token_ids = np.resize(self._token_ids, max(64, 2 * place))
                self._counts = np.resize(self._counts, max(64, 2 * place))
            self._token_ids[place], self._counts[place] = token_id, 0
        return place

    @property
    def token_ids(self) -> np.ndarray:
        """The different tokens of prompt and output, `[n]` int64, in order of appearance."""
        return self._token_ids[: len(self._places)]

    @property
    def output_counts(self) -> np.ndarray:
        """How often each of `token_ids` occurs in the output, `[n]` float32; 0 for those of the prompt alone."""
        return self._counts[: len(self._places)]


class TokenRules:
    """One request's rules, but for the grammar: what they do to the next token's logits, given the tokens so far."""

    def __init__(self, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> None:
        self._params = params
        self._bad_words = bad_words
        self.bias_token_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.biases = np.array(list(params.logit_bias.values()), dtype=np.float32)
        allowed = params.allowed_token_ids
        self.allowed_token_ids = None if allowed is None else np.unique(np.array(allowed, dtype=np.int64))

    def penalties(self, sequence: "Sequence") -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Token ids, the repetition penalty of each and what to subtract from each; None without penalties."""
        params = self._params
        if params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0:
            return None
        token_ids, counts = sequence.token_counts.token_ids, sequence.token_counts.output_counts
        subtracted = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        return token_ids, np.full(len(token_ids), params.repetition_penalty, np.float32), subtracted.astype(np.float32)

    def banned_token_ids(self, sequence: "Sequence") -> list[int]:
        """What would end the sequence before its `min_tokens`, and what would complete a bad word."""
        banned = set(sequence.banned_token_ids)
        for *beginning, last in self._bad_words:
            if not beginning or sequence.token_ids[-len(beginning) :] == beginning:
                banned.add(last)
        return sorted(banned)


def token_rules(params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> TokenRules | None:
    """Compile a request's rules; None if it has none. `bad_words` are its bad words as token ids."""
    plain = (
        not params.logit_bias
        and params.allowed_token_ids is None
        and params.min_tokens == 0
        and params.repetition_penalty == 1
        and params.presence_penalty == params.frequency_penalty == 0
        and not bad_words
    )
    return None if plain else TokenRules(params, bad_words)


def encode_bad_words(tokenizer: "PreTrainedTokenizerBase", words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return each word as token ids, as it is written at the beginning of a text and after a space."""
    stems = (word.removeprefix(" ") for word in words)
    spellings = [spelling for stem in stems for spelling in (stem, " " + stem) if spelling]
    encoded = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))


class Edit(NamedTuple):
    """Places in a step's logits, `[n]` int64 each, and for each place some numbers, `[n]` float32 each."""

    rows: Tensor
    token_ids: Tensor
    values: tuple[Tensor, ...] = ()


class Allowed(NamedTuple):
    """All places in `rows` `[n]` int64, each of them once, that are ruled out but for those of `kept`."""

    rows: Tensor
    kept: Edit


class LogitEdits(NamedTuple):
    """What the rules of all rows do to a step's logits, in the order of the fields."""

    biases: Edit | None  # added
    allowed: Allowed | None
    penalties: Edit | None  # the repetition penalty, and what is subtracted
    banned: Edit | None  # ruled out


def logit_edits(sequences: "list[Sequence]", device: Device) -> LogitEdits | None:
    """Collect the edits of a step whose rows of logits continue `sequences`; None if there are none."""
    biases, allowed, penalties, banned = [], [], [], []
    for row, sequence in enumerate(sequences):
        rules = sequence.request.token_rules
        if rules is None:
            continue
        if len(rules.biases):
            biases.append((row, rules.bias_token_ids, rules.biases))
        if rules.allowed_token_ids is not None:
            allowed.append((row, rules.allowed_token_ids))
        if penalty := rules.penalties(sequence):
            penalties.append((row, *penalty))
        if token_ids := rules.banned_token_ids(sequence):
            banned.append((row, np.array(token_ids, dtype=np.int64)))
    if not (biases or allowed or penalties or banned):
        return None
    return LogitEdits(
        biases=_edit(biases, device) if biases else None,
        allowed=_allowed(allowed, device) if allowed else None,
        penalties=_edit(penalties, device) if penalties else None,
        banned=_edit(banned, device) if banned else None,
    )


def _allowed(parts: list, device: Device) -> Allowed:
    (rows,) = device.upload(np.array([row for row, _ in parts]))
    return Allowed(rows, _edit(parts, device))


def _edit(parts: list, device: Device) -> Edit:
    """Join parts `(row, token ids, numbers ...)`."""
    rows = np.repeat([part[0] for part in parts], [len(part[1]) for part in parts])
    token_ids, *values = (np.concatenate(column) for column in list(zip(*parts, strict=True))[1:])
    on_device = device.upload(rows, token_ids, *values)
    return Edit(on_device[0], on_device[1], tuple(on_device[2:]))


def apply_edits(logits: Tensor, edits: LogitEdits) -> None:
    """Edit `logits` `[R, vocab_size]` float32 in place. What is -inf stays so."""
    if edits.biases:
        rows, token_ids, (added,) = edits.biases
        logits[rows, token_ids] += added
    if edits.allowed:
        rows, token_ids, _ = edits.allowed.kept
        kept = logits[rows, token_ids]
        logits[edits.allowed.rows] = -math.inf
        logits[rows, token_ids] = kept
    if edits.penalties:
        rows, token_ids, (repetition, subtracted) = edits.penalties
        scores = logits[rows, token_ids]
        scores = torch.where(scores > 0, scores / repetition, scores * repetition)
        logits[rows, token_ids] = scores - subtracted
    if edits.banned:
        rows, token_ids, _ = edits.banned
        logits[rows, token_ids] = -math.inf
