"""The form of an output: what a name says, what the flag says, and what is refused where they do not agree."""

from pathlib import Path
from typing import Any

import pytest

from jobs.errors import UsageError
from jobs.output import Output, OutputFormat, errors_beside, output_of
from jobs.settings import Settings
from jobs.spec import JobSpec, RecordRows
from jobs.storage import Stores
from jobs.submit import prepare

LINES, GZIP, ZSTD = Output(), Output(compression="gzip"), Output(compression="zstd")
TABLE = Output(format="parquet")


@pytest.mark.parametrize(
    ("url", "flag", "form"),
    [
        (None, None, LINES),
        (None, "parquet", TABLE),
        ("out.jsonl", None, LINES),
        ("s3://b/out.JSONL.GZ", None, GZIP),
        ("out.ndjson.zst", "jsonl.zst", ZSTD),
        ("a.jsonl/out.parquet", None, TABLE),
        ("out", None, LINES),
        ("out.part", "jsonl.gz", GZIP),
        ("out.2024", "parquet", TABLE),
        ("out/", None, Output(folder=True)),
        ("s3://b/out.parquet/", "parquet", Output(format="parquet", folder=True)),
        ("out/", "jsonl.zst", Output(compression="zstd", folder=True)),
    ],
)
def test_the_name_says_the_form_and_the_flag_what_the_name_leaves_open(
    url: str | None, flag: OutputFormat | None, form: Output
) -> None:
    assert output_of(url, flag) == form


@pytest.mark.parametrize(
    ("url", "flag", "words"),
    [
        ("out.jsonl", "parquet", "--output-format parquet contradicts the output's name, out.jsonl"),
        ("out.parquet", "jsonl", "is that of parquet"),
        ("out.jsonl.gz", "jsonl", "is that of jsonl.gz"),
        ("out.csv", None, "ends with .csv"),
        ("out.csv", "jsonl", "ends with .csv"),
        ("out.jsonl.bz2", None, "ends with .bz2"),
        ("out.parquet.gz", "parquet", "ends with .gz"),
    ],
)
def test_a_contradiction_is_refused_and_names_the_flag(url: str, flag: OutputFormat | None, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        output_of(url, flag)
    assert caught.value.code == "output_format"
    assert "--output-format" in caught.value.message


@pytest.mark.parametrize(
    ("url", "errors"),
    [
        ("file:///a/out.jsonl", "file:///a/out.errors.jsonl"),
        ("s3://b/out.jsonl.gz", "s3://b/out.errors.jsonl"),
        ("s3://b/out.parquet", "s3://b/out.errors.jsonl"),
        ("s3://b/out.parquet/", "s3://b/out.parquet.errors.jsonl"),
        ("file:///a/out", "file:///a/out.errors.jsonl"),
    ],
)
def test_the_errors_lie_beside_the_output_and_never_in_its_folder(url: str, errors: str) -> None:
    assert errors_beside(url) == errors


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"q": "a"}\n')
    return tmp_path


def prepared(folder: Path, output: str, flag: OutputFormat | None = None, **fields: Any) -> JobSpec:
    config = Settings(storage=str(folder / "store"))
    return prepare(
        "in.jsonl",
        model="tiny",
        stores=Stores(config),
        settings=config,
        rows=RecordRows(prompt_column="q"),
        output=output,
        output_format=flag,
        **fields,
    )


def test_a_folder_that_is_not_there_yet_is_an_output(folder: Path) -> None:
    spec = prepared(folder, "sub/out/", "parquet")
    assert spec.output == Output(format="parquet", folder=True)
    assert (spec.output_url, spec.error_url) == (
        f"file://{folder}/sub/out/",
        f"file://{folder}/sub/out.errors.jsonl",
    )
    assert not (folder / "sub").exists()


def test_a_folder_with_something_in_it_is_refused(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.parquet").touch()
    with pytest.raises(UsageError, match="not empty: it holds part-00000") as caught:
        prepared(folder, "out/")
    assert caught.value.code == "output_not_empty"


def test_a_run_that_is_taken_up_may_have_left_parts_there(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.jsonl").touch()
    assert prepared(folder, "out/", taken_up=True).output.folder


def test_a_whole_bucket_is_no_output(folder: Path) -> None:
    with pytest.raises(UsageError, match="is a whole bucket"):
        prepared(folder, "s3://bucket/", "parquet")


def test_the_name_without_a_url_has_the_form_s_suffix(folder: Path) -> None:
    spec = prepared(folder, "", "jsonl.zst")
    assert spec.output_url == f"{spec.layout.root}/output.jsonl.zst"
    assert spec.error_url == f"{spec.layout.root}/output.errors.jsonl"
