"""Arrow types with others in place of those that Parquet's readers and writers are not at one about."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.types as kinds


def plain(kind: pa.DataType) -> pa.DataType:
    """The type with strings, bytes and lists for views of them, and inside others with values for dictionaries.

    Arrow cannot write a part of a struct of views, nor read such dictionaries over several row groups.
    """
    return kind if kinds.is_dictionary(kind) else _replaced(kind, _plain)


def without_nulls(kind: pa.DataType) -> pa.DataType:
    """The type with strings for nulls of no type, which some readers take for whole numbers."""
    return _replaced(kind, lambda inner: pa.string() if kinds.is_null(inner) else inner)


def cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """The values in another type, part by part down to those that differ.

    Arrow's own cast of a list or struct also casts the parts that stay as they are, and of those that are nulls of no
    type it makes too few (pyarrow 26). Raises ArrowInvalid where a value does not fit.
    """
    given = values.type
    if given == kind:
        return values
    if kinds.is_null(given):
        return pa.nulls(len(values), kind)
    if kinds.is_struct(given) and kinds.is_struct(kind) and given.names == kind.names:
        parts = [cast(values.field(place), field.type) for place, field in enumerate(kind)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=values.is_null())
    if kinds.is_fixed_size_list(given) and kinds.is_fixed_size_list(kind) and given.list_size == kind.list_size:
        items = values.values.slice(values.offset * given.list_size, len(values) * given.list_size)
        return pa.FixedSizeListArray.from_arrays(cast(items, kind.value_type), type=kind, mask=values.is_null())
    if kinds.is_list(given) and kinds.is_list(kind):
        return pa.ListArray.from_arrays(
            _offsets(values), cast(values.values, kind.value_type), kind, mask=values.is_null()
        )
    if kinds.is_large_list(given) and kinds.is_large_list(kind):
        items = cast(values.values, kind.value_type)
        return pa.LargeListArray.from_arrays(_offsets(values), items, kind, mask=values.is_null())
    if kinds.is_map(given) and kinds.is_map(kind):
        keys, items = cast(values.keys, kind.key_type), cast(values.items, kind.item_type)
        return pa.MapArray.from_arrays(_offsets(values), keys, items, kind, mask=values.is_null())
    return values.cast(kind)


def _offsets(values: pa.Array) -> pa.Array:
    """Where each list begins, and the last ends: a copy, since Arrow takes no part of an array beside a mask."""
    return pa.array(values.offsets.to_numpy())


def _plain(kind: pa.DataType) -> pa.DataType:
    if kinds.is_dictionary(kind):
        return _plain(kind.value_type)
    if kinds.is_string_view(kind):
        return pa.string()
    return pa.binary() if kinds.is_binary_view(kind) else kind


def _replaced(kind: pa.DataType, replace: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with each type in it that is no list, struct or map replaced."""

    def item() -> pa.Field:
        return kind.value_field.with_type(_replaced(kind.value_type, replace))

    if kinds.is_struct(kind):
        return pa.struct([field.with_type(_replaced(field.type, replace)) for field in kind])
    if kinds.is_map(kind):
        return pa.map_(kind.key_type, _replaced(kind.item_type, replace), keys_sorted=kind.keys_sorted)
    if kinds.is_fixed_size_list(kind):
        return pa.list_(item(), kind.list_size)
    if kinds.is_list(kind) or kinds.is_list_view(kind):
        return pa.list_(item())
    if kinds.is_large_list(kind) or kinds.is_large_list_view(kind):
        return pa.large_list(item())
    return replace(kind)
