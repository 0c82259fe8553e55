"""Inputs larger than memory, and results that can be seen before the last row is done."""

import json
import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.inputs import InputOptions
from jobs.parquet_rows import read_batches
from jobs.source import source_of
from jobs.spec import RecordRows
from jobs.submit import enter, prepare
from tests.jobs.site import Site
from tests.problems.conftest import run_to_its_end
from tests.system.fleet import Fleet
from tests.system.mill import PAGEMILL

DOCUMENT = "x" * 900_000
SAME, TIMES = 60, 40


def nested_file(folder: Path) -> Path:
    """One row group whose only column, a nested one, has more text than 32-bit offsets reach, in a file of kilobytes:
    all of its rows have the same document."""
    assert SAME * TIMES * len(DOCUMENT) > 2**31
    message = pa.struct({"role": pa.string(), "content": pa.string()})
    rows = pa.array([[{"role": "user", "content": DOCUMENT}]] * SAME, pa.list_(message))
    path = folder / "nested.parquet"
    pq.write_table(pa.concat_tables([pa.table({"messages": rows})] * TIMES), path, row_group_size=10**9)
    return path


def test_a_nested_column_of_more_than_two_gigabytes_is_read_in_small_pieces(site: Site, tmp_path: Path) -> None:
    """arrow#32723, ray PR#61824: a row group whose nested column decodes to more than 2 GB cannot be read as a whole:
    "Nested data conversions not implemented for chunked array outputs"."""
    path = nested_file(tmp_path)
    assert (pq.read_metadata(path).num_row_groups, path.stat().st_size < 200_000) == (1, True)
    services = {"stores": site.stores, "settings": site.settings, "model": "tiny"}
    spec = prepare(str(path), rows=RecordRows(messages_column="messages"), **services)
    before, peak, rows = pa.total_allocated_bytes(), 0, 0
    for found in read_batches(spec, site.stores, source_of(spec, site.stores), 0, SAME * TIMES):
        rows += found.batch.num_rows
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert rows == SAME * TIMES
    assert 0 < peak < 300 << 20
    few = prepare(
        str(path), rows=RecordRows(messages_column="messages"), input_options=InputOptions(limit=6), **services
    )
    enter(few, site.ledger, site.stores, site.tokens)
    assert run_to_its_end(site, few) == [f"answer {n}" for n in range(6)]


def test_rows_can_be_read_before_the_job_has_ended(fleet: Fleet) -> None:
    """vllm#30268, PR#52505, curator#120: nothing was written until the last of 500,000 rows was done, and the memory
    that held all of it ran out just before."""
    job = fleet.submit(rows=32)
    command = [*PAGEMILL, "results", job.id, "--follow"]
    with subprocess.Popen(command, env=fleet.env("", {}), stdout=subprocess.PIPE) as process:
        fleet.control()
        fleet.worker(step_s=1.0)
        assert process.stdout is not None
        first = process.stdout.readline()
        view = fleet.view(job)
        rest = process.stdout.read()
    assert not view.terminal
    assert view.done < 32
    assert json.loads(first)["prompt"] == "question 0"
    fleet.finished(job)
    assert first + rest == fleet.stores.read(job.spec.output_url)
    assert process.returncode == os.EX_OK
