"""How one request wants its tokens chosen, and when it wants them to stop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling and stopping rules of one request; checked when made, never changed.

    Raises `RequestError` (its `field` names the parameter) for a value of the wrong type or out of range, and
    `TypeError`, as any Python call does, for a name that does not exist.

    Attributes:
        max_tokens: Most tokens to generate. None: as many as the model's context holds.
        min_tokens: Until this many are generated, no end-of-sequence token, stop token or stop string ends the request.
        temperature: 0 picks the likeliest token (greedy); higher is more random.
        top_k: Keep the k likeliest tokens. 0 or -1 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probabilities sum to at least this. 1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest. 0 keeps all.
        seed: The noise of token t is a function of (seed, t, vocabulary id) only, so that equal seeds give equal
            answers in any batch. None: a seed derived from the engine's seed and the request's index.
        stop: One string or several; the first to appear ends the request, and the text is cut before it.
        stop_token_ids: Token ids that end the request, beside the model's own.
        ignore_eos: Go on past the model's end-of-sequence tokens.
        include_stop_str_in_output: Cut the text after the stop string or stop token instead of before it.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, at_least=1)
        _check_int("min_tokens", self.min_tokens, at_least=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _check_number("temperature", self.temperature, low=0.0, high=math.inf)
        _check_int("top_k", self.top_k, at_least=-1)
        _check_number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise _invalid("top_p", self.top_p, "above 0 (temperature=0 is the way to greedy)")
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, at_least=_INT64_MIN, at_most=_INT64_MAX)
        self._check_stops()
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise _invalid(name, value, "true or false")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, str | list | tuple) or not all(
            isinstance(s, str) and s for s in self.stop_strings
        ):
            raise _invalid("stop", self.stop, "a non-empty string or a list of them")
        if not isinstance(self.stop_token_ids, list | tuple):
            raise _invalid("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, at_least=0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check_int(field: str, value: Any, *, at_least: int, at_most: int | None = None) -> None:
    # bool is an int to Python, but `max_tokens: true` in a job file is a mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(field, value, "an integer")
    if value < at_least:
        raise _invalid(field, value, f"at least {at_least}")
    if at_most is not None and value > at_most:
        raise _invalid(field, value, f"at most {at_most}")


def _check_number(field: str, value: Any, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _invalid(field, value, "a finite number")
    if not low <= value <= high:
        raise _invalid(field, value, f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}")


def _invalid(field: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"{field} must be {wanted}, not {value!r}.", field=field)
