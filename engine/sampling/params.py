"""How one request wants its tokens chosen, and when it wants them to stop."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from engine.errors import RequestError
from engine.structured.output import StructuredOutput

MAX_LOGPROBS = 20
MAX_CHOICES = 1024
MAX_BEAM_WIDTH = 64
MAX_LOGIT_BIASES = 1024

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
# Parameters that choose between a beam's tokens, or look at single tokens, where beam search looks at all.
_WITHOUT_BEAMS = ("top_k", "top_p", "min_p", "best_of", "stop", "logprobs", "structured_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling and stopping rules of one request; checked when made, never changed.

    Raises `RequestError` (its `field` names the parameter) for a value of the wrong type or out of range, or one that
    contradicts another, and `TypeError`, as any Python call does, for a name that does not exist. Hashable where the
    sequences given are tuples.

    Attributes:
        n: How many answers to return. With temperature 0 they would all be the same, so that needs beam search.
        best_of: How many answers to generate, of which the `n` with the highest mean log-probability per token are
            returned, best first. None: n.
        beam_width: Search for the likeliest answer with so many beams, as Transformers does, and return the best `n`
            of them, best first. Wants temperature 0. None: no beam search.
        length_penalty: A beam's score is its log-probability divided by its length to this power: above 0 favours long
            answers, below 0 short ones.
        early_stopping: When beam search ends. True: once `beam_width` answers are complete. False: once no beam, at
            its present length, scores better than the worst of them. `never`: once no beam ever can.
        max_tokens: Most tokens to generate. None: as many as the model's context holds.
        min_tokens: Until this many are generated, no end-of-sequence token, stop token or stop string ends the request.
        temperature: 0 picks the likeliest token (greedy); higher is more random.
        top_k: Keep the k likeliest tokens. 0 or -1 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probabilities sum to at least this. 1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest. 0 keeps all.
        repetition_penalty: Divides the logits above 0, and multiplies those below, of tokens in prompt or answer (CTRL,
            Keskar et al. 2019). 1 changes nothing.
        presence_penalty: Subtracted from the logits of tokens that occur in the answer, -2 to 2.
        frequency_penalty: Subtracted from a token's logit as often as it occurs in the answer, -2 to 2.
        logit_bias: Token id to a number from -100 to 100 that is added to its logit.
        bad_words: Strings whose tokens, with a space before them or without, are never generated in a row.
        allowed_token_ids: The only tokens that may be generated. None: all.
        seed: The noise of token t is a function of (seed, t, vocabulary id) only, so that equal seeds give equal
            answers in any batch. Answer i of several has the noise of `choice_seed(seed, i)`, see
            `engine.sampling.seeds`. None: a seed derived from the engine's seed and the request's index.
        stop: One string or several; the first to appear ends the request, and the text is cut before it.
        stop_token_ids: Token ids that end the request, beside the model's own.
        ignore_eos: Go on past the model's end-of-sequence tokens.
        include_stop_str_in_output: Cut the text after the stop string or stop token instead of before it.
        skip_special_tokens: Leave the model's control tokens out of the text.
        logprobs: Return each token's log-probability and those of so many of the likeliest, 0 to 20, all as the model
            gave them, before any of the rules above. None: nothing.
        prompt_logprobs: The same for the tokens of the prompt.
        structured_output: What the answer has to match. Where nothing more may follow the answer ends, whatever
            min_tokens and ignore_eos say; max_tokens and stop strings may end it before it is complete.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_lengths()
        self._check_distribution()
        self._check_tokens()
        self._check_stops()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise _invalid(name, value, "true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _check_int(name, value, at_least=0, at_most=MAX_LOGPROBS)
        if not isinstance(self.structured_output, StructuredOutput | None):
            raise _invalid("structured_output", self.structured_output, "a StructuredOutput")
        self._check_beams()

    def _check_choices(self) -> None:
        _check_int("n", self.n, at_least=1, at_most=MAX_CHOICES)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, at_least=1, at_most=MAX_CHOICES)
            if self.best_of < self.n:
                raise _invalid("best_of", self.best_of, f"at least n ({self.n})")
        if self.beam_width is not None:
            _check_int("beam_width", self.beam_width, at_least=1, at_most=MAX_BEAM_WIDTH)
            if self.n > self.beam_width:
                raise _invalid("n", self.n, f"at most beam_width ({self.beam_width})")
        _check_number("temperature", self.temperature, low=0.0, high=math.inf)
        if self.greedy and self.beam_width is None and self.num_choices > 1:
            name = "n" if self.best_of is None else "best_of"
            raise _invalid(name, self.num_choices, "1 with temperature 0, which gives the same answer every time")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, at_least=1)
        _check_int("min_tokens", self.min_tokens, at_least=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")

    def _check_distribution(self) -> None:
        _check_int("top_k", self.top_k, at_least=-1)
        _check_number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise _invalid("top_p", self.top_p, "above 0 (temperature=0 is the way to greedy)")
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        # Beyond, logits overflow.
        _check_number("repetition_penalty", self.repetition_penalty, low=1e-3, high=1e3)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, at_least=_INT64_MIN, at_most=_INT64_MAX)

    def _check_tokens(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise _invalid("logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, more than {MAX_LOGIT_BIASES}.",
                field="logit_bias",
                hint="To allow few tokens or forbid many, use allowed_token_ids.",
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, at_least=0)
            _check_number("logit_bias", bias, low=-100.0, high=100.0)
        if not isinstance(self.bad_words, list | tuple) or not all(
            isinstance(word, str) and word for word in self.bad_words
        ):
            raise _invalid("bad_words", self.bad_words, "a list of non-empty strings")
        if self.allowed_token_ids is not None:
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise _invalid("allowed_token_ids", self.allowed_token_ids, "a list of at least one token id")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, str | list | tuple) or not all(
            isinstance(s, str) and s for s in self.stop_strings
        ):
            raise _invalid("stop", self.stop, "a non-empty string or a list of them")
        _check_token_ids("stop_token_ids", self.stop_token_ids)

    def _check_beams(self) -> None:
        _check_number("length_penalty", self.length_penalty, low=-10.0, high=10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _invalid("early_stopping", self.early_stopping, 'true, false or "never"')
        defaults = {spec.name: spec.default for spec in fields(self)}
        if self.beam_width is None:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != defaults[name]:
                    raise _invalid(name, getattr(self, name), "left out without beam_width")
            return
        if not self.greedy:
            raise _invalid("temperature", self.temperature, "0 with beam_width")
        for name in _WITHOUT_BEAMS:
            value = getattr(self, name)
            if value != defaults[name] and not (name == "top_k" and value == -1) and not (name == "stop" and not value):
                raise _invalid(name, value, "left out with beam_width")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` for a token id that a model with `vocab_size` tokens does not have."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name}: token id {token_id} is outside the model's vocabulary of {vocab_size}.", field=name
                    )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest are wanted for each token; its own log-probability is, unless this is None.

        Choosing between answers takes that as well.
        """
        return 0 if self.logprobs is None and self.num_choices > self.n else self.logprobs

    @property
    def num_choices(self) -> int:
        """How many answers are sampled, of which `n` are returned. Beam search has a number of its own."""
        return self.best_of or self.n


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


def _check_token_ids(field: str, value: Any) -> None:
    if not isinstance(value, list | tuple):
        raise _invalid(field, value, "a list of token ids")
    for token_id in value:
        _check_int(field, token_id, at_least=0)


def _invalid(field: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"{field} must be {wanted}, not {value!r}.", field=field)
