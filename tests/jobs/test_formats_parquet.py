"""Parquet inputs: every row of every type, in any row groups, and only the rows and columns that are asked for."""

import io
import json
import math
import tracemalloc
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.errors import InputChanged, PagemillError, RowError, UsageError
from jobs.formats import parquet
from jobs.formats.arrow_types import plain
from jobs.formats.json_values import json_rows
from jobs.formats.where import parse_where
from jobs.inputs import InputOptions
from jobs.parquet_rows import read_batches
from jobs.planner import plan, raw_lines
from jobs.source import source_of
from jobs.spec import OpenAIRows
from jobs.submit import enter, prepare
from tests.jobs.site import Site
from tests.jobs.specs import RecordRows, request
from tests.jobs.test_formats_text import Bench, bench_in, numbered, prompt_of
from tests.servers import BUCKET, S3Server


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return bench_in(tmp_path)


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def prompts(count: int, **columns: list[Any]) -> pa.Table:
    return pa.table({"prompt": numbered(count), **columns})


@pytest.fixture(params=["as it is", "cut first"])
def group_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups that are small enough to be read in place, or too large."""
    if request.param == "cut first":
        monkeypatch.setattr(parquet, "MAX_GROUP_ROWS", 2)


@pytest.mark.usefixtures("group_rows")
def test_rows_come_in_order_over_files_and_row_groups(bench: Bench) -> None:
    bench.file("b.parquet", parquet_bytes(prompts(10), row_group_size=3))
    bench.file("a.parquet", parquet_bytes(pa.table({"prompt": ["last", None]})))
    bench.file("none.parquet", parquet_bytes(prompts(0)))
    sources = ("b.parquet", "none.parquet", "a.parquet")
    assert bench.prompts(*sources) == [*numbered(10), "last", "missing_required_parameter"]
    error = bench.plan(bench.job(*sources)).first_errors[0]
    assert (Path(error.file or "").name, error.line, error.byte) == ("a.parquet", 2, None)


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    group=st.integers(1, 5),
    rows=st.integers(1, 4),
    limit=st.one_of(st.none(), st.integers(1, 12)),
    large=st.integers(1, 6),
)
@settings(max_examples=60)
def test_however_rows_lie_in_groups_each_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], group: int, rows: int, limit: int | None, large: int
) -> None:
    bench = bench_in(tmp_path_factory.mktemp("groups"), rows)
    names, first = [], 0
    for place, count in enumerate(counts):
        names.append(f"{place}.parquet")
        bench.file(names[-1], parquet_bytes(pa.table({"prompt": numbered(count, first)}), row_group_size=group))
        first += count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "MAX_GROUP_ROWS", large)
        if not first:
            return
        assert bench.prompts(*names, limit=limit) == numbered(first)[:limit]


def test_large_groups_are_cut_once_with_only_the_columns_that_are_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_GROUP_ROWS", 5)
    table = prompts(20, keep=list(range(20)), odd=[n % 2 for n in range(20)], unused=["x"] * 20)
    bench.file("a.parquet", parquet_bytes(table))
    spec = bench.job("a.parquet", columns=("prompt", "keep"), where="odd = 1")
    assert spec.input.regroup
    planned = bench.plan(spec)
    assert [row.row.record["keep"] for row in bench.rows(spec, planned)] == list(range(1, 20, 2))
    (copy,) = bench.stores.list(f"{spec.layout.root}/in/")
    assert pq.read_schema(copy.url.removeprefix("file://")).names == ["prompt", "keep", "odd"]
    bench.plan(spec)
    assert len(list(bench.stores.list(f"{spec.layout.root}/in/"))) == 1


@pytest.mark.usefixtures("group_rows")
def test_a_sample_of_what_is_asked_for(bench: Bench) -> None:
    bench.file("a.parquet", parquet_bytes(prompts(60, even=[n % 2 == 0 for n in range(60)]), row_group_size=7))
    drawn, again, other = (
        bench.prompts("a.parquet", where="even = true", sample=10, sample_seed=seed) for seed in (3, 3, 4)
    )
    assert drawn == again != other
    numbers = [int(prompt.split()[1]) for prompt in drawn]
    assert len(numbers) == 10
    assert numbers == sorted(numbers)
    assert all(number % 2 == 0 for number in numbers)


def test_files_may_lack_columns_of_each_other_but_types_are_one(bench: Bench) -> None:
    bench.file("a.parquet", parquet_bytes(pa.table({"prompt": ["a"], "x": pa.nulls(1)})))
    bench.file("b.parquet", parquet_bytes(pa.table({"x": ["b"], "prompt": ["b"]})))
    bench.file("c.parquet", parquet_bytes(pa.table({"prompt": ["c"]})))
    spec = bench.job("a.parquet", "b.parquet", "c.parquet")
    assert [row.row.record for row in bench.rows(spec)] == [
        {"prompt": "a", "x": None},
        {"prompt": "b", "x": "b"},
        {"prompt": "c", "x": None},
    ]
    bench.file("d.parquet", parquet_bytes(pa.table({"prompt": [5]})))
    with pytest.raises(UsageError, match=r"d\.parquet has other columns"):
        bench.job("a.parquet", "d.parquet")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": ("nope",)}, "--select: the input has no column 'nope'"),
        ({"where": "nope = 1"}, "--where: the input has no column 'nope'"),
        ({"where": "prompt = 1"}, "'prompt' is string, and is compared with 1"),
        ({"where": "prompt ="}, "--where, character 9"),
        ({"columns": ("other",)}, "--prompt-column: the input has no column 'prompt'"),
    ],
)
def test_columns_that_are_not_there_are_said_when_the_job_is_handed_in(
    bench: Bench, options: dict[str, Any], words: str
) -> None:
    bench.file("a.parquet", parquet_bytes(prompts(1, other=[1])))
    with pytest.raises(UsageError, match=words):
        bench.job("a.parquet", **options)


def test_select_and_where_are_for_parquet(bench: Bench) -> None:
    bench.file("a.jsonl", b'{"prompt":"a"}\n')
    with pytest.raises(UsageError, match="--where and --select are for Parquet"):
        bench.job("a.jsonl", where="a = 1")


@pytest.mark.parametrize("cut", [0, 4, 100, -1, -8, -20])
def test_half_a_parquet_file_is_an_error(bench: Bench, cut: int) -> None:
    bench.file("whole.parquet", parquet_bytes(prompts(3)))
    bench.file("a.parquet", parquet_bytes(prompts(100))[: cut or None][: 0 if cut == 0 else None])
    with pytest.raises(PagemillError, match=r"a\.parquet is no whole Parquet file") as raised:
        bench.job("whole.parquet", "a.parquet")
    assert raised.value.code == "corrupt_input"


def test_a_page_that_was_damaged_fails_the_job_by_name(bench: Bench) -> None:
    data = bytearray(parquet_bytes(prompts(2000), compression="zstd"))
    data[200:260] = bytes(60)
    bench.file("a.parquet", bytes(data))
    with pytest.raises(PagemillError, match=r"a\.parquet is no whole Parquet file"):
        bench.plan(bench.job("a.parquet"))


@pytest.mark.usefixtures("group_rows")
def test_a_parquet_file_that_changed_is_refused(bench: Bench) -> None:
    bench.file("a.parquet", parquet_bytes(prompts(5)))
    spec = bench.job("a.parquet")
    bench.file("a.parquet", parquet_bytes(prompts(6)))
    with pytest.raises(InputChanged, match=r"a\.parquet has changed"):
        bench.plan(spec)


def test_openai_lines_may_be_parquet_with_nulls_for_what_is_not_set(bench: Bench) -> None:
    message = [{"role": "user", "content": "Hi", "name": None, "weight": None}]
    rows = [request({"messages": message, "seed": None}, custom_id=str(n)) for n in range(3)]
    bench.file("a.parquet", parquet_bytes(pa.Table.from_pylist(rows)))
    spec = prepare(
        str(bench.folder / "a.parquet"),
        model="tiny",
        stores=bench.stores,
        settings=bench.settings,
        rows=OpenAIRows(),
    )
    planned = plan(spec, bench.stores, bench.settings)
    assert (planned.rows, planned.bad) == (3, 0), planned.first_errors


# --- conditions ----------------------------------------------------------------------------------------------------

TABLE = pa.RecordBatch.from_pylist(
    [
        {"n": 1, "s": "x", "f": 0.5, "t": datetime(2024, 1, 1), "d": Decimal("1.50"), "m": {"l": "en"}, "o k": True},
        {"n": None, "s": "it's", "f": None, "t": datetime(2025, 1, 1), "d": Decimal("2.5"), "m": None, "o k": False},
    ]
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("n = 1", [0]),
        ("n <> 1", []),
        ("NOT n = 1 or n IS NULL", [1]),
        ("n is not null", [0]),
        ("s in ('x', 'it''s')", [0, 1]),
        ("s not in ('x')", [1]),
        ("t < '2024-06-01'", [0]),
        ("d >= '2.5'", [1]),
        ("d > 2", [1]),
        ("m.l = 'en'", [0]),
        ("`o k` = true", [0]),
        ("f = 0.5 and (s = 'y' or s = 'x')", [0]),
        ("s = 'y' or s = 'x' and n = 2", []),
        ("n >= -1e0", [0]),
    ],
)
def test_a_condition_keeps_the_rows_for_which_it_is_true(text: str, kept: list[int]) -> None:
    where = parse_where(text)
    where.check(TABLE.schema)
    assert [row for row, holds in enumerate(where.mask(TABLE).to_pylist()) if holds] == kept


NO_CONDITIONS = ["", "n", "n =", "n = x", "n = 1 s", "(n = 1", "n in ()", "n + 1 = 2", "= 1", "s = 'x", "n is 1"]


@pytest.mark.parametrize("text", [*NO_CONDITIONS, "__import__('os')", "n not 1", "(" * 100 + "n = 1" + ")" * 100])
def test_what_is_no_condition_is_said_with_its_place(text: str) -> None:
    with pytest.raises(UsageError, match="--where"):
        parse_where(text)


@pytest.mark.parametrize("text", ["s = 1", "n = 'x'", "t = 'yesterday'", "m = 'x'", "`o k` = 1", "s = true", "m.z = 1"])
def test_a_condition_that_does_not_go_with_the_types_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="types of the columns"):
        parse_where(text).check(TABLE.schema)


# --- values --------------------------------------------------------------------------------------------------------

VALUES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.int64(), 2**62, 2**62),
    (pa.uint64(), 2**64 - 1, 2**64 - 1),
    (pa.float64(), 0.1, 0.1),
    (pa.float64(), math.nan, None),
    (pa.float32(), -math.inf, None),
    (pa.float16(), 0.5, 0.5),
    (pa.list_(pa.float64()), [0.5, math.nan], [0.5, None]),
    (pa.list_(pa.struct({"v": pa.float32()})), [{"v": math.inf}, {"v": 1.5}], [{"v": None}, {"v": 1.5}]),
    (pa.map_(pa.string(), pa.float64()), [("k", math.nan)], [{"key": "k", "value": None}]),
    (pa.bool_(), True, True),
    (pa.string(), "\u2028é", "\u2028é"),
    (pa.large_string(), "x", "x"),
    (pa.binary(), b"\x00\xff", "AP8="),
    (pa.binary(2), b"ab", "YWI="),
    (pa.decimal128(12, 2), Decimal("-1.50"), "-1.50"),
    (pa.decimal256(60, 3), Decimal("12345678901234567890.125"), "12345678901234567890.125"),
    (pa.date32(), date(2024, 2, 29), "2024-02-29"),
    (pa.time32("ms"), time(1, 2, 3, 4000), "01:02:03.004"),
    (pa.time64("us"), time(1, 2, 3, 4), "01:02:03.000004"),
    (pa.timestamp("ms"), datetime(2024, 5, 1, 10), "2024-05-01T10:00:00.000"),
    (pa.timestamp("ns"), 1_714_557_600_000_000_001, "2024-05-01T10:00:00.000000001"),
    (pa.timestamp("us", "Europe/Berlin"), datetime(2024, 5, 1, 10), "2024-05-01T10:00:00.000000Z"),
    (pa.timestamp("us"), datetime(1, 1, 1), "0001-01-01T00:00:00.000000"),
    (pa.duration("ms"), timedelta(seconds=1.5), 1500),
    (pa.list_(pa.int8()), [1, None], [1, None]),
    (pa.list_(pa.decimal128(5, 1)), [Decimal("1.5"), None], ["1.5", None]),
    (pa.large_list(pa.binary()), [b"a"], ["YQ=="]),
    (pa.list_(pa.timestamp("s"), 1), [datetime(2024, 1, 1)], ["2024-01-01T00:00:00"]),
    (pa.struct({"a": pa.int8(), "b": pa.string()}), {"a": 1, "b": None}, {"a": 1, "b": None}),
    (pa.struct({"a": pa.list_(pa.date32())}), {"a": [date(2024, 1, 1)]}, {"a": ["2024-01-01"]}),
    (pa.map_(pa.string(), pa.binary()), [("k", b"a")], [{"key": "k", "value": "YQ=="}]),
    (pa.dictionary(pa.int8(), pa.string()), "word", "word"),
    (pa.uuid(), UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (pa.large_list(pa.large_string()), ["a", None], ["a", None]),
    (pa.time64("ns"), 1, "00:00:00.000000001"),
    (pa.date64(), date(2024, 2, 29), "2024-02-29"),
    (pa.binary_view(), b"a", "YQ=="),
    (pa.null(), None, None),
]


@pytest.mark.parametrize(("kind", "value", "written"), VALUES, ids=[str(kind) for kind, *_ in VALUES])
def test_each_type_is_written_in_one_way_and_null_as_null(kind: pa.DataType, value: Any, written: Any) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([value, None], kind)], ["x"])
    assert [json.loads(line) for line in json_rows(batch)] == [{"x": written}, {"x": None}]


def test_a_value_that_json_cannot_hold_costs_its_row(bench: Bench) -> None:
    late = pa.array([0, 2**61], pa.timestamp("us"))
    bad = pa.Array.from_buffers(pa.string(), 2, [None, *pa.array([b"ok", b"\xff"]).buffers()[1:]])
    for name, column in (("late", late), ("bad", bad)):
        bench.file(f"{name}.parquet", parquet_bytes(pa.table({"prompt": ["a", "b"], name: column})))
        spec = bench.job(f"{name}.parquet")
        first, second = (row.row for row in bench.rows(spec))
        assert prompt_of(first) == "a"
        assert isinstance(second, RowError)
        assert (second.code, second.line) == ("invalid_value", 2)
        assert f"'{name}'" in second.message


NUMBERS = (pa.int32(), pa.uint64(), pa.float64(), pa.bool_(), pa.decimal128(20, 4))
TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string()))
TIMES = (pa.date32(), pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.time64("us"), pa.duration("us"))
flat = st.sampled_from([*NUMBERS, *TEXTS, *TIMES])
kinds = st.recursive(
    flat,
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: pa.struct(list(zip("abc", some, strict=False)))),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
    ),
    max_leaves=4,
)


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), _values(kind))


def _values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_dictionary(kind):
        return st.sampled_from(["a", "b"])
    if pa.types.is_map(kind):
        return st.dictionaries(st.text("xyz", min_size=1), values(kind.item_type), max_size=2).map(
            lambda found: list(found.items())
        )
    if pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return st.lists(values(kind.value_type), max_size=3)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    ranges = {"int32": 31, "uint64": 63, "date32[day]": 15, "time64[us]": 36}
    if pa.types.is_floating(kind):
        return st.floats(allow_nan=False)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_binary(kind):
        return st.binary(max_size=4)
    if pa.types.is_decimal(kind):
        return st.decimals(-1000, 1000, places=4)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return st.text(max_size=4).filter(lambda text: text.isascii() or text.isprintable())
    return st.integers(0, 2 ** ranges.get(str(kind), 60) - 1)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    count = draw(st.integers(1, 6))
    columns = {"prompt": pa.array(numbered(count))}
    for name in "xy":
        kind = draw(kinds)
        columns[name] = pa.array([draw(values(kind)) for _ in range(count)], kind)
    return pa.table(columns)


# Arrow casts no null that stands for a list of two nulls, and the dictionary beside it must be cast.
_WORD_AND_PAIR = pa.struct([("word", pa.dictionary(pa.int8(), pa.string())), ("pair", pa.list_(pa.null(), 2))])
NULLS_IN_PAIRS = pa.table({"prompt": numbered(2), "x": pa.array([None, {"word": "red", "pair": None}], _WORD_AND_PAIR)})


@given(table=tables(), group=st.integers(1, 3), large=st.sampled_from([1, 100]))
@example(table=NULLS_IN_PAIRS, group=2, large=100)
@settings(max_examples=80)
def test_columns_pass_through_with_their_types_and_values(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, group: int, large: int
) -> None:
    bench = bench_in(tmp_path_factory.mktemp("types"), rows=2)
    data = parquet_bytes(table, row_group_size=group)
    expected = pq.read_table(io.BytesIO(data))
    bench.file("a.parquet", data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "MAX_GROUP_ROWS", large)
        spec = bench.job("a.parquet")
    planned = bench.plan(spec)
    assert (planned.rows, planned.bad) == (table.num_rows, 0)
    source = source_of(spec, bench.stores)
    batches = [
        rows.batch
        for shard in planned.shards
        for rows in read_batches(spec, bench.stores, source, shard.start, shard.end)
    ]
    found = pa.Table.from_batches(batches)
    assert found.schema.types == [plain(kind) for kind in expected.schema.types]
    for name in expected.column_names:
        assert [str(value) for value in found[name]] == [str(value) for value in expected[name]]
    assert all(json.loads(line) for line in raw_lines(spec, bench.stores, planned.shards))


# --- at size, and in buckets ---------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_a_row_group(bench: Bench) -> None:
    bench.folder.mkdir(parents=True)
    schema = pa.schema({"prompt": pa.string(), "body": pa.list_(pa.struct({"text": pa.string()}))})

    def batches() -> Iterator[pa.RecordBatch]:
        for first in range(0, 40_000, 1000):
            rows = [{"prompt": f"question {n}", "body": [{"text": f"{n} " * 300}]} for n in range(first, first + 1000)]
            yield pa.RecordBatch.from_pylist(rows, schema=schema)

    # One group of some 80 MB of text.
    pq.write_table(pa.Table.from_batches(list(batches())), bench.folder / "a.parquet", row_group_size=10**9)
    one = bench_in(bench.folder.parent, rows=1000)
    spec = one.job("a.parquet")
    assert spec.input.regroup
    before = pa.total_allocated_bytes()
    peak = 0

    def look(rows: int, size: int) -> None:
        nonlocal peak
        peak = max(peak, pa.total_allocated_bytes() - before)

    tracemalloc.start()
    try:
        planned = plan(spec, one.stores, one.settings, look)
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()
    assert planned.rows == 40_000
    assert 0 < peak < 60 << 20


@pytest.mark.parametrize("kind", ["moto", "rclone"])
@pytest.mark.usefixtures("group_rows")
def test_parquet_in_a_bucket_is_read_by_ranges(kind: str, bench: Bench, request: pytest.FixtureRequest) -> None:
    s3: S3Server = request.getfixturevalue(f"{kind}_s3")
    prefix = f"s3://{BUCKET}/{uuid4().hex}"
    there = Bench(bench.folder, s3.settings(storage=f"{prefix}/store", max_shard_rows=3, state_dir=bench.folder))
    there.stores.put(f"{prefix}/in/b.parquet", parquet_bytes(prompts(7), row_group_size=2))
    there.stores.put(f"{prefix}/in/a.parquet", parquet_bytes(pa.table({"prompt": ["first"]})))
    assert there.prompts(f"{prefix}/in/") == ["first", *numbered(7)]
    spec = there.job(f"{prefix}/in/")
    there.stores.put(f"{prefix}/in/a.parquet", parquet_bytes(pa.table({"prompt": ["other"]})))
    with pytest.raises(InputChanged):
        there.plan(spec)


@pytest.mark.usefixtures("group_rows")
def test_a_job_on_parquet_runs_to_its_end(any_site: Site) -> None:
    name = f"{any_site.settings.storage_url}/{uuid4().hex}.parquet"
    table = prompts(9, when=[datetime(2024, 1, n + 1) for n in range(9)])
    any_site.stores.put(name, parquet_bytes(table, row_group_size=5))
    spec = prepare(
        name,
        model="tiny",
        stores=any_site.stores,
        settings=any_site.settings,
        rows=RecordRows(prompt_column="prompt"),
        input_options=InputOptions(where="when > '2024-01-02'"),
    )
    enter(spec, any_site.ledger, any_site.stores, any_site.tokens)
    any_site.control.plan(spec.id)
    any_site.work(spec)
    any_site.control.assemble(spec.id)
    rows = any_site.rows(spec.output_url)
    assert [row["prompt"] for row in rows] == numbered(7, 2)
    assert rows[0]["when"] == "2024-01-03T00:00:00.000000"
    assert rows[6]["response"] == "answer 6"
