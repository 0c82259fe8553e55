"""What is not a number in one request stays there: its neighbours, and those who come later, get their answers."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, PoolingParams, SamplingParams, StructuredOutput
from tests.engine.lora_fixture import write_adapter
from tests.engine.models_fixture import poison, tiny_llama

POISON = 319
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)
    assert poison(path) == POISON
    return path


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    return str(write_adapter(tmp_path_factory.mktemp("adapter"), folder, seed=1))


def engine(folder, **options):
    options = {"block_size": 4, "num_kv_blocks": 129, "max_num_seqs": 32, "max_loras": 1, **options}
    return LLM(str(folder), dtype="float32", num_threads=1, **options)


KINDS = {
    "greedy": GREEDY,
    "several answers": SamplingParams(n=3, seed=1, max_tokens=8),
    "best of several": SamplingParams(n=1, best_of=3, seed=1, max_tokens=8),
    "beam search": SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=8),
    "a grammar": SamplingParams(structured_output=StructuredOutput(regex="[a-z]{8}"), seed=2, n=2),
    "logprobs": SamplingParams(temperature=0, logprobs=2, prompt_logprobs=2, max_tokens=8),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.2, logit_bias={7: 3.0}, min_tokens=4, max_tokens=8),
    "stop strings": SamplingParams(seed=3, stop=["a", "b"], max_tokens=8),
    "an embedding": PoolingParams(pooling="mean"),
    "an embedding of the first token": PoolingParams(pooling="cls"),
    "an embedding of the last token": PoolingParams(pooling="last"),
}


def answers(llm, prompts, params, lora):
    """The answers to requests of both sorts, all of them in the engine together."""
    return list(llm._answer(prompts, params, lora))


def contents(output):
    return output.data.round(4).tolist() if hasattr(output, "data") else [one.token_ids for one in output.outputs]


@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("budget", [256, 7])
def test_a_request_whose_logits_are_not_numbers_fails_alone_whatever_it_asks_for(folder, adapter, budget, with_adapter):
    good = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    lora = adapter if with_adapter else None
    params = [one for one in KINDS.values() for _ in range(2)]
    clean = answers(engine(folder), [good] * len(params), params, lora)
    # The poisoned ones come first, so that it is they who compute the beginning that all of them share.
    prompts = [[*good[:8], POISON], good] * len(KINDS)
    llm = engine(folder, max_num_batched_tokens=budget)
    for _ in range(2):  # and once more, when the cache is full of what there was
        outputs = answers(llm, prompts, params, lora)
        for name, failed, served, expected in zip(KINDS, outputs[::2], outputs[1::2], clean[1::2], strict=True):
            code = "nan_hidden_states" if "embedding" in name else "nan_logits"
            assert failed.error.code == code, name
            assert served.error is None, name
            assert contents(served) == contents(expected), name
    assert llm.stats().kv_blocks_used == 0
    llm._core.scheduler.check_integrity()


@pytest.fixture(scope="module")
def steep(tmp_path_factory):
    """A model that after token 7 is all but certain of token 9: too certain for float16, not for bfloat16."""
    path = tiny_llama(tmp_path_factory.mktemp("steep"), tokenizer=True)
    weights = load_file(path / "model.safetensors")
    direction = torch.ones(64)
    direction[::2] = -1
    # So long that two layers change little of it; then its product with the head's row is 64 * 1500.
    weights["model.embed_tokens.weight"][7] = 200 * direction
    weights["lm_head.weight"][9] = 1500 * direction
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, n=2, logprobs=3, max_tokens=8, ignore_eos=True)])
def test_what_overflows_in_float16_fails_alone_and_in_bfloat16_not_at_all(steep, params):
    prompts = [[1, 2, 3], [1, 2, 7], [4, 5, 6], [7]]
    params = replace(params, allowed_token_ids=[1, 2, 3, 4, 9])
    half = LLM(str(steep), dtype="float16", num_threads=1, num_kv_blocks=33)
    alone = [half.generate([prompt], params)[0] for prompt in prompts]
    outputs = half.generate(prompts, params)
    for output, expected in zip(outputs[::2], alone[::2], strict=True):
        assert output.error is None
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]
    for output in outputs[1::2]:
        assert output.error.code == "nan_logits"
        assert "bfloat16" in output.error.hint
    brain = LLM(str(steep), dtype="bfloat16", num_threads=1, num_kv_blocks=33)
    for output in brain.generate(prompts, params):
        assert output.error is None
    assert {output.outputs[0].token_ids[0] for output in brain.generate(prompts[1::2], params)} == {9}
