"""What stands in the output and error files for a row: OpenAI batch lines, or the record with four columns more.

OpenAI rows: answers go to the output file and refusals to the error file, each row in one of them. Records: the output
file has a line for every row, in place, and the error file lists the failed ones with their place in the input.

A line is a function of the job, the row and the answer: a shard that is run again gives the same bytes for the same
answers.
"""

import hashlib
from base64 import b64encode
from dataclasses import dataclass
from itertools import accumulate
from struct import iter_unpack
from typing import Any, Literal, NamedTuple

from jobs.errors import RowError
from jobs.formats.jsonl import Line, dumps, one_line
from jobs.pooling import Pooling
from jobs.records import Usage
from jobs.rows import Row, object_of, result_columns
from jobs.spec import JobSpec, RecordRows

NEVER_RUN = frozenset({"batch_expired", "batch_cancelled"})
"""Codes of rows whose request was never made: the job ended before."""
SERVER_ERRORS = frozenset({"engine_error", "engine_died", "out_of_memory"})
"""Codes of rows that failed through no fault of their request."""


class TokenLogprob(NamedTuple):
    """One token of an answer, and how likely the model held it; `top` are the likeliest ones at its place.

    `token` is its text and `utf8` its bytes, which alone may be no character. `rank` 1 is the likeliest.
    """

    token_id: int
    token: str
    utf8: bytes
    logprob: float
    rank: int
    top: "tuple[TokenLogprob, ...]" = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a row; `logprobs` has an entry a token where the row asks for them."""

    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers to a row, in order.

    `prompt_logprobs` has an entry a token of the prompt where the row asks for them; nothing says of the first.
    """

    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of a row's inputs, in order; each is float32 numbers, little-endian."""

    vectors: tuple[bytes, ...]
    usage: Usage


Outcome = Completion | Embeddings | RowError


def output_line(spec: JobSpec, index: int, line: Line, row: Row | None, outcome: Outcome) -> bytes | None:
    """What row `index` adds to the output: a line with its newline, or nothing.

    It is `line` of the input, and `row` where it could be read as one.
    """
    if isinstance(outcome, RowError):
        return _failed_record(spec, line, outcome) if isinstance(spec.rows, RecordRows) else None
    if row is None:
        raise ValueError("a completion of a line that is no row")
    if isinstance(spec.rows, RecordRows):
        return _extended(row.source, answer_columns(spec, outcome))
    digest = _digest(spec, index)
    if isinstance(outcome, Embeddings):
        return _answered(digest, row.custom_id, 200, _embeddings_body(spec, row, outcome))
    return _answered(digest, row.custom_id, 200, _completion_body(spec, row, digest, outcome))


def answer_columns(spec: JobSpec, outcome: Outcome) -> dict[str, Any]:
    """What a record gets besides its own columns: `result_columns`, each null where the row failed, but `error`."""
    if isinstance(outcome, RowError):
        return dict.fromkeys(result_columns(spec)) | {"error": _error(outcome)}
    return {**_record_answer(spec, outcome), **usage_columns(outcome)}


def usage_columns(outcome: Completion | Embeddings) -> dict[str, Any]:
    """Those of `answer_columns` that every answer has."""
    return {"usage": {**_usage(outcome.usage), "cached_tokens": outcome.usage.cached_tokens}, "error": None}


def passes_through(outcome: Outcome) -> bool:
    """Whether a record's own columns stand beside its outcome: not where one of them has the name of one of ours."""
    return not isinstance(outcome, RowError) or outcome.code != "column_collision"


def error_line(spec: JobSpec, index: int, line: Line, row: Row | None, error: RowError) -> bytes:
    """The failed row's line in the error file. For a record it holds the record, where the line is one."""
    custom_id = row.custom_id if row else error.custom_id
    if not isinstance(spec.rows, RecordRows):
        return _openai_error(_digest(spec, index), custom_id, line, error)
    place: dict[str, Any] = {"line": line.number, "byte": line.offset}
    if error.file is not None:
        place["file"] = error.file
    head = dumps({"custom_id": custom_id, **place, "error": _error(error), "record": None})
    if line.data is None or object_of(line.data) is None:
        return head + b"\n"
    return b"".join((head.removesuffix(b"null}"), one_line(line.data), b"}\n"))


def _openai_error(digest: str, custom_id: str | None, line: Line, error: RowError) -> bytes:
    if error.code in NEVER_RUN:
        reason = {"code": error.code, "message": error.message}
        return dumps({**_head(digest, custom_id), "response": None, "error": reason}) + b"\n"
    status, kind = (500, "server_error") if error.code in SERVER_ERRORS else (400, "invalid_request_error")
    detail = {
        "message": error.message,
        "type": kind,
        "param": error.param,
        "code": error.code,
        "line": line.number,
    }
    return _answered(digest, custom_id, status, {"error": detail})


def _answered(digest: str, custom_id: str | None, status: int, body: dict[str, Any]) -> bytes:
    """A line for a request that was made. `error` is null even where it was refused: OpenAI says so in the response."""
    response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return dumps({**_head(digest, custom_id), "response": response, "error": None}) + b"\n"


def _head(digest: str, custom_id: str | None) -> dict[str, str | None]:
    return {"id": _row_id(digest), "custom_id": custom_id}


def row_id(spec: JobSpec, index: int) -> str:
    """The id of row `index` in OpenAI lines: the same in a job and in those that run its failed rows again."""
    return _row_id(_digest(spec, index))


def _row_id(digest: str) -> str:
    return f"batch_req_{digest}"


def _record_answer(spec: JobSpec, outcome: Completion | Embeddings) -> dict[str, Any]:
    """The answer in a record's columns: lists where the job asks for several, so that a column has one type."""
    if isinstance(outcome, Embeddings):
        return {"embedding": _written(outcome.vectors[0], spec.pooling)}
    sampling, choices = spec.sampling, outcome.choices
    several = sampling.n is not None and sampling.n > 1
    texts = [choice.text for choice in choices]
    reasons = [choice.finish_reason for choice in choices]
    columns: dict[str, Any] = {
        "response": texts if several else texts[0],
        "finish_reason": reasons if several else reasons[0],
    }
    if sampling.logprobs is not None:
        logprobs = [choice.logprobs and _chat_logprobs(choice.logprobs)["content"] for choice in choices]
        columns["logprobs"] = logprobs if several else logprobs[0]
    return columns


def _embeddings_body(spec: JobSpec, row: Row, outcome: Embeddings) -> dict[str, Any]:
    if not isinstance(row.params, Pooling):
        raise TypeError("an embedding for a row that asks for none")
    data = [
        {"object": "embedding", "index": place, "embedding": _written(vector, row.params)}
        for place, vector in enumerate(outcome.vectors)
    ]
    tokens = outcome.usage.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": spec.model, "usage": usage}


def _written(vector: bytes, pooling: Pooling) -> str | list[float]:
    """A vector as the row wants it: as numbers with the nine digits that tell float32 numbers apart, or in base64."""
    if pooling.encoding_format == "base64":
        return b64encode(vector).decode()
    return [float(f"{number:.9g}") for (number,) in iter_unpack("<f", vector)]


def _completion_body(spec: JobSpec, row: Row, digest: str, completion: Completion) -> dict[str, Any]:
    prefix, kind = ("chatcmpl", "chat.completion") if row.kind == "chat" else ("cmpl", "text_completion")
    choice_of = _chat_choice if row.kind == "chat" else _text_choice
    body = {
        "id": f"{prefix}-{digest}",
        "object": kind,
        "created": spec.created_at,
        "model": spec.model,
        "choices": [{"index": place, **choice_of(choice)} for place, choice in enumerate(completion.choices)],
        "usage": {
            **_usage(completion.usage),
            "prompt_tokens_details": {"cached_tokens": completion.usage.cached_tokens},
        },
    }
    if completion.prompt_logprobs is not None:
        body["prompt_logprobs"] = [token and _alternatives(token) for token in completion.prompt_logprobs]
    return body


def _chat_choice(choice: Choice) -> dict[str, Any]:
    return {
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": choice.logprobs and _chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _text_choice(choice: Choice) -> dict[str, Any]:
    return {
        "text": choice.text,
        "logprobs": choice.logprobs and _text_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _chat_logprobs(tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    content = [{**_named(token), "top_logprobs": [_named(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _named(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.utf8)}


def _text_logprobs(tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """The older shape: parallel lists. Offsets count the characters of the tokens before."""
    ends = list(accumulate((len(token.token) for token in tokens), initial=0))
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{other.token: other.logprob for other in token.top} for token in tokens],
        "text_offset": ends[:-1],
    }


def _alternatives(token: TokenLogprob) -> dict[str, Any]:
    """A token of the prompt and the likeliest ones at its place, by id, as vLLM writes them."""
    return {
        str(other.token_id): {"logprob": other.logprob, "rank": other.rank, "decoded_token": other.token}
        for other in (token, *token.top)
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _failed_record(spec: JobSpec, line: Line, error: RowError) -> bytes:
    columns = answer_columns(spec, error)
    if line.data is None or not passes_through(error) or object_of(line.data) is None:
        return dumps(columns) + b"\n"
    return _extended(line.data, columns)


def _error(error: RowError) -> dict[str, str | None]:
    return {"code": error.code, "message": error.message, "param": error.param}


def _extended(record: bytes, columns: dict[str, Any]) -> bytes:
    """The JSON object `record` with more columns: its own keep their digits, order and, but for line ends, bytes."""
    head = one_line(record).rstrip()[:-1].rstrip()
    separator = b"" if head.strip() == b"{" else b","
    return b"".join((head, separator, dumps(columns)[1:], b"\n"))


def _digest(spec: JobSpec, index: int) -> str:
    """What the ids of a row are made of."""
    return hashlib.sha256(f"{spec.origin}:{index}".encode()).hexdigest()[:32]
