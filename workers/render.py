"""Between a row and the engine: what to ask for it, and what the engine's answer means for the row."""

import hashlib
from dataclasses import dataclass
from typing import Any, cast

from engine.outputs import CompletionOutput, RequestOutput
from engine.outputs import TokenLogprob as EngineLogprob
from engine.prompts import Prompt
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from jobs.errors import RowError
from jobs.results import Choice, Completion, TokenLogprob
from jobs.rows import Row
from jobs.sampling import StructuredOutput as WantedOutput

# OpenAI's default for completions; a chat answer without a limit may fill the model's context.
_COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineRequest:
    prompt: Prompt
    params: SamplingParams
    lora: str | None = None


def request_for(job_id: str, index: int, row: Row) -> EngineRequest:
    """What to ask the engine for row `index` of a job. Raises the engine's RequestError for a parameter out of range.

    A row without a seed gets one from the job and its place, so that a shard that is run again gives the same text.
    """
    given: dict[str, Any] = {name: value for name, value in row.sampling if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if "max_tokens" not in given:
        given["max_tokens"] = _COMPLETION_MAX_TOKENS if row.kind == "completion" else None
    if "seed" not in given:
        digest = hashlib.blake2b(f"{job_id}:{index}:0".encode(), digest_size=8).digest()
        given["seed"] = int.from_bytes(digest, "big", signed=True)
    if "structured_output" in given:
        given["structured_output"] = _structured_output(given["structured_output"])
    return EngineRequest(cast(Prompt, row.prompt), SamplingParams(**given), row.lora)


def _structured_output(wanted: WantedOutput) -> StructuredOutput:
    fields = {name: value for name, value in wanted if value not in (None, False)}
    if "json_schema" in fields:
        fields["json"] = fields.pop("json_schema")
    return StructuredOutput(**fields)


def outcome_of(row: Row, output: RequestOutput) -> Completion | RowError:
    """The engine's answer as the row's result, or as its error."""
    if output.error is not None:
        return row_error(row, output.error.code, str(output.error), output.error.field)
    of_prompt = output.prompt_logprobs
    return Completion(
        choices=tuple(map(_choice, output.outputs)),
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=sum(len(answer.token_ids) for answer in output.outputs),
        cached_tokens=output.num_cached_tokens,
        prompt_logprobs=None if of_prompt is None else tuple(_logprob(token) if token else None for token in of_prompt),
    )


def _choice(answer: CompletionOutput) -> Choice:
    if answer.finish_reason not in ("stop", "length"):
        raise ValueError(f"an answer that ended by {answer.finish_reason!r} is no result")
    logprobs = None if answer.logprobs is None else tuple(map(_logprob, answer.logprobs))
    return Choice(answer.text, answer.finish_reason, logprobs)


def _logprob(token: EngineLogprob) -> TokenLogprob:
    top = tuple(map(_logprob, token.top))
    return TokenLogprob(token.token_id, token.text, token.utf8, token.logprob, token.rank, top)


def row_error(row: Row, code: str, message: str, param: str | None = None) -> RowError:
    return RowError(code=code, message=message, param=param, line=row.line, byte=row.offset, custom_id=row.custom_id)
