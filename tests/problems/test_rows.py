"""Rows that others' batch systems choke on, mix up, or keep quiet about: each runs through real workers here."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jobs.errors import EXIT_DONE, EXIT_ROWS_FAILED
from jobs.formats.jsonl import dumps
from jobs.spec import JobSpec, OpenAIRows
from tests.jobs.commands import Command, commands
from tests.jobs.site import Site
from tests.problems.conftest import lines_of
from tests.system.fleet import Fleet
from tests.system.stub_engine import REFUSED, answer_to
from workers.render import seed_of


def file_of(*lines: bytes) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def chat(custom_id: str, text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"model": "stub", "messages": messages}
    return dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def answer(spec: JobSpec, index: int, prompt: str) -> str:
    return answer_to(prompt, seed_of(spec.id, index))


def texts(lines: list[Any]) -> dict[str, str]:
    """The answers of OpenAI's output lines by custom_id."""
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}


def test_rows_that_share_a_custom_id_neither_hang_a_job_nor_get_each_other_s_answers(mill: Fleet) -> None:
    """sglang#1415, sglang PR#4026, llm-d-batch-gateway#147: a batch with an id that repeats never ended, or a row got
    the answer of another, or one of the two was gone without a word."""
    repeats = [chat("a", f"more {n}") for n in range(7)]
    job = mill.submit(data=file_of(chat("a", "one"), chat("b", "two"), *repeats), shape=OpenAIRows(), on_bad_row="skip")
    view = mill.wait_for_end(job)
    assert (view.done, view.failed) == (2, 7)
    assert texts(lines_of(mill, job.spec.output_url)) == {
        "a": answer(job.spec, 0, "one"),
        "b": answer(job.spec, 1, "two"),
    }
    refused = [line["response"]["body"]["error"] for line in lines_of(mill, job.spec.error_url)]
    assert [(error["code"], error["line"]) for error in refused] == [
        ("duplicate_custom_id", line) for line in range(3, 10)
    ]


def test_a_batch_with_a_repeated_custom_id_is_refused_with_its_line_before_any_work(mill: Fleet) -> None:
    """The same threads: under OpenAI's rules the file is refused, and says where."""
    job = mill.submit(data=file_of(chat("a", "one"), chat("b", "two"), chat("a", "three")), shape=OpenAIRows())
    view = mill.wait_for_end(job, "failed")
    assert [(error.code, error.line, error.custom_id) for error in view.errors] == [("duplicate_custom_id", 3, "a")]
    assert mill.tries(job) == {}


def test_the_same_prompt_a_hundred_times_is_answered_a_hundred_times(mill: Fleet) -> None:
    """hermes-agent#86523: a run that was taken up again by the text of its prompts dropped those that were meant to
    repeat."""
    job = mill.submit(prompts=["again"] * 100)
    mill.wait_for_end(job)
    found = [row["response"] for row in lines_of(mill, job.spec.output_url)]
    assert found == [answer(job.spec, index, "again") for index in range(100)]


def test_one_bad_prompt_costs_one_row(mill: Fleet) -> None:
    """ray#59194: one prompt that was longer than the model's context ended a job of hundreds of thousands of rows;
    headroom PR#2316: a line of `null` or `[1]` refused the whole file."""
    good = [dumps({"prompt": f"question {n}"}) for n in range(8)]
    bad = {2: dumps({"prompt": f"{REFUSED}: too long"}), 4: b"null", 5: b"[1]", 7: b'{"prompt": "cut o', 9: b"{}"}
    lines = list(good)
    for index, line in bad.items():
        lines.insert(index, line)
    job = mill.submit(data=file_of(*lines))
    view = mill.wait_for_end(job)
    assert (view.done, view.failed) == (8, 5)
    rows = lines_of(mill, job.spec.output_url)
    codes = {index: row["error"]["code"] for index, row in enumerate(rows) if row["error"]}
    assert codes == {
        2: "refused_by_stub",
        4: "not_an_object",
        5: "not_an_object",
        7: "invalid_json_line",
        9: "missing_required_parameter",
    }
    answered = [(index, json.loads(line)["prompt"]) for index, line in enumerate(lines) if index not in bad]
    assert [(index, rows[index]["response"]) for index, _ in answered] == [
        (index, answer(job.spec, index, prompt)) for index, prompt in answered
    ]
    assert set(mill.tries(job).values()) == {1}


LINE_ENDS = "\u2028\u2029\u0085\u000b\u000c\u001c\u001d\u001e"
"""What `str.splitlines` takes for the end of a line beside `\\n` and `\\r`."""


def test_line_separators_inside_of_text_split_no_row(mill: Fleet) -> None:
    """jsonlines#53, deer-flow PR#5423, datalad#3523: U+2028 and its like are valid inside of a JSON string, and readers
    that split text instead of bytes made several broken rows of one."""
    prompts = [f"before{end}after" for end in (*LINE_ENDS, LINE_ENDS, "\r", "\r\n")]
    raw = [json.dumps({"prompt": prompt}, ensure_ascii=False).encode() for prompt in prompts]
    assert "\u2028".encode() in raw[0]
    job = mill.submit(data=file_of(*(line + b"\r" for line in raw)))
    view = mill.wait_for_end(job)
    assert (view.rows, view.failed) == (len(prompts), 0)
    rows = lines_of(mill, job.spec.output_url)
    assert [row["prompt"] for row in rows] == prompts
    assert [row["response"] for row in rows] == [answer(job.spec, n, prompt) for n, prompt in enumerate(prompts)]


@pytest.fixture
def pagemill(
    mill: Fleet, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Command]:
    yield from commands(Site.of(mill.settings, mill.ledger), mill.valkey, monkeypatch, capfdbinary)


def test_a_job_of_nothing_but_errors_does_not_pass_for_a_success(mill: Fleet, pagemill: Command) -> None:
    """kaapi-backend#723, litellm#33987, tensorzero#1198: a batch of which every row had failed was `completed`, as any
    other, and programs went on with an output that was not there."""
    job = mill.submit(prompts=[f"{REFUSED} {n}" for n in range(5)])
    watched = pagemill("watch", job.id, "--json")
    assert watched.code == EXIT_ROWS_FAILED != EXIT_DONE
    view = watched.json
    assert (view["state"], view["done"], view["failed"], view["rows"]) == ("completed", 0, 5, 5)
    assert view["error_url"] == job.spec.error_url
    rows = lines_of(mill, job.spec.output_url)
    assert [(row["response"], row["error"]["code"]) for row in rows] == [(None, "refused_by_stub")] * 5
    assert "0 done, 5 failed" in pagemill("status", job.id).out
    assert pagemill("report", job.id, "--json").json["failures"] == {"refused_by_stub": 5}
