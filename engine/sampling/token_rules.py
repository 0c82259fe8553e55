"""What requests say of single tokens: biases, penalties, and what must not be generated at all.

A request's rules are compiled once, and for each step they become flat lists of places in the logits, those of all rows
together: a row without rules costs nothing. Penalties, which depend on all tokens so far, are in `penalties`.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from engine.device import Device
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import PenaltyEdit, PenaltyRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine.sequence import Sequence


class TokenRules:
    """One request's rules, but for the grammar: what they do to the next token's logits, given the tokens so far."""

    def __init__(self, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> None:
        self._params = params
        self._bad_words = bad_words
        self.bias_token_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.biases = np.array(list(params.logit_bias.values()), dtype=np.float32)
        allowed = params.allowed_token_ids
        self.allowed_token_ids = None if allowed is None else np.unique(np.array(allowed, dtype=np.int64))

    @property
    def penalises(self) -> bool:
        """Whether the request has penalties, see `engine.sampling.penalties`."""
        params = self._params
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

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
    penalties: PenaltyEdit | None
    banned: Edit | None  # ruled out


def logit_edits(sequences: "list[Sequence]", device: Device, penalty_rows: PenaltyRows) -> LogitEdits | None:
    """Collect the edits of a step whose rows of logits continue `sequences`; None if there are none."""
    biases, allowed, banned = [], [], []
    for row, sequence in enumerate(sequences):
        rules = sequence.request.token_rules
        if rules is None:
            continue
        if len(rules.biases):
            biases.append((row, rules.bias_token_ids, rules.biases))
        if rules.allowed_token_ids is not None:
            allowed.append((row, rules.allowed_token_ids))
        if token_ids := rules.banned_token_ids(sequence):
            banned.append((row, np.array(token_ids, dtype=np.int64)))
    penalties = penalty_rows.edit(sequences, device)
    if not (biases or allowed or penalties or banned):
        return None
    return LogitEdits(
        biases=_edit(biases, device) if biases else None,
        allowed=_allowed(allowed, device) if allowed else None,
        penalties=penalties,
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
        edits.penalties.apply(logits)
    if edits.banned:
        rows, token_ids, _ = edits.banned
        logits[rows, token_ids] = -math.inf
