"""Job specs for tests, with only what a test is about left to say."""

from typing import Any

from jobs.errors import RowError
from jobs.formats.jsonl import Line, dumps
from jobs.rows import Row, parse_row
from jobs.spec import Input, InputFile, JobSpec, OpenAIRows, RecordRows


def openai_spec(**fields: Any) -> JobSpec:
    defaults: dict[str, Any] = {
        "id": "batch_1",
        "created_at": 1_700_000_000,
        "model": "tiny",
        "input": Input(files=(InputFile(url="file:///in.jsonl", size=1, etag="e"),)),
        "storage_url": "file:///store",
        "output_url": "file:///out.jsonl",
        "error_url": "file:///err.jsonl",
        "rows": OpenAIRows(),
        "on_bad_row": "skip",
    }
    return JobSpec(**{**defaults, **fields})


def record_spec(**fields: Any) -> JobSpec:
    shape = {
        name: fields.pop(name) for name in ("prompt_column", "messages_column", "system", "embed") if name in fields
    }
    return openai_spec(rows=RecordRows(**shape or {"prompt_column": "prompt"}), **fields)


def request(body: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """An OpenAI chat line with some fields changed, of the line or of its body; `...` takes a field away."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | (body or {})
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": _present(chat)}
    return _present(line | changes)


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not ...}


def read(record: Any, spec: JobSpec, number: int = 3, offset: int = 40) -> Row | RowError:
    data = record if isinstance(record, bytes) else dumps(record)
    return parse_row(Line(number, offset, offset + len(data) + 1, data), spec)
