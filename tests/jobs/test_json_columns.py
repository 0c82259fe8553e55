"""Columns of JSON records: any records fit the columns that were found over them, and come back as they were."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import PagemillError
from jobs.formats import json_columns
from jobs.formats.json_columns import JsonColumns, column_of, encoder_of

_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text("ab{}", max_size=3)
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)),
    max_leaves=8,
)
_RECORDS = st.lists(st.dictionaries(st.sampled_from("abc"), _VALUES, max_size=3), max_size=6)


def columns_of(records: list[dict[str, Any]]) -> tuple[pa.Schema, dict[str, list[Any]]]:
    found = JsonColumns()
    for record in records:
        found.add(record)
    schema = found.schema()
    return schema, {field.name: column_of(records, field, encoder_of(field)).to_pylist() for field in schema}


def as_written(value: Any, field: pa.Field) -> Any:
    """What a value of a record is in its column."""
    if value is None:
        return None
    if field.metadata:
        return json.loads(json.dumps(value), parse_constant=lambda name: None)
    if pa.types.is_list(field.type):
        return [as_written(item, field.type.value_field) for item in value]
    if pa.types.is_struct(field.type):
        return {sub.name: as_written(value.get(sub.name), sub) for sub in field.type.fields}
    return value


def as_read(value: Any, field: pa.Field) -> Any:
    """The same of a value in the column: JSON text is parsed."""
    if value is None:
        return None
    if field.metadata:
        return json.loads(value)
    if pa.types.is_list(field.type):
        return [as_read(item, field.type.value_field) for item in value]
    if pa.types.is_struct(field.type):
        return {sub.name: as_read(value[sub.name], sub) for sub in field.type.fields}
    return value


@given(records=_RECORDS)
@settings(deadline=None)
def test_any_records_fit_the_columns_that_are_found_and_nothing_of_them_is_lost(records: list[dict[str, Any]]) -> None:
    schema, columns = columns_of(records)
    assert set(schema.names) == {name for record in records for name in record}
    for field in schema:
        expected = [as_written(record.get(field.name), field) for record in records]
        assert [as_read(value, field) for value in columns[field.name]] == expected
        assert not pa.types.is_null(field.type)


@given(records=_RECORDS)
@settings(deadline=None)
def test_the_columns_do_not_depend_on_the_order_of_the_records(records: list[dict[str, Any]]) -> None:
    forwards, _ = columns_of(records)
    backwards, _ = columns_of(records[::-1])
    assert _unordered(forwards) == _unordered(backwards)


def _unordered(fields: Any) -> Any:
    def shape(field: pa.Field) -> Any:
        if pa.types.is_struct(field.type):
            return _unordered(field.type.fields)
        return [shape(field.type.value_field)] if pa.types.is_list(field.type) else str(field.type)

    return {field.name: (shape(field), bool(field.metadata)) for field in fields}


@pytest.mark.parametrize("value", [1e999, [1.5, -1e999], {"a": 1e999}])
def test_a_number_beyond_floating_point_is_null_in_json_text(value: Any) -> None:
    _, columns = columns_of([{"a": value}, {"a": "text"}])
    assert json.loads(columns["a"][0]) in (None, [1.5, None], {"a": None})


def test_an_object_of_many_names_is_a_dictionary_in_json_text() -> None:
    many = {f"key {n}": n for n in range(json_columns.MAX_FIELDS + 1)}
    schema, columns = columns_of([{"a": {"key 1": 1}}, {"a": many}, {"a": {"key 2": 2}}])
    assert schema.field("a").type == pa.string()
    assert [json.loads(text) for text in columns["a"]] == [{"key 1": 1}, many, {"key 2": 2}]


def test_names_without_end_are_kept_as_text_and_columns_without_end_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_columns, "MAX_COLUMNS", 20)
    schema, _ = columns_of([{"a": {f"key {n}": n}} for n in range(30)])
    assert schema.field("a").type == pa.string()
    with pytest.raises(PagemillError) as caught:
        columns_of([{f"column {n}": n} for n in range(30)])
    assert caught.value.code == "too_many_columns"


def test_what_nests_deeper_than_readers_go_is_text() -> None:
    value: Any = "end"
    for _ in range(60):
        value = [value]
    schema, columns = columns_of([{"a": value}])
    assert pa.ipc.read_schema(schema.serialize()) == schema
    inner: Any = columns["a"][0]
    while isinstance(inner, list):
        (inner,) = inner
    assert inner.startswith("[[[")
    assert inner.endswith('"end"' + "]" * inner.count("["))
