"""Structured output: every form, through the whole engine with tiny random weights, which say anything they may."""

import json
import re
import threading
import time

import jsonschema
import pytest

import engine.structured.grammar
from engine import LLM, RequestError, SamplingParams, StructuredOutput
from engine.messages import NewRequest
from engine.structured.grammar import GrammarCompiler, GrammarMasks
from tests.engine.models_fixture import byte_tokenizer, tiny_llama
from tests.engine.schemas import schemas
from tests.engine.test_core import finish, text_core
from tests.engine.toy import EOS, answer, toy_limits

PERSON = {
    "type": "object",
    "properties": {
        "näme": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["näme", "age"],
    "additionalProperties": False,
}
LARK = """
start: greeting ("," greeting)?
greeting: ("hello" | "你好") " " NAME
NAME: /[A-Z][a-z]{1,4}/
"""
GBNF = """
# sums of small numbers
root ::= number (op number){1,3}
op ::= "+" | "−"
number ::= [1-9] [0-9]?
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(
        tiny_llama(
            tmp_path_factory.mktemp("llama"), tokenizer=True, max_position_embeddings=1024, eos_token_id=[257, 259]
        )
    )


@pytest.fixture(scope="module")
def llm(folder):
    return small_engine(folder)


def small_engine(folder, **options):
    sizes = {"max_num_seqs": 200, "max_num_batched_tokens": 1024, "num_kv_blocks": 4097, "block_size": 16}
    return LLM(folder, dtype="float32", num_threads=1, **{**sizes, **options})


def params(structured_output=None, **options):
    return SamplingParams(**{"max_tokens": 512, "structured_output": structured_output, **options})


def texts(llm, structured_output, count=8, **options):
    outputs = llm.generate([[n, 1] for n in range(count)], params(structured_output, **options))
    assert {(output.error, output.outputs[0].finish_reason) for output in outputs} == {(None, "stop")}
    return [output.outputs[0].text for output in outputs]


def matcher(structured_output, vocab_size=320):
    return GrammarCompiler(byte_tokenizer(), vocab_size, frozenset({257, 259})).compile(structured_output).result()


def follows(structured_output, text):
    """Whether `text` is a whole answer."""
    automaton = matcher(structured_output)
    try:
        for token_id in byte_tokenizer()(text)["input_ids"]:
            automaton.consume(token_id)
    except RequestError:
        return False
    return automaton.automaton.is_accepting()


def test_two_hundred_different_schemas_each_get_an_answer_that_keeps_to_them(llm):
    asked = schemas(200)
    assert len({json.dumps(schema) for schema in asked}) == 200
    outputs = llm.generate(
        [[n % 256, 1] for n in range(200)], [params(StructuredOutput(json=s), max_tokens=1000) for s in asked]
    )
    assert [output.error for output in outputs] == [None] * 200
    complete = [n for n, output in enumerate(outputs) if output.outputs[0].finish_reason == "stop"]
    assert len(complete) >= 198, "a number may have any number of digits, all other parts are bounded"
    for n in complete:
        jsonschema.validate(json.loads(outputs[n].outputs[0].text), asked[n])


@pytest.mark.model
@pytest.mark.slow
def test_two_hundred_different_schemas_with_a_real_model():
    llm = LLM("demo", max_num_seqs=100)
    asked = schemas(200)
    sampling = [params(StructuredOutput(json=s), temperature=0.9, seed=n) for n, s in enumerate(asked)]
    chats = [[{"role": "user", "content": f"Write JSON about {n} things."}] for n in range(200)]
    outputs = llm.generate(chats, sampling)
    assert [output.error for output in outputs] == [None] * 200
    complete = [n for n, output in enumerate(outputs) if output.outputs[0].finish_reason == "stop"]
    assert len(complete) >= 190
    for n in complete:
        jsonschema.validate(json.loads(outputs[n].outputs[0].text), asked[n])


def test_any_json_object(llm):
    assert follows(StructuredOutput(json_object=True), '{"a": [1, {"b": null}], "": "é"}')
    assert not follows(StructuredOutput(json_object=True), "[1]")
    outputs = llm.generate([[n] for n in range(8)], params(StructuredOutput(json_object=True), max_tokens=300))
    complete = [o.outputs[0].text for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert complete, "nothing bounds these, so that some reach max_tokens"
    assert all(isinstance(json.loads(text), dict) for text in complete)


def test_json_may_have_one_space_between_its_parts_and_no_more():
    assert follows(StructuredOutput(json=PERSON), '{"näme": "Zoë", "age": 3}')
    assert follows(StructuredOutput(json=PERSON), '{"näme":"Zoë","age":3}')
    assert not follows(StructuredOutput(json=PERSON), '{"näme":  "Zoë", "age": 3}')
    assert not follows(StructuredOutput(json=PERSON), '{"näme": "Zoë",\n"age": 3}')
    spacious = {**PERSON, "x-guidance": {"whitespace_pattern": r"\s*"}}
    assert follows(StructuredOutput(json=spacious), '{"näme":  "Zoë",\n"age": 3}')


def test_a_regular_expression_of_characters_of_many_bytes(llm):
    pattern = "[α-ω]{2,5}(日本|🙂)+[0-9]?"
    for text in texts(llm, StructuredOutput(regex=pattern)):
        assert re.fullmatch(pattern, text), text


def test_one_of_several_strings(llm):
    choices = ['say "hi"', "back\\slash", "two\nlines", "🙂", "ja", "jawohl", "/re/"]
    for choice in choices:
        assert follows(StructuredOutput(choice=choices), choice)
    assert not follows(StructuredOutput(choice=choices), "jaw")
    assert set(texts(llm, StructuredOutput(choice=choices), count=32)) <= set(choices)


def test_a_lark_grammar(llm):
    one = r"(hello|你好) [A-Z][a-z]{1,4}"
    for text in texts(llm, StructuredOutput(grammar=LARK)):
        assert re.fullmatch(f"{one}(,{one})?", text), text


def test_a_gbnf_grammar(llm):
    for text in texts(llm, StructuredOutput(grammar=GBNF)):
        assert re.fullmatch("[1-9][0-9]?([+−][1-9][0-9]?){1,3}", text), text


def test_an_answer_that_is_cut_off_says_so(llm):
    (output,) = llm.generate([[1]], params(StructuredOutput(regex="[a-z]{50}"), max_tokens=10))
    assert output.outputs[0].finish_reason == "length"
    assert re.fullmatch("[a-z]{10}", output.outputs[0].text)


@pytest.mark.parametrize("options", [{"min_tokens": 20}, {"ignore_eos": True}])
def test_a_grammar_that_is_complete_ends_the_answer_whatever_else_is_asked(llm, options):
    for text in texts(llm, StructuredOutput(regex="a{1,4}b"), **options):
        assert re.fullmatch("a{1,4}b", text)


def test_min_tokens_holds_back_an_end_that_the_grammar_leaves_open(llm):
    assert all(len(text) >= 20 for text in texts(llm, StructuredOutput(regex="[a-z]*"), min_tokens=20))


def test_several_answers_to_one_prompt_each_follow_the_grammar_by_themselves(llm):
    (output,) = llm.generate([[1, 2]], params(StructuredOutput(json=PERSON), n=6))
    answers = {completion.text for completion in output.outputs}
    assert len(answers) == 6
    for answer_text in answers:
        jsonschema.validate(json.loads(answer_text), PERSON)


def test_tokens_that_only_pad_the_vocabulary_are_never_allowed(llm):
    # The model has logits for 320 tokens, the tokenizer knows 260.
    assert llm.info.vocab_size == 320
    biased = dict.fromkeys((*range(260, 320), 256, 258), 100.0)
    for text in texts(llm, StructuredOutput(json=PERSON), logit_bias=biased):
        jsonschema.validate(json.loads(text), PERSON)


def test_each_end_token_of_the_model_may_end_an_answer(llm):
    for end in (257, 259):
        outputs = llm.generate([[7]], params(StructuredOutput(choice=["yes"]), logit_bias={end: 50.0}))
        assert outputs[0].outputs[0].token_ids[-1] == end
        assert outputs[0].outputs[0].text == "yes"


def test_preemption_in_the_middle_of_a_grammar_changes_nothing(folder, llm):
    # Answers of nearly max_tokens, of which the scheduler at first expects 70 %.
    items = {"type": "array", "items": {"enum": ["näher 🙂", "weiter 🙂"]}, "minItems": 15, "maxItems": 15}
    prompts = [[n, 3, 4] for n in range(12)]
    tight = small_engine(folder, num_kv_blocks=40, max_num_seqs=12, max_model_len=600)
    outputs = tight.generate(prompts, params(StructuredOutput(json=items), seed=5, max_tokens=270))
    assert tight.stats().preemptions > 0
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    roomy = llm.generate(prompts, params(StructuredOutput(json=items), seed=5, max_tokens=270))
    assert [output.outputs for output in outputs] == [output.outputs for output in roomy]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (StructuredOutput(json={"type": "nonsense"}), "structured_output.json"),
        (StructuredOutput(json={"type": "string", "pattern": "("}), "structured_output.json"),
        (StructuredOutput(json={"type": "integer", "minimum": 5, "maximum": 3}), "structured_output.json"),
        (StructuredOutput(json={"$ref": "https://example.com/schema.json"}), "structured_output.json"),
        (StructuredOutput(regex="a(?=b)"), "structured_output.regex"),
        (StructuredOutput(grammar="start: nothing"), "structured_output.grammar"),
        (StructuredOutput(grammar="root ::= ("), "structured_output.grammar"),
    ],
)
def test_a_form_that_cannot_be_compiled_costs_its_own_row_only(llm, bad, field):
    good = params(StructuredOutput(choice=["yes", "no"]))
    outputs = llm.generate([[1], [2], [3], [4]], [good, params(bad), params(bad), params(max_tokens=4)])
    for output in outputs[1:3]:
        assert (output.error.code, output.error.field) == ("invalid_grammar", field)
        assert len(output.error.message) > len(field) + 20, "it says what is wrong"
    assert outputs[0].outputs[0].text in ("yes", "no")
    assert outputs[3].error is None


def chain_of_references(length):
    links = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(length)}
    return StructuredOutput(json={"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(
    "huge",
    [
        chain_of_references(15_000),
        StructuredOutput(grammar="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        StructuredOutput(grammar="root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
        StructuredOutput(regex="(" * 30_000 + "a" + ")" * 30_000),
    ],
    ids=["references", "lark", "gbnf", "regex"],
)
def test_what_is_too_large_or_too_deep_is_refused_and_does_not_take_the_process_down(huge):
    with pytest.raises(RequestError) as refused:
        matcher(huge)
    assert refused.value.code == "invalid_grammar"
    assert len(refused.value.message) < 1000


def test_a_grammar_is_compiled_once_for_all_that_ask_for_it():
    compiler = GrammarCompiler(byte_tokenizer(), 320, frozenset({257}))
    assert compiler.compile(StructuredOutput(regex="a")) is compiler.compile(StructuredOutput(regex="a"))
    assert compiler.compile(StructuredOutput(regex="a")) is not compiler.compile(StructuredOutput(choice=["a"]))


def test_only_the_grammars_that_were_asked_for_last_are_kept(monkeypatch):
    monkeypatch.setattr(engine.structured.grammar, "_CACHED_GRAMMARS", 2)
    compiler = GrammarCompiler(byte_tokenizer(), 320, frozenset({257}))
    a, b, c = (StructuredOutput(regex=letter) for letter in "abc")
    kept, gone = compiler.compile(a), compiler.compile(b)
    compiler.compile(a)
    compiler.compile(c)
    assert compiler.compile(a) is kept
    assert compiler.compile(b) is not gone


def test_a_fork_goes_its_own_way():
    first = matcher(StructuredOutput(choice=["ab", "ac"]))
    a, b, c = byte_tokenizer()("abc")["input_ids"]
    first.consume(a)
    second = first.fork()
    first.consume(b)
    second.consume(c)
    assert first.finished
    assert second.finished
    with pytest.raises(RequestError, match=r"structured_output\.choice"):
        first.fork().consume(c)


def test_a_model_without_a_tokenizer_gives_no_structured_output():
    core = text_core()
    core_without = GrammarCompiler(None, core.info.vocab_size, frozenset({EOS}))
    with pytest.raises(RequestError) as refused:
        core_without.compile(StructuredOutput(regex="a")).result()
    assert refused.value.field == "structured_output"


@pytest.fixture
def held_compiler(monkeypatch):
    """Grammars are not compiled before this event is set."""
    go_on = threading.Event()
    compile_now = engine.structured.grammar._compile

    def compile_when_told(*args):
        assert go_on.wait(60)
        return compile_now(*args)

    monkeypatch.setattr(engine.structured.grammar, "_compile", compile_when_told)
    yield go_on
    go_on.set()


YES = SamplingParams(temperature=0, max_tokens=8, structured_output=StructuredOutput(choice=["yes"]))
PLAIN = SamplingParams(temperature=0, max_tokens=8)


def test_a_request_waits_for_its_grammar_and_the_others_go_on(held_compiler):
    core = text_core()
    core.add_requests([NewRequest(0, [1], YES), NewRequest(1, [1, 2, 3], PLAIN)])
    outputs = []
    while not outputs:
        outputs = core.step()
    assert [output.index for output in outputs] == [1]
    assert list(outputs[0].outputs[0].token_ids) == answer([1, 2, 3], 8)
    assert (core.stats().waiting, core.has_unfinished) == (1, True)
    held_compiler.set()
    assert finish(core)[0].outputs[0].text == "yes"


def test_with_nothing_else_to_do_a_step_waits_for_the_grammar_instead_of_spinning(held_compiler):
    core = text_core()
    core.add_requests([NewRequest(0, [1], YES)])
    began = time.monotonic()
    for _ in range(3):
        assert core.step() == []
    assert time.monotonic() - began > 0.1
    held_compiler.set()
    assert finish(core)[0].outputs[0].text == "yes"


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(held_compiler):
    core = text_core()
    core.add_requests([NewRequest(0, [1], YES), NewRequest(1, [1], YES)])
    core.step()
    core.abort(0)
    (output,) = core.step()
    assert (output.index, output.outputs[0].finish_reason) == (0, "abort")
    held_compiler.set()
    outputs = finish(core)
    assert list(outputs) == [1]
    assert outputs[1].outputs[0].text == "yes"


def test_no_more_requests_wait_for_grammars_than_can_soon_run(held_compiler):
    core = text_core(toy_limits(max_num_seqs=2))
    core.add_requests(NewRequest(index, "hello", YES) for index in range(20))
    for _ in range(3):
        core.step()
    assert len(core._unencoded) == 18
    held_compiler.set()
    assert {output.outputs[0].text for output in finish(core).values()} == {"yes"}


def test_no_more_compiled_grammars_wait_than_two_batches_have():
    core = text_core(toy_limits(max_num_seqs=2))
    core.add_requests(NewRequest(index, "hello", YES) for index in range(20))
    known = 0
    while core.has_unfinished:
        core.step()
        known = max(known, core.stats().waiting - len(core._unencoded))
    assert 0 < known <= 4


def test_a_token_that_the_grammar_cannot_take_fails_its_request_and_not_the_engine(monkeypatch):
    monkeypatch.setattr(GrammarMasks, "fill", lambda self, rows: None)
    core = text_core()
    core.add_requests([NewRequest(0, [1, 2, 3], YES), NewRequest(1, [1, 2, 3], PLAIN)])
    outputs = finish(core)
    assert outputs[0].error.code == "invalid_grammar"
    assert list(outputs[1].outputs[0].token_ids) == answer([1, 2, 3], 8)
    core.scheduler.check_integrity()
