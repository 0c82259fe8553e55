"""Conditions on columns: `lang = 'en' and (score >= 0.5 or score is null) and not kind in ('ad', 'spam')`.

    condition   = all { "or" all }
    all         = one { "and" one }
    one         = "not" one | "(" condition ")" | column test
    test        = ( "=" | "==" | "!=" | "<>" | "<" | "<=" | ">" | ">=" ) literal
                | [ "not" ] "in" "(" literal { "," literal } ")" | "is" [ "not" ] "null"
    column      = name { "." name } | "`" any characters "`"          a name with dots may be one, or a struct's field
    literal     = number | 'text' with '' for ' | "true" | "false"    text also stands for dates, times and decimals

As in SQL, what is compared with null is neither true nor false, and only what is true is kept. Words are written in any
case. There is nothing else in it: no functions, no arithmetic, nothing that is executed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from jobs.errors import UsageError

Literal = bool | int | float | str
Mask = Callable[[pa.RecordBatch], pa.BooleanArray]

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<text>'(?:[^']|'')*')
    | `(?P<quoted>[^`]+)`
    | (?P<word>[^\W\d]\w*(?:\.[^\W\d]\w*)*)
    | (?P<sign>==|!=|<>|<=|>=|=|<|>|\(|\)|,)
    )""",
    re.VERBOSE,
)
_COMPARE: dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Where:
    """A condition: the columns that it looks at, and what says of a batch's rows whether it holds."""

    columns: tuple[str, ...]
    mask: Mask

    def check(self, schema: pa.Schema) -> None:
        """Raises UsageError where the condition does not go with columns of these types."""
        try:
            self.mask(pa.RecordBatch.from_pylist([], schema=schema))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise UsageError(f"--where does not go with the types of the columns: {error}") from error


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def parse_where(text: str) -> Where:
    """The condition that the text is. Raises UsageError with the place where it is none."""
    return _Parser(text).parse()


class _Parser:
    """A recursive descent over the grammar above; one method a rule."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._place = 0
        self._depth = 0
        self._columns: dict[str, None] = {}

    def parse(self) -> Where:
        mask = self._condition()
        if self._next.kind != "end":
            raise self._unexpected("the end, 'and' or 'or'")
        return Where(tuple(self._columns), mask)

    def _condition(self) -> Mask:
        mask = self._all()
        while self._take("or"):
            mask = _both(pc.or_kleene, mask, self._all())
        return mask

    def _all(self) -> Mask:
        mask = self._one()
        while self._take("and"):
            mask = _both(pc.and_kleene, mask, self._one())
        return mask

    def _one(self) -> Mask:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UsageError(f"--where nests more than {_MAX_DEPTH} levels deep.")
        if self._take("not"):
            mask = _not(self._one())
        elif self._take("("):
            mask = self._condition()
            self._expect(")")
        else:
            mask = self._test(self._column())
        self._depth -= 1
        return mask

    def _column(self) -> str:
        token = self._next
        if token.kind not in ("word", "quoted"):
            raise self._unexpected("a column, 'not' or '('")
        self._place += 1
        self._columns[token.text] = None
        return token.text

    def _test(self, column: str) -> Mask:
        if self._next.text in _COMPARE and self._next.kind == "sign":
            compare = _COMPARE[self._next.text]
            self._place += 1
            value = self._literal()
            return lambda batch: _compared(compare, batch, column, value)
        if self._take("is"):
            negated = self._take("not")
            self._expect("null")
            wanted = pc.is_valid if negated else pc.is_null
            return lambda batch: wanted(_values(batch, column))
        negated = self._take("not")
        if not self._take("in"):
            raise self._unexpected("'in'" if negated else "a comparison, 'in' or 'is'")
        self._expect("(")
        values = [self._literal()]
        while self._take(","):
            values.append(self._literal())
        self._expect(")")
        tests = [_equals(column, value) for value in values]
        mask = reduce(partial(_both, pc.or_kleene), tests)
        return _not(mask) if negated else mask

    def _literal(self) -> Literal:
        token = self._next
        if token.kind == "text":
            value: Literal = token.text[1:-1].replace("''", "'")
        elif token.kind == "number":
            value = float(token.text) if re.search(r"[.eE]", token.text) else int(token.text)
        elif token.kind == "word" and token.text.lower() in ("true", "false"):
            value = token.text.lower() == "true"
        else:
            raise self._unexpected("a number, a 'text', true or false")
        self._place += 1
        return value

    @property
    def _next(self) -> _Token:
        return self._tokens[self._place]

    def _take(self, word: str) -> bool:
        if self._next.kind not in ("word", "sign") or self._next.text.lower() != word:
            return False
        self._place += 1
        return True

    def _expect(self, word: str) -> None:
        if not self._take(word):
            raise self._unexpected(f"'{word}'")

    def _unexpected(self, wanted: str) -> UsageError:
        token = self._next
        found = "the end" if token.kind == "end" else f"'{token.text}'"
        return UsageError(f"--where, character {token.at + 1}: {found} where {wanted} is expected.")


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            raise UsageError(f"--where, character {at + 1}: {text[at:].strip()[:10]!r} is not understood.")
        tokens.append(_Token(found.lastgroup, found[found.lastgroup], found.start(found.lastgroup)))
        at = found.end()
    return [*tokens, _Token("end", "", len(text))]


def _both(combine: Callable[[pa.Array, pa.Array], pa.Array], left: Mask, right: Mask) -> Mask:
    return lambda batch: combine(left(batch), right(batch))


def _equals(column: str, value: Literal) -> Mask:
    return lambda batch: _compared(pc.equal, batch, column, value)


def _not(mask: Mask) -> Mask:
    return lambda batch: pc.invert(mask(batch))


def top_column(schema: pa.Schema, column: str) -> str:
    """The column of the schema in which this one is: itself, or for a struct's field the struct."""
    return column if column in schema.names else column.partition(".")[0]


def _values(batch: pa.RecordBatch, column: str) -> pa.Array:
    top = top_column(batch.schema, column)
    values = batch.column(top)
    for name in column[len(top) + 1 :].split(".") if top != column else ():
        values = pc.struct_field(values, name)
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _compared(
    compare: Callable[[pa.Array, pa.Scalar], pa.Array], batch: pa.RecordBatch, column: str, literal: Literal
) -> pa.Array:
    values = _values(batch, column)
    scalar = pa.scalar(literal)
    kind = values.type
    is_text = isinstance(literal, str)
    if is_text and (pa.types.is_temporal(kind) or pa.types.is_decimal(kind)):
        scalar = scalar.cast(kind)
    elif is_text != _is_text(kind) or isinstance(literal, bool) != pa.types.is_boolean(kind):
        raise pa.ArrowInvalid(f"'{column}' is {kind}, and is compared with {literal!r}")
    return compare(values, scalar)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
