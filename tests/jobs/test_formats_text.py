"""Compressed files, CSV and several files at once: every row is there, in order, with its place, or a reason is."""

import bz2
import csv
import gzip
import io
import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import InputChanged, PagemillError, RowError
from jobs.formats import compressed
from jobs.formats.csv_rows import csv_to_jsonl
from jobs.formats.jsonl import dumps
from jobs.inputs import InputOptions
from jobs.planner import Planned, PlannedRow, plan, raw_lines, shard_rows
from jobs.rows import Row
from jobs.settings import Settings
from jobs.spec import JobSpec
from jobs.storage import Stores
from jobs.submit import enter, prepare
from tests.jobs.site import Site
from tests.jobs.specs import RecordRows
from tests.servers import BUCKET, S3Server


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstd, ".bz2": bz2.compress}


class Bench:
    """A folder with inputs, a place for jobs on them, and no processes."""

    def __init__(self, folder: Path, config: Settings) -> None:
        self.folder = folder
        self.settings = config
        self.stores = Stores(config)

    def write(self, **files: bytes) -> None:
        for name, data in files.items():
            self.file(name, data)

    def file(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)

    def job(self, *sources: str, column: str = "prompt", **options: Any) -> JobSpec:
        return prepare(
            [str(self.folder / source) if "://" not in source else source for source in sources],
            model="tiny",
            stores=self.stores,
            settings=self.settings,
            rows=RecordRows(prompt_column=column),
            input_options=InputOptions(**options),
        )

    def plan(self, spec: JobSpec) -> Planned:
        return plan(spec, self.stores, self.settings)

    def rows(self, spec: JobSpec, planned: Planned | None = None) -> list[PlannedRow]:
        shards = (planned or self.plan(spec)).shards
        return [row for shard in shards for row in shard_rows(spec, self.stores, shard)]

    def prompts(self, *sources: str, **options: Any) -> list[Any]:
        """The prompts of a job's rows as workers get them; of a bad row, its code."""
        spec = self.job(*sources, **options)
        planned = self.plan(spec)
        seen = self.rows(spec, planned)
        assert [row.index for row in seen] == list(range(planned.rows))
        assert planned.bad == sum(isinstance(row.row, RowError) for row in seen)
        assert [row.row for row in seen if isinstance(row.row, RowError)] == list(planned.errors)
        return [prompt_of(row.row) for row in seen]


def prompt_of(row: Row | RowError) -> Any:
    return row.code if isinstance(row, RowError) else row.record.get("prompt", row.record)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return bench_in(tmp_path)


def bench_in(folder: Path, rows: int = 3) -> Bench:
    config = Settings(state_dir=folder / "state", storage=f"file://{folder}/store", max_shard_rows=rows)
    return Bench(folder / "in", config)


def lines(*prompts: Any) -> bytes:
    return b"".join(dumps({"prompt": prompt}) + b"\n" for prompt in prompts)


def numbered(count: int, start: int = 0) -> list[str]:
    return [f"question {number}" for number in range(start, start + count)]


# --- compressed files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_is_read_whole_members_and_frames_and_all(bench: Bench, suffix: str) -> None:
    pack = COMPRESS[suffix]
    half = lines(*numbered(10))
    # The second member begins in the middle of a line.
    bench.file(f"a.jsonl{suffix}", pack(half[:100]) + pack(half[100:]) + pack(lines("last")[:-1]))
    assert bench.prompts(f"a.jsonl{suffix}") == [*numbered(10), "last"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_members_of_nothing_between_others_hold_nothing(bench: Bench, suffix: str) -> None:
    pack = COMPRESS[suffix]
    bench.file(f"a.jsonl{suffix}", pack(b"") + pack(lines("a")) + pack(b"") * 3 + pack(lines("b")) + pack(b""))
    assert bench.prompts(f"a.jsonl{suffix}") == ["a", "b"]


def test_thousands_of_small_streams_in_a_bz2_file_are_read_in_time(bench: Bench) -> None:
    bench.file("a.jsonl.bz2", bz2.compress(b"") * 100_000 + bz2.compress(lines("a")))
    started = time.process_time()
    assert bench.prompts("a.jsonl.bz2") == ["a"]
    assert time.process_time() - started < 10


def test_frames_of_zstd_that_hold_no_content_are_skipped(bench: Bench) -> None:
    skipped = struct.pack("<II", 0x184D2A50, 5) + b"notes"
    bench.file("a.jsonl.zst", skipped + zstd(lines("a")) + skipped + zstd(lines("b")) + skipped)
    assert bench.prompts("a.jsonl.zst") == ["a", "b"]


def test_a_zstd_window_that_is_too_large_is_said_to_be(bench: Bench) -> None:
    long = zstandard.ZstdCompressionParameters(window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=long).compressobj()
    bench.file("a.jsonl.zst", packer.compress(lines("a")) + packer.flush())
    with pytest.raises(PagemillError, match="window of more than 128 MiB") as raised:
        bench.plan(bench.job("a.jsonl.zst"))
    assert raised.value.code == "corrupt_input"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_truncated_archive_is_an_error_wherever_it_is_cut(bench: Bench, suffix: str) -> None:
    whole = COMPRESS[suffix](lines(*(f"{random.Random(n).random()}" for n in range(2000))))
    first = COMPRESS[suffix](lines("in a member of its own"))
    cuts = [*random.Random(7).sample(range(1, len(whole)), 12), 1, 2, 3, len(whole) - 1, len(whole) - 4]
    for cut in cuts:
        for before in (b"", first):
            bench.file(f"a.jsonl{suffix}", before + whole[:cut])
            with pytest.raises(PagemillError, match="cut off") as raised:
                bench.plan(bench.job(f"a.jsonl{suffix}"))
            assert raised.value.code == "truncated_input"
            assert f"a.jsonl{suffix}" in raised.value.message


@pytest.mark.parametrize("suffix", COMPRESS)
def test_what_is_no_archive_is_said_by_name(bench: Bench, suffix: str) -> None:
    bench.file(f"a.jsonl{suffix}", lines("a"))
    with pytest.raises(PagemillError, match=f"a.jsonl{suffix} cannot be decompressed") as raised:
        bench.plan(bench.job(f"a.jsonl{suffix}"))
    assert raised.value.code == "corrupt_input"


@pytest.mark.parametrize(
    ("data", "kind"), [(lines("a").decode().encode("utf-16"), "UTF-16"), (gzip.compress(lines("a")), "gzip")]
)
def test_what_is_no_text_under_the_name_of_json_lines_is_refused_with_what_it_may_be(
    bench: Bench, data: bytes, kind: str
) -> None:
    bench.file("a.jsonl", data)
    planned = bench.plan(bench.job("a.jsonl"))
    assert planned.bad == planned.rows > 0
    assert f"the line begins as {kind} does" in planned.first_errors[0].message


@pytest.mark.parametrize("suffix", COMPRESS)
def test_junk_behind_an_archive_is_an_error(bench: Bench, suffix: str) -> None:
    bench.file(f"a.jsonl{suffix}", COMPRESS[suffix](lines("a")) + b"and more")
    with pytest.raises(PagemillError):
        bench.plan(bench.job(f"a.jsonl{suffix}"))


def test_errors_in_a_compressed_file_name_line_and_byte_of_what_it_holds(bench: Bench) -> None:
    data = lines("a") + b"\r\n" + b'{"prompt": 5}\r\n' + lines("b")
    bench.file("a.jsonl.gz", gzip.compress(b"\xef\xbb\xbf" + data))
    planned = bench.plan(bench.job("a.jsonl.gz"))
    assert [(error.line, error.byte, error.code) for error in planned.errors] == [
        (3, 3 + data.index(b'{"prompt": 5}'), "invalid_type")
    ]


def test_a_decompression_bomb_is_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "UNCHECKED", 4 << 20)
    bench.file("a.jsonl.gz", gzip.compress(b" " * (40 << 20)))
    bench.file("b.jsonl.gz", gzip.compress(b" " * (3 << 20) + lines("a")))
    with pytest.raises(PagemillError) as raised:
        bench.plan(bench.job("a.jsonl.gz"))
    assert raised.value.code == "decompression_bomb"
    assert bench.prompts("b.jsonl.gz") == ["a"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv"])
def test_a_copy_of_more_bytes_than_may_be_is_an_error_and_leaves_nothing(bench: Bench, name: str) -> None:
    if name == "a.csv":
        # Each row of two bytes is a line with the header in it.
        bench.file(name, b"prompt," + b"x" * 1000 + b"\n" + b",\n" * 1000)
    else:
        bench.file(name, gzip.compress(lines("a") * 50_000))
    bench.settings = bench.settings.model_copy(update={"max_copy_bytes": 600_000})
    spec = bench.job(name)
    with pytest.raises(PagemillError, match="more than 600,000 bytes as JSON lines") as raised:
        bench.plan(spec)
    assert (raised.value.code, name in raised.value.message) == ("input_too_large", True)
    assert list(bench.stores.list(f"{spec.layout.root}/")) == []


def test_planning_twice_uses_the_copy_that_is_there(bench: Bench) -> None:
    bench.file("a.jsonl.gz", gzip.compress(lines(*numbered(7))))
    spec = bench.job("a.jsonl.gz")
    first, second = bench.plan(spec), bench.plan(spec)
    assert first.shards == second.shards
    assert len(list(bench.stores.list(f"{spec.layout.root}/in/"))) == 1


def test_a_compressed_file_that_changed_is_refused(bench: Bench) -> None:
    bench.file("a.jsonl.gz", gzip.compress(lines("a")))
    bench.file("b.jsonl.gz", gzip.compress(lines("b")))
    spec = bench.job("a.jsonl.gz", "b.jsonl.gz")
    bench.file("b.jsonl.gz", gzip.compress(lines("c")))
    with pytest.raises(InputChanged, match=r"b\.jsonl\.gz has changed"):
        bench.plan(spec)


# --- CSV -----------------------------------------------------------------------------------------------------------

cells = st.text(st.sampled_from('ab7,;"\n\t é\u2028\u0085\U0001f600 '), max_size=6)


@given(
    rows=st.lists(st.tuples(cells, cells), min_size=1, max_size=8),
    delimiter=st.sampled_from(",\t"),
    end=st.sampled_from(["\n", "\r\n"]),
    cut=st.integers(1, 40),
)
@settings(max_examples=200)
def test_csv_as_python_writes_it_is_read_as_it_was_however_it_is_cut(
    rows: list[tuple[str, str]], delimiter: str, end: str, cut: int
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end)
    writer.writerow(["x", "y"])
    writer.writerows(rows)
    data = text.getvalue().encode()
    chunks = [data[start : start + cut] for start in range(0, len(data), cut)]
    written = b"".join(csv_to_jsonl(chunks, delimiter, 1 << 20, "a.csv"))
    found = [json.loads(line) for line in written.split(b"\n") if line]
    assert found == [{"x": x, "y": y} for x, y in rows]
    assert written.count(b"\n") == data.count(b"\n")


@given(st.binary(max_size=200).map(lambda data: b"prompt\n" + data), st.integers(1, 50))
@settings(max_examples=200)
def test_whatever_bytes_a_csv_holds_each_line_is_a_row_a_part_of_one_or_refused(data: bytes, cut: int) -> None:
    chunks = [data[start : start + cut] for start in range(0, len(data), cut)]
    written = b"".join(csv_to_jsonl(chunks, ",", 60, "a.csv"))
    assert written.count(b"\n") == data.count(b"\n") + (not data.endswith(b"\n"))
    for line in written.split(b"\n"):
        assert not line or type(json.loads(line)) in (dict, list)


def test_values_of_a_csv_are_strings_and_line_numbers_its_own(bench: Bench) -> None:
    text = '\ufeffid,prompt\r\n007,"two\r\nlines, one row"\r\n\r\n8,a,b\r\n9,"x""y"\r\n10,\r\n'
    bench.file("a.csv", text.encode())
    spec = bench.job("a.csv")
    first, second, third, fourth = (row.row for row in bench.rows(spec))
    assert isinstance(first, Row)
    assert (first.line, first.record) == (2, {"id": "007", "prompt": "two\r\nlines, one row"})
    assert isinstance(second, RowError)
    assert (second.line, second.byte, second.code) == (5, None, "invalid_csv")
    assert "3 fields, and the header has 2" in second.message
    assert isinstance(third, Row)
    assert (third.line, third.record["prompt"]) == (6, 'x"y')
    assert isinstance(fourth, RowError)
    assert (fourth.line, fourth.param) == (7, "prompt")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (b'"abc"d', "expected after"),
        (b'"abc', "end of data"),
        (b"\xff\xfe", "not UTF-8"),
        (b"x" * 2000, "longer than 1024 bytes"),
        (b'"' + b"x\n" * 600, "a quote in it is never closed"),
    ],
)
def test_a_row_that_is_no_csv_is_refused_and_the_next_line_is_read(bench: Bench, row: bytes, words: str) -> None:
    bench.file("a.csv", b"prompt\nbefore\n" + row + b"\nafter\n")
    spec = bench.job("a.csv").model_copy(update={"max_line_bytes": 1024})
    planned = bench.plan(spec)
    assert planned.first_errors[0].line == 3
    assert words in planned.first_errors[0].message
    prompts = [prompt_of(row.row) for row in bench.rows(spec, planned)]
    assert prompts[:2] == ["before", "invalid_csv"]
    if row != b'"abc':
        assert prompts[-1] == "after"


@pytest.mark.parametrize(
    ("header", "words"),
    [(b"a,b,a\n", "'a' stands there twice"), ("a,b\n".encode("utf-16"), "not UTF-8"), (b'"a\n', "end of data")],
)
def test_a_header_that_names_no_columns_fails_the_job(bench: Bench, header: bytes, words: str) -> None:
    bench.file("a.csv", header)
    with pytest.raises(PagemillError, match=words) as raised:
        bench.plan(bench.job("a.csv"))
    assert raised.value.code == "invalid_csv_header"


def test_a_csv_of_only_a_header_has_no_rows(bench: Bench) -> None:
    bench.file("a.csv", b"prompt\n")
    with pytest.raises(PagemillError, match="no rows"):
        bench.plan(bench.job("a.csv"))


def test_a_tsv_in_an_archive(bench: Bench) -> None:
    bench.file("a.tsv.zst", zstd(b'id\tprompt\n1\ta, b\n2\t"c\td"\n'))
    assert bench.prompts("a.tsv.zst") == ["a, b", "c\td"]


# --- several files -------------------------------------------------------------------------------------------------


def test_files_follow_each_other_and_errors_name_theirs(bench: Bench) -> None:
    bench.file("b.jsonl", b"\xef\xbb\xbf" + lines("b1") + b"{\n" + lines("b2")[:-1])
    bench.file("a.jsonl", lines("a1", 5))
    bench.file("empty.jsonl", b"")
    bench.file("c.jsonl.gz", gzip.compress(lines("c1") + b"\n[]"))
    sources = ("b.jsonl", "a.jsonl", "empty.jsonl", "c.jsonl.gz")
    codes = ["invalid_json_line", "invalid_type", "not_an_object"]
    assert bench.prompts(*sources) == ["b1", codes[0], "b2", "a1", codes[1], "c1", codes[2]]
    planned = bench.plan(bench.job(*sources))
    folder = bench.folder
    assert [(error.file, error.line, error.byte) for error in planned.errors] == [
        (f"{folder}/b.jsonl", 2, 3 + len(lines("b1"))),
        (f"{folder}/a.jsonl", 2, len(lines("a1"))),
        (f"{folder}/c.jsonl.gz", 3, len(lines("c1")) + 1),
    ]


@given(
    files=st.lists(st.lists(st.sampled_from([b'{"prompt":"a"}', b"{", b"", b'{"prompt":""}']), max_size=5), max_size=5),
    last_end=st.booleans(),
    compress=st.lists(st.booleans(), min_size=5, max_size=5),
    rows=st.integers(1, 4),
)
@settings(max_examples=60)
def test_no_row_is_lost_or_doubled_over_files_and_shards(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[bytes]],
    last_end: bool,
    compress: list[bool],
    rows: int,
) -> None:
    bench = bench_in(tmp_path_factory.mktemp("files"), rows)
    names = []
    for place, content in enumerate(files):
        data = b"\n".join(content) + b"\n" * (last_end and bool(content))
        names.append(f"{place}.jsonl" + ".gz" * compress[place])
        bench.file(names[-1], gzip.compress(data) if compress[place] else data)
    expected = [
        (place, line + 1, text) for place, content in enumerate(files) for line, text in enumerate(content) if text
    ]
    if not expected:
        with pytest.raises(PagemillError):
            bench.plan(bench.job(*names))
        return
    spec = bench.job(*names)
    planned = bench.plan(spec)
    assert [(row.line.file, row.line.number, row.line.data) for row in bench.rows(spec, planned)] == expected
    assert sum(shard.rows for shard in planned.shards) == planned.rows == len(expected)
    assert b"".join(raw_lines(spec, bench.stores, planned.shards)) == b"".join(text + b"\n" for *_, text in expected)


def test_a_custom_id_is_unique_over_all_files(bench: Bench) -> None:
    bench.file("z.jsonl", b'{"prompt":"a","custom_id":"1"}\n{"prompt":5}\n')
    bench.file("a.jsonl", b'{"prompt":5}\n{"prompt":"b","custom_id":"1"}\n')
    planned = bench.plan(bench.job("z.jsonl", "a.jsonl"))
    assert [(Path(error.file or "").name, error.line, error.code) for error in planned.errors] == [
        ("z.jsonl", 2, "invalid_type"),
        ("a.jsonl", 1, "invalid_type"),
        ("a.jsonl", 2, "duplicate_custom_id"),
    ]


def test_one_file_of_several_that_changed_is_named(bench: Bench) -> None:
    bench.write(**{"a.jsonl": lines("a"), "b.jsonl": lines("b")})
    spec = bench.job("a.jsonl", "b.jsonl")
    planned = bench.plan(spec)
    bench.file("b.jsonl", lines("c"))
    with pytest.raises(InputChanged, match=r"b\.jsonl has changed"):
        bench.rows(spec, planned)


# --- a part of the rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_limit_takes_the_first_rows_bad_ones_too(bench: Bench, name: str) -> None:
    data = lines("a") + b"\n{\n" + lines("b", "c", "d", "e", "f")
    bench.file(name, gzip.compress(data) if name.endswith(".gz") else data)
    assert bench.prompts(name, limit=4) == ["a", "invalid_json_line", "b", "c"]
    assert len(bench.prompts(name, limit=100)) == 7


def test_a_limit_reads_no_further_than_it_must(bench: Bench) -> None:
    data = gzip.compress(lines(*(random.Random(n).random() for n in range(300_000))))
    bench.file("a.jsonl.gz", data[: len(data) // 2])
    bench.file("b.jsonl.gz", b"no archive")
    spec = bench.job("a.jsonl.gz", "b.jsonl.gz", limit=2)
    assert bench.plan(spec).rows == 2
    with pytest.raises(PagemillError):
        bench.plan(bench.job("a.jsonl.gz", "b.jsonl.gz"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.zst"])
def test_a_sample_is_drawn_by_its_seed_and_keeps_the_order(bench: Bench, name: str) -> None:
    data = b"prompt\n" + "\n".join(numbered(100)).encode() if name == "a.csv" else lines(*numbered(100))
    bench.file(name, zstd(data) if name.endswith(".zst") else data)
    first, again, other = (bench.prompts(name, sample=10, sample_seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == len(other) == 10
    assert first == sorted(first, key=lambda prompt: int(prompt.split()[1]))
    assert bench.prompts(name, sample=1000) == numbered(100)


def test_every_row_has_the_same_chance_of_being_drawn(bench: Bench) -> None:
    bench.file("a.jsonl", lines(*range(20)).replace(b":", b':"').replace(b"}", b'"}'))
    drawn = [int(prompt) for seed in range(200) for prompt in bench.prompts("a.jsonl", sample=5, sample_seed=seed)]
    # 200 draws at 1/4 are 50, and the standard deviation is 6.1.
    assert all(25 <= drawn.count(number) <= 75 for number in range(20))


# --- in buckets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_inputs_in_a_bucket_of_every_kind_and_spelling(kind: str, bench: Bench, request: pytest.FixtureRequest) -> None:
    s3: S3Server = request.getfixturevalue(f"{kind}_s3")
    prefix = f"s3://{BUCKET}/{uuid4().hex}"
    there = Bench(bench.folder, s3.settings(storage=f"{prefix}/store", max_shard_rows=2, state_dir=bench.folder))
    there.stores.put(f"{prefix}/data/b.jsonl", lines("b"))
    there.stores.put(f"{prefix}/data/a.jsonl.gz", gzip.compress(lines("a1", "a2")))
    there.stores.put(f"{prefix}/data/deep/c.jsonl", lines("c"))
    there.stores.put(f"{prefix}/data/_SUCCESS", b"")
    assert there.prompts(f"{prefix}/data/") == ["a1", "a2", "b", "c"]
    assert there.prompts(f"{prefix}/data/*.jsonl*") == ["a1", "a2", "b"]
    assert there.prompts(f"{prefix}/data/**/*.jsonl") == ["b", "c"]
    assert there.prompts(f"{prefix}/data/deep/c.jsonl", f"{prefix}/data/b.jsonl") == ["c", "b"]
    bench.file("local.csv.bz2", bz2.compress(b"prompt\nhere\n"))
    assert there.prompts("local.csv.bz2") == ["here"]
    spec = there.job("local.csv.bz2")
    assert spec.input.files[0].url == spec.layout.input(0, ".csv.bz2")


def test_a_job_on_a_compressed_csv_runs_to_its_end(any_site: Site) -> None:
    name = f"{any_site.settings.storage_url}/{uuid4().hex}.csv.gz"
    any_site.stores.put(
        name, gzip.compress(b"prompt,id\n" + b"".join(b"q%d,%d\n" % (n, n) for n in range(9)) + b"bad\n")
    )
    spec = prepare(
        name,
        model="tiny",
        stores=any_site.stores,
        settings=any_site.settings,
        rows=RecordRows(prompt_column="prompt"),
    )
    enter(spec, any_site.ledger, any_site.stores, any_site.tokens)
    any_site.control.plan(spec.id)
    any_site.work(spec)
    any_site.control.assemble(spec.id)
    rows = any_site.rows(spec.output_url)
    assert [row.get("id") for row in rows] == [*map(str, range(9)), None]
    assert rows[3]["response"] == "answer 3"
    assert rows[9]["error"]["code"] == "invalid_csv"
