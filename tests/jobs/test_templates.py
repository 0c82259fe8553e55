"""Templates make prompts of records, and what they cannot do is the row's error, with the line."""

from typing import Any

import pytest
from pydantic import ValidationError

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
        ("{{ q * 10**9 }}", 1, "too long"),
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


def test_each_template_is_called_by_its_name() -> None:
    assert refused({"q": "a"}, prompt_column="q", system_template="{{ x }}").param == "system_template"
    error = refused({"q": "a"}, messages_template="[{{ q }}]")
    assert error.message.startswith("The messages_template made no JSON")
    assert refused({"q": "a"}, messages_template="[1]").code == "invalid_type"


def test_an_empty_prompt_and_lone_surrogates_are_refused_as_in_a_column() -> None:
    assert refused({"q": ""}, template="{{ q }}").code == "invalid_value"
    error = read(b'{"q": "\\ud800"}', job(template="{{ q }}"))
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
