"""Templates make prompts of records, and what they cannot do is the row's error, with the line."""

import time
from typing import Any

import pytest
from pydantic import ValidationError

from jobs import template_limits
from jobs.errors import RowError
from jobs.rows import Row
from jobs.spec import Input, InputFile, JobSpec, RecordRows
from tests.jobs.specs import openai_spec, read

CSV = Input(files=(InputFile(url="file:///in.csv", size=1, etag="e"),), format="csv")


def job(**shape: Any) -> JobSpec:
    fields = {"input": shape.pop("input")} if "input" in shape else {}
    return openai_spec(rows=RecordRows(**shape), **fields)


def prompt(record: dict[str, Any], **shape: Any) -> Any:
    row = read(record, job(**shape))
    assert isinstance(row, Row), row
    return row.prompts[0]


def refused(record: dict[str, Any], **shape: Any) -> RowError:
    error = read(record, job(**shape))
    assert isinstance(error, RowError), error
    return error


def test_a_template_makes_the_user_message_of_the_columns() -> None:
    text = "{{ title|upper }}\n{% for tag in tags %}\n- {{ tag }}\n{% endfor %}\n{{ row['odd name'] }}"
    record = {"title": "a<b", "tags": ["x", "y"], "odd name": 7}
    assert prompt(record, template=text) == ({"role": "user", "content": "A<B\n- x\n- y\n7"},)


def test_the_system_message_may_be_a_template_too() -> None:
    assert prompt({"q": "Hi", "who": "Ada"}, prompt_column="q", system_template="You are {{ who }}.") == (
        {"role": "system", "content": "You are Ada."},
        {"role": "user", "content": "Hi"},
    )


def test_messages_may_be_made_by_a_template() -> None:
    text = '[{"role": "user", "content": {{ q|tojson }}}]'
    record = {"q": 'say "<é>"\n'}
    assert prompt(record, messages_template=text) == ({"role": "user", "content": 'say "<é>"\n'},)


def test_a_template_may_make_what_is_embedded() -> None:
    row = read({"a": "x", "b": "y"}, job(template="{{ a }} {{ b }}", embed=True))
    assert isinstance(row, Row)
    assert (row.kind, row.prompts) == ("embedding", ("x y",))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("{{ absent }}", 1, "'absent' is undefined"),
        ("a\n\nb {{ q.name }}", 3, "has no attribute 'name'"),
        ("\n{{ nothing }}", 2, "a null would be printed"),
        ("\n{{ q + 1 }}", 2, "TypeError"),
        ("{{ 1 / 0 }}", 1, "ZeroDivisionError"),
        ("{{ q.__class__.__mro__ }}", 1, "unsafe"),
        ("{{ tags.append(1) }}", 1, "unsafe"),
        ("{{ q * 10**9 }}", 1, "more than 16,777,216 characters"),
        ("{{ 10 ** 100000 }}", 1, "too large"),
        ("{% include 'other' %}", 1, "TypeError"),
    ],
)
def test_what_a_template_cannot_do_is_the_rows_error_with_the_line(text: str, line: int, words: str) -> None:
    error = refused({"q": "Hi", "nothing": None, "tags": []}, template=text)
    assert (error.code, error.param, error.line) == ("template_error", "template", 3)
    assert words in error.message
    assert f"Line {line} of the template" in error.message


def test_a_template_may_not_make_more_than_a_row_may_be() -> None:
    error = refused({"q": "Hi" * 500}, template="{% for i in range(100000) %}{{ q }}{% endfor %}")
    assert error.code == "template_error"
    assert "more than 16,777,216 characters" in error.message


def doubled(how: str, first: str = "'a'") -> str:
    return f"{{% set ns = namespace(s={first}) %}}{{% for i in range(60) %}}{{% set ns.s = {how} %}}{{% endfor %}}"


COSTLY = {
    "loops in loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "a range": "{% for i in range(10**12) %}{% endfor %}",
    "a macro, twice in itself": "{% macro m(n) %}{% if n %}{{ m(n-1) ~ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a macro without an end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for x in [60] recursive %}{% if x %}{{ loop([x-1, x-1]) }}{% endif %}{% endfor %}",
    "text doubled by ~": doubled("ns.s ~ ns.s"),
    "text doubled by +": doubled("ns.s + ns.s"),
    "lists doubled": doubled("ns.s + ns.s", "[1]"),
    "lists in lists": doubled("[ns.s, ns.s]") + "{{ ns.s }}",
    "dicts in dicts": doubled("dict(a=ns.s, b=ns.s)") + "{{ ns.s == ns.s }}",
    "numbers squared": doubled("ns.s * ns.s", "7"),
    "text kept aside": "{% set x %}{% for i in range(100000) %}" + "data " * 1000 + "{% endfor %}{% endset %}",
    "columns kept aside": "{% set x %}{% for i in range(100000) %}{{ big }}{% endfor %}{% endset %}",
    "copies by a filter": "{{ range(100000)|map('attr', 'x')|map('default', big)|map('upper')|list|length }}",
    "padding": "{{ q.center(10**10) }}",
    "padding by a filter": "{{ q|center(10**10) }}",
    "padding in a constant": "{{ 'x'|center(10**10) }}",
    "padding of markup": "{{ (q|escape).ljust(10**10) }}",
    "a width": "{{ '{:>9999999999}'.format(1) }}",
    "a width in the arguments": "{{ '{:>{}}'.format(1, 10**10) }}",
    "a width of %": "{{ '%9999999999d' % 1 }}",
    "a star of %": "{{ '%-*d' % (10**10, 1) }}",
    "a width of a filter": "{{ '%09999999999d'|format(1) }}",
    "fields without end": "{{ ('{0}' * 10000).format(big) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "replacing": "{{ big.replace('', big) }}",
    "replacing by a filter": "{{ big|replace('x', big) }}",
    "joining": "{{ big.join(['x'] * 10000) }}",
    "joining by a filter": "{{ ([big] * 10000)|join }}",
    "indenting": "{{ ('\n' * 100000)|indent(10000) }}",
    "wrapping": "{{ big|wordwrap(1, wrapstring=big) }}",
    "parts that are filled up": "{{ q|batch(10**10, 'x')|list }}",
    "slices without end": "{{ q|slice(10**10)|list }}",
    "digits": "{{ 1.5|round(10**9, 'floor') }}",
    "JSON that is indented": "{{ [1]|tojson(indent=10**9) }}",
    "lists summed up": "{{ ([[0] * 100] * 1000)|sum(start=[]) }}",
    "tags without end": "{{ ('<a>' * 1000000)|striptags }}",
}


@pytest.mark.parametrize("text", COSTLY.values(), ids=COSTLY.keys())
def test_a_template_that_would_take_all_time_or_memory_costs_its_row(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 50_000)
    started = time.process_time()
    error = refused({"q": "Hi", "big": "x y " * 100_000}, template=text)
    assert error.code == "template_error"
    assert error.message.startswith("Line ")
    assert time.process_time() - started < 30


def test_what_is_not_counted_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    text = "{% for i in range(100000) %}{% if 'zz' in big %}{% endif %}{% endfor %}"
    assert "it takes more than 0.1 seconds" in refused({"big": "x y " * 100_000}, template=text).message


def test_after_a_row_that_cost_too_much_the_next_one_has_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 5000)
    text = "{% for i in range(n) %}{% for j in range(n) %}{{ 'x' if j == 0 }}{% endfor %}{% endfor %}"
    assert "more than 5,000 steps" in refused({"n": 80}, template=text).message
    for _ in range(3):
        assert prompt({"n": 60}, template=text)[0]["content"] == "x" * 60


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("{% for i in nums if i > 7 %}{{ loop.index }}/{{ loop.length }}:{{ i }}{{ ' ' if not loop.last }}{% endfor %}",
         "1/2:8 2/2:9"),
        ("{% for k, v in d.items() %}{{ k }}={{ v|tojson }} {% else %}none{% endfor %}", 'a=[{"b": 1}] '),
        ("{% set a, b = 1, 2 %}{{ a + b }}{{ a ~ b }}{{ [a, b] + [3] }}{{ (a, b)[1] }}{{ {'k': a}.k }}",
         "312[1, 2, 3]21"),
        ("{% macro w(x) %}<{{ caller() }}{{ x }}>{% endmacro %}{% call w(1) %}in{% endcall %}", "<in1>"),
        ("{{ '**%s** 12345 %05.2f%%' % (q, 1.5) }} {{ '{0:>4}|{n}|{{}}'.format(1, n=2) }}",
         "**Hi** 12345 01.50%    1|2|{}"),
        ("{{ '%s-%d'|format('a', 3) }} {{ nums|select('odd')|map('string')|join('+') }} {{ nums|sum }}",
         "a-3 1+3+5+7+9 45"),
        ("{{ q.replace('H', 'J', 1).strip().split('i')[0] }}{{ ', '.join(['a', 'b']) }} {{ q[1:] }}", "Ja, b i"),
        ("{{ 'a\nb'|indent(2) }}|{{ 'a b'|wordwrap(1) }}|{{ nums|batch(6)|map('length')|list }}", "a\n  b|a\nb|[6, 4]"),
        ("{% set ns = namespace(n=0) %}{% for i in nums %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "45"),
        ("{{ '<b>x</b> &amp; y'|striptags }} {{ 2.567|round(1) }} {{ 3|center(3) }} {{ d }}",
         "x & y 2.6  3  {'a': [{'b': 1}]}"),
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
    ],
)  # fmt: skip
def test_what_templates_are_made_of_works_as_in_jinja(text: str, made: str) -> None:
    record = {"q": "Hi", "nums": list(range(10)), "d": {"a": [{"b": 1}]}}
    assert prompt(record, template=text)[0]["content"] == made


@pytest.mark.parametrize("text", ["{{ nums|map('string') }}", "{{ q.upper }}", "{{ namespace() }}", "{{ range }}"])
def test_what_has_no_text_of_its_own_is_not_printed(text: str) -> None:
    assert "would be printed" in refused({"q": "Hi", "nums": [1]}, template=text).message


def test_a_template_makes_the_same_of_a_row_each_time() -> None:
    with pytest.raises(ValidationError, match="random"):
        RecordRows(template="{{ q|random }}")


def test_each_template_is_called_by_its_name() -> None:
    assert refused({"q": "a"}, prompt_column="q", system_template="{{ x }}").param == "system_template"
    error = refused({"q": "a"}, messages_template="[{{ q }}]")
    assert error.message.startswith("The messages_template made no JSON")
    assert refused({"q": "a"}, messages_template="[1]").code == "invalid_type"


def test_an_empty_prompt_and_lone_surrogates_are_refused_as_in_a_column() -> None:
    assert refused({"q": ""}, template="{{ q }}").code == "invalid_value"
    for shape in ({"template": "{{ q }}"}, {"messages_template": '[{"role":"user","content":{{ q|tojson }}}]'}):
        error = read(b'{"q": "\\ud800"}', job(**shape))
        assert isinstance(error, RowError)
        assert error.code == "invalid_value"


def test_a_null_may_have_a_value() -> None:
    text = "{{ a|default('none', true) }}{% if a is none %}!{% endif %}"
    assert prompt({"a": None}, template=text)[0]["content"] == "none!"


def test_a_column_of_any_name_can_be_reached() -> None:
    assert prompt({"row": "r", "range": "s"}, template="{{ row['row'] }}{{ range }}")[0]["content"] == "rs"


@pytest.mark.parametrize(
    "shape",
    [
        {"template": "{{ a"},
        {"template": "a", "prompt_column": "b"},
        {"messages_template": "[]", "system": "s"},
        {"messages_column": "m", "system_template": "s"},
        {"prompt_column": "p", "system": "s", "system_template": "s"},
        {"messages_template": "[]", "embed": True},
        {},
    ],
)
def test_a_shape_that_makes_no_sense_is_no_shape(shape: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RecordRows(**shape)


def test_cells_of_a_csv_that_are_sampling_parameters_are_read_as_json() -> None:
    record = {"q": "a", "max_tokens": "7", "temperature": "0.5", "stop": '["x","y"]', "seed": "", "n": "3"}
    row = read(record, job(prompt_column="q", input=CSV))
    assert isinstance(row, Row)
    sampling = row.params
    assert (sampling.max_tokens, sampling.temperature, sampling.stop) == (7, 0.5, ("x", "y"))
    assert sampling.seed is None
    assert row.record == record
    bad = read(record | {"max_tokens": "many"}, job(prompt_column="q", input=CSV))
    assert isinstance(bad, RowError)
    assert bad.param == "max_tokens"


def test_messages_in_a_cell_are_json() -> None:
    row = read({"m": '[{"role":"user","content":"a"}]'}, job(messages_column="m", input=CSV))
    assert isinstance(row, Row)
    assert row.prompts[0] == ({"role": "user", "content": "a"},)
    bad = read({"m": "no json"}, job(messages_column="m", input=CSV))
    assert isinstance(bad, RowError)
    assert bad.code == "invalid_type"
