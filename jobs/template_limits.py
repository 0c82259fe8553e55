"""Jinja's sandbox, in which a rendering also has a limit: a row costs its own result at most, and never a worker.

Jinja's own sandbox keeps templates from Python's attributes, from changing what they are given, and from ranges of
more than 100,000. Here each turn of a loop, each call and each filter is a step, and so are each 256 characters that
are made; a rendering has `MAX_STEPS` of them, which take a second or two. What makes much of little - texts and lists
that are multiplied, padded, replaced or joined - is refused before it is made. What neither of them counts, such as a
comparison of long texts in a loop, ends with the thread's time on a processor.
"""

import re
import time
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEXT = 16 * 1024 * 1024
"""The most characters that a value of a template may have, or a whole list of them as text."""
MAX_STEPS = 500_000
MAX_SECONDS = 5.0
"""Of a thread's time on a processor."""

_CHARACTERS_A_STEP = 256
_ITEM = 8  # what an item of a list takes, beside its text
_MAX_BITS = 4096
_STEPS_A_LOOK = 100
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
# They make texts of any length, and no prompt needs them.
_NO_METHODS = frozenset({"expandtabs", "maketrans", "translate", "to_bytes", "format_map"})
_PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d*\.)?(?:\*|\d{5})")
_BRACES_WIDTH = re.compile(r"\{[^{}]*(?:\{|\d{5})")
_Containers = (list, tuple, dict, set, frozenset, ItemsView, KeysView, ValuesView)


class Budget:
    """What is left of one rendering's steps and time."""

    def __init__(self) -> None:
        self._steps = 0
        self._next_look = _STEPS_A_LOOK
        self._end = time.thread_time() + MAX_SECONDS

    def spend(self, steps: int) -> None:
        """Raises SecurityError where that is more than there is."""
        self._steps += steps
        if self._steps < self._next_look:
            return
        if self._steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")
        if time.thread_time() > self._end:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")
        self._next_look = self._steps + _STEPS_A_LOOK


BUDGET: ContextVar[Budget] = ContextVar("budget of a rendering")


def made(value: Any) -> Any:
    """The value, its characters paid for."""
    size = 0 if isinstance(value, Namespace) else text_size(value)
    BUDGET.get().spend(1 + size // _CHARACTERS_A_STEP)
    if size > MAX_TEXT:
        raise _too_long()
    return value


def may_make(characters: int) -> None:
    """Raises SecurityError where a text of so many would be too long."""
    if characters > MAX_TEXT:
        raise _too_long()


def _too_long() -> SecurityError:
    return SecurityError(f"it makes more than {MAX_TEXT:,} characters")


def text_size(value: Any) -> int:
    """About how many characters the value is as text; a list that stands in others, as often as it stands there."""
    return len(value) if isinstance(value, str | bytes) else _size(value, {})


def _size(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, Namespace):
        raise SecurityError("a namespace stands in no list")
    if not isinstance(value, _Containers):
        return 8
    size = known.get(id(value))
    if size is None:
        if isinstance(value, dict | ItemsView):
            pairs = value.items() if isinstance(value, dict) else value
            size = sum(_ITEM + _size(key, known) + _size(item, known) for key, item in pairs)
        else:
            size = sum(_ITEM + _size(item, known) for item in value)
        known[id(value)] = size = 2 + size
    return size


def check_percent(text: str, values: Any) -> None:
    """Raises SecurityError where `text % values` has a width that is not small, or may make too much."""
    if _PERCENT_WIDTH.search(text):
        raise SecurityError("a width that is large, or not written in the format")
    may_make(len(text) + text.count("%") * text_size(values))


def _check_braces(text: str, values: Any) -> None:
    """The same for `text.format(...)`."""
    fields = text.replace("{{", "")
    if _BRACES_WIDTH.search(fields):
        raise SecurityError("a width that is large, or not written in the format")
    may_make(len(text) + fields.count("{") * text_size(values))


def check_replace(text: str, old: str, new: str, count: int | None = None) -> None:
    """Raises SecurityError where the text with the new parts would be too long."""
    may_make(len(text) + (text.count(old) if count is None or count < 0 else count) * len(new))


def check_join(separator: str, items: list[Any]) -> None:
    """Raises SecurityError where the items in one text would be too long."""
    may_make(len(separator) * len(items) + text_size(items))


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """The sandbox. Templates are to be compiled of what `parsed` returns, and rendered with a `BUDGET` set."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        # Nothing is computed before there is a budget: neither constants nor what is printed of them.
        super().__init__(**options, optimized=False, finalize=_printed)
        self.filters = {name: _charged(filter_) for name, filter_ in filters.items()}

    def parsed(self, text: str) -> nodes.Template:
        """The template with what counts its steps in it. Raises TemplateSyntaxError."""
        tree: nodes.Template = _Counted(self).visit(self.parse(text))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes | int) and attr in _NO_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_braces(value.__self__, [args, kwargs])
            return formatted(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if isinstance(__obj, BuiltinMethodType | MethodType):
            if __obj.__self__ is __self:
                return __obj(*args)  # what `_Counted` put there
            if isinstance(__obj.__self__, str | bytes):
                args = _checked_method(__obj.__self__, __obj.__name__, args)
        return made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "**" if _bits(left) * abs(right) > _MAX_BITS:
                raise SecurityError("the result of ** would be too large")
            case "*":
                _check_product(left, right)
            case "%" if isinstance(left, str):
                check_percent(left, right)
            case "+" if isinstance(left, str | bytes | list | tuple):
                may_make(text_size(left) + text_size(right))
        return made(super().call_binop(context, operator, left, right))

    def step(self, steps: int) -> None:
        """A turn of a loop, as compiled templates call it."""
        BUDGET.get().spend(steps)

    def made(self, value: Any) -> Any:
        """The list, tuple or dict, its characters paid for, as compiled templates call it."""
        return made(value)

    def concatenated(self, *values: Any) -> str:
        """The values as one text: the operator `~`, as compiled templates call it."""
        texts = [as_text(value) for value in values]
        may_make(sum(map(len, texts)))
        return str(made("".join(texts)))


class _Counted(NodeTransformer):
    """Puts calls of `step`, `made` and `concatenated` where a template loops, makes a container, or uses `~`."""

    def __init__(self, environment: LimitedSandbox) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        written = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        steps = nodes.Const(1 + written // _CHARACTERS_A_STEP)
        node.body.insert(0, nodes.ExprStmt(self._call("step", [steps], node), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("concatenated", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("made", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("made", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("made", [node], node) if node.ctx == "load" else node

    def _call(self, name: str, args: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=node.lineno)
        return call.set_environment(self._environment)  # type: ignore[return-value]


def as_text(value: Any) -> str:
    """What is printed of a value. Raises SecurityError where that is too long, before it is made.

    Raises UndefinedError for what has no text of its own, such as a function or what `map` returns.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, (int, float, bytes, Undefined, *_Containers)):
        kind = type(value).__name__
        raise UndefinedError(f"a {kind} would be printed: call it, or put |list or |join behind it")
    may_make(text_size(value))
    return str(value)


@pass_context
def _printed(context: Context, value: Any) -> str:
    if value is None:
        raise UndefinedError("a null would be printed: give it a value with default('', true)")
    text = as_text(value)
    BUDGET.get().spend(len(text) // _CHARACTERS_A_STEP)
    return text


def _charged(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter_)
    def charged(*args: Any, **kwargs: Any) -> Any:
        return made(filter_(*args, **kwargs))

    return charged


def _checked_method(text: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a text's method. Raises SecurityError where its result would be too long."""
    if name in _PADDING:
        may_make(args[0])
    elif name == "replace":
        check_replace(text, *args)
    elif name == "join":
        items = list(args[0])
        check_join(text, items)
        return (items,)
    return args


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if _bits(left) + _bits(right) > _MAX_BITS:
            raise SecurityError("the result of * would be too large")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            may_make(max(text_size(sequence), 1) * times)


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 1
