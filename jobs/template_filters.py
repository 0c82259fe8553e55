"""Filters that make much of little, with a look at how much before they do; and JSON for prompts."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Environment, filters, pass_environment, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext

from jobs.template_limits import as_text, check_join, check_percent, check_replace, may_make, text_size

_MAX_PARTS = 100_000
_MAX_INDENT = 16
_MAX_DIGITS = 300
_MAX_WRAPPED = 1024 * 1024
_MAX_MARKUP = 256 * 1024
"""Jinja takes tags out one by one, and copies the text each time."""


@pass_eval_context
def _replace(context: EvalContext, text: Any, old: str, new: str, count: int | None = None) -> str:
    text = as_text(text)
    check_replace(text, as_text(old), as_text(new), count)
    return filters.do_replace(context, text, old, new, count)


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    check_join(as_text(d), items)
    return filters.sync_do_join(context, items, d, attribute)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    by = width if isinstance(width, int) else len(width)
    may_make(by)
    may_make(len(text) + (len(text.splitlines()) + 1) * by)
    return filters.do_indent(text, width, first, blank)


def _center(value: Any, width: int = 80) -> str:
    may_make(width)
    return filters.do_center(as_text(value), width)


@pass_environment
def _wordwrap(
    environment: Environment,
    text: str,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> str:
    if len(text) > _MAX_WRAPPED:
        raise SecurityError(f"more than {_MAX_WRAPPED:,} characters to wrap")
    may_make(len(text) * (1 + len(wrapstring or "")))
    return filters.do_wordwrap(environment, text, width, break_long_words, wrapstring, break_on_hyphens)


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[list[Any]]:
    _few(linecount)
    return list(filters.do_batch(value, linecount, fill_with))


def _slice(value: Iterable[Any], slices: int, fill_with: Any = None) -> list[list[Any]]:
    _few(slices)
    return list(filters.sync_do_slice(list(value), slices, fill_with))


def _few(parts: int) -> None:
    if parts > _MAX_PARTS:
        raise SecurityError(f"more than {_MAX_PARTS:,} parts")


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > _MAX_DIGITS:
        raise SecurityError(f"more than {_MAX_DIGITS} digits")
    return filters.do_round(value, precision, method)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    check_percent(as_text(value), [args, kwargs])
    return filters.do_format(value, *args, **kwargs)


@pass_environment
def _sum(environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("only numbers are summed up")
    return filters.sync_do_sum(environment, iterable, attribute, start)


def _striptags(value: Any) -> str:
    text = as_text(value)
    if len(text) > _MAX_MARKUP:
        raise SecurityError(f"more than {_MAX_MARKUP:,} characters of HTML")
    return str(filters.do_striptags(text))


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no prompt wants.
    if indent and indent > _MAX_INDENT:
        raise SecurityError(f"an indent of more than {_MAX_INDENT}")
    may_make(text_size(value) * (1 + (indent or 0)))
    return json.dumps(value, ensure_ascii=False, indent=indent)


FILTERS: Mapping[str, Callable[..., Any]] = {
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "string": as_text,
    "striptags": _striptags,
    "sum": _sum,
    "tojson": _to_json,
    "wordwrap": _wordwrap,
}
NOT_OFFERED = ("pprint", "random", "urlize", "xmlattr")
"""Those of Jinja that make HTML, or another prompt of the same row each time."""
