"""What form one request's answer has to have."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import RequestError

# Sizes beyond which compiling takes seconds, not milliseconds. Lists may be long, programs hardly are.
_MOST_CHARACTERS = {"json": 2**20, "choice": 2**20, "regex": 2**16, "grammar": 2**16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The one thing that an answer has to match from its first character to its last; exactly one field is set.

    Raises `RequestError`, whose `field` is `structured_output.` and the name of the field that is wrong, for a value of
    the wrong type, an empty one, one that is not Unicode text or is too long, and for none or several at once. Whether
    a schema, pattern or grammar can be compiled shows only in the engine.

    Attributes:
        json: A JSON Schema: an object, or the text of one. It is kept as text, with its keys in their order, which is
            the order in which the answer has them. JSON is written with at most one space between its parts; the
            schema's own `x-guidance` changes that, see llguidance.
        json_object: Any JSON object.
        regex: A regular expression in the syntax of Rust's regex crate, without look-around and back-references.
        choice: One of these strings.
        grammar: A context-free grammar. One that defines `start:` or begins with `%llguidance` is read as Lark, in
            llguidance's dialect, any other as GBNF.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise _invalid("json_object", f"must be true or false, not {self.json_object!r}")
        given = [spec.name for spec in fields(self) if getattr(self, spec.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(spec.name for spec in fields(self))
            raise RequestError(
                f"structured_output must have exactly one of {names}, not {' and '.join(given) or 'none'}.",
                field="structured_output",
            )
        # The caller's own schema and list may change later; what is compiled, compared and hashed must not.
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                _check_text(name, text)
        if given[0] != "json_object":
            self._check_size(given[0])

    def _check_size(self, name: str) -> None:
        value = getattr(self, name)
        size = len(value) if isinstance(value, str) else sum(map(len, value))
        if size > _MOST_CHARACTERS[name]:
            raise _invalid(name, f"has {size} characters, more than {_MOST_CHARACTERS[name]}")

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(spec.name for spec in fields(self) if getattr(self, spec.name) not in (None, False))


def _schema_text(schema: Any) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        # Without NaN, and with what Python takes for a key, such as a number, refused like any other wrong type.
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise _invalid("json", f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise _invalid("json", f"must be a JSON Schema, which is an object, not {type(value).__name__}")
    _check_text("json", text)
    return text


def _choices(choice: Any) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
        raise _invalid("choice", "must be a list of at least one string")
    for text in choice:
        _check_text("choice", text)
    return tuple(choice)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise _invalid(name, f"must be non-empty text, not {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(name, f"is not valid Unicode text ({error.reason} at character {error.start})") from error


def _invalid(name: str, message: str) -> RequestError:
    return RequestError(f"structured_output.{name} {message}.", field=f"structured_output.{name}")
