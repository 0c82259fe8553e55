"""Between a row and the engine: what is asked for it, and what the answer means for it."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError
from engine.outputs import CompletionOutput, FinishReason, PoolingOutput, RequestOutput, TokenLogprob
from engine.pooling.params import PoolingParams
from engine.sampling.params import SamplingParams
from engine.structured.output import StructuredOutput
from jobs.errors import RowError
from jobs.records import Usage
from jobs.results import Choice, Completion, Embeddings, Outcome
from jobs.rows import Row
from jobs.sampling import Sampling
from jobs.spec import JobSpec
from tests.jobs.specs import openai_spec, read, record_spec, request
from workers.render import EngineRequest, requests_for
from workers.render import outcome_of as outcome_of_all


def row(record: Any, spec: JobSpec) -> Row:
    found = read(record, spec)
    assert isinstance(found, Row)
    return found


def output(finish_reason: FinishReason = "stop", **fields: Any) -> RequestOutput:
    return RequestOutput(0, (1, 2, 3), (CompletionOutput(0, "text", (7, 8), finish_reason),), **fields)


def request_for(job_id: str, index: int, asked: Row) -> EngineRequest:
    (found,) = requests_for(job_id, index, asked)
    return found


def outcome_of(asked: Row, found: RequestOutput) -> Outcome:
    return outcome_of_all(asked, [found])


CHAT = row(request(), openai_spec())


def test_a_row_s_parameters_are_the_engine_s() -> None:
    body = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 11, "stop": ["a", "b"]}
    asked = request_for("job", 0, row(request(body), openai_spec()))
    assert list(asked.prompt) == [{"role": "user", "content": "Hi"}]
    params = asked.params
    assert (params.max_tokens, params.temperature, params.top_p, asked.seed) == (5, 0.5, 0.9, 11)
    assert params.stop_strings == ("a", "b")


def test_what_a_row_does_not_say_the_job_does() -> None:
    spec = record_spec(sampling=Sampling(max_tokens=7, temperature=0.0))
    assert request_for("job", 0, row({"prompt": "a"}, spec)).params.max_tokens == 7
    assert request_for("job", 0, row({"prompt": "a", "max_tokens": 3}, spec)).params.max_tokens == 3
    assert request_for("job", 0, row({"prompt": "a", "max_tokens": 3}, spec)).params.greedy


def test_without_a_limit_chats_fill_the_context_and_completions_are_short() -> None:
    completion = request({"prompt": "a", "messages": ...}, url="/v1/completions")
    assert request_for("job", 0, CHAT).params.max_tokens is None
    assert request_for("job", 0, row(completion, openai_spec())).params.max_tokens == 16


def test_a_row_without_a_seed_has_one_of_its_own_that_stays() -> None:
    seeds = {(job, index): request_for(job, index, CHAT).seed for job in ("a", "b") for index in (0, 1)}
    assert len(set(seeds.values())) == 4
    assert seeds["a", 1] == request_for("a", 1, CHAT).seed


def test_rows_that_differ_in_their_seeds_share_their_parameters() -> None:
    asked = [request_for("job", n, row(request({"temperature": 0.5, "seed": n}), openai_spec())) for n in range(2)]
    asked.append(request_for("job", 2, row(request({"temperature": 0.5}), openai_spec())))
    assert asked[0].params is asked[1].params is asked[2].params
    assert len({one.seed for one in asked}) == 3


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_is_a_completion(reason: FinishReason) -> None:
    assert outcome_of(CHAT, output(reason, num_cached_tokens=2)) == Completion(
        (Choice("text", reason),), Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2)
    )


def test_every_answer_and_its_logprobs_reach_the_row() -> None:
    token = TokenLogprob(7, -0.5, 1, "t", b"t", top=(TokenLogprob(8, -1.0, 2, "u", b"u"),))
    answers = tuple(CompletionOutput(i, f"text {i}", (7, 8), "stop", logprobs=(token, token)) for i in range(2))
    found = outcome_of(CHAT, RequestOutput(0, (1, 2, 3), answers, prompt_logprobs=(None, token, token)))
    assert isinstance(found, Completion)
    assert [choice.text for choice in found.choices] == ["text 0", "text 1"]
    assert found.usage == Usage(prompt_tokens=3, completion_tokens=4)
    assert found.choices[0].logprobs is not None
    assert found.choices[0].logprobs[1].top[0].token == "u"
    assert found.prompt_logprobs is not None
    assert found.prompt_logprobs[0] is None
    assert found.prompt_logprobs[2] == found.choices[0].logprobs[0]


def test_a_bias_is_the_engine_s() -> None:
    asked = request_for("job", 0, row(request({"logit_bias": {"7": -5, "3": 2}}), openai_spec()))
    assert asked.params.logit_bias == {3: 2, 7: -5}


@pytest.mark.parametrize(
    ("wanted", "engine_s"),
    [
        ({"json": {"type": "object"}}, StructuredOutput(json={"type": "object"})),
        ({"json_object": True}, StructuredOutput(json_object=True)),
        ({"choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))),
        ({"regex": "a+"}, StructuredOutput(regex="a+")),
        ({"grammar": "start: /a/"}, StructuredOutput(grammar="start: /a/")),
    ],
)
def test_what_an_answer_has_to_be_is_the_engine_s(wanted: Any, engine_s: StructuredOutput) -> None:
    asked = request_for("job", 0, row(request({"structured_outputs": wanted}), openai_spec()))
    assert asked.params.structured_output == engine_s


def test_a_row_s_adapter_is_the_engine_s_and_the_job_s_where_it_names_none() -> None:
    spec = openai_spec(lora="ours")
    assert request_for("job", 0, row(request(), spec)).lora == "ours"
    assert request_for("job", 0, row(request({"lora": "mine"}), spec)).lora == "mine"
    assert request_for("job", 0, CHAT).lora is None
    assert request_for("job", 0, row({"prompt": "a"}, record_spec(lora="ours"))).lora == "ours"


def test_every_parameter_of_a_row_is_one_of_the_engine_s() -> None:
    assert set(Sampling.model_fields) <= {spec.name for spec in fields(SamplingParams)}


EMBEDDING = row(
    request({"messages": ..., "input": ["a", "b"], "dimensions": 2, "normalize": False}, url="/v1/embeddings"),
    openai_spec(),
)


def test_each_input_of_an_embeddings_row_is_a_request() -> None:
    asked = requests_for("job", 0, EMBEDDING)
    assert [found.prompt for found in asked] == ["a", "b"]
    assert {found.params for found in asked} == {PoolingParams(dimensions=2, normalize=False)}


def test_vectors_are_a_row_s_in_the_order_of_its_inputs() -> None:
    outputs = [PoolingOutput(0, (1, 2), np.array([n, 0.5], np.float32), num_cached_tokens=1) for n in range(2)]
    found = outcome_of_all(EMBEDDING, outputs)
    assert isinstance(found, Embeddings)
    assert [np.frombuffer(vector, "<f4").tolist() for vector in found.vectors] == [[0, 0.5], [1, 0.5]]
    assert found.usage == Usage(prompt_tokens=4, cached_tokens=2)


def test_one_bad_input_is_the_row_s_error_and_named() -> None:
    refused = PoolingOutput.rejected(0, RequestError("Too long.", code="context_length_exceeded", field="prompt"))
    found = outcome_of_all(EMBEDDING, [PoolingOutput(0, (1,), np.zeros(2, np.float32)), refused])
    assert isinstance(found, RowError)
    assert (found.code, found.message) == ("context_length_exceeded", "Input 1: Too long.")


def test_a_refusal_is_the_row_s_error_with_its_place() -> None:
    refused = RequestError("Too long.", code="context_length_exceeded", field="messages", hint="Shorten it.")
    assert outcome_of(CHAT, RequestOutput.rejected(0, refused)) == RowError(
        code="context_length_exceeded",
        message="Too long. Shorten it.",
        param="messages",
        line=3,
        byte=40,
        custom_id="r1",
    )


def test_an_answer_that_was_cut_off_is_never_taken_for_a_result() -> None:
    with pytest.raises(ValueError, match="abort"):
        outcome_of(CHAT, output("abort"))


def test_the_engine_knows_a_rows_job_and_its_priority() -> None:
    (asked,) = requests_for("job", 0, EMBEDDING, priority=7)[:1]
    assert (asked.group, asked.priority) == ("job", 7)
