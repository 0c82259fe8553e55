"""Between a row and the engine: what to ask for it, and what the engine's answer means for the row."""

import hashlib
from dataclasses import dataclass
from typing import cast

from engine.outputs import RequestOutput
from engine.prompts import Prompt
from engine.sampling_params import SamplingParams
from jobs.errors import RowError
from jobs.results import Completion
from jobs.rows import Row

# OpenAI's default for completions; a chat answer without a limit may fill the model's context.
_COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineRequest:
    prompt: Prompt
    params: SamplingParams


def request_for(job_id: str, index: int, row: Row) -> EngineRequest:
    """What to ask the engine for row `index` of a job. Raises the engine's RequestError for a parameter out of range.

    A row without a seed gets one from the job and its place, so that a shard that is run again gives the same text.
    """
    given = {name: value for name, value in row.sampling if value is not None}
    if "max_tokens" not in given:
        given["max_tokens"] = _COMPLETION_MAX_TOKENS if row.kind == "completion" else None
    if "seed" not in given:
        digest = hashlib.blake2b(f"{job_id}:{index}:0".encode(), digest_size=8).digest()
        given["seed"] = int.from_bytes(digest, "big", signed=True)
    return EngineRequest(cast(Prompt, row.prompt), SamplingParams(**given))


def outcome_of(row: Row, output: RequestOutput) -> Completion | RowError:
    """The engine's answer as the row's result, or as its error."""
    if output.error is not None:
        return row_error(row, output.error.code, str(output.error), output.error.field)
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        raise ValueError(f"an answer that ended by {answer.finish_reason!r} is no result")
    return Completion(
        text=answer.text,
        finish_reason=answer.finish_reason,
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=len(answer.token_ids),
        cached_tokens=output.num_cached_tokens,
    )


def row_error(row: Row, code: str, message: str, param: str | None = None) -> RowError:
    return RowError(code=code, message=message, param=param, line=row.line, byte=row.offset, custom_id=row.custom_id)
