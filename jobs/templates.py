"""Jinja templates that make a prompt of a record.

The columns are the template's variables, and `row` is the whole record. A column that is not there and a null that
would be printed are errors of that row, not the word "None" in its prompt. Templates run in Jinja's sandbox: they
cannot change what they are given, nor reach Python's own attributes, nor files; and what one may cost has a limit.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from pydantic_core import from_json

from jobs.row_fields import RowRefused, refuse_lone_surrogates
from jobs.template_filters import FILTERS, NOT_OFFERED
from jobs.template_limits import BUDGET, MAX_TEXT, Budget, LimitedSandbox

_COMPILED_NAME = "<template>"


def _environment() -> LimitedSandbox:
    environment = LimitedSandbox(
        {**DEFAULT_FILTERS, **FILTERS}, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    for name in NOT_OFFERED:
        del environment.filters[name]
    del environment.globals["lipsum"]
    return environment


_ENVIRONMENT = _environment()


@lru_cache(maxsize=64)
def _compiled(text: str) -> Template:
    return _ENVIRONMENT.from_string(_ENVIRONMENT.parsed(text))


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
    budget = BUDGET.set(Budget())
    try:
        for part in _compiled(text).generate({**record, "row": record}):
            parts.append(part)
            size += len(part)
            if size > MAX_TEXT:
                raise SecurityError(f"it makes more than {MAX_TEXT:,} characters")
    except Exception as error:  # whatever a template makes of a record is that row's error
        line = _line(error)
        where = f"Line {line} of the {name}" if line else f"The {name}"
        why = error.message if isinstance(error, UndefinedError | SecurityError) else f"{type(error).__name__}: {error}"
        raise RowRefused("template_error", f"{where} cannot be rendered: {why}.", name) from error
    finally:
        BUDGET.reset(budget)
    return "".join(parts)


def render_json(text: str, name: str, record: Mapping[str, Any]) -> Any:
    """The same for a template that makes JSON, as a value."""
    made = render(text, name, record)
    refuse_lone_surrogates(made)
    try:
        return from_json(made, allow_inf_nan=False)
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
