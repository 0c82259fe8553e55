"""Between a row and the engine: what to ask for it, and what the engine's answers mean for the row."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from engine.outputs import CompletionOutput, EngineOutput, PoolingOutput, RequestOutput
from engine.outputs import TokenLogprob as EngineLogprob
from engine.pooling.params import PoolingParams
from engine.prompts import Prompt
from engine.sampling.params import SamplingParams
from engine.structured.output import StructuredOutput
from jobs.errors import RowError
from jobs.pooling import Pooling
from jobs.records import Usage
from jobs.results import Choice, Completion, Embeddings, Outcome, TokenLogprob
from jobs.row_fields import Kind
from jobs.rows import Row
from jobs.sampling import Sampling
from jobs.sampling import StructuredOutput as WantedOutput

# OpenAI's default for completions; a chat answer without a limit may fill the model's context.
_COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the engine is asked for. The seed is apart from the parameters, which most rows of a job share.

    `priority` and `group` are the job's, as in `engine.request.Request`.
    """

    prompt: Prompt
    params: SamplingParams | PoolingParams
    lora: str | None = None
    seed: int | None = None
    priority: int = 0
    group: str = ""


def requests_for(job_id: str, index: int, row: Row, priority: int = 0) -> list[EngineRequest]:
    """What to ask the engine for row `index` of a job: one request for each of its prompts.

    Rows of a job come from one template, and are expected to be answered at similar length.

    Raises the engine's RequestError for a parameter out of range.
    """
    if isinstance(row.params, Pooling):
        params: SamplingParams | PoolingParams = _pooling_params(row.params)
        seed = None
    elif row.params.seed is None:
        params = _sampling_params(row.params, row.kind)
        # So that a shard that is run again gives the same text.
        seed = seed_of(job_id, index)
    else:
        params = _sampling_params(row.params.model_copy(update={"seed": None}), row.kind)
        seed = row.params.seed
    return [EngineRequest(cast(Prompt, prompt), params, row.lora, seed, priority, job_id) for prompt in row.prompts]


@lru_cache(maxsize=256)
def _pooling_params(pooling: Pooling) -> PoolingParams:
    return PoolingParams(
        pooling=pooling.pooling,
        normalize=pooling.normalize,
        dimensions=pooling.dimensions,
        truncate_prompt_tokens=pooling.truncate_prompt_tokens,
    )


# Checking them takes longer than anything else that is done for a row.
@lru_cache(maxsize=256)
def _sampling_params(sampling: Sampling, kind: Kind) -> SamplingParams:
    given: dict[str, Any] = {name: value for name, value in sampling if value is not None}
    if "max_tokens" not in given:
        given["max_tokens"] = _COMPLETION_MAX_TOKENS if kind == "completion" else None
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if "structured_output" in given:
        given["structured_output"] = _structured_output(given["structured_output"])
    return SamplingParams(**given)


def seed_of(job_id: str, index: int) -> int:
    """The seed of row `index` of a job, where the row names none."""
    return int.from_bytes(hashlib.blake2b(f"{job_id}:{index}:0".encode(), digest_size=8).digest(), "big", signed=True)


def _structured_output(wanted: WantedOutput) -> StructuredOutput:
    fields = {name: value for name, value in wanted if value not in (None, False)}
    if "json_schema" in fields:
        fields["json"] = fields.pop("json_schema")
    return StructuredOutput(**fields)


def outcome_of(row: Row, outputs: Sequence[EngineOutput]) -> Outcome:
    """The engine's answers to a row's requests as the row's result, or as its error: that of the first that failed."""
    for place, output in enumerate(outputs):
        if output.error is not None:
            where = f"Input {place}: " if len(outputs) > 1 else ""
            return row_error(row, output.error.code, f"{where}{output.error}", output.error.field)
    first, *others = outputs
    usage = sum(map(_usage, others), _usage(first))
    if isinstance(first, RequestOutput):
        of_prompt = first.prompt_logprobs
        return Completion(
            choices=tuple(map(_choice, first.outputs)),
            usage=usage,
            prompt_logprobs=None if of_prompt is None else tuple(_logprob(t) if t else None for t in of_prompt),
        )
    vectors = cast(Sequence[PoolingOutput], outputs)
    return Embeddings(tuple(output.data.astype("<f4").tobytes() for output in vectors), usage)


def _usage(output: EngineOutput) -> Usage:
    answers = output.outputs if isinstance(output, RequestOutput) else ()
    return Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=sum(len(answer.token_ids) for answer in answers),
        cached_tokens=output.num_cached_tokens,
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
    return RowError(
        code=code,
        message=message,
        param=param,
        line=row.line,
        byte=row.offset,
        custom_id=row.custom_id,
        file=row.file,
    )
