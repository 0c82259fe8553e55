"""A plan covers its input exactly, is the same each time, and names everything that cannot run."""

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import InputChanged, PagemillError, RowError, UnreadableJob
from jobs.formats.jsonl import dumps
from jobs.planner import SHARDS_OF_A_SIZE, Plan, Planned, Shard, dump_plan, load_plan, plan, shard_rows
from jobs.quick_check import ANSWER_TOKENS
from jobs.rows import Row
from jobs.settings import Settings
from jobs.shards import FIRST_ERRORS, dump_shard, load_shard
from jobs.spec import Input, InputFile, JobSpec
from jobs.storage import FileStore, Stores
from tests.jobs.specs import openai_spec, record_spec, request
from tests.servers import BUCKET, S3Server

STORE = FileStore()


def job(path: Path, data: bytes, spec: Callable[..., JobSpec] = record_spec, **fields: Any) -> JobSpec:
    info = STORE.put(str(path), data)
    return spec(input=Input(files=(InputFile(url=info.url, size=info.size, etag=info.etag),)), **fields)


def cut(rows: int = 1000, tokens: int = 1_000_000) -> Settings:
    return Settings(max_shard_rows=rows, min_shard_tokens=tokens)


def records(*prompts: Any) -> bytes:
    return b"".join(dumps({"prompt": prompt}) + b"\n" for prompt in prompts)


def everything(planned: Planned) -> list[tuple[int | None, str]]:
    return [(error.line, error.code) for error in planned.errors]


lines = st.sampled_from(
    [b'{"prompt":"a"}', b'{"prompt":"b","max_tokens":50}', b'{"prompt":""}', b"{", b"", b"  "]
    + [b'{"prompt":"' + b"x" * 2000 + b'"}']
    + [b'{"prompt":"c","custom_id":"%d"}' % number for number in range(3)]
)
ends = st.sampled_from([b"\n", b"\r\n"])


@given(
    parts=st.lists(st.tuples(lines, ends), max_size=25),
    last_end=st.booleans(),
    rows=st.integers(1, 6),
    tokens=st.sampled_from([1, 300, 10**6]),
)
@settings(max_examples=150)
def test_shards_cover_rows_and_bytes_exactly(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[bytes, bytes]], last_end: bool, rows: int, tokens: int
) -> None:
    data = b"".join(line + end for line, end in parts)
    data = data if last_end else data.removesuffix(b"\n")
    spec = job(tmp_path_factory.getbasetemp() / "in.jsonl", data, max_line_bytes=1024)
    expected = [line for line, _ in parts if line.strip()]
    if not expected:
        with pytest.raises(PagemillError, match="no rows"):
            plan(spec, STORE, cut(rows, tokens))
        return
    planned = plan(spec, STORE, cut(rows, tokens))
    assert planned.rows == len(expected)
    assert [shard.index for shard in planned.shards] == list(range(len(planned.shards)))
    assert all(1 <= shard.rows <= rows for shard in planned.shards)
    assert planned.shards[0].start == planned.shards[0].first_row == 0
    assert planned.shards[-1].end == len(data)
    for left, right in pairwise(planned.shards):
        assert (left.end, left.first_row + left.rows) == (right.start, right.first_row)
        assert data[left.end - 1 : left.end] == b"\n"
    seen = [row for shard in planned.shards for row in shard_rows(spec, STORE, shard)]
    assert [row.index for row in seen] == list(range(len(expected)))
    assert [row.line.data for row in seen] == [line if len(line) <= 1024 else None for line in expected]
    refused = [row.row for row in seen if isinstance(row.row, RowError)]
    assert refused == list(planned.errors)
    assert planned.bad == len(refused)
    assert all(data[error.byte or 0 :].startswith(row.line.data or b"{") for row, error in _refused(seen))


def _refused(seen: list[Any]) -> list[tuple[Any, RowError]]:
    return [(row, row.row) for row in seen if isinstance(row.row, RowError)]


def test_a_plan_is_the_same_each_time_and_reads_back(tmp_path: Path) -> None:
    spec = job(tmp_path / "in", records("a", 5, "b", "c", "") * 30)
    first, second = plan(spec, STORE, cut(7)), plan(spec, STORE, cut(7))
    assert dump_plan(first) == dump_plan(second)
    assert load_plan(dump_plan(first)) == Plan(first.rows, first.bad, first.shards, first.first_errors, first.in_runs)
    assert len(first.shards) == 22


def test_a_shard_is_cut_at_its_tokens_and_at_its_rows(tmp_path: Path) -> None:
    line = dumps({"prompt": "x" * 400, "max_tokens": 100}) + b"\n"
    spec = job(tmp_path / "in", line * 20)
    tokens_of_a_row = len(line) // 4 + 100
    assert [shard.rows for shard in plan(spec, STORE, cut(tokens=tokens_of_a_row * 3)).shards] == [3] * 6 + [2]
    assert [shard.rows for shard in plan(spec, STORE, cut(rows=8)).shards] == [8, 8, 4]
    assert [shard.rows for shard in plan(spec, STORE, cut(tokens=1)).shards] == [1] * 20


def test_a_large_input_has_larger_shards_more_than_it_has_many(tmp_path: Path) -> None:
    spec = job(tmp_path / "in", b'{"prompt":"x"}\n' * (4 * SHARDS_OF_A_SIZE))
    sizes = Counter(shard.rows for shard in plan(spec, STORE, cut(rows=1)).shards)
    assert sizes == {1: SHARDS_OF_A_SIZE, 2: SHARDS_OF_A_SIZE, 4: SHARDS_OF_A_SIZE // 4}
    a_row = ANSWER_TOKENS + len(b'{"prompt":"x"}') // 4
    rows = [shard.rows for shard in plan(spec, STORE, cut(tokens=a_row + 1)).shards]
    assert set(rows[:SHARDS_OF_A_SIZE]) == {2}
    assert set(rows[SHARDS_OF_A_SIZE:-1]) == {3}


def test_the_jobs_own_answer_limit_counts(tmp_path: Path) -> None:
    spec = job(tmp_path / "in", records(*["x"] * 10))
    longer = spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"max_tokens": 10_000})})
    assert len(plan(spec, STORE, cut(tokens=9_000)).shards) == 1
    assert len(plan(longer, STORE, cut(tokens=9_000)).shards) == 10


def test_all_bad_rows_are_listed_with_line_and_byte(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"prompt":"a"}\r\n\r\n{"prompt":5}\n{"prompt":"b"}\nnonsense'
    planned = plan(job(tmp_path / "in", data), STORE, cut())
    assert [(e.line, e.byte, e.code) for e in planned.errors] == [
        (3, data.index(b'{"prompt":5}'), "invalid_type"),
        (5, data.index(b"nonsense"), "invalid_json_line"),
    ]
    assert (planned.rows, planned.bad) == (4, 2)
    assert list(planned.first_errors) == list(planned.errors)


def test_of_many_errors_the_first_hundred_are_kept_and_all_can_be_read(tmp_path: Path) -> None:
    planned = plan(job(tmp_path / "in", b"{\n" * 1000), STORE, cut())
    assert planned.bad == 1000
    assert [error.line for error in planned.first_errors] == list(range(1, FIRST_ERRORS + 1))
    assert [error.line for error in planned.errors] == list(range(1, 1001))
    assert everything(planned) == everything(planned)


def test_a_repeated_custom_id_is_refused_each_time_but_the_first(tmp_path: Path) -> None:
    ids = ["a", "b", "a", "c", "bad", "b", "a"]
    bad = {"echo": True}
    data = b"".join(dumps(request(custom_id=name, body=bad if name == "bad" else {})) + b"\n" for name in ids)
    spec = job(tmp_path / "in", data, openai_spec)
    planned = plan(spec, STORE, cut(rows=3))
    assert everything(planned) == [
        (3, "duplicate_custom_id"),
        (5, "unsupported_parameter"),
        (6, "duplicate_custom_id"),
        (7, "duplicate_custom_id"),
    ]
    duplicate = next(iter(planned.errors))
    assert (duplicate.custom_id, duplicate.param) == ("a", "custom_id")
    assert data[duplicate.byte or 0 :].startswith(b'{"custom_id":"a"')
    assert [shard.duplicates for shard in planned.shards] == [0b100, 0b100, 0b001]
    ran = [row.index for shard in planned.shards for row in shard_rows(spec, STORE, shard) if isinstance(row.row, Row)]
    assert ran == [0, 1, 3]


def test_a_refused_row_does_not_take_its_custom_id(tmp_path: Path) -> None:
    data = b"".join(dumps(request(custom_id="a", body=body)) + b"\n" for body in ({"echo": True}, {}))
    planned = plan(job(tmp_path / "in", data, openai_spec), STORE, cut())
    assert everything(planned) == [(1, "unsupported_parameter")]


def test_records_may_repeat_anything_but_a_custom_id(tmp_path: Path) -> None:
    data = records("x", "x") + b'{"custom_id":"a","prompt":"x"}\n' * 2 + b'{"custom_id":1,"prompt":"x"}\n' * 2
    assert everything(plan(job(tmp_path / "in", data), STORE, cut())) == [(4, "duplicate_custom_id")]


def test_ids_whose_hashes_collide_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second hash of an id, that of a longer text, is left as it is.
    monkeypatch.setattr("jobs.duplicates.hash", lambda text: len(text) if len(text) < 3 else hash(text), raising=False)
    data = b"".join(dumps({"custom_id": name, "prompt": "x"}) + b"\n" for name in ("aa", "bb", "aa", "c", "bb"))
    assert everything(plan(job(tmp_path / "in", data), STORE, cut())) == [
        (3, "duplicate_custom_id"),
        (5, "duplicate_custom_id"),
    ]


def test_repeats_are_found_among_more_ids_than_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.duplicates._RUN", 20)
    monkeypatch.setattr("jobs.duplicates._BATCH", 10)
    names = [f"id-{number}" for number in range(95)]
    data = b"".join(dumps({"custom_id": name, "prompt": "x"}) + b"\n" for name in [*names, "id-93", "id-2", "new"])
    assert everything(plan(job(tmp_path / "in", data), STORE, cut())) == [
        (96, "duplicate_custom_id"),
        (97, "duplicate_custom_id"),
    ]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n\t"])
def test_an_input_without_rows_is_no_job(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(PagemillError) as raised:
        plan(job(tmp_path / "in", data), STORE, cut())
    assert raised.value.code == "empty_file"


def test_an_input_that_was_overwritten_is_no_longer_the_jobs(tmp_path: Path) -> None:
    spec = job(tmp_path / "in", records("a", "b"))
    shard = plan(spec, STORE, cut()).shards[0]
    STORE.put(spec.input.files[0].url, records("c", "d"))
    with pytest.raises(InputChanged, match="in"):
        plan(spec, STORE, cut())
    with pytest.raises(InputChanged):
        list(shard_rows(spec, STORE, shard))


def test_the_input_may_be_in_s3(moto_s3: S3Server) -> None:
    stores = Stores(moto_s3.settings())
    info = stores.put(f"s3://{BUCKET}/planner/in.jsonl", records("a", 5, "b"))
    spec = record_spec(input=Input(files=(InputFile(url=info.url, size=info.size, etag=info.etag),)))
    planned = plan(spec, stores, cut(rows=2))
    rows = [row.row for shard in planned.shards for row in shard_rows(spec, stores, shard)]
    assert [row.line for row in rows if isinstance(row, Row)] == [1, 3]
    stores.put(info.url, records("c"))
    with pytest.raises(InputChanged):
        list(shard_rows(spec, stores, planned.shards[0]))


def test_a_shard_of_another_plan_is_found_out(tmp_path: Path) -> None:
    spec = job(tmp_path / "in", records("a", "b"))
    with pytest.raises(InputChanged, match="3 were planned"):
        list(shard_rows(spec, STORE, Shard(0, 0, 3, 0, spec.input.size, 1, 0)))


def test_planning_tells_how_far_it_is(tmp_path: Path) -> None:
    data = records(*["x" * 1000] * 20_000)
    heard: list[tuple[int, int]] = []
    planned = plan(job(tmp_path / "in", data), STORE, cut(), lambda rows, size: heard.append((rows, size)))
    assert heard == sorted(heard)
    assert heard[-1] == (planned.rows, len(data))
    assert max(right[1] - left[1] for left, right in pairwise(heard)) <= 8 << 20


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    limit = 1 << 20
    with (tmp_path / "in").open("wb") as file:
        for number in range(5):
            file.write(records(*["x" * 1000] * 5_000))
            file.write(b"{" if number else b"x" * (40 << 20))
            file.write(b"\n" * 5)
    info = STORE.head(str(tmp_path / "in"))
    spec = record_spec(
        input=Input(files=(InputFile(url=info.url, size=info.size, etag=info.etag),)), max_line_bytes=limit
    )
    tracemalloc.start()
    try:
        planned = plan(spec, STORE, cut())
        # Two chunks of 8 MiB, and the lines into which one of them is split.
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert everything(planned) == [(5001, "line_too_long")] + [
        (5001 + number * 5005, "invalid_json_line") for number in range(1, 5)
    ]


def test_a_shard_reads_back_and_is_small() -> None:
    for shard in (Shard(3, 30, 10, 999, 1999, 31, 3), Shard(3, 30, 10, 999, 1999, 31, 7, 0b100000001)):
        assert load_shard(dump_shard(shard)) == shard
        assert len(dump_shard(shard)) < 120


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-20],
        lambda data: b"\n".join(data.splitlines()[:-1]),
        lambda data: data.replace(b'"format":1', b'"format":0'),
    ],
)
def test_half_a_plan_is_no_plan(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    data = dump_plan(plan(job(tmp_path / "in", records("a", "b")), STORE, cut(1)))
    with pytest.raises(PagemillError) as raised:
        load_plan(damage(data))
    assert raised.value.code == "bad_plan"
    assert json.loads(data.splitlines()[0])["shards"] == 2


@pytest.mark.parametrize(("ours", "newer"), [(b'"format":1', b'"format":2'), (b'"index":0', b'"index":0,"skip":[]')])
def test_a_plan_of_a_newer_version_is_told_from_a_broken_one(tmp_path: Path, ours: bytes, newer: bytes) -> None:
    data = dump_plan(plan(job(tmp_path / "in", records("a", "b")), STORE, cut(1)))
    assert ours in data
    with pytest.raises(UnreadableJob):
        load_plan(data.replace(ours, newer))
