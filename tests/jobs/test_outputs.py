"""Outputs in each form: what we write, pyarrow, DuckDB and pandas read, and it is what was asked."""

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import datasets
import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs import joining
from jobs.assemble import assemble
from jobs.errors import RowError
from jobs.formats import json_columns
from jobs.formats.arrow_types import plain, without_nulls
from jobs.formats.json_values import json_rows
from jobs.layout import absolute_url
from jobs.output import errors_beside, output_of
from jobs.planner import PlannedRow, shard_rows
from jobs.records import SegmentRecord, Usage
from jobs.results import Choice, Completion, Embeddings, Outcome, TokenLogprob
from jobs.sampling import Sampling
from jobs.spec import JobSpec, OpenAIRows, RecordRows
from jobs.spool import Spool
from jobs.submit import enter, prepare
from tests.jobs.arrow_tables import cast_table, tables
from tests.jobs.site import Site, prompts
from tests.jobs.specs import request as batch_line
from tests.jobs.test_assemble import Crashed, crash, manifest

FORMS = ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.parquet", "jsonl/", "jsonl.gz/", "jsonl.zst/", "parquet/"]
MIXED = [{"prompt": f"question {n}", "n": n} if n % 5 else {"text": f"none {n}", "n": n} for n in range(10)]


def output_at(folder: Path | str, name: str) -> dict[str, Any]:
    """The fields of a spec whose output has this name: a file, or a folder called like its format."""
    url = f"{absolute_url(str(folder))}/{name}"
    form = output_of(url, name.rstrip("/") if name.endswith("/") else None)  # type: ignore[arg-type]
    return {"output": form, "output_url": url, "error_url": errors_beside(url)}


def done(site: Site, data: list[Any] | bytes, answer: Any = None, **fields: Any) -> JobSpec:
    """A job that has been run to its end."""
    spec = site.submit(data, **fields)
    site.control.plan(spec.id)
    assert site.ledger.state(spec.id) == "in_progress"
    work(site, spec, answer)
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == "completed"
    return spec


def work(site: Site, spec: JobSpec, answer: Any) -> None:
    if answer is None:
        site.work(spec)
        return
    while (lease := site.lease(spec)) is not None:
        with Spool(lease.spec, site.stores) as spool:
            for planned in shard_rows(lease.spec, site.stores, lease.shard):
                spool.add(planned, planned.row if isinstance(planned.row, RowError) else answer(planned))
            assert site.ledger.commit(lease, spool.put(lease, "")) == "ok"


def path_of(spec: JobSpec) -> str:
    return spec.output_url.removeprefix("file://")


def files_of(spec: JobSpec) -> list[str]:
    path = Path(path_of(spec))
    return [str(path)] if path.is_file() else sorted(str(part) for part in path.glob("part-*"))


def by_pyarrow(spec: JobSpec) -> list[dict[str, Any]]:
    if spec.output.format == "parquet":
        return pa.dataset.dataset(path_of(spec), format="parquet").to_table().to_pylist()
    tables = [pa.json.read_json(pa.input_stream(file, compression="detect")) for file in files_of(spec)]
    return pa.concat_tables(tables, promote_options="permissive").to_pylist()


def by_duckdb(spec: JobSpec) -> list[dict[str, Any]]:
    pattern = f"{path_of(spec)}part-*" if spec.output.folder else path_of(spec)
    reader = "read_parquet" if spec.output.format == "parquet" else "read_json_auto"
    found = duckdb.sql(f"select * from {reader}('{pattern}')")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def by_pandas(spec: JobSpec) -> list[dict[str, Any]]:
    if spec.output.format == "parquet":
        frame = pd.read_parquet(path_of(spec))
    else:
        frame = pd.concat([pd.read_json(file, lines=True) for file in files_of(spec)])
    return [
        {name: None if value is pd.NaT else value for name, value in row.items()} for row in frame.to_dict("records")
    ]


def by_datasets(folder: Path, cache: Path) -> list[dict[str, Any]]:
    """What Hugging Face's library makes of a folder as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return list(datasets.load_dataset(str(folder), cache_dir=str(cache))["train"])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("read", [by_pyarrow, by_duckdb, by_pandas])
def test_each_form_of_output_is_read_by_others_as_what_was_written(
    name: str, read: Any, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "PART_BYTES", 1500)
    spec = done(site, MIXED, **output_at(tmp_path, name))
    rows = read(spec)
    assert [row["n"] for row in rows] == list(range(10))
    assert [row["response"] for row in rows if row["n"] % 5] == [f"answer {n}" for n in range(10) if n % 5]
    failed = [row for row in rows if row["n"] % 5 == 0]
    assert [row["text"] for row in failed] == ["none 0", "none 5"]
    assert [row["error"]["code"] for row in failed] == ["missing_required_parameter"] * 2
    assert all(type(row["response"]) is not str for row in failed)
    assert [row["usage"]["completion_tokens"] for row in rows if row["n"] % 5] == [2] * 8
    assert [row["line"] for row in site.rows(spec.error_url)] == [1, 6]


@pytest.mark.parametrize("name", [name for name in FORMS if name.endswith("/")])
def test_a_folder_is_a_dataset_to_hugging_faces_library_whatever_its_first_part_lacks(
    name: str, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "PART_BYTES", 1)
    data: list[dict[str, Any]] = [{"prompt": f"question {n}", "n": n, "tags": None} for n in range(12)]
    data[8] |= {"tags": ["x"], "deep": {"a": 1.5, "b": [{"c": 1}]}, "mixed": 1}
    data[9] |= {"mixed": {"a": ["text"]}}
    data[10] = {"text": "no prompt", "n": 10}
    spec = done(site, data, **output_at(tmp_path, name))
    assert len(files_of(spec)) == 3
    rows = by_datasets(tmp_path / name, tmp_path / "cache")
    assert [row["n"] for row in rows] == list(range(12))
    assert [row["response"] for row in rows] == [f"answer {n}" if n != 10 else None for n in range(12)]
    assert (rows[0]["tags"], rows[8]["tags"], rows[8]["deep"]) == (None, ["x"], {"a": 1.5, "b": [{"c": 1}]})
    assert (rows[10]["text"], rows[10]["error"]["code"]) == ("no prompt", "missing_required_parameter")
    text = name == "parquet/"
    assert (rows[8]["mixed"], rows[9]["mixed"]) == (("1", '{"a":["text"]}') if text else (1, {"a": ["text"]}))
    schema = {
        column["name"]: column["type"]
        for column in json.loads((tmp_path / name / "_manifest.json").read_bytes())["schema"]
    }
    assert (schema["n"], schema["tags"], schema["mixed"]) == (
        "int64",
        "list<element: string>",
        "string" if text else "json",
    )


@pytest.mark.parametrize("name", ["jsonl/", "parquet/"])
def test_a_folder_of_openai_lines_is_a_dataset_too(name: str, site: Site, tmp_path: Path) -> None:
    data = [batch_line(custom_id=str(n)) for n in range(6)]
    done(site, data, rows=OpenAIRows(), **output_at(tmp_path, name))
    rows = by_datasets(tmp_path / name, tmp_path / "cache")
    assert [row["custom_id"] for row in rows] == list("012345")
    body = rows[5]["response"]["body"]
    answer = json.loads(body) if name == "parquet/" else body
    assert answer["choices"][0]["message"]["content"] == "answer 5"


def test_a_table_written_as_a_folder_of_json_lines_has_the_columns_that_json_has(site: Site, tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": [f"question {n}" for n in range(6)],
            "when": pa.array([None] * 5 + [0], pa.timestamp("s", "UTC")),
            "price": pa.array([None] * 5 + [Decimal("1.50")], pa.decimal128(9, 2)),
            "data": pa.array([None] * 5 + [b"x"], pa.binary()),
            "kind": pa.array([None] * 5 + ["red"]).dictionary_encode(),
            "counts": pa.array([None] * 5 + [[("k", 7)]], pa.map_(pa.string(), pa.int8())),
            "took": pa.array([None] * 5 + [5], pa.duration("ms")),
            "nothing": pa.nulls(6),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    spec = prepare(
        str(tmp_path / "in.parquet"),
        model="tiny",
        stores=site.stores,
        settings=site.settings,
        rows=RecordRows(prompt_column="prompt"),
        output=f"{tmp_path}/out/",
    )
    enter(spec, site.ledger, site.stores, site.tokens)
    site.control.plan(spec.id)
    site.work(spec)
    site.control.assemble(spec.id)
    *_, last = by_datasets(tmp_path / "out", tmp_path / "cache")
    assert (last["when"], last["price"], last["data"]) == ("1970-01-01T00:00:00.000Z", "1.50", "eA==")
    assert (last["kind"], last["counts"], last["took"]) == ("red", [{"key": "k", "value": 7}], 5)
    assert (last["nothing"], last["response"]) == (None, "answer 5")


def test_a_folder_of_lines_with_more_columns_than_can_be_named_is_written_all_the_same(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_columns, "MAX_COLUMNS", 5)
    spec = done(site, [{"prompt": "x", f"c{n}": n} for n in range(10)], **output_at(tmp_path, "jsonl/"))
    assert len(by_duckdb(spec)) == 10
    assert json.loads((tmp_path / "jsonl" / "_manifest.json").read_bytes())["schema"] is None
    assert "features" not in (tmp_path / "jsonl" / ".huggingface.yaml").read_text()


@pytest.mark.parametrize("name", [name for name in FORMS if name.endswith("/")])
def test_readers_of_whole_folders_pass_over_what_is_no_part(name: str, site: Site, tmp_path: Path) -> None:
    """By the rule of Spark, Hive and Arrow: names that begin with a dot or an underscore are not data."""
    spec = done(site, MIXED, **output_at(tmp_path, name))
    others = {path.name for path in (tmp_path / name).iterdir()} - {Path(file).name for file in files_of(spec)}
    assert others == {"_manifest.json", ".huggingface.yaml"}
    if spec.output.compression != "zstd":
        found = pa.dataset.dataset(str(tmp_path / name), format="json" if spec.output.format == "jsonl" else "parquet")
        assert found.count_rows() == 10


def table_of(site: Site, spec: JobSpec) -> pa.Table:
    return pq.read_table(pa.BufferReader(site.stores.read(spec.output_url)))


@pytest.fixture
def parquet(tmp_path: Path) -> dict[str, Any]:
    return output_at(tmp_path, "out.parquet")


def test_a_column_that_is_null_in_the_first_shard_has_its_type_in_all(site: Site, parquet: dict[str, Any]) -> None:
    data = [{"prompt": "x", "note": None if n < 9 else "at last", "never": None} for n in range(12)]
    spec = done(site, data, **parquet)
    table = table_of(site, spec)
    assert (table.schema.field("note").type, table.schema.field("never").type) == (pa.string(), pa.string())
    assert table.column("note").to_pylist() == [None] * 9 + ["at last"] * 3
    for shard in range(3):
        info, _ = site.ledger.records(spec.id)[shard].objects(spec.layout, shard)  # type: ignore[union-attr]
        assert pq.read_schema(pa.BufferReader(site.stores.read(info.url))) == table.schema  # type: ignore[union-attr]


def test_columns_are_typed_over_the_whole_input(site: Site, parquet: dict[str, Any]) -> None:
    data: list[dict[str, Any]] = [{"prompt": "x"} for _ in range(8)]
    data[0] |= {"a": 1, "b": {"x": [1]}, "c": [], "d": 1, "e": True, "f": {}, "g": 2**60}
    data[7] |= {"a": 2.5, "b": {"y": "z"}, "c": [None], "d": "one", "e": False, "f": {}, "g": 0.5}
    spec = done(site, data, **parquet)
    schema = table_of(site, spec).schema
    assert {name: str(schema.field(name).type) for name in "abcdefg"} == {
        "a": "double",
        "b": "struct<x: list<element: int64>, y: string>",
        "c": "list<element: string>",
        "d": "string",
        "e": "bool",
        "f": "string",
        "g": "string",
    }
    first, *_, last = table_of(site, spec).to_pylist()
    assert (first["a"], last["a"], first["b"], last["b"]) == (1.0, 2.5, {"x": [1], "y": None}, {"x": None, "y": "z"})
    assert (first["d"], last["d"], first["f"], first["g"], last["g"]) == ("1", '"one"', "{}", str(2**60), "0.5")
    assert (first["c"], last["c"]) == ([], [None])


def test_the_columns_of_the_answer_are_typed_where_all_rows_failed(site: Site, parquet: dict[str, Any]) -> None:
    spec = done(site, [{"text": "no prompt"}] * 6, **parquet)
    table = table_of(site, spec)
    assert {field.name: str(field.type) for field in table.schema} == {
        "text": "string",
        "response": "string",
        "finish_reason": "string",
        "usage": "struct<prompt_tokens: int64, completion_tokens: int64, total_tokens: int64, cached_tokens: int64>",
        "error": "struct<code: string, message: string, param: string>",
    }
    assert table.column("response").null_count == table.column("usage").null_count == 6
    assert len(site.rows(spec.error_url)) == 6
    assert duckdb.sql(f"select count(*) from '{path_of(spec)}' where response is null").fetchall() == [(6,)]


@pytest.mark.parametrize("name", FORMS)
def test_a_job_without_failed_rows_has_no_error_file(name: str, site: Site, tmp_path: Path) -> None:
    spec = done(site, prompts(5), **output_at(tmp_path, name))
    view = site.ledger.view(spec.id)
    assert (view.error_url, view.failed) == (None, 0)
    assert not Path(spec.error_url.removeprefix("file://")).exists()


@pytest.mark.parametrize("name", FORMS)
def test_an_output_without_rows_is_a_whole_file_all_the_same(name: str, site: Site, tmp_path: Path) -> None:
    """As of a job that is cancelled before a shard is done."""
    spec = site.submit(prompts(5), **output_at(tmp_path, name))
    site.control.plan(spec.id)
    site.ledger.cancel(spec.id)
    site.control.assemble(spec.id)
    (file,) = files_of(spec)
    if spec.output.format == "parquet":
        assert pq.read_table(file).column_names == ["prompt", "response", "finish_reason", "usage", "error"]
        assert duckdb.sql(f"select * from '{file}'").fetchall() == []
    else:
        with pa.input_stream(file, compression="detect") as stream:
            assert stream.read() == b""
        assert (Path(file).stat().st_size > 0) == (spec.output.compression is not None)


def test_a_table_of_a_job_that_was_never_planned_has_the_columns_of_the_answer(
    site: Site, parquet: dict[str, Any]
) -> None:
    spec = site.submit(prompts(5), **parquet)
    site.ledger.cancel(spec.id)
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == "cancelled"
    assert table_of(site, spec).to_pydict() == {"response": [], "finish_reason": [], "usage": [], "error": []}


def test_a_record_that_is_no_object_is_a_row_of_nulls_with_its_error(site: Site, parquet: dict[str, Any]) -> None:
    spec = done(site, b'{"prompt":"a","x":1}\n[1]\n{"prompt":"b","response":"mine","x":2}\n', **parquet)
    rows = table_of(site, spec).to_pylist()
    assert [(row["prompt"], row["x"], row["response"]) for row in rows] == [
        ("a", 1, "answer 0"),
        (None, None, None),
        (None, None, None),
    ]
    assert [row["error"] and row["error"]["code"] for row in rows] == [None, "not_an_object", "column_collision"]


def test_lone_surrogates_are_replaced_in_names_and_values(site: Site, parquet: dict[str, Any]) -> None:
    spec = done(site, b'{"prompt":"a","\\ud800x":{"y":["\\uDC00!", "\\ud83d\\ude00"]}}\n', **parquet)
    assert table_of(site, spec).column("\ufffdx").to_pylist() == [{"y": ["\ufffd!", "\U0001f600"]}]


def test_several_answers_and_their_logprobs_are_lists(site: Site, parquet: dict[str, Any]) -> None:
    token = TokenLogprob(1, "a", b"a", -0.5, 1, (TokenLogprob(2, "\ufffd", b"\xf0", -1.5, 2),))

    def answer(planned: PlannedRow) -> Outcome:
        return Completion((Choice("one", "stop", (token,)), Choice("two", "length", (token, token))), Usage())

    data = [{"prompt": "x"}, {"prompt": None}, {"prompt": "y"}]
    spec = done(site, data, answer, sampling=Sampling(n=2, logprobs=1), **parquet)
    first, failed, _ = table_of(site, spec).to_pylist()
    assert (first["response"], first["finish_reason"]) == (["one", "two"], ["stop", "length"])
    shape = {"token": "a", "logprob": -0.5, "bytes": [97]}
    likely = {"token": "\ufffd", "logprob": -1.5, "bytes": [240]}
    assert first["logprobs"] == [[shape | {"top_logprobs": [likely]}], [shape | {"top_logprobs": [likely]}] * 2]
    assert (failed["response"], failed["logprobs"]) == (None, None)


def test_vectors_are_lists_of_float32_bit_by_bit(site: Site, parquet: dict[str, Any]) -> None:
    vector = pa.array([0.1, -3.4e38, 1e-45, float("nan")], pa.float32())

    def answer(planned: PlannedRow) -> Outcome:
        return Embeddings((vector.buffers()[1].to_pybytes()[:16],), Usage(prompt_tokens=3))

    data = [{"prompt": "x"}, {"prompt": None}, {"prompt": "y"}]
    spec = done(site, data, answer, rows=RecordRows(prompt_column="prompt", embed=True), **parquet)
    column = table_of(site, spec).column("embedding").combine_chunks()
    assert column.type == pa.list_(pa.float32())
    assert column.is_null().to_pylist() == [False, True, False]
    for row in (0, 2):
        assert column[row].values.to_numpy().tobytes() == vector.to_numpy().tobytes()


def test_openai_lines_are_rows_with_the_body_as_json_text(site: Site, parquet: dict[str, Any]) -> None:
    data = [batch_line(custom_id="a"), batch_line({"messages": []}, custom_id="b")]
    spec = done(site, data, rows=OpenAIRows(), **parquet)
    good, bad = table_of(site, spec).to_pylist()
    assert (good["custom_id"], good["response"]["status_code"], good["error"]) == ("a", 200, None)
    assert json.loads(good["response"]["body"])["choices"][0]["message"]["content"] == "answer 0"
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("b", 400)
    assert json.loads(bad["response"]["body"])["error"]["param"] == "body.messages"
    assert [row["custom_id"] for row in site.rows(spec.error_url)] == ["b"]


def test_more_columns_than_a_table_holds_fail_the_job_by_name(site: Site, parquet: dict[str, Any]) -> None:
    data = [{"prompt": "x", **{f"c{n}_{m}": 1 for m in range(1001)}} for n in range(10)]
    spec = site.submit(data, **parquet)
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, [error.code for error in view.errors]) == ("failed", ["too_many_columns"])


def snapshot(site: Site, url: str) -> dict[str, bytes]:
    return {info.url: site.stores.read(info.url) for info in site.stores.list(url)}


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl.gz", "out.jsonl.zst", "parquet/", "jsonl.gz/"])
def test_an_assembly_that_is_repeated_writes_the_same_bytes(
    any_site: Site, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = any_site.submit(MIXED * 2, **output_at(f"{any_site.settings.storage_url}/{uuid4().hex}", name))
    any_site.control.plan(spec.id)
    any_site.work(spec)
    record = any_site.ledger.records(spec.id)[0]
    assert isinstance(record, SegmentRecord)
    assert record.output is not None
    monkeypatch.setattr(joining, "PART_BYTES", record.output.size * 5 // 2)
    with monkeypatch.context() as patch:
        # All is joined, and the manifest not yet written.
        patch.setattr("jobs.assemble._publish", crash)
        with pytest.raises(Crashed):
            any_site.control.assemble(spec.id)
    first = snapshot(any_site, spec.output_url)
    assert len(any_site.ledger.records(spec.id)) == 5
    assert len(first) == (len(["0 1", "2 3", "4", "manifest", "card"]) if spec.output.folder else 1)
    any_site.stores.delete(first)
    any_site.control.assemble(spec.id)
    assert any_site.ledger.state(spec.id) == "completed"
    assert snapshot(any_site, spec.output_url) == first


def test_two_assemblers_at_once_write_one_table(site: Site, parquet: dict[str, Any]) -> None:
    spec = site.submit(MIXED, **parquet)
    site.control.plan(spec.id)
    site.work(spec)
    together = threading.Barrier(2)

    def keep_step() -> None:
        with suppress(threading.BrokenBarrierError):
            together.wait(5)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(assemble, spec, site.ledger, site.stores, keep_step) for _ in range(2)]
    assert [run.result() for run in runs] == [None, None]
    assert site.ledger.state(spec.id) == "completed"
    assert table_of(site, spec).column("n").to_pylist() == list(range(10))


def test_the_manifest_of_a_folder_says_what_its_parts_are(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "PART_BYTES", 1)
    spec = done(site, MIXED, **output_at(tmp_path, "parquet/"))
    said = json.loads((tmp_path / "parquet" / "_manifest.json").read_bytes())
    assert [part["name"] for part in said["parts"]] == [f"part-{n:05}.parquet" for n in range(3)]
    for part in said["parts"]:
        data = (tmp_path / "parquet" / part["name"]).read_bytes()
        assert (part["bytes"], part["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert part["rows"] == pq.read_metadata(pa.BufferReader(data)).num_rows
    assert (said["rows"], said["ok"], said["failed"], said["usage"]["prompt_tokens"]) == (10, 8, 2, 24)
    assert said["schema"][:2] == [{"name": "text", "type": "string"}, {"name": "n", "type": "int64"}]
    assert manifest(site, spec).output.size == said["bytes"] == sum(part["bytes"] for part in said["parts"])
    assert (manifest(site, spec).output.url, manifest(site, spec).output.lines) == (f"file://{tmp_path}/parquet/", 10)


def test_small_segments_share_a_part_whose_digest_is_that_of_its_bytes(site: Site, tmp_path: Path) -> None:
    done(site, MIXED, **output_at(tmp_path, "jsonl.gz/"))
    (part,) = json.loads((tmp_path / "jsonl.gz" / "_manifest.json").read_bytes())["parts"]
    data = (tmp_path / "jsonl.gz" / part["name"]).read_bytes()
    assert (part["rows"], part["sha256"]) == (10, hashlib.sha256(data).hexdigest())


def test_parts_of_a_stopped_assembly_that_are_not_part_of_the_result_are_taken_away(site: Site, tmp_path: Path) -> None:
    """It had found smaller segments than were there in the end."""
    spec = site.submit(MIXED, **output_at(tmp_path, "parquet/"))
    site.control.plan(spec.id)
    site.work(spec)
    for name in ("part-00007.parquet", "part-of-another.txt"):
        site.stores.put(spec.output_url + name, b"old")
    site.control.assemble(spec.id)
    assert [Path(file).name for file in files_of(spec)] == ["part-00000.parquet", "part-of-another.txt"]


def test_a_dead_shard_of_a_table_is_rows_with_errors(site: Site, parquet: dict[str, Any]) -> None:
    spec = site.submit(prompts(6), max_tries=1, **parquet)
    site.control.plan(spec.id)
    lease = site.lease(spec)
    assert lease is not None
    assert site.ledger.release(lease, "the worker ran out of memory")
    site.work(spec)
    site.control.assemble(spec.id)
    rows = table_of(site, spec).to_pylist()
    assert [row["prompt"] for row in rows] == [f"question {n}" for n in range(6)]
    assert [row["error"] and row["error"]["code"] for row in rows] == ["engine_error"] * 4 + [None] * 2


def run_table(site: Site, folder: Path, table: pa.Table, name: str, group: int = 3) -> JobSpec:
    """A job on a table, in row groups of so many rows, that has been run to its end."""
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "in.parquet", row_group_size=group)
    spec = prepare(
        str(folder / "in.parquet"),
        model="tiny",
        stores=site.stores,
        settings=site.settings,
        rows=RecordRows(prompt_column="prompt"),
        output=f"{folder}/{name}",
        output_format=name.rstrip("/") if name.endswith("/") else None,  # type: ignore[arg-type]
    )
    enter(spec, site.ledger, site.stores, site.tokens)
    site.control.plan(spec.id)
    site.work(spec)
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == "completed"
    return spec


def asked_of(table: pa.Table) -> pa.Table:
    return table.append_column("prompt", pa.array([f"question {n}" for n in range(table.num_rows)]))


def as_they_pass(path: Path) -> pa.Table:
    """What of a file's columns is in an output: all, in types that are written as they are read."""
    table = pq.read_table(path)
    return cast_table(table, [without_nulls(plain(kind)) for kind in table.schema.types])


HYPOTHESIS = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(table=tables(min_rows=1, max_rows=8), name=st.sampled_from(["out.parquet", "parquet/"]))
@HYPOTHESIS
def test_columns_of_a_table_pass_through_unchanged_as_pyarrow_duckdb_and_pandas_read_them(
    table: pa.Table, name: str, site: Site, tmp_path: Path
) -> None:
    asked = asked_of(table)
    spec = run_table(site, tmp_path / uuid4().hex, asked, name)
    expected = as_they_pass(Path(path_of(spec)).parent / "in.parquet")
    found = pa.dataset.dataset(path_of(spec), format="parquet").to_table()
    assert found.column("response").to_pylist() == [f"answer {n}" for n in range(table.num_rows)]
    assert str(expected.to_pydict()) == str(asked.to_pydict())
    assert found.select(asked.column_names).schema.types == expected.schema.types
    frame = pd.read_parquet(path_of(spec), dtype_backend="pyarrow")
    files = f"{path_of(spec)}{'part-*' if spec.output.folder else ''}"
    of_duckdb = duckdb.sql(f"select * from read_parquet('{files}')").to_arrow_table()
    for column in asked.column_names:
        assert same(found[column], expected[column])
        assert same(pa.chunked_array([pa.array(frame[column])]), expected[column])
        # It has other types for some: 64-bit integers for durations, floating point for the longest decimals.
        assert same(of_duckdb[column], expected[column].cast(of_duckdb[column].type))


def same(some: pa.ChunkedArray, others: pa.ChunkedArray) -> bool:
    """As text, since NaN is no NaN."""
    return str(some.to_pylist()) == str(others.to_pylist())


@given(table=tables(min_rows=1, max_rows=8), name=st.sampled_from([form for form in FORMS if "jsonl" in form]))
@HYPOTHESIS
def test_columns_of_a_table_are_in_json_lines_as_duckdb_and_pandas_read_them(
    table: pa.Table, name: str, site: Site, tmp_path: Path
) -> None:
    folder = tmp_path / uuid4().hex
    spec = run_table(site, folder, asked_of(table), name)
    (batch,) = pq.read_table(folder / "in.parquet").combine_chunks().to_batches()
    expected = [json.loads(line) for line in json_rows(batch)]
    if any(type(row) is list for row in expected):
        return  # a year that is none: the row is refused, which other tests are about
    names = [*batch.schema.names, "response"]
    for row, record in enumerate(expected):
        record["response"] = f"answer {row}"
    files = f"{path_of(spec)}{'part-*' if spec.output.folder else ''}"
    columns = dict.fromkeys(names, "JSON")
    read = duckdb.sql(f"select * from read_json('{files}', columns={columns})").fetchall()
    assert [[None if value is None else json.loads(value) for value in row] for row in read] == [
        [record[column] for column in names] for record in expected
    ]
    frame = pd.concat([pd.read_json(file, lines=True, dtype=False) for file in files_of(spec)])
    assert list(frame["response"]) == [f"answer {n}" for n in range(table.num_rows)]
    assert set(names) <= set(frame.columns)


def test_a_part_of_a_struct_of_views_is_written(site: Site, tmp_path: Path) -> None:
    """As other libraries than pyarrow write them: Arrow itself cannot write these columns sliced."""
    kind = pa.struct([("text", pa.string_view()), ("data", pa.list_(pa.binary_view()))])
    table = pa.table({"views": pa.array([{"text": f"{n}", "data": [b"x"]} for n in range(9)], kind)})
    spec = run_table(site, tmp_path / "views", asked_of(table), "out.parquet", group=9)
    found = pq.read_table(path_of(spec)).column("views")
    assert found.type == pa.struct([("text", pa.string()), ("data", pa.list_(pa.field("element", pa.binary())))])
    assert found.to_pylist() == table.column("views").to_pylist()


def test_dictionaries_in_lists_and_structs_are_written_as_their_values(site: Site, tmp_path: Path) -> None:
    """Arrow reads them over one row group and no further: the segments of a job could not be joined."""
    colour = pa.dictionary(pa.int8(), pa.string())
    kind = pa.struct([("one", colour), ("some", pa.list_(colour))])
    table = pa.table({"nested": pa.array([{"one": "red", "some": ["red", None]}, None] * 6, kind)})
    spec = run_table(site, tmp_path / "colours", asked_of(table), "out.parquet")
    found = pq.read_table(path_of(spec)).column("nested")
    assert found.type == pa.struct([("one", pa.string()), ("some", pa.list_(pa.field("element", pa.string())))])
    assert found.to_pylist() == table.column("nested").to_pylist()


def test_nulls_without_a_type_are_strings_in_structs_and_lists_too(site: Site, tmp_path: Path) -> None:
    columns = {"a": pa.nulls(3), "b": pa.array([[None], None, []]), "c": pa.array([{"x": None}, None, {"x": None}])}
    spec = run_table(site, tmp_path / "nulls", asked_of(pa.table(columns)), "out.parquet")
    found = pq.read_table(path_of(spec))
    assert [str(found.schema.field(name).type) for name in "abc"] == [
        "string",
        "list<element: string>",
        "struct<x: string>",
    ]
    assert found.select(["a", "b", "c"]).to_pydict() == pa.table(columns).to_pydict()
