"""Sampling parameters of a job and of a row, by their wire names, in values that can be hashed and written as JSON."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

MAX_CHOICES = 128
MAX_LOGPROBS = 20

StopString = Annotated[str, StringConstraints(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _bias_pairs(value: Any) -> Any:
    """OpenAI writes the bias as an object whose names are token ids. Pairs can be hashed, and sorted ones compared."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, tuple | list) or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
    ):
        raise ValueError("give an object of token ids and numbers")
    if wrong := next((name for name, _ in pairs if not str(name).isdecimal()), None):
        raise ValueError(f"{wrong!r} is not a token id")
    return tuple(sorted((int(name), bias) for name, bias in pairs))


def _schema_text(value: Any) -> Any:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) if isinstance(value, dict | bool) else value


class StructuredOutput(BaseModel):
    """What the answer's text has to be: exactly one of these. A schema is kept as JSON text, its own order of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    json_schema: Annotated[str, BeforeValidator(_schema_text)] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Annotated[str, StringConstraints(min_length=1)] | None = None
    choice: tuple[StopString, ...] | None = None
    grammar: Annotated[str, StringConstraints(min_length=1)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutput":
        given = [name for name, value in self if value not in (None, False, ())]
        if len(given) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        return self


class Sampling(BaseModel):
    """Sampling parameters by their OpenAI or vLLM names; `None` leaves the choice to the model's defaults.

    In a job they are defaults: a row's own fields win. `logprobs` is a number of alternatives, with 0 for the chosen
    token alone; `logit_bias` holds `(token id, bias)`, and is written as an object.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    beam_width: Annotated[int, Field(ge=1, le=64)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    logit_bias: (
        Annotated[tuple[tuple[TokenId, Annotated[float, Field(ge=-100, le=100)]], ...], BeforeValidator(_bias_pairs)]
        | None
    ) = None
    bad_words: tuple[StopString, ...] | None = None
    allowed_token_ids: tuple[TokenId, ...] | None = None
    stop: StopString | tuple[StopString, ...] | None = None
    stop_token_ids: tuple[TokenId, ...] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    structured_output: StructuredOutput | None = None

    def over(self, defaults: "Sampling") -> "Sampling":
        """These parameters, with those that are not set taken from `defaults`."""
        mine = {name: value for name, value in self if value is not None}
        return defaults.model_copy(update=mine)
