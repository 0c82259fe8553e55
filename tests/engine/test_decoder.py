"""The decoder's logits against Transformers' own models, however the tokens are cut into steps."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.loader import load
from tests.engine.models_fixture import PagedRun, check_same_bits_in_any_company, tiny_llama, tiny_mistral

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "llama": (tiny_llama, {}),
    "tied heads": (tiny_llama, {"tie_word_embeddings": True}),
    "biases": (tiny_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": (tiny_llama, {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (
        tiny_llama,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "seven query heads to one": (
        tiny_llama,
        {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80, "hidden_size": 112},
    ),
    "nine query heads to three": (
        tiny_llama,
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 144},
    ),
    "no grouping": (tiny_llama, {"num_key_value_heads": 4}),
    "mistral": (tiny_mistral, {"head_dim": 32}),
}


@pytest.fixture(params=VARIANTS)
def folder(request, tmp_path):
    make, config = VARIANTS[request.param]
    return make(tmp_path, **config)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def transformers_logits(folder, ids: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def paged(folder) -> PagedRun:
    return PagedRun(load(str(folder), dtype=torch.float32, device=CPU).decoder)


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_has_the_logits_of_transformers(folder):
    ids = tokens(100)
    assert_close(paged(folder).step({"a": ids})["a"], transformers_logits(folder, ids))


def test_a_prompt_in_chunks_has_the_logits_of_transformers(folder):
    ids = tokens(100)
    run = paged(folder)
    logits = [run.step({"a": ids[start:end]})["a"] for start, end in ((0, 33), (33, 34), (34, 96), (96, 100))]
    assert_close(torch.cat(logits), transformers_logits(folder, ids))


def test_decode_steps_have_the_logits_of_transformers(folder):
    ids = tokens(40)
    run = paged(folder)
    logits = [run.step({"a": ids[:30]})["a"], *(run.step({"a": [token]})["a"] for token in ids[30:])]
    assert_close(torch.cat(logits), transformers_logits(folder, ids))


def test_sequences_that_share_steps_do_not_see_each_other(folder):
    first, second, third = tokens(50, 1), tokens(17, 2), tokens(33, 3)
    run = paged(folder)
    parts = [
        run.step({"first": first[:20], "second": second[:16]}),
        run.step({"third": third[:32], "second": second[16:], "first": first[20:49]}),
        run.step({"first": first[49:], "third": third[32:]}),
    ]
    for name, ids in (("first", first), ("second", second), ("third", third)):
        logits = torch.cat([part[name] for part in parts if name in part])
        assert_close(logits, transformers_logits(folder, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(tmp_path, dtype):
    folder = tiny_llama(tmp_path)
    ids = tokens(60)
    logits = PagedRun(load(str(folder), dtype=dtype, device=CPU).decoder).step({"a": ids})["a"]
    assert logits.dtype == dtype
    expected = transformers_logits(folder, ids)
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_in_bfloat16_a_row_has_the_same_bits_alone_in_company_and_in_chunks(tmp_path):
    folder = tiny_llama(tmp_path, num_hidden_layers=3, hidden_size=192, num_attention_heads=3, num_key_value_heads=1)
    decoder = load(str(folder), dtype=torch.bfloat16, device=CPU).decoder
    rows = {f"row {index}": tokens(20 + 7 * index, index) for index in range(12)}
    check_same_bits_in_any_company(decoder, rows)
