"""What one request wants made of a prompt's hidden states: an embedding, or a cross-encoder's score."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.errors import RequestError

PoolingType = Literal["mean", "cls", "last"]
PoolingTask = Literal["embed", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The pooling rules of one request; checked when made, never changed. None leaves a choice to the model.

    Raises `RequestError` (its `field` names the parameter) for a value of the wrong type or out of range, and for a
    parameter of the other task.

    Attributes:
        task: `embed`, one vector of a prompt; or `score`, what a sequence classification head says of it.
        pooling: Of `embed`. `mean` of all tokens' final hidden states, that of the first token (`cls`), or of the
            `last`. None: what the model's sentence-transformers files say, else `mean` for an encoder and `last` for
            a decoder.
        normalize: Of `embed`: divide the vector by its Euclidean length. None: what the model's files say, else yes.
        dimensions: Of `embed`: keep only so many leading dimensions, before normalising. Only models trained for it
            (Matryoshka representation learning) give useful vectors. None: all.
        use_activation: Of `score`: apply the model's activation, by default a sigmoid where the head has one label and
            nothing where it has more. False: the head's logits.
        truncate_prompt_tokens: Keep only so many tokens of a prompt, special tokens among them; -1: as many as the
            model takes. The end is cut off, or the beginning of a text whose tokenizer is set to that. None: a prompt
            that is too long is an error.
    """

    task: PoolingTask = "embed"
    pooling: PoolingType | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.task not in get_args(PoolingTask):
            raise _invalid("task", self.task, f"one of {', '.join(get_args(PoolingTask))}")
        if self.pooling is not None and self.pooling not in get_args(PoolingType):
            raise _invalid("pooling", self.pooling, f"one of {', '.join(get_args(PoolingType))}")
        for name in ("normalize", "use_activation"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise _invalid(name, value, "true or false")
        if self.dimensions is not None and not _is_int(self.dimensions, at_least=1):
            raise _invalid("dimensions", self.dimensions, "an integer of at least 1")
        limit = self.truncate_prompt_tokens
        if limit is not None and limit != -1 and not _is_int(limit, at_least=1):
            raise _invalid("truncate_prompt_tokens", limit, "an integer of at least 1, or -1 for the model's limit")
        self._refuse_other_task()

    def _refuse_other_task(self) -> None:
        foreign = ("use_activation",) if self.task == "embed" else ("pooling", "normalize", "dimensions")
        for name in foreign:
            if getattr(self, name) is not None:
                raise RequestError(f"{name} says nothing for the task {self.task!r}.", field=name, hint="Leave it out.")


def _is_int(value: Any, *, at_least: int) -> bool:
    # bool is an int to Python, but `dimensions: true` in a job file is a mistake.
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _invalid(field: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"{field} must be {wanted}, not {value!r}.", field=field)
