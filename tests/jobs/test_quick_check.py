"""The planner's quick look and the whole one agree, and keys that stand twice are found."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import RowError
from jobs.formats.json_keys import count_kept, repeated_key
from jobs.formats.jsonl import Line, dumps
from jobs.pooling import Pooling
from jobs.prefixes import text_of
from jobs.quick_check import ANSWER_TOKENS, answer_tokens, quick_check
from jobs.rows import Row, parse_row
from jobs.sampling import Sampling
from jobs.spec import JobSpec
from tests.jobs.specs import openai_spec, read, record_spec, request

HI = {"role": "user", "content": "Hi"}
SPECS = {
    "records": record_spec(),
    "messages": record_spec(messages_column="prompt", sampling=Sampling(n=3, max_tokens=7)),
    "vectors": record_spec(prompt_column="prompt", embed=True),
    "lines": openai_spec(model_aliases=("small",)),
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**65),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["", "a:b", '":']),
)
texts = st.sampled_from(["Hi", "", "a: b", '"a": b', "\u2028", "[{" * 40, "x" * 600])
messages = st.one_of(
    scalars,
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "tool", "developer"]), "content": st.one_of(texts, scalars)},
            optional={"name": scalars},
        ),
        max_size=3,
    ),
)
numbers = st.sampled_from([0, 1, 1.0, True, None, "1", 2.5, -1, 100])
bodies = st.fixed_dictionaries(
    {"model": st.sampled_from(["tiny", "small", "other", 5]), "messages": messages},
    optional={
        "max_tokens": numbers,
        "max_completion_tokens": numbers,
        "temperature": numbers,
        "n": numbers,
        "stream": numbers,
        "user": numbers,
        "stop": st.one_of(texts, st.lists(texts, max_size=2)),
        "unknown": scalars,
    },
)
records = st.fixed_dictionaries(
    {"prompt": st.one_of(texts, scalars, messages)},
    optional={"custom_id": st.one_of(texts, scalars), "max_tokens": numbers, "usage": scalars, "more": messages},
)
requests = st.fixed_dictionaries(
    {"custom_id": st.one_of(texts, scalars), "body": st.one_of(bodies, scalars)},
    optional={"method": st.sampled_from(["POST", "GET"]), "url": st.sampled_from(["/v1/chat/completions", "/v1/x"])},
).map(lambda changes: {**request(), **changes})


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(record=st.one_of(records, requests, scalars), spaced=st.booleans(), cut=st.integers(-3, 0))
@settings(max_examples=300)
def test_what_the_quick_look_takes_the_whole_one_takes_for_the_same(
    spec: JobSpec, record: Any, spaced: bool, cut: int
) -> None:
    text = json.dumps(record, separators=(" , ", " : ") if spaced else (",", ":"), ensure_ascii=not spaced)
    data = text.encode()[: cut or None]
    good = quick_check(spec)(data)
    if good is not None:
        row = parse_row(Line(1, 0, len(data), data), spec)
        assert isinstance(row, Row), row
        assert good[:2] == (row.custom_id, answer_tokens(row.params))
        if isinstance(row.params, Pooling):
            assert good[2] is None
        else:
            assert good[2] is not None
            assert text_of(good[2]) == text_of(row.prompts[0])


@pytest.mark.parametrize(
    ("spec", "record", "good"),
    [
        (SPECS["records"], {"prompt": "a: b", "custom_id": "7", "more": [{"x": {}}]}, ("7", ANSWER_TOKENS, "a: b")),
        (SPECS["messages"], {"prompt": [{"role": "user", "content": "Hi"}]}, (None, 21, [HI])),
        (SPECS["vectors"], {"prompt": "Hi"}, (None, 0, None)),
        (SPECS["lines"], request({"max_tokens": 5, "temperature": 0, "seed": 1}), ("r1", 5, [HI])),
    ],
    ids=SPECS,
)
def test_rows_as_most_are_need_no_whole_look(spec: JobSpec, record: Any, good: Any) -> None:
    look = quick_check(spec)
    assert [look(dumps(record)) for _ in range(2)] == [good, good]


def test_numbers_of_another_type_are_other_parameters() -> None:
    look = quick_check(SPECS["lines"])
    assert look(dumps(request({"max_tokens": 1}))) == ("r1", 1, [HI])
    assert look(dumps(request({"max_tokens": True}))) is None


def test_the_answers_of_vectors_cost_nothing() -> None:
    assert answer_tokens(Pooling()) == 0


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (b'{"a":1,"a":2}', "a"),
        (b'{"a":1, "b":{"c":[{"d":1,"d":1}]}}', "d"),
        (b'{"a" :1,"a"\t:2,"b":"x\\":"}', "a"),
        (b'{"a":1,"\\u0061":2}', "a"),
        (b'{"a":"x: y","a":"\\":"}', "a"),
        (b'{"a":{"a":{"a":1}}}', None),
        (b'{"a":"\\":", "b" : "\\":"}', None),
        (b'{"a":"\\" x: ","a":"y: \\" "}', "a"),
        (b'{"a":["x: ",{"b":"y: "}],"b":["c",":"]}', None),
        (b'{"a":" : : \\": \\":"}', None),
        (b"[1,2]", None),
        (b"{}", None),
    ],
)
def test_a_key_that_stands_twice_is_found(data: bytes, key: str | None) -> None:
    assert repeated_key(data, *count_kept(json.loads(data))) == key


names = st.sampled_from(["a", "b", "é", ':"', " :"])
trees = st.recursive(
    st.one_of(names, st.integers()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(st.tuples(names, inner), max_size=3).map(tuple)),
    max_leaves=8,
)


def written(tree: Any, colon: str) -> str:
    if isinstance(tree, tuple):
        return "{" + ",".join(f"{json.dumps(name)}{colon}{written(item, colon)}" for name, item in tree) + "}"
    return "[" + ",".join(written(item, colon) for item in tree) + "]" if isinstance(tree, list) else json.dumps(tree)


def has_twice(tree: Any) -> bool:
    if isinstance(tree, tuple):
        return len({name for name, _ in tree}) < len(tree) or any(has_twice(item) for _, item in tree)
    return isinstance(tree, list) and any(map(has_twice, tree))


@given(trees, st.sampled_from([":", " :", ": ", "\t: "]))
def test_keys_that_stand_twice_are_found_wherever_they_are(tree: Any, colon: str) -> None:
    text = written(tree, colon)
    assert (repeated_key(text.encode(), *count_kept(json.loads(text))) is not None) == has_twice(tree)


@pytest.mark.parametrize("spec", [SPECS["records"], SPECS["lines"]], ids=["records", "lines"])
def test_a_row_with_a_key_twice_is_refused(spec: JobSpec) -> None:
    data = dumps(request() | {"prompt": "a"} if spec is SPECS["records"] else request())
    assert isinstance(read(data, spec), Row)
    error = read(data.replace(b'"role":"user"', b'"role":"user","role":"system"'), spec)
    assert isinstance(error, RowError)
    assert (error.code, error.param) == ("duplicate_key", "role")
    assert error.custom_id is None
