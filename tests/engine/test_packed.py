"""What crosses the pipe between an engine process and its owner arrives as it was."""

import pickle
from dataclasses import fields

import pytest

from engine.errors import RequestError
from engine.messages import NewRequest
from engine.outputs import CompletionOutput, RequestOutput, TokenLogprob
from engine.sampling.params import SamplingParams

TOKEN = TokenLogprob(5, -0.5, 2, "a", b"a", (TokenLogprob(6, -0.25, 1, "b", b"b"),))
ANSWER = CompletionOutput(1, "text", (1, 2), "stop", "end", (TOKEN, TOKEN), -1.0)
VALUES = [
    TOKEN,
    ANSWER,
    RequestOutput(3, (4, 5), (ANSWER,), 2, None, (None, TOKEN)),
    NewRequest(7, "prompt", SamplingParams(seed=1), b"salt", "adapter", 9, 3, "job"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_field_arrives(value):
    defaults = [field.name for field in fields(value) if getattr(value, field.name) == field.default]
    assert defaults in ([], ["error"]), "each field is to differ from its default"
    assert pickle.loads(pickle.dumps(value)) == value


def test_an_error_arrives_with_its_code_and_field():
    sent = RequestOutput.rejected(1, RequestError("Too long.", code="context_length_exceeded", field="prompt"))
    received = pickle.loads(pickle.dumps(sent))
    assert (received.error.code, received.error.field) == ("context_length_exceeded", "prompt")
