"""Parameters of embedding rows, by their OpenAI or vLLM names."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Pooling(BaseModel):
    """How a text becomes a vector; `None` leaves the choice to the model. In a job they are defaults: a row's own win.

    `truncate_prompt_tokens` cuts longer texts, -1 at the model's limit; without it they are errors. `encoding_format`
    `base64` writes float32 numbers, little-endian, as OpenAI does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None

    def over(self, defaults: "Pooling") -> "Pooling":
        """These parameters, with those that are not set taken from `defaults`."""
        mine = {name: value for name, value in self if value is not None}
        return defaults.model_copy(update=mine)
