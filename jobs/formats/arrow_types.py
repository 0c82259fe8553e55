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
