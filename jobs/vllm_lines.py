"""Results in the shape that `vllm run-batch` writes: one file with a line for every row, in order, failures in place.

A failure has its status in `response`, whose body is null, and vLLM's error object in `error`.
"""

import json
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

from jobs.errors import PagemillError
from jobs.formats.jsonl import dumps
from jobs.results import row_id
from jobs.spec import JobSpec

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


def vllm_lines(spec: JobSpec, rows: int, output: Iterator[bytes], errors: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of an OpenAI job's output file and error file, each in row order, as vLLM's lines with their ends.

    Each row is in one of the two files, and its id says which row it is. The ids that are written are of this call
    alone, as vLLM's are of a run. Raises PagemillError where one is in neither.
    """
    run = token_hex(8)
    heads = {"output": next(output, None), "errors": next(errors, None)}
    files = {"output": output, "errors": errors}
    parsed: dict[str, Any] = {name: line and json.loads(line) for name, line in heads.items()}
    for index in range(rows):
        wanted = row_id(spec, index)
        name = next((name for name, line in parsed.items() if line and line["id"] == wanted), None)
        if name is None:
            raise PagemillError(f"Row {index} has no result: the job's files are not whole.", code="short_output")
        yield dumps(_vllm_line(parsed[name], f"{run}{index:016x}")) + b"\n"
        following = next(files[name], None)
        parsed[name] = following and json.loads(following)


def _vllm_line(line: dict[str, Any], unique: str) -> dict[str, Any]:
    status = line["response"]["status_code"]
    body = line["response"]["body"]
    if "id" in body:
        body["id"] = f"{body['id'].partition('-')[0]}-{unique}"
    response = {"status_code": status, "request_id": f"vllm-batch-{unique}", "body": body if status == 200 else None}
    return {
        "id": f"vllm-{unique}",
        "custom_id": line["custom_id"],
        "response": response,
        "error": None if status == 200 else {"error": _error(body["error"], status)},
    }


def _error(error: dict[str, Any], status: int) -> dict[str, Any]:
    """As vLLM has it: the code is the status, and the type is a class."""
    return {"message": error["message"], "type": _TYPES[status], "param": error["param"], "code": status}
