"""The line of a job's shards: what prompts begin with is found, and only the places change."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.formats.jsonl import dumps
from jobs.planner import Planned, plan
from jobs.prefixes import Beginnings, Line
from jobs.row_fields import Prompt
from jobs.settings import Settings
from jobs.shards import Plan, Shard, dump_plan, dump_shard, load_plan, load_shard
from jobs.spec import OpenAIRows, RecordRows
from jobs.submit import prepare
from tests.jobs.site import Site
from tests.jobs.specs import request

DOCUMENTS, QUESTIONS, IN_SHARD = 12, 5, 3
BY_DOCUMENT = [QUESTION * 4 + SHARD for SHARD in range(4) for QUESTION in range(QUESTIONS)]
"""The shards of `asked`, those of the same documents one after the other."""


def document(number: int, size: int = 3000) -> str:
    return "".join(random.Random(number).choices("abcdefghij ", k=size))


def asked(before: str = "", size: int = 3000) -> list[str]:
    """Each question about each document: one question's rows after the other's."""
    return [f"{before}{document(d, size)} Question {q}?" for q in range(QUESTIONS) for d in range(DOCUMENTS)]


def line_of(prompts: Sequence[Prompt], in_shard: int = IN_SHARD, most_marks: int = 1 << 17) -> Line:
    beginnings = Beginnings(most_marks)
    for number, prompt in enumerate(prompts, 1):
        beginnings.add(prompt)
        if number % in_shard == 0 or number == len(prompts):
            beginnings.end_shard(500 * in_shard)
    return beginnings.line()


def order(places: Iterable[int]) -> list[int]:
    return [shard for shard, _ in sorted(enumerate(places), key=lambda item: item[1])]


def system_and_user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "system", "content": text[:500]}, {"role": "user", "content": text[500:]})


def token_ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    "form", [str, system_and_user, token_ids, lambda text: [2**40 + ord(c) for c in text]], ids=str
)
def test_shards_of_the_same_documents_stand_together(form: Any) -> None:
    line = line_of([form(prompt) for prompt in asked()])
    assert order(line.places) == BY_DOCUMENT
    assert line.in_runs


def test_a_system_prompt_that_all_have_hides_no_documents() -> None:
    assert order(line_of(asked(before="You are " * 60)).places) == BY_DOCUMENT


def test_shards_that_are_cut_elsewhere_stand_by_those_they_share_most_with() -> None:
    # Each question's shards begin one row later than those of the one before.
    prompts = [p for n, prompt in enumerate(asked()) for p in ("Hi",) * (n % DOCUMENTS == 0) + (prompt,)]
    shared = [{p[:3000] for p in prompts[n : n + IN_SHARD]} for n in range(0, len(prompts), IN_SHARD)]
    line = line_of(prompts)
    in_common = [len(shared[one] & shared[other]) for one, other in pairwise(order(line.places))]
    assert sum(in_common) >= 30  # of at most 48


@pytest.mark.parametrize(
    "prompts",
    [
        [f"Question {n}?" for n in range(60)],
        [document(n) for n in range(60)],
        ["A" * 600 + document(n) for n in range(60)],
        [document(n // QUESTIONS) for n in range(60)],
    ],
    ids=["short", "different", "one system prompt", "together in the file"],
)
def test_a_job_that_gains_nothing_keeps_the_order_of_its_file(prompts: list[str]) -> None:
    assert list(line_of(prompts).places) == list(range(20))


def test_an_order_that_saves_less_than_a_hundredth_is_not_kept() -> None:
    """Of 40 shards the last is like the first: three times 512 of 240,000 characters."""
    prompts = [document(n % 117, 600) for n in range(120)]
    assert list(line_of(prompts).places) == list(range(40))
    # In fewer, it is more.
    assert order(line_of([*prompts[:57], *prompts[-3:]]).places) == [0, 19, *range(1, 19)]


def test_what_is_saved_counts_by_its_length() -> None:
    """Text that repeats itself has the same mark at each length."""
    beginnings = Beginnings()
    for _ in range(2):
        beginnings.add("x" * 20_000)
        beginnings.end_shard(100_000)
    assert beginnings.line().in_runs


def test_shards_in_the_order_of_the_file_are_worked_on_in_runs_where_neighbours_share_prefixes() -> None:
    assert line_of([document(n // 15) for n in range(60)]).in_runs
    assert not line_of([document(n) for n in range(60)]).in_runs
    assert not line_of([f"Question {n}?" for n in range(60)]).in_runs


def test_a_sample_of_the_marks_tells_as_much() -> None:
    prompts = [f"{document(d, 600)} Question {q}?" for q in range(4) for d in range(400)]
    whole, sample = line_of(prompts, 100), line_of(prompts, 100, most_marks=60)
    assert order(whole.places) == [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
    assert list(sample.places) == list(whole.places)


def test_what_is_held_does_not_grow_with_the_job() -> None:
    beginnings = Beginnings(most_marks=100)
    for number in range(3000):
        beginnings.add(document(number, 600))
        if number % 10 == 9:
            beginnings.end_shard(500)
    assert sum(map(len, beginnings._shards)) <= 100
    assert all(beginnings._is_held(mark) for marks in beginnings._shards for mark in marks)


def jsonl(records: Iterable[Any]) -> bytes:
    return b"".join(dumps(record) + b"\n" for record in records)


def parquet(prompts: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": prompts}), sink)
    return bytes(sink.getvalue())


def lines(prompts: list[str]) -> bytes:
    bodies = ({"model": "tiny", "messages": [{"role": "user", "content": prompt}]} for prompt in prompts)
    return jsonl(request(body, custom_id=f"row-{number}") for number, body in enumerate(bodies))


def planned(site: Site, path: Path, rows: RecordRows | OpenAIRows, **settings: Any) -> Planned:
    limits = Settings(max_shard_rows=IN_SHARD, **settings)
    return plan(prepare(str(path), model="tiny", stores=site.stores, settings=limits, rows=rows), site.stores, limits)


PROMPT = RecordRows(prompt_column="prompt")


@pytest.mark.parametrize(
    ("name", "data", "rows"),
    [
        ("prompts.jsonl", lambda texts: jsonl({"prompt": text} for text in texts), PROMPT),
        ("table.parquet", parquet, PROMPT),
        ("lines.jsonl", lines, OpenAIRows()),
        (
            "parts.jsonl",
            lambda texts: jsonl({"question": text[3000:], "document": text[:3000]} for text in texts),
            RecordRows(template="{{ document }} {{ question }}"),
        ),
    ],
    ids=["prompt", "parquet", "openai", "template"],
)
def test_the_planner_gives_shards_their_places(
    site: Site, tmp_path: Path, name: str, data: Callable[[list[str]], bytes], rows: RecordRows | OpenAIRows
) -> None:
    path = tmp_path / name
    path.write_bytes(data(asked()))
    found = planned(site, path, rows)
    assert order(shard.place for shard in found.shards) == BY_DOCUMENT
    assert found.in_runs
    assert [shard.first_row for shard in found.shards] == list(range(0, DOCUMENTS * QUESTIONS, IN_SHARD))
    read = load_plan(dump_plan(found))
    assert (read.shards, read.in_runs) == (found.shards, True)
    as_in_file = planned(site, path, rows, shard_order="file")
    assert [shard.place for shard in as_in_file.shards] == list(range(20))
    assert not as_in_file.in_runs


def test_what_is_embedded_has_no_prefix_to_share(site: Site, tmp_path: Path) -> None:
    bodies = ({"model": "tiny", "input": text, "messages": ...} for text in asked())
    embeddings = jsonl(request(body, custom_id=str(n), url="/v1/embeddings") for n, body in enumerate(bodies))
    texts = jsonl({"prompt": text} for text in asked())
    vectors = RecordRows(prompt_column="prompt", embed=True)
    for name, data, rows in (
        ("texts.jsonl", texts, vectors),
        ("texts.parquet", parquet(asked()), vectors),
        ("lines.jsonl", embeddings, OpenAIRows()),
    ):
        (tmp_path / name).write_bytes(data)
        found = planned(site, tmp_path / name, rows)
        assert [shard.place for shard in found.shards] == list(range(20))
        assert not found.in_runs
        assert found.bad == 0


def test_what_prompts_save_is_measured_on_prompts_and_answers(site: Site, tmp_path: Path) -> None:
    """48 times 512 characters are little beside 60 answers of 20,000 tokens."""
    path = tmp_path / "long.jsonl"
    for tokens, places in ((20, BY_DOCUMENT), (20_000, list(range(20)))):
        path.write_bytes(jsonl({"prompt": text, "max_tokens": tokens} for text in asked(size=600)))
        limits = {"min_shard_tokens": 1 << 30}
        assert order(shard.place for shard in planned(site, path, PROMPT, **limits).shards) == places


def test_a_plan_without_places_is_one_in_the_order_of_the_file() -> None:
    """As versions before wrote them, and as those can read them."""
    shard = Shard(3, 30, 10, 999, 1999, 31, place=3)
    assert b"place" not in dump_shard(shard)
    assert load_shard(dump_shard(shard)) == shard
    plan_of_old = dump_plan(Plan(10, 0, (shard,), (), in_runs=False)).replace(b',"in_runs":false', b"")
    assert b"in_runs" not in plan_of_old
    assert load_plan(plan_of_old) == Plan(10, 0, (shard,), (), in_runs=False)


@pytest.mark.parametrize(
    ("row", "rows"),
    [
        (b'{"prompt":"%s"}', PROMPT),
        (b'{"m":[{"role":"user","content":"%s"}]}', RecordRows(messages_column="m")),
        (b'{"p":"%s"}', RecordRows(template="{{ p }}")),
    ],
    ids=["prompt", "messages", "template"],
)
def test_half_a_character_where_a_prompt_is_looked_at_costs_its_row(
    site: Site, tmp_path: Path, row: bytes, rows: RecordRows
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(row % text for text in (b"x" * 500 + rb"\ud800" + b"y" * 600, b"z" * 1100)))
    assert [error.code for error in planned(site, path, rows).errors] == ["invalid_value"]
