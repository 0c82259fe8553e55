"""The public face, on a tiny random Llama from a folder."""

from itertools import count, islice

import pytest

from engine import LLM, ConfigError, EngineConfig, ModelNotFound, SamplingParams
from tests.engine.asking import AskingProcess
from tests.engine.models_fixture import tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=True))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=65, block_size=8)


def test_a_list_of_prompts_gives_a_list_in_its_order(llm):
    prompts = ["one", "a second, longer prompt", [3, 4, 5], [{"role": "user", "content": "hi"}]]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert outputs[2].prompt_token_ids == (3, 4, 5)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert llm.generate([prompt], GREEDY)[0].outputs == output.outputs, "alone and in a batch alike"
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)


def test_a_string_alone_is_one_prompt(llm):
    (output,) = llm.generate("hello", GREEDY)
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_conversations_go_through_the_chat_template(llm):
    conversation = [{"role": "user", "content": "hi"}]
    (alone,) = llm.chat(conversation, GREEDY)
    (listed,) = llm.chat([conversation], GREEDY)
    assert alone == listed
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(alone.prompt_token_ids) == llm.tokenizer(rendered)["input_ids"]


def test_each_prompt_may_have_parameters_of_its_own(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(["a", "b", "c"], params)] == [1, 5, 3]
    with pytest.raises(ValueError, match="3 prompts, but 2"):
        llm.generate(["a", "b", "c"], params[:2])


def test_an_iterator_is_drawn_from_as_answers_are_taken(llm):
    drawn = []

    def prompts():
        for n in count():
            drawn.append(n)
            yield [n % 250, 7]

    answers = llm.generate(prompts(), GREEDY)
    assert drawn == []
    for expected, output in enumerate(islice(answers, 50)):
        assert output.index == expected
        assert output.prompt_token_ids == (expected % 250, 7)
        assert len(drawn) <= expected + 1 + 4 * 4, "a few batches ahead, and no more"
    answers.close()
    assert [output.index for output in llm.generate(["a", "b"], GREEDY)] == [0, 1]
    assert llm.stats().running == llm.stats().waiting == 0


def test_two_iterators_may_be_read_in_turns(llm):
    first = llm.generate(iter([[n, 1] for n in range(20)]), GREEDY)
    second = llm.generate(iter([[n, 2] for n in range(20)]), GREEDY)
    for n, (one, other) in enumerate(zip(first, second, strict=True)):
        assert (one.index, one.prompt_token_ids) == (n, (n, 1))
        assert (other.index, other.prompt_token_ids) == (n, (n, 2))


def test_bad_rows_come_back_in_their_places_with_their_errors(llm):
    outputs = llm.generate(["good", "", [10_000], [1] * 600, "good"], GREEDY)
    assert [output.error and output.error.code for output in outputs] == [
        None,
        "invalid_request",
        "invalid_request",
        "context_length_exceeded",
        None,
    ]
    assert outputs[0].outputs == outputs[4].outputs


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"scheduling_policy": "lifo"},
        {"max_num_seqs": 0},
        {"num_kv_blocks": 8, "kv_cache_memory": 2**20},
        {"num_kv_blocks": 4, "block_size": 8, "max_model_len": 100},
        {"kv_cache_memory": 100},
        {"max_model_len": 513},
        {"device": "cpu", "gpu_memory_utilization": 0.5},
        {"device": "nowhere"},
    ],
)
def test_options_that_cannot_be_are_refused(folder, options):
    with pytest.raises(ConfigError):
        LLM(folder, **options)


def test_an_option_that_does_not_exist_is_an_error(folder):
    with pytest.raises(TypeError, match="max_nun_seqs"):
        LLM(folder, max_nun_seqs=3)


def test_left_open_the_context_is_what_the_pool_holds(folder):
    assert LLM(folder, num_kv_blocks=5, block_size=8).info.max_model_len == 32
    assert LLM(folder, kv_cache_memory=2**24).info.max_model_len == 512


def test_an_engine_process_gives_what_the_engine_here_gives(folder, llm):
    process = AskingProcess(EngineConfig(folder, dtype="float32", num_kv_blocks=65, block_size=8, num_threads=1))
    info = process.start()
    assert (info.dtype, info.max_model_len, info.num_kv_blocks) == ("float32", 512, 65)
    prompts = ["one", [{"role": "user", "content": "hi"}]]
    futures = [process.ask(prompt, GREEDY) for prompt in prompts]
    here = llm.generate(prompts, GREEDY)
    assert [future.result(60).outputs for future in futures] == [output.outputs for output in here]
    process.stop()


def test_an_engine_process_says_that_there_is_no_model():
    with pytest.raises(ModelNotFound):
        AskingProcess(EngineConfig("/no/such/model")).start()
