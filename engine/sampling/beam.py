"""Beam search: of all answers that a model can give, the likeliest that a search of a certain width comes across.

    beams        candidates of each             the best of all together, with a width of 3
    a  -1.2      a x -1.5   a y -2.3  ...       a x -1.5     goes on in a
    b  -1.9      b z -2.0   b . -2.1  ...  ──►  b z -2.0     goes on in b
    c  -2.2      c x -4.0   c z -4.4  ...       b . -2.1     is complete
                                                a y -2.3     goes on in a fork of a
                                                a z -2.9     is one too many; c is dropped

The beams of a request go on together. One whose candidates are there before those of the others is parked until then:
preemption may take its blocks, and does not take its candidates.

The rules are those of Transformers' `_beam_search` without sampling (generation/utils.py, version 5). The candidates of
all beams together, the best `num_candidates` of them, are looked at in order: of the first `beam_width`, those that end
are complete; of all, the first `beam_width` that do not end go on. Where there are too few, Transformers fills up with
what has ended or was ruled out, at scores around -1e9; here fewer beams go on. Of equal scores that of the better beam
comes first.
"""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.request import Request


class Continuation(NamedTuple):
    """A beam and one more token; `score` is the log-probability of all that was generated, with it."""

    beam: Sequence
    token_id: int
    score: float


class BeamSearch:
    """The search of one request. Its beams are the request's sequences, the best first; what is complete is kept here.

    In the end the request's sequences are the answers to return, the best first.
    """

    def __init__(self, request: "Request", width: int) -> None:
        self._request = request
        self._width = width
        self._end_token_ids = request.eos_token_ids | frozenset(request.params.stop_token_ids)
        self._candidates: dict[Sequence, tuple[tuple[int, float], ...]] = {}
        self._complete: list[tuple[float, Sequence]] = []  # with its score, the best first, at most `width`

    @property
    def num_candidates(self) -> int:
        """So many that, if each beam's candidates include all tokens that end it, enough others are left to go on."""
        return max(2, 1 + len(self._end_token_ids)) * self._width

    def offer(self, beam: Sequence, candidates: tuple[tuple[int, float], ...]) -> bool:
        """Park a beam with its candidates, token ids and log-probabilities; True if it was the last to have them."""
        self._candidates[beam] = candidates
        beam.parked = True
        return len(self._candidates) == len(self._request.sequences)

    def advance(self, fork: Callable[[Sequence], Sequence], drop: Callable[[Sequence], None]) -> int:
        """Go on by one token, or end; return the number of beams that went on.

        `fork` makes one more of the request's sequences, as far as the one it is given; `drop` finishes one that is
        given up. Where no token may follow and nothing is complete, nothing is changed.
        """
        ranked = self._ranked()
        self._candidates.clear()
        length = self._request.sequences[0].num_output_tokens + 1
        ends = [length == self._request.max_tokens or one.token_id in self._end_token_ids for one in ranked]
        for continuation, end in zip(ranked[: self._width], ends, strict=False):
            if end:
                self._complete_with(continuation, self._normalised(continuation.score, length))
        if not ranked and not self._complete:
            return 0
        going_on = [continuation for continuation, end in zip(ranked, ends, strict=True) if not end][: self._width]
        survivors = () if self._is_over(going_on, length) else {continuation.beam for continuation in going_on}
        for beam in self._request.sequences:
            if beam not in survivors:
                drop(beam)
        if survivors:
            self._go_on(going_on, fork)
            return len(going_on)
        self._request.sequences = [sequence for _, sequence in self._complete[: self._request.params.n]]
        return 0

    def _ranked(self) -> list[Continuation]:
        """The best continuations of all beams together, the best first."""
        continuations = [
            Continuation(beam, token_id, beam.cumulative_logprob + logprob)
            for beam in self._request.sequences
            for token_id, logprob in self._candidates[beam]
            if logprob > -math.inf
        ]
        return sorted(continuations, key=lambda one: one.score, reverse=True)[: self.num_candidates]

    def _complete_with(self, continuation: Continuation, score: float) -> None:
        if len(self._complete) == self._width and score <= self._complete[-1][0]:
            return
        answer = continuation.beam.fork(continuation.beam.choice, continuation.beam.seed)
        _append(answer, continuation)
        self._complete = sorted([*self._complete, (score, answer)], key=itemgetter(0), reverse=True)[: self._width]

    def _is_over(self, going_on: list[Continuation], length: int) -> bool:
        """Whether what goes on, at a length of `length`, cannot or need not become better than what is complete."""
        if not going_on:
            return True
        if len(self._complete) < self._width:
            return False
        params = self._request.params
        if params.early_stopping is True:
            return True
        # A heuristic, but for "never": a longer answer's score may still rise.
        ideal = self._request.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        return self._normalised(going_on[0].score, ideal) <= self._complete[-1][0]

    def _normalised(self, score: float, length: int) -> float:
        return score / math.pow(length, self._request.params.length_penalty)

    def _go_on(self, going_on: list[Continuation], fork: Callable[[Sequence], Sequence]) -> None:
        # All forks first: the beam they begin with is changed by its own next token.
        beams: list[Sequence] = []
        for continuation in going_on:
            beams.append(fork(continuation.beam) if continuation.beam in beams else continuation.beam)
        for beam, continuation in zip(beams, going_on, strict=True):
            _append(beam, continuation)
        self._request.sequences = beams


def _append(beam: Sequence, continuation: Continuation) -> None:
    beam.append_token(continuation.token_id)
    beam.cumulative_logprob = continuation.score
