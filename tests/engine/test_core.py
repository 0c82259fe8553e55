"""The loop with a toy model: encoding, stopping, errors of single rows, and a device that runs out of memory."""

import math

import pytest

from engine import waiting
from engine.loop import TokenBudget
from engine.messages import NewRequest
from engine.sampling.params import SamplingParams
from tests.engine.models_fixture import byte_tokenizer
from tests.engine.toy import (
    EOS,
    VOCAB_SIZE,
    FaultyRunner,
    ToyModel,
    answer,
    next_token,
    toy_core,
    toy_limits,
    toy_runner,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def text_core(*args, **options):
    return toy_core(*args, tokenizer=byte_tokenizer(), **options)


def finish(core, max_steps=500):
    outputs = []
    for _ in range(max_steps):
        if not core.has_unfinished:
            return {output.index: output for output in outputs}
        outputs += core.step()
    raise AssertionError("the loop does not come to an end")


def ask(core, *prompts, params=GREEDY):
    core.add_requests(NewRequest(index, prompt, params) for index, prompt in enumerate(prompts))
    outputs = finish(core)
    assert sorted(outputs) == list(range(len(prompts)))
    core.scheduler.check_integrity()
    return [outputs[index] for index in range(len(prompts))]


def test_text_messages_and_token_ids_are_answered_alike():
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": "hi"}]
    outputs = ask(text_core(), text, messages, byte_tokenizer()(text)["input_ids"])
    assert len({output.prompt_token_ids for output in outputs}) == 1
    assert len({output.outputs for output in outputs}) == 1
    prompt = outputs[0].prompt_token_ids
    assert list(outputs[0].outputs[0].token_ids) == answer(prompt, 8)


def test_an_answer_ends_at_the_models_end_token_and_its_text_is_without_it():
    prompt = next([n] for n in range(256) if EOS in answer([n], 8))
    (output,) = ask(text_core(), prompt)
    completion = output.outputs[0]
    assert completion.token_ids[-1] == EOS
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == byte_tokenizer().decode(completion.token_ids, skip_special_tokens=True)


def test_ignore_eos_goes_on_to_max_tokens():
    prompt = next([n] for n in range(256) if EOS in answer([n], 8))
    (output,) = ask(text_core(), prompt, params=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert list(output.outputs[0].token_ids) == answer(prompt, 8, ignore_eos=True)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_the_answer_and_stays_out_of_the_text_unless_asked_for(include):
    prompt = next([n] for n in range(256) if EOS not in answer([n], 2) and max(answer([n], 2)) < 128)
    first, second = answer(prompt, 2)
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[second], include_stop_str_in_output=include)
    (output,) = ask(text_core(), prompt, params=params)
    completion = output.outputs[0]
    assert completion.token_ids == (first, second)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", second)
    assert completion.text == byte_tokenizer().decode([first, second] if include else [first])


def test_a_stop_string_ends_the_answer():
    prompt = next([n] for n in range(256) if EOS not in answer([n], 5))
    text = byte_tokenizer().decode(answer(prompt, 5))
    stop = next(character for character in text if character != "\ufffd")
    params = SamplingParams(temperature=0, max_tokens=64, stop=stop)
    (output,) = ask(text_core(), prompt, params=params)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert output.outputs[0].text == text[: text.index(stop)]


def test_min_tokens_holds_back_end_tokens_stop_tokens_and_stop_strings():
    prompt = next([n] for n in range(256) if answer([n], 8)[-1] == EOS)
    stops = SamplingParams(temperature=0, max_tokens=12, min_tokens=12, stop=["\ufffd", *map(chr, range(128))])
    (output,) = ask(text_core(), prompt, params=stops)
    assert EOS not in output.outputs[0].token_ids
    assert len(output.outputs[0].token_ids) == 12
    banned = next_token(prompt)
    (output,) = ask(
        text_core(), prompt, params=SamplingParams(temperature=0, max_tokens=4, min_tokens=2, stop_token_ids=[banned])
    )
    assert banned not in output.outputs[0].token_ids[:2]


def test_an_answer_without_end_stops_at_the_context():
    core = text_core(toy_limits(max_model_len=40, num_kv_blocks=11))
    (output,) = ask(core, [1] * 10, params=SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 30


BAD_PROMPTS = {
    "empty text": ("", "prompt"),
    "no tokens": ([], "prompt"),
    "a token outside of the vocabulary": ([1, VOCAB_SIZE], "prompt"),
    "a negative token": ([-1], "prompt"),
    "a token that is no integer": ([1, 2.5], "prompt"),
    "no prompt at all": (None, "prompt"),
    "text that is not Unicode": ("lone \ud800 surrogate", "prompt"),
    "a message without a role": ([{"content": "hi"}], "messages"),
    "too many tokens": ([1] * 64, "prompt"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_fails_alone(name):
    prompt, field = BAD_PROMPTS[name]
    before, bad, after = ask(text_core(), "before", prompt, "after")
    assert bad.error.field == field
    assert bad.outputs[0].finish_reason == "error"
    for good, text in ((before, "before"), (after, "after")):
        assert good.error is None
        assert list(good.outputs[0].token_ids) == answer(byte_tokenizer()(text)["input_ids"], 8)


def test_a_template_that_refuses_the_messages_fails_that_request_alone():
    core = text_core()
    core.tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}hi"
    )
    refused, served = ask(core, [{"role": "system", "content": ""}], [{"role": "user", "content": ""}])
    assert "user first" in str(refused.error)
    assert served.error is None


def test_messages_for_a_model_without_a_template_are_refused():
    core = text_core()
    core.tokenizer.chat_template = None
    (output,) = ask(core, [{"role": "user", "content": "hi"}])
    assert "no chat template" in str(output.error)


def test_a_model_without_a_tokenizer_serves_token_ids_only():
    core = toy_core()
    text, ids = ask(core, "hi", [1, 2])
    assert "without a tokenizer" in str(text.error)
    assert (list(ids.outputs[0].token_ids), ids.outputs[0].text) == (answer([1, 2], 8), "")
    (output,) = ask(toy_core(), [1, 2], params=SamplingParams(stop="x"))
    assert output.error.field == "stop"


def test_text_that_was_rendered_with_a_bos_does_not_get_a_second_one():
    core = text_core()
    tokenizer = core.tokenizer
    tokenizer.add_bos_token = True
    tokenizer.update_post_processor()
    with_bos, without = ask(core, "<s>hello", "hello")
    assert with_bos.prompt_token_ids == without.prompt_token_ids
    assert with_bos.prompt_token_ids.count(tokenizer.bos_token_id) == 1


def test_a_stop_token_outside_of_the_vocabulary_is_refused():
    (output,) = ask(text_core(), [1], params=SamplingParams(stop_token_ids=[VOCAB_SIZE]))
    assert output.error.field == "stop_token_ids"


def test_seeded_answers_are_the_same_alone_and_in_any_batch():
    class Flat(ToyModel):
        def logits(self, hidden):
            return super().logits(hidden) / 8

    def run(count, limits):
        core = text_core(limits, runner=toy_runner(limits, Flat()))
        params = [SamplingParams(max_tokens=12, seed=n if n % 2 else None, top_p=0.9) for n in range(count)]
        core.add_requests(NewRequest(n, [n, n + 1], params[n]) for n in range(count))
        return [finished.outputs[0].token_ids for _, finished in sorted(finish(core).items())]

    together = run(9, toy_limits(max_num_seqs=9))
    assert together == run(9, toy_limits(max_num_seqs=1))
    assert together == run(9, toy_limits(max_num_batched_tokens=2, num_kv_blocks=17))
    assert len(set(together)) == 9


def test_logits_that_are_not_numbers_end_that_request_with_an_error():
    class Broken(ToyModel):
        def logits(self, hidden):
            logits = super().logits(hidden)
            logits[hidden[:, 0] == next_token([66])] = math.nan
            return logits

    limits = toy_limits()
    good, bad = ask(text_core(limits, runner=toy_runner(limits, Broken())), [1, 2, 3], [66])
    assert bad.error.code == "nan_logits"
    assert list(good.outputs[0].token_ids) == answer([1, 2, 3], 8)


def test_an_aborted_request_comes_back_with_what_it_has():
    core = text_core(toy_limits(max_num_seqs=1))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    core.add_requests(NewRequest(index, [index + 1], params) for index in range(4))
    for _ in range(3):
        core.step()
    for index in (0, 1, 3):
        core.abort(index)
    core.abort(77)
    outputs = finish(core)
    assert [outputs[index].outputs[0].finish_reason for index in range(4)] == ["abort", "abort", "length", "abort"]
    assert list(outputs[0].outputs[0].token_ids) == answer([1], 3, ignore_eos=True)
    assert outputs[3].outputs[0].token_ids == ()


def test_a_step_that_does_not_fit_the_memory_is_run_in_parts():
    limits = toy_limits(max_num_batched_tokens=16)
    largest = []

    def fits(plan):
        largest.append(plan.num_tokens)
        return plan.num_tokens <= 5

    core = text_core(limits, runner=FaultyRunner(toy_runner(limits), fits))
    outputs = ask(core, *([n] * 12 for n in range(6)))
    assert max(largest) == 16
    for n, output in enumerate(outputs):
        assert output.error is None
        assert list(output.outputs[0].token_ids) == answer([n] * 12, 8)


def test_a_request_that_never_fits_the_memory_is_taken_out_and_the_others_go_on():
    limits = toy_limits()

    def fits(plan):
        return all(row.start + row.num_tokens < 20 for row in plan.rows)

    core = text_core(limits, runner=FaultyRunner(toy_runner(limits), fits))
    outputs = ask(core, [1] * 5, [2] * 40, [3] * 5, [4] * 30)
    assert [output.error and output.error.code for output in outputs] == [None, "out_of_memory", None, "out_of_memory"]
    assert list(outputs[2].outputs[0].token_ids) == answer([3] * 5, 8)


def test_a_device_without_any_memory_fails_every_request_and_hangs_none():
    limits = toy_limits()
    core = text_core(limits, runner=FaultyRunner(toy_runner(limits), lambda plan: False))
    assert {output.error.code for output in ask(core, [1], [2], [3] * 30)} == {"out_of_memory"}


def test_the_token_budget_recovers_after_steps_that_fit():
    budget = TokenBudget(64)
    assert budget.reduce(64)
    assert budget.reduce(32)
    assert budget.tokens == 16
    for _ in range(2 * 64):
        budget.record_success()
    assert budget.tokens == 64


def test_stats_count_prompts_hits_and_tokens():
    core = text_core()
    ask(core, [5] * 12, [5] * 12, params=SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    stats = core.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (24, 8, 6)
    assert (stats.running, stats.waiting, stats.kv_usage, stats.preemptions) == (0, 0, 0.0, 0)
    assert stats.steps >= 4


def test_stats_say_how_many_sequences_ran_in_a_step():
    core = text_core(toy_limits(max_num_seqs=2))
    core.add_requests(
        NewRequest(index, [index + 2] * 3, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        for index in range(4)
    )
    while core.has_unfinished:
        core.step()
    stats = core.stats()
    assert (stats.steps, stats.step_rows) == (8, 16), "two and two, each with a step a token"
    assert (stats.tail_steps, stats.tail_step_rows) == (4, 8), "nobody waits beside the last two"


def test_in_order_of_arrival_only_as_many_prompts_are_encoded_as_can_soon_run():
    core = text_core(toy_limits(max_num_seqs=2, scheduling_policy="fcfs"))
    core.add_requests(NewRequest(index, "hello", GREEDY) for index in range(50))
    core.step()
    assert len(core._unencoded) == 48
    assert core.stats().waiting + core.stats().running == 50


@pytest.mark.parametrize(
    ("most", "wanted"),
    [({"LOOKAHEAD_REQUESTS": 20}, 20), ({"LOOKAHEAD_TOKENS": 49}, 10), ({"LOOKAHEAD_REQUESTS": 1}, 2)],
    ids=["requests", "tokens", "not less than a batch"],
)
def test_to_order_them_more_prompts_are_encoded_but_not_all(monkeypatch, most, wanted):
    for name, value in most.items():
        monkeypatch.setattr(waiting, name, value)
    core = text_core(toy_limits(max_num_seqs=2))
    core.add_requests(NewRequest(index, "hello", GREEDY) for index in range(50))
    core.step()
    assert len(core._unencoded) == 50 - wanted
    assert core.stats().waiting + core.stats().running == 50
