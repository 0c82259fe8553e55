"""The whole of `run-batch` with the real model."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.system.mill import MODEL, PAGEMILL, Mill

pytestmark = pytest.mark.model


def test_a_batch_file_becomes_vllm_s_output_and_nothing_else_is_left(tmp_path: Path) -> None:
    def line(name: str, **body: object) -> str:
        messages = [{"role": "user", "content": "Say hello."}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, **body}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})

    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([line("a"), line("b", temperature=9), line("c", seed=1)]))
    command = [*PAGEMILL, "run-batch", "-i", str(source), "-o", str(output), "--model", MODEL, "--max-num-seqs", "8"]
    done = subprocess.run(command, env=Mill(tmp_path / "unused").env, capture_output=True, timeout=250)
    assert done.returncode == 0, done.stderr.decode()
    found = [json.loads(one) for one in output.read_text().splitlines()]
    assert [(one["custom_id"], one["response"]["status_code"]) for one in found] == [("a", 200), ("b", 400), ("c", 200)]
    assert found[0]["response"]["body"]["usage"]["completion_tokens"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
