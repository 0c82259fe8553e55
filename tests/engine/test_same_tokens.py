"""The same rows give the same tokens, whatever else is in the batch and whatever happens to their blocks."""

from pathlib import Path

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.build import assemble_engine
from engine.loader import load
from engine.messages import NewRequest
from tests.engine.models_fixture import tiny_llama

CPU = torch.device("cpu")
NUM_ROWS = 64


def rows_of(prompts, max_tokens):
    """Requests of every kind: seeded, greedy, with penalties, with several continuations, with a seed of the engine."""
    kinds = [
        {"seed": 11, "temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 1.1, "top_k": 20, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"seed": 4, "temperature": 0.8, "min_p": 0.05, "n": 3},
    ]
    return [
        NewRequest(index, prompt, SamplingParams(**kinds[index % 4], max_tokens=max_tokens, ignore_eos=index % 8 < 4))
        for index, prompt in enumerate(prompts)
    ]


def answers(loaded, rows, **options):
    """Run rows together; return each one's answers by its index, and the engine's statistics."""
    options = {"num_kv_blocks": 512, "block_size": 16, "max_num_seqs": 64, **options}
    core = assemble_engine(EngineConfig("model", **options), loaded, CPU)
    core.add_requests(rows)
    found = {}
    while core.has_unfinished:
        for output in core.step():
            assert output.error is None
            found[output.index] = [one.token_ids for one in output.outputs]
    core.scheduler.check_integrity()
    assert core.scheduler.tables.pool.references() == {}
    assert core.scheduler.tables.swap.pool.references() == {}
    return found, core.stats()


def host_bytes(loaded, num_blocks):
    model = loaded.config
    return num_blocks * 16 * 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize


def alone(loaded, rows, **options):
    return {row.index: answers(loaded, [row], max_num_seqs=1, **options)[0][row.index] for row in rows}


def check_same(loaded, rows, expected, few_blocks, **options):
    """Every way to run `rows` gives `expected`; in a pool of `few_blocks` some of them are preempted."""
    together, stats = answers(loaded, rows, **options)
    assert together == expected
    assert stats.preemptions == 0
    assert answers(loaded, rows, **options)[0] == expected, "a second run"
    assert answers(loaded, rows[::-1], **options)[0] == expected, "another order"
    assert answers(loaded, rows, max_num_batched_tokens=16, **options)[0] == expected, "chunks of 16 tokens"
    assert answers(loaded, rows, enable_prefix_caching=False, **options)[0] == expected, "nothing cached"
    few = {"num_kv_blocks": few_blocks, "max_model_len": (few_blocks - 1) * 16, **options}
    recomputed, stats = answers(loaded, rows, **few)
    assert recomputed == expected, "after recomputation"
    assert stats.preemptions > stats.swaps == 0
    swapped, stats = answers(loaded, rows, swap_space=host_bytes(loaded, 200), **few)
    assert swapped == expected, "after swaps"
    assert stats.swaps > 0
    assert stats.swapped_blocks_in > 0


# In float32 torch's products of some rows differ in their last bits from those of others, and might tip a rounding.
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [(torch.float32, "auto"), (torch.bfloat16, "int8")])
def test_a_tiny_llamas_rows_are_answered_alike_in_every_way(tmp_path, dtype, kv_cache_dtype):
    loaded = load(str(tiny_llama(tmp_path)), dtype=dtype, device=CPU)
    shared = [(5 * place + 1) % 250 for place in range(40)]
    prompts = [
        [*shared[: (0, 16, 40)[index % 3]], *((index * place + 7) % 250 for place in range(1 + index % 33))]
        for index in range(NUM_ROWS)
    ]
    rows = rows_of(prompts, max_tokens=40)
    expected = alone(loaded, rows, kv_cache_dtype=kv_cache_dtype)
    assert len({tuple(map(tuple, found)) for found in expected.values()}) == NUM_ROWS
    check_same(loaded, rows, expected, few_blocks=33, kv_cache_dtype=kv_cache_dtype)


def test_seeded_answers_are_the_same_alone_and_in_a_batch_of_256(tmp_path):
    loaded = load(str(tiny_llama(tmp_path)), dtype=torch.float32, device=CPU)
    rows = [
        NewRequest(index, [index, *range(index % 7)], SamplingParams(seed=index // 2, max_tokens=8, ignore_eos=True))
        for index in range(256)
    ]
    together, stats = answers(loaded, rows, max_num_seqs=256)
    assert stats.steps <= 9, "all of them share all their steps but the first"
    assert together == answers(loaded, rows, max_num_seqs=1, enable_prefix_caching=False)[0]
    assert len({tokens[0] for tokens in together.values()}) == 256


@pytest.mark.model
def test_smollm2s_rows_are_answered_alike_in_every_way():
    loaded = load("demo", dtype=torch.float32, device=CPU)
    text = (Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl").read_text().splitlines()
    prompts = [loaded.tokenizer(line[:150])["input_ids"][: 12 + 5 * index] for index, line in enumerate(text[:8])]
    rows = rows_of(prompts, max_tokens=24)
    check_same(loaded, rows, alone(loaded, rows), few_blocks=10)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_prompts_that_end_near_a_blocks_border_are_answered_alike_when_they_are_cached(tmp_path, length):
    loaded = load(str(tiny_llama(tmp_path)), dtype=torch.float32, device=CPU)
    prompt = [(3 * place + 2) % 250 for place in range(length)]
    rows = rows_of([prompt] * 4, max_tokens=20)
    expected = alone(loaded, rows)
    # One row at a time, so that all but the first find the prompt in the cache.
    found, stats = answers(loaded, rows, max_num_seqs=1)
    assert found == expected
    assert stats.cached_tokens == 3 * ((length - 1) // 16 * 16)


def test_an_answer_may_fill_context_and_pool_to_the_last_token(tmp_path):
    loaded = load(str(tiny_llama(tmp_path)), dtype=torch.float32, device=CPU)
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=None, ignore_eos=True)
    row = NewRequest(0, list(range(20)), params)
    (expected, _), (found, stats) = (
        answers(loaded, [row], num_kv_blocks=num_blocks, max_model_len=96) for num_blocks in (64, 7)
    )
    assert [len(tokens) for tokens in expected[0]] == [76, 76, 76]
    assert found == expected
    assert stats.preemptions > 0
