"""Time another engine, in the interpreter of an environment that has it: nothing of pagemill is imported here.

    PYTHON main.py ADAPTER REQUEST ANSWER

ADAPTER is a file beside this one. Its `load(model, threads, options)` returns what generates: a function from rows,
each with its `prompt` as token ids and its `new_tokens`, to the token ids that came, row by row. Its `versions()` names
what was measured. REQUEST and ANSWER are JSON. What is timed is one call of that function, after one with other rows.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict


class PeerRow(TypedDict):
    """A prompt, and exactly how many tokens to generate after it."""

    prompt: list[int]
    new_tokens: int


Generate = Callable[[list[PeerRow]], list[list[int]]]


def main(adapter_path: str, request_path: str, answer_path: str) -> None:
    """Load, warm up, time, check, and write the answer; a wrong number of tokens is an exit with a message."""
    request: dict[str, Any] = json.loads(Path(request_path).read_text(encoding="utf-8"))
    adapter = _module(Path(adapter_path))
    generate: Generate = adapter.load(request["model"], request["threads"], request["options"])
    generate(request["warm_up"])
    rows: list[PeerRow] = request["rows"]
    began = time.perf_counter()
    token_ids = generate(rows)
    seconds = time.perf_counter() - began
    if [len(ids) for ids in token_ids] != [row["new_tokens"] for row in rows]:
        sys.exit(f"{adapter_path}: not every row has exactly the tokens that were asked for")
    answer = {"seconds": seconds, "token_ids": token_ids, "versions": adapter.versions()}
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
