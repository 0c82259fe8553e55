"""Joining Parquet files: every row as it was, in order, in memory that does not grow with the number of files."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import StorageError
from jobs.formats.arrow_types import plain
from jobs.formats.parquet_out import Sink, join, parquet_writer
from jobs.settings import Settings
from jobs.storage import Stores
from tests.jobs.arrow_tables import cast_table, tables


def written(table: pa.Table, path: Path, group_rows: int = 3) -> Path:
    with parquet_writer(path, table.schema) as writer:
        writer.write_table(table, row_group_size=group_rows)
    return path


def joined(files: list[Path], schema: pa.Schema, target: Path) -> pa.Table:
    with Stores(Settings()).writer(f"file://{target}") as writer:
        join(iter(files), Sink(writer), schema)
    return pq.read_table(target)


@given(table=tables(), cut=st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_columns_of_every_type_are_joined_unchanged(
    table: pa.Table, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("join")
    # Parquet does not have all types of Arrow: what is joined is of those that it has.
    table = pq.read_table(written(table, folder / "in"))
    table = cast_table(table, [plain(kind) for kind in table.schema.types])
    files = [written(table.slice(0, cut), folder / "a"), written(table.slice(cut), folder / "b")]
    found = joined(files, table.schema, folder / "out")
    assert found.schema == table.schema
    assert str(found.to_pydict()) == str(table.to_pydict())


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2, 3], "b": [["x"], None, []], "c": pa.array(["u", "v", "u"]).dictionary_encode()})
    files = [written(table, tmp_path / "a"), written(table, tmp_path / "b")]
    for name in ("one", "two"):
        joined(files, table.schema, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_an_error_of_the_store_is_raised_as_it_is(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise StorageError("Could not write it: no space left.")

    table = pa.table({"a": list(range(1000))})
    with pytest.raises(StorageError, match="no space left"):
        join([written(table, tmp_path / "a")], Sink(Full()), table.schema)


_CHILD = """
    import sys
    from pathlib import Path
    import pyarrow as pa
    from jobs.formats import parquet_out
    from jobs.settings import Settings
    from jobs.storage import Stores

    parquet_out._GROUP_BYTES = 4 << 20
    file, times, target = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    schema = pa.schema([("data", pa.binary()), ("words", pa.list_(pa.string()))])
    with Stores(Settings()).writer(f"file://{target}") as writer:
        parquet_out.join([file] * times, parquet_out.Sink(writer), schema)
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """A quarter of a gigabyte of parts takes little more than one part does."""
    noise = [os.urandom(40_000) for _ in range(100)]
    table = pa.table({"data": noise, "words": [["some", "words"]] * 100})
    file = written(table, tmp_path / "part", group_rows=20)
    assert file.stat().st_size > 4_000_000

    def peak_kib(times: int) -> int:
        child = [sys.executable, "-c", textwrap.dedent(_CHILD), str(file), str(times), str(tmp_path / "out")]
        done = subprocess.run(child, capture_output=True, text=True, check=True)
        return int(done.stdout)

    one, many = peak_kib(1), peak_kib(60)
    assert pq.read_metadata(tmp_path / "out").num_rows == 6000
    # What allocators keep for later differs from run to run by some tens of megabytes.
    assert many - one < 100 * 1024
