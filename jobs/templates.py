"""Jinja templates that make a prompt of a record.

The columns are the template's variables, and `row` is the whole record. A column that is not there and a null that
would be printed are errors of that row, not the word "None" in its prompt. Templates run in Jinja's sandbox: they
cannot change what they are given, nor reach Python's own attributes, nor files.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json

from jobs.row_fields import RowRefused

MAX_RENDERED = 16 * 1024 * 1024
"""The most characters that a template may make of a record."""

_MAX_POWER_BITS = 4096
_COMPILED_NAME = "<template>"


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, in which a number from the data cannot ask for all memory either."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and _bits(left) * abs(right) > _MAX_POWER_BITS:
            raise SecurityError("the result of ** would be too large")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and len(sequence) * times > MAX_RENDERED:
                    raise SecurityError("the result of * would be too long")
        return super().call_binop(context, operator, left, right)


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 1


def _printed(value: Any) -> Any:
    if value is None:
        raise UndefinedError("a null would be printed: give it a value with default('', true)")
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no prompt wants.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> _Sandbox:
    environment = _Sandbox(undefined=StrictUndefined, finalize=_printed, trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]
    return environment


_ENVIRONMENT = _environment()


@lru_cache(maxsize=64)
def _compiled(text: str) -> Template:
    return _ENVIRONMENT.from_string(text)


def check_template(text: str) -> str:
    """The same text. Raises ValueError with the line where it is no template."""
    try:
        _compiled(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} of the template: {error.message}") from error
    return text


def render(text: str, name: str, record: Mapping[str, Any]) -> str:
    """What the template makes of the record. `name` is for errors. Raises RowRefused (`template_error`)."""
    parts: list[str] = []
    size = 0
    try:
        for part in _compiled(text).generate({**record, "row": record}):
            parts.append(part)
            size += len(part)
            if size > MAX_RENDERED:
                raise SecurityError(f"it makes more than {MAX_RENDERED:,} characters")
    except Exception as error:  # whatever a template makes of a record is that row's error
        line = _line(error)
        where = f"Line {line} of the {name}" if line else f"The {name}"
        why = error.message if isinstance(error, UndefinedError | SecurityError) else f"{type(error).__name__}: {error}"
        raise RowRefused("template_error", f"{where} cannot be rendered: {why}.", name) from error
    return "".join(parts)


def render_json(text: str, name: str, record: Mapping[str, Any]) -> Any:
    """The same for a template that makes JSON, as a value."""
    try:
        return from_json(render(text, name, record), allow_inf_nan=False)
    except ValueError as error:
        raise RowRefused("template_error", f"The {name} made no JSON: {error}.", name) from error


def _line(error: Exception) -> int | None:
    """The template's line in which the error was raised: Jinja puts it into the traceback."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _COMPILED_NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
