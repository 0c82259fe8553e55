"""`kv_cache_dtype`: what a KV cache in fewer bits does to logits and answers, what it holds, and where it is refused.

Bounds of the real model leave a margin of about one half to what was measured against float32, of the prompts and
the sixty answers of `tests.engine.test_quantize`, by a model in bfloat16:

                                                KV cache in   bfloat16     int8
    mean KL divergence, in nats                                 0.0017   0.0029
    mean cosine similarity                                      0.9996   0.9987
    tokens where the likeliest is the same                        0.97     0.97
    answers whose first  8 tokens are the same                    0.95     0.93
    answers whose first 16 tokens are the same                    0.87     0.75
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.build import assemble_engine
from engine.capacity import kv_capacity
from engine.errors import ConfigError, ModelNotFound
from engine.loader import LoadedModel, load
from engine.messages import NewRequest
from tests.engine.encoder_fixture import tiny_encoder
from tests.engine.models_fixture import check_same_bits_in_any_company, poison, tiny_llama
from tests.engine.test_quantize import QUESTIONS, answers, check_agreement, check_bounds, exact_answers, prompt_logits
from tests.engine.test_same_tokens import alone, check_same, rows_of

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("kv") / "model")


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    found = load(str(folder), device=CPU, dtype=dtype)
    assert isinstance(found, LoadedModel)
    return found


def greedy(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    llm = LLM(str(folder), device="cpu", num_threads=1, **{"dtype": "bfloat16", "num_kv_blocks": 64, **options})
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS)]


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float16, torch.float8_e4m3fn])
def test_a_row_has_the_same_bits_alone_in_company_and_in_chunks(folder: Path, kv_dtype: torch.dtype) -> None:
    rows = {name: list(range(start, start + 40)) for name, start in (("a", 0), ("b", 50), ("c", 90), ("d", 200))}
    check_same_bits_in_any_company(loaded(folder).decoder, rows, kv_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kv_dtype", "bound"),
    [(torch.int8, 0.04), (torch.float8_e4m3fn, 0.15), (torch.bfloat16, 0.02), (torch.float16, 0.02)],
)
def test_logits_are_near_those_with_a_cache_of_the_models_dtype(
    folder: Path, dtype: torch.dtype, kv_dtype: torch.dtype, bound: float
) -> None:
    model, prompts = loaded(folder, dtype), [list(range(start, start + 60)) for start in (0, 60, 120)]
    plain, found = prompt_logits(model, prompts), prompt_logits(model, prompts, kv_dtype)
    assert (plain - found).norm() < bound * plain.norm()
    assert torch.equal(plain, found) == (kv_dtype == dtype)


def test_a_prefix_that_is_cached_in_int8_gives_the_tokens_of_one_that_is_computed(folder: Path) -> None:
    prefix = list(range(5, 75))
    prompts = [[*prefix, 100 + row] for row in range(5)]
    found = [
        greedy(folder, prompts, kv_cache_dtype="int8", max_num_seqs=1, enable_prefix_caching=cached)
        for cached in (True, False)
    ]
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 5


def test_a_request_that_is_not_finite_fails_and_its_neighbour_does_not(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "poisoned", tie_word_embeddings=False)
    poisonous = poison(folder)
    config = EngineConfig(str(folder), num_kv_blocks=64, kv_cache_dtype="int8")
    core = assemble_engine(config, loaded(folder), CPU)
    core.add_requests([NewRequest(0, [1, 2, poisonous, 3], PARAMS), NewRequest(1, [1, 2, 3], PARAMS)])
    found = {}
    while core.has_unfinished:
        found |= {output.index: output for output in core.step()}
    assert found[0].error is not None
    assert found[1].error is None
    assert len(found[1].outputs[0].token_ids) == PARAMS.max_tokens


def test_transformers_own_code_has_a_cache_in_int8_too(folder: Path) -> None:
    prompts = [list(range(start, start + 30)) for start in (0, 50, 100)]
    plain, found = (
        greedy(folder, prompts, model_impl="transformers", kv_cache_dtype=kv_dtype) for kv_dtype in ("auto", "int8")
    )
    assert len(plain) == len(found) == 3
    assert sum(one[:2] == other[:2] for one, other in zip(plain, found, strict=True)) >= 2


def test_a_pool_that_is_taken_at_once_serves(folder: Path) -> None:
    prompts = [list(range(30))]
    taken = greedy(folder, prompts, kv_cache_dtype="int8", preallocate_kv=True)
    assert taken == greedy(folder, prompts, kv_cache_dtype="int8")


def test_the_same_memory_holds_twice_the_tokens_but_for_the_scales(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "wide", head_dim=128)
    blocks, tokens = [], []
    for kv_dtype in ("auto", "int8"):
        options = {"device": "cpu", "dtype": "bfloat16", "kv_cache_dtype": kv_dtype, "kv_cache_memory": 4 << 20}
        blocks.append(LLM(str(folder), num_threads=1, **options).info.num_kv_blocks)
        capacity = kv_capacity(EngineConfig(str(folder), **options))
        assert capacity is not None
        tokens.append(capacity.kv_tokens)
    # 256 bytes a head against 128 and a scale of 4.
    assert blocks[1] == blocks[0] * 256 // 132
    assert tokens[1] / tokens[0] == pytest.approx(256 / 132, rel=0.03)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "named", "precision"),
    [("auto", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16"), ("int8", "int8", "bfloat16 kv-int8")],
)
def test_the_engine_says_what_its_cache_holds(folder: Path, kv_cache_dtype: str, named: str, precision: str) -> None:
    options = {"device": "cpu", "dtype": "bfloat16", "num_kv_blocks": 64, "num_threads": 1}
    info = LLM(str(folder), kv_cache_dtype=kv_cache_dtype, **options).info
    assert (info.kv_cache_dtype, info.precision, info.dtype) == (named, precision, "bfloat16")


def test_what_no_cache_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, bfloat16, float16, int8, fp8, not 'i4'"):
        EngineConfig("model", kv_cache_dtype="i4")  # type: ignore[arg-type]


def test_fp8_is_refused_on_a_cpu_and_int8_on_a_gpu_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 is for GPUs, and the device is a CPU") as refused:
        LLM("nowhere", device="cpu", kv_cache_dtype="fp8")
    assert refused.value.hint == "Take int8."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="kv_cache_dtype int8 is for CPUs, and the device is a GPU") as refused:
        LLM("nowhere", device="cuda", kv_cache_dtype="int8")
    assert refused.value.hint == "Take fp8."


def test_fp8_is_refused_on_a_gpu_that_does_not_compute_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8 needs a GPU .* A100 does not"):
        LLM("nowhere", device="cuda", kv_cache_dtype="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ModelNotFound):
        LLM("nowhere", device="cuda", kv_cache_dtype="fp8")


def test_a_gpu_is_sized_for_the_cache_that_it_can_have(folder: Path) -> None:
    plain, narrow = (
        kv_capacity(EngineConfig(str(folder), dtype="bfloat16", kv_cache_dtype=kv_dtype), 24 * 2**30)
        for kv_dtype in ("auto", "fp8")
    )
    assert plain is not None
    assert narrow is not None
    assert narrow.kv_bytes_per_token * 32 == plain.kv_bytes_per_token * 20, "heads of 16: 20 bytes against 32"
    with pytest.raises(ConfigError, match="int8 is for CPUs"):
        kv_capacity(EngineConfig(str(folder), kv_cache_dtype="int8"), 24 * 2**30)


def test_an_encoder_has_no_cache_to_choose_a_dtype_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype says nothing for an encoder"):
        LLM(str(tiny_encoder(tmp_path / "bert", "bert")), device="cpu", kv_cache_dtype="int8")


def check_smollm2(num_questions: int) -> None:
    exact = exact_answers(num_questions)
    found = answers(num_questions, dtype="bfloat16", kv_cache_dtype="int8")
    check_bounds(exact, found, divergence=0.0045, cosine=0.998, likeliest=0.94)
    check_agreement(exact, found, 0.75, 0.5)


@pytest.mark.model
def test_smollm2_stays_within_the_bounds() -> None:
    check_smollm2(24)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_stays_within_the_bounds_over_many_questions() -> None:
    check_smollm2(200)


@pytest.mark.model
def test_smollm2s_rows_are_answered_alike_in_every_way_with_int8() -> None:
    model = load("demo", dtype=torch.bfloat16, device=CPU)
    assert isinstance(model, LoadedModel)
    assert model.tokenizer is not None
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[:8]
    prompts = [model.tokenizer(line[:150])["input_ids"][: 12 + 5 * index] for index, line in enumerate(lines)]
    rows = rows_of(prompts, max_tokens=24)
    check_same(model, rows, alone(model, rows, kv_cache_dtype="int8"), few_blocks=10, kv_cache_dtype="int8")
