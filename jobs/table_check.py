"""A quick look at a whole batch of a table's rows, as `jobs.quick_check` looks at lines: that all are good.

Only columns of plain values are looked at here, and only records whose prompt is a column of text. A batch that has
anything else, or one row that is not good, is left to the look at its rows as lines.
"""

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from jobs.openai_rows import MAX_CUSTOM_ID
from jobs.prefixes import LENGTHS
from jobs.quick_check import answer_tokens
from jobs.rows import SAMPLING_COLUMNS, result_columns
from jobs.spec import JobSpec, RecordRows

_MAX_ESCAPED = 6
"""Bytes of JSON that a byte of text is at most: a control character is written as backslash, u and four digits."""
_NUMBER_BYTES = 32
_IS_TEXT = (kinds.is_string, kinds.is_large_string)
_IS_PLAIN = (*_IS_TEXT, kinds.is_integer, kinds.is_float32, kinds.is_float64, kinds.is_boolean, kinds.is_null)


class GoodRows(NamedTuple):
    """Of each row of a batch, its custom_id, if it counts, about its length as JSON, and what its prompt begins with;
    of all, the longest answer."""

    custom_ids: Iterable[str | None]
    sizes: list[int]
    prompts: Iterable[str | None]
    tokens: int


def table_check(spec: JobSpec, columns: pa.Schema) -> Callable[[pa.RecordBatch], GoodRows | None]:
    """What looks at batches of these columns. It returns None for one whose rows have to be looked at as lines."""
    shape = spec.rows
    if not isinstance(shape, RecordRows) or shape.prompt_column is None or shape.system_template is not None:
        return lambda batch: None
    prompt = shape.prompt_column
    special = {*result_columns(spec), *SAMPLING_COLUMNS}
    if not special.isdisjoint(columns.names) or not all(_is(_IS_PLAIN, field.type) for field in columns):
        return lambda batch: None
    texts = [field.name for field in columns if _is(_IS_TEXT, field.type)]
    if prompt not in texts:
        return lambda batch: None
    tokens = answer_tokens(spec.pooling if shape.embed else spec.sampling)
    frame = sum(len(name) + 6 for name in columns.names) + _NUMBER_BYTES * (len(columns) - len(texts))
    has_ids = "custom_id" in texts

    def look(batch: pa.RecordBatch) -> GoodRows | None:
        if batch.nbytes * _MAX_ESCAPED + frame > spec.max_line_bytes or not _is_valid(batch):
            return None
        prompts = pc.binary_length(batch.column(prompt))
        if prompts.null_count or pc.min(prompts).as_py() == 0:
            return None
        ids = batch.column("custom_id") if has_ids else None
        if ids is not None and (pc.max(pc.utf8_length(ids)).as_py() or 0) > MAX_CUSTOM_ID:
            return None
        sizes = prompts
        for name in texts:
            if name != prompt:
                sizes = pc.add(sizes, pc.fill_null(pc.binary_length(batch.column(name)), 0))
        custom_ids = repeat(None) if ids is None else ids.to_pylist()
        heads: Iterable[str | None] = repeat(None)
        if not shape.embed and pc.max(prompts).as_py() >= LENGTHS[0]:
            heads = pc.utf8_slice_codeunits(batch.column(prompt), 0, LENGTHS[-1]).to_pylist()
        return GoodRows(custom_ids, [frame + size for size in sizes.to_pylist()], heads, tokens)

    return look


def _is(tests: Iterable[Callable[[pa.DataType], bool]], kind: pa.DataType) -> bool:
    return any(test(kind) for test in tests)


def _is_valid(batch: pa.RecordBatch) -> bool:
    """Whether all text is UTF-8: what reads Parquet does not look."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
