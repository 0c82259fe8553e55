"""How inputs are named: paths, folders, globs, keys and standard input, in one order on every machine."""

import bz2
import contextlib
import gzip
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import UsageError
from jobs.inputs import MAX_FILES, find_files
from tests.jobs.test_formats_text import Bench, bench_in, lines


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return bench_in(tmp_path)


def found(bench: Bench, *sources: str) -> list[str]:
    """The files that the sources name, as paths in the bench's folder."""
    prefix = f"file://{bench.folder}/"
    return [url.removeprefix(prefix) for url in find_files([str(bench.folder / s) for s in sources], bench.stores)]


def fill(bench: Bench, *names: str) -> None:
    for name in names:
        bench.file(name, lines(name))


def test_a_folder_is_all_files_below_it_in_the_byte_order_of_their_paths(bench: Bench) -> None:
    names = ["B.jsonl", "a-b.jsonl", "a/1.jsonl", "a/10.jsonl", "a/2.jsonl.gz", "é.jsonl", "\U0001f600.ndjson"]
    for name in reversed(names):
        bench.file(name, gzip.compress(lines(name)) if name.endswith(".gz") else lines(name))
    fill(bench, "_SUCCESS", ".hidden.jsonl", "a/_part.jsonl", "a/.git/x.jsonl", "_temporary/y.jsonl")
    assert found(bench, ".") == sorted(names, key=os.fsencode)
    assert bench.prompts(".") == sorted(names, key=os.fsencode)


def test_sources_come_in_the_order_in_which_they_are_named(bench: Bench) -> None:
    fill(bench, "b/2.jsonl", "b/1.jsonl", "a.jsonl", "c.jsonl")
    assert found(bench, "c.jsonl", "b", "a*") == ["c.jsonl", "b/1.jsonl", "b/2.jsonl", "a.jsonl"]


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("*.jsonl", ["[x].jsonl", "a.jsonl", "b.jsonl"]),
        ("?.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[ab].jsonl", ["a.jsonl", "b.jsonl"]),
        ("[!a].jsonl", ["b.jsonl"]),
        ("[^a].jsonl", ["a.jsonl"]),
        ("[[]x].jsonl", ["[x].jsonl"]),
        ("[x].jsonl", ["[x].jsonl"]),
        ("**/*.jsonl", ["[x].jsonl", "a.jsonl", "b.jsonl", "d/c.jsonl", "d/e/f.jsonl"]),
        ("d/**", ["d/c.jsonl", "d/e/f.jsonl"]),
        ("d/*", ["d/c.jsonl"]),
        ("*/*.jsonl", ["d/c.jsonl"]),
        ("[a-b]*", ["a.jsonl", "b.jsonl"]),
    ],
)
def test_a_glob_matches_as_in_a_shell_and_stars_do_not_cross_folders(bench: Bench, glob: str, names: list[str]) -> None:
    fill(bench, "a.jsonl", "b.jsonl", "[x].jsonl", "d/c.jsonl", "d/e/f.jsonl")
    assert found(bench, glob) == names


@given(st.text("ab[]!-*?\\/.^", min_size=1, max_size=8))
def test_no_glob_is_more_than_a_glob(tmp_path_factory: pytest.TempPathFactory, glob: str) -> None:
    bench = bench_in(tmp_path_factory.getbasetemp() / "globs")
    fill(bench, "a.jsonl")
    with contextlib.suppress(UsageError):
        assert set(find_files([f"file://{bench.folder}/{glob}"], bench.stores)) <= {f"file://{bench.folder}/a.jsonl"}


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ((), "There is no input"),
        (("a.jsonl", "./a.jsonl"), "is named twice"),
        (("a.jsonl", "*"), "is named twice"),
        (("mixed",), "a file that is no input by its name: notes.txt"),
        (("nothing",), "There is no file"),
        (("noth*",), "No file matches"),
        (("[b-a].jsonl",), "is no glob"),
    ],
)
def test_what_cannot_be_found_is_said(bench: Bench, sources: tuple[str, ...], words: str) -> None:
    fill(bench, "a.jsonl", "mixed/notes.txt", "mixed/a.jsonl")
    with pytest.raises(UsageError, match=words):
        found(bench, *sources)


def test_formats_are_not_mixed_but_compressions_may_be(bench: Bench) -> None:
    bench.file("a.csv", b"prompt\na\n")
    bench.file("b.csv.gz", gzip.compress(b"prompt\nb\n"))
    bench.file("c.CSV.BZ2", bz2.compress(b"prompt\nc\n"))
    fill(bench, "d.jsonl")
    assert bench.prompts("a.csv", "b.csv.gz", "c.CSV.BZ2") == ["a", "b", "c"]
    with pytest.raises(UsageError, match=r"a\.csv is csv, and .*d\.jsonl is jsonl"):
        bench.job("a.csv", "d.jsonl")


def test_a_format_that_is_told_goes_before_what_names_say(bench: Bench) -> None:
    bench.file("export.txt", b"prompt\tid\na\t1\n")
    bench.file("more.csv", b"prompt\tid\nb\t2\n")
    assert bench.prompts("export.txt", "more.csv", format="tsv") == ["a", "b"]


def test_too_many_files_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.inputs.MAX_FILES", 3)
    fill(bench, *(f"{n}.jsonl" for n in range(4)))
    assert MAX_FILES >= 10_000
    with pytest.raises(UsageError, match="more than 3 files"):
        found(bench, ".")


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["a", "b"]}), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (lines("a", "b"), None),
        (gzip.compress(lines("a", "b")), None),
        (bz2.compress(lines("a", "b")), "jsonl"),
        (b"prompt\na\nb\n", "csv"),
        (gzip.compress(b"prompt\tx\na\t1\nb\t2\n"), "tsv"),
        (parquet_bytes(), "parquet"),
    ],
    ids=["lines", "gzip", "bz2", "csv", "tsv in gzip", "parquet"],
)
def test_standard_input_is_of_any_format_and_compression(
    bench: Bench, data: bytes, form: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.folder.parent)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    bench.folder = Path()
    spec = bench.job("-", format=form)
    assert spec.input.files[0].label == "standard input"
    assert [row.row.record["prompt"] for row in bench.rows(spec)] == ["a", "b"]


def test_an_empty_archive_is_none(bench: Bench) -> None:
    bench.file("a.jsonl.gz", b"")
    fill(bench, "b.jsonl")
    with pytest.raises(UsageError, match=r"a\.jsonl\.gz is empty"):
        bench.job("a.jsonl.gz", "b.jsonl")
