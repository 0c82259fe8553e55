"""The rows of a planned job as lines, whatever its format."""

from collections.abc import Callable, Iterator

from jobs.formats.jsonl import Line
from jobs.parquet_rows import read_parquet_lines
from jobs.source import Source, read_text_lines
from jobs.spec import JobSpec
from jobs.storage import Store


def read_lines(
    spec: JobSpec,
    stores: Store,
    source: Source,
    start: int,
    end: int,
    first_line: int,
    on_read: Callable[[int], None] = lambda positions: None,
) -> Iterator[Line]:
    """The lines at the positions [start, end) that are asked for; at `start` is number `first_line` of its file.

    `on_read` hears how many positions were read, every few megabytes. Raises InputChanged where a file is not the
    version that the job was submitted with.
    """
    if spec.input.format == "parquet":
        return read_parquet_lines(spec, stores, source, start, end, on_read)
    return read_text_lines(spec, stores, source, start, end, first_line, on_read)
