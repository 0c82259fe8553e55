"""What is left of a job that was stopped is submitted by the same options, and makes the same requests."""

import gzip
import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.errors import RowError
from jobs.inputs import InputOptions
from jobs.planner import plan, shard_rows
from jobs.rows import Row
from jobs.spec import JobSpec, OpenAIRows, RecordRows
from jobs.submit import enter, prepare
from tests.jobs.conftest import SHARD_ROWS
from tests.jobs.site import Site


def submitted(site: Site, path: str | Path, shape: RecordRows | OpenAIRows, **options: Any) -> JobSpec:
    return prepare(
        str(path),
        model="tiny",
        stores=site.stores,
        settings=site.settings,
        rows=shape,
        input_options=InputOptions(**options),
        on_bad_row="skip",
    )


def stopped(site: Site, spec: JobSpec, shards: int = 1) -> str:
    """Runs so many shards of the job, cancels it, and returns what is left."""
    enter(spec, site.ledger, site.stores, site.tokens)
    site.control.plan(spec.id)
    site.work(spec, shards=shards)
    site.ledger.cancel(spec.id)
    site.control.assemble(spec.id)
    url = site.ledger.view(spec.id).remaining_url
    assert url is not None
    return url


def requests(site: Site, spec: JobSpec) -> list[Any]:
    """What the engine would be asked for each row; of a refused one, nothing."""
    planned = plan(spec, site.stores, site.settings)
    rows = [found.row for shard in planned.shards for found in shard_rows(spec, site.stores, shard)]
    return [
        (row.custom_id, row.kind, row.prompts, row.params) if isinstance(row, Row) else RowError.__name__
        for row in rows
    ]


CSV = (
    "id,custom_id,prompt,max_tokens,stop,messages\n"
    + "".join(
        f'00{n},c{n},"question {n}\nof two lines",{n},"[""a"",""b""]","[{{""role"":""user"",""content"":""m{n}""}}]"\n'
        for n in range(1, 7)
    )
    + "008,c8,last,,,[]\n009,too,few\n"
)


@pytest.mark.parametrize(
    "shape",
    [
        RecordRows(prompt_column="prompt"),
        RecordRows(messages_column="messages"),
        RecordRows(template="{{ id }}: {{ prompt|upper }}", system="s"),
        RecordRows(messages_template='[{"role": "user", "content": {{ prompt|tojson }}}]'),
    ],
    ids=["column", "messages", "template", "messages by template"],
)
@pytest.mark.parametrize("name", ["in.csv", "in.csv.gz", "in.tsv"])
def test_the_rest_of_a_csv_makes_the_same_requests_as_json_lines(
    site: Site, tmp_path: Path, shape: RecordRows, name: str
) -> None:
    data = CSV.replace(",", "\t").replace('""\t""', '"",""') if name == "in.tsv" else CSV
    data = data.replace('user""\t""content', 'user"",""content')
    (tmp_path / name).write_bytes(gzip.compress(data.encode()) if name.endswith(".gz") else data.encode())
    whole = submitted(site, tmp_path / name, shape)
    expected = requests(site, whole)
    assert len(expected) == 8
    assert expected.count(RowError.__name__) <= 2
    url = stopped(site, submitted(site, tmp_path / name, shape))
    assert url.endswith("/remaining.jsonl")
    rest = submitted(site, url, shape)
    assert requests(site, rest) == expected[SHARD_ROWS:]
    assert [row.get("id") for row in site.rows(url) if isinstance(row, dict)] == ["005", "006", "008"]


def table_file(path: Path) -> pa.Table:
    when = pa.array([datetime(2024, 5, 1, tzinfo=UTC)] * 20, pa.timestamp("us", "Europe/Paris"))
    table = pa.table(
        {
            "prompt": pa.array([f"question {n}" for n in range(20)]).dictionary_encode(),
            "messages": [[{"role": "user", "content": f"m{n}", "name": None}] for n in range(20)],
            "n": range(20),
            "when": when,
            "data": [b"\x00\xff"] * 20,
        }
    )
    pq.write_table(table, path, row_group_size=7)
    return table


@pytest.mark.parametrize("shape", [RecordRows(prompt_column="prompt"), RecordRows(messages_column="messages")])
def test_the_rest_of_a_table_is_a_table_of_the_rows_and_columns_that_were_asked_for(
    site: Site, tmp_path: Path, shape: RecordRows
) -> None:
    table = table_file(tmp_path / "in.parquet")
    asked: dict[str, Any] = {"where": "n >= 5", "columns": ("data", "messages", "prompt", "when"), "sample": 10}
    whole = submitted(site, tmp_path / "in.parquet", shape, **asked)
    expected = requests(site, whole)
    assert len(expected) == 10
    url = stopped(site, submitted(site, tmp_path / "in.parquet", shape, **asked))
    assert url.endswith("/remaining.parquet")
    rest = submitted(site, url, shape)
    assert requests(site, rest) == expected[SHARD_ROWS:]
    found = pq.read_table(io.BytesIO(site.stores.read(url)))
    assert found.schema.types == [table.schema.field(name).type for name in asked["columns"]]
    assert found.column("data").to_pylist() == [b"\x00\xff"] * 6


@pytest.mark.parametrize("limit", [None, 9])
def test_of_a_job_that_was_not_planned_the_rows_that_were_asked_for_are_left(
    site: Site, tmp_path: Path, limit: int | None
) -> None:
    table_file(tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt":"question {n}"}}\n' for n in range(20)))
    shape = RecordRows(prompt_column="prompt")
    for name in ("in.parquet", "in.jsonl"):
        spec = submitted(site, tmp_path / name, shape, limit=limit)
        enter(spec, site.ledger, site.stores, site.tokens)
        site.ledger.cancel(spec.id)
        site.control.assemble(spec.id)
        url = site.ledger.view(spec.id).remaining_url
        assert url is not None
        assert requests(site, submitted(site, url, shape)) == requests(site, spec)


def test_the_rest_of_openai_lines_in_a_table_is_such_a_table(site: Site, tmp_path: Path) -> None:
    lines = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": n or None},
        }
        for n in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "in.parquet")
    expected = requests(site, submitted(site, tmp_path / "in.parquet", OpenAIRows()))
    url = stopped(site, submitted(site, tmp_path / "in.parquet", OpenAIRows()))
    assert requests(site, submitted(site, url, OpenAIRows())) == expected[SHARD_ROWS:]
    assert RowError.__name__ not in expected
