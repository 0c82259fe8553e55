"""Rows' parameters from the file to the answer, through real processes: every way to ask that a job has."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.system.mill import DATA, PAGEMILL, read_jsonl

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def run(source: Path, output: Path, *options: str) -> Any:
    command = [*PAGEMILL, "run", str(source), "-o", str(output), "--seed", "3", *options]
    return subprocess.run(command, capture_output=True, timeout=250)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"max_tokens": 40, "messages": [{"role": "user", "content": "A name and a number?"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_every_parameter_of_openai_lines_reaches_the_answer(tmp_path: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
    rows = [
        line("several", n=3, max_tokens=8),
        line("likeliest", logprobs=True, top_logprobs=2, max_tokens=5, temperature=0),
        line("schema", response_format=schema),
        line("choice", structured_outputs={"choice": ["yes", "no"]}),
        line("biased", logit_bias={"28": 100}, max_tokens=3, temperature=0),
        line("beams", beam_width=3, n=2, temperature=0, max_tokens=6),
        line("wrong schema", response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}),
        line("contradiction", n=2, temperature=0),
        line("no adapters", lora="nowhere/at-all"),
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    done = run(source, output, "--model", "demo", "--on-bad-row", "skip")
    assert done.returncode == 3, done.stderr.decode()
    answers = {row["custom_id"]: row["response"]["body"]["choices"] for row in read_jsonl(output.read_bytes())}
    texts = {name: [choice["message"]["content"] for choice in choices] for name, choices in answers.items()}
    assert len(set(texts["several"])) == 3
    tokens = answers["likeliest"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == texts["likeliest"][0]
    assert all(token["logprob"] == max(t["logprob"] for t in token["top_logprobs"]) for token in tokens)
    assert all(math.exp(token["logprob"]) <= 1 for token in tokens)
    jsonschema.validate(json.loads(texts["schema"][0]), SCHEMA)
    assert texts["choice"][0] in ("yes", "no")
    assert len(set(texts["biased"][0])) == 1
    assert len(set(texts["beams"])) == 2
    errors = {
        row["custom_id"]: row["response"]["body"]["error"]
        for row in read_jsonl((tmp_path / "out.errors.jsonl").read_bytes())
    }
    assert {name: error["param"] for name, error in errors.items()} == {
        "wrong schema": "structured_output.json",
        "contradiction": "n",
        "no adapters": "lora",
    }


def test_a_document_collection_is_embedded(tmp_path: Path) -> None:
    source, output = DATA / "gsm8k_16.jsonl", tmp_path / "vectors.jsonl"
    done = run(source, output, "--model", "demo-embed", "--prompt-column", "question", "--embed")
    assert done.returncode == 0, done.stderr.decode()
    rows = read_jsonl(output.read_bytes())
    assert [row["question"] for row in rows] == [row["question"] for row in read_jsonl(source.read_bytes())]
    assert {len(row["embedding"]) for row in rows} == {384}
    assert all(math.isclose(math.hypot(*row["embedding"]), 1, rel_tol=1e-5) for row in rows)
    assert all(row["usage"]["prompt_tokens"] > 5 for row in rows)


def test_an_encoder_that_is_asked_to_answer_says_so_row_by_row(tmp_path: Path) -> None:
    source, output = DATA / "gsm8k_16.jsonl", tmp_path / "out.jsonl"
    done = run(source, output, "--model", "demo-embed", "--prompt-column", "question")
    assert done.returncode == 3, done.stderr.decode()
    rows = read_jsonl(output.read_bytes())
    assert [row["question"] for row in rows] == [row["question"] for row in read_jsonl(source.read_bytes())]
    assert {row["error"]["code"] for row in rows} == {"unsupported_task"}
