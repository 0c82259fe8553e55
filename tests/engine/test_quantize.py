"""`quantize`, mostly `int8`: what it does to logits and answers, what it leaves alone, and where it is refused.

Bounds of the real model leave a margin of about one half to what was measured against float32, of logits of the
tokens of three questions of GSM8K, and of the greedy answers to sixty:

                                                      bfloat16    int8
    mean KL divergence, in nats                         0.0021   0.0144
    mean cosine similarity                              0.9995   0.9974
    tokens where the likeliest is the same                0.98     0.92
    answers whose first  8 tokens are the same            0.93     0.85
    answers whose first 16 tokens are the same            0.80     0.55

SmolLM2 has 135 million parameters, and many of its tokens are near ties; a larger model loses less.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import MixtralConfig

from engine import LLM, EngineConfig, SamplingParams
from engine.build import assemble_engine
from engine.capacity import kv_capacity
from engine.errors import ConfigError, ModelNotSupported
from engine.loader import LoadedModel, load
from engine.memory import kv_cache_dtype
from engine.messages import NewRequest
from kernels import ops, reference_quantized
from kernels.linear import Packers, packers
from kernels.reference_quantized import Float8Weight, Int4Weight
from tests.engine.encoder_fixture import tiny_encoder
from tests.engine.families import SMALL, random_model, tokens
from tests.engine.kernel_tables import use_kernels
from tests.engine.lora_fixture import write_adapter
from tests.engine.models_fixture import PagedRun, check_same_bits_in_any_company, poison, tiny_llama
from tests.engine.test_loader_gguf import write_gguf

CPU = torch.device("cpu")
QUESTIONS = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
# Whose logits are compared: some 240 tokens.
_PROMPTS = 3


def loaded(folder: Path | str, **options: Any) -> LoadedModel:
    found = load(str(folder), device=CPU, **{"dtype": torch.bfloat16, **options})
    assert isinstance(found, LoadedModel)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("quantize") / "model", tie_word_embeddings=True)


def prompt_logits(model: LoadedModel, prompts: list[list[int]], kv_dtype: torch.dtype | None = None) -> Tensor:
    """Of every token of every prompt, `[num_tokens, vocab_size]` float32."""
    run = PagedRun(model.decoder, num_blocks=200, kv_dtype=kv_dtype)
    with torch.inference_mode():
        found = run.step({str(index): prompt for index, prompt in enumerate(prompts)})
    return torch.cat(list(found.values())).float()


def test_logits_are_near_those_of_the_model_and_not_the_same(folder: Path) -> None:
    prompts = [list(range(start, start + 40)) for start in (0, 60, 120)]
    plain, quantized = (prompt_logits(loaded(folder, quantize=quantize), prompts) for quantize in (None, "int8"))
    assert not torch.equal(plain, quantized)
    assert (plain - quantized).norm() < 0.1 * plain.norm()


def test_a_row_has_the_same_bits_alone_in_company_and_in_chunks(folder: Path) -> None:
    rows = {name: list(range(start, start + 30)) for name, start in (("a", 0), ("b", 50), ("c", 90), ("d", 200))}
    check_same_bits_in_any_company(loaded(folder, quantize="int8").decoder, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_models_of_other_types_are_quantised_too(folder: Path, dtype: torch.dtype) -> None:
    prompts = [list(range(40))]
    exact = prompt_logits(loaded(folder, dtype=torch.float32), prompts)
    quantized = prompt_logits(loaded(folder, dtype=dtype, quantize="int8"), prompts)
    assert 0 < (exact - quantized).norm() < 0.1 * exact.norm()


def test_a_gguf_file_is_quantised_from_what_it_is_dequantised_to(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", folder, without=("output.weight",))
    prompts = [list(range(40))]
    quantized = prompt_logits(loaded(file, quantize="int8"), prompts)
    assert torch.equal(quantized, prompt_logits(loaded(folder, quantize="int8"), prompts))
    assert not torch.equal(quantized, prompt_logits(loaded(file), prompts))


def test_experts_are_quantised_and_their_router_is_not(tmp_path: Path) -> None:
    random_model(MixtralConfig(**SMALL, num_local_experts=4)).save_pretrained(tmp_path)
    x = torch.randn(50, SMALL["hidden_size"], generator=torch.Generator().manual_seed(1)).bfloat16()
    layers = [loaded(tmp_path, quantize=q).decoder._weights.layers[1].feed_forward for q in (None, "int8")]
    plain, quantized = (layer(x, None) for layer in layers)
    assert (plain - quantized).norm() < 0.1 * plain.norm()
    gated = torch.randn(50, SMALL["intermediate_size"], generator=torch.Generator().manual_seed(2)).bfloat16()
    for one, other in zip(*(layer._experts for layer in layers), strict=True):
        assert not torch.equal(one.gate_up.product(x), other.gate_up.product(x))
        assert not torch.equal(one.down(gated), other.down(gated))
    (ids, weights), (same_ids, same_weights) = (layer.route(x) for layer in layers)
    assert torch.equal(ids, same_ids)
    assert torch.equal(weights, same_weights)


def test_a_quantised_mixture_of_experts_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    random_model(MixtralConfig(**SMALL, num_local_experts=4)).save_pretrained(tmp_path)
    rows = {f"row {index}": tokens(20 + 7 * index, index) for index in range(6)}
    check_same_bits_in_any_company(loaded(tmp_path, quantize="int8").decoder, rows)


def test_a_request_that_is_not_finite_fails_and_its_neighbour_does_not(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "poisoned", tie_word_embeddings=False)
    poisonous = poison(folder)
    core = assemble_engine(EngineConfig(str(folder), num_kv_blocks=64), loaded(folder, quantize="int8"), CPU)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    core.add_requests([NewRequest(0, [1, 2, poisonous, 3], params), NewRequest(1, [1, 2, 3], params)])
    found = {}
    while core.has_unfinished:
        found |= {output.index: output for output in core.step()}
    assert found[0].error is not None
    assert found[1].error is None
    assert len(found[1].outputs[0].token_ids) == 4


def test_adapters_add_to_quantised_linears(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", folder, seed=1)
    llm = LLM(
        str(folder), device="cpu", dtype="bfloat16", quantize="int8", max_loras=1, num_kv_blocks=64, num_threads=1
    )
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with_adapter, without = llm.generate([[1, 2, 3]] * 2, params, lora=[str(adapter), None])
    assert with_adapter.error is None
    assert with_adapter.outputs[0].token_ids != without.outputs[0].token_ids


def test_the_engine_says_what_it_multiplies(folder: Path) -> None:
    info = LLM(str(folder), device="cpu", dtype="bfloat16", quantize="int8", num_kv_blocks=64, num_threads=1).info
    assert (info.dtype, info.quantize, info.linear_dtype) == ("bfloat16", "int8", "int8")


def test_a_quantised_weight_takes_a_byte_and_the_embedding_two(folder: Path) -> None:
    options = {"device": "cpu", "dtype": "bfloat16"}
    plain, quantized = (kv_capacity(EngineConfig(str(folder), **options, quantize=q)) for q in (None, "int8"))
    assert plain is not None
    assert quantized is not None
    elements, embedding, norms = plain.weight_bytes // 2, 320 * 64, 5 * 64
    assert quantized.weight_bytes == elements + 2 * embedding + norms


def test_quantize_takes_its_values_only() -> None:
    with pytest.raises(ConfigError, match="quantize must be one of int8, fp8, int4, not 'int2'"):
        EngineConfig("model", quantize="int2")  # type: ignore[arg-type]


def test_transformers_code_is_not_quantised() -> None:
    with pytest.raises(ConfigError, match="quantize is for the engine's own code"):
        EngineConfig("model", quantize="int8", model_impl="transformers")


def test_a_family_that_only_transformers_knows_is_not_quantised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyKnowsItForCausalLM"], "model_type": "nobody"}')
    with pytest.raises(ModelNotSupported, match="NobodyKnowsItForCausalLM"):
        loaded(tmp_path, quantize="int8")


def test_an_encoder_is_not_quantised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantize is for decoders"):
        LLM(str(tiny_encoder(tmp_path / "bert", "bert")), device="cpu", quantize="int8")


def test_a_gpu_is_refused_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"quantize int8 is for CPUs, and the device is a GPU\. Take fp8 or int4"):
        LLM("nowhere", device="cuda", quantize="int8")


def test_nothing_is_sized_for_a_gpu_that_the_engine_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"quantize int8 is for CPUs, and the device is a GPU\. Take fp8 or int4"):
        kv_capacity(EngineConfig(str(folder), quantize="int8"), 24 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * 2**30, 24 * 2**30))
    with pytest.raises(ConfigError, match="the device is a GPU"):
        kv_capacity(EngineConfig(str(folder), quantize="int8"))
    assert kv_capacity(EngineConfig(str(folder), quantize="int8", device="cpu")) is not None


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_a_cpu_is_told_to_take_int8(folder: Path, quantize: str) -> None:
    with pytest.raises(ConfigError, match=f"quantize {quantize} is for GPUs, and the device is a CPU. Take int8"):
        LLM("nowhere", device="cpu", quantize=quantize)
    with pytest.raises(ConfigError, match=f"quantize {quantize} is for GPUs"):
        kv_capacity(EngineConfig(str(folder), device="cpu", quantize=quantize))
    with pytest.raises(ConfigError, match=f"quantize {quantize} needs an NVIDIA GPU"):
        loaded(folder, quantize=quantize)


@pytest.mark.parametrize(
    ("quantize", "capability", "needed"),
    [("int4", (7, 5), "sm_80"), ("fp8", (7, 5), "sm_89"), ("fp8", (8, 6), "sm_89")],
)
def test_an_older_gpu_is_refused_before_a_weight_is_read(
    monkeypatch: pytest.MonkeyPatch, quantize: str, capability: tuple[int, int], needed: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    ops._of_cuda.cache_clear()
    try:
        with pytest.raises(ConfigError, match=f"quantize {quantize} needs an NVIDIA GPU.*{needed}"):
            LLM("nowhere", device="cuda", quantize=quantize)
    finally:
        ops._of_cuda.cache_clear()


def reference_table(monkeypatch: pytest.MonkeyPatch) -> list[Int4Weight | Float8Weight]:
    """Give models that are loaded from now on the products of a GPU, as they are defined; return what they pack."""
    found: list[Int4Weight | Float8Weight] = []
    products = {"int4": reference_quantized.int4_linear, "float8": reference_quantized.float8_linear}

    def pack(product: Any) -> Packers[Any]:
        return packers(lambda weight, bias: found.append(weight) or (lambda x: product(x, weight, bias)))

    use_kernels(monkeypatch, **{name: pack(product) for name, product in products.items()})
    return found


@pytest.mark.parametrize(("quantize", "off"), [("fp8", 0.3), ("int4", 0.7)])
def test_the_products_of_a_gpu_are_given_quantised_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quantize: str, off: float
) -> None:
    prompts = [list(range(40))]
    plain = prompt_logits(loaded(folder), prompts)
    whole = load_file(folder / "model.safetensors")
    packed = reference_table(monkeypatch)
    found = prompt_logits(loaded(folder, quantize=quantize), prompts)
    assert 0 < (found - plain).norm() < off * plain.norm()
    # The language head, which is the embedding, is not among them.
    assert [len(weight.values) for weight in packed] == 2 * [128, 64, 192, 64]
    up = whole["model.layers.0.mlp.up_proj.weight"].bfloat16()
    gate_up = packed[2]
    if isinstance(gate_up, Int4Weight):
        assert [weight.group_size for weight in packed] == 2 * [64, 64, 64, 32]
        alone = reference_quantized.dequantize_int4(reference_quantized.quantize_int4(up, 64))
        assert torch.equal(reference_quantized.dequantize_int4(gate_up)[96:], alone)
    else:
        restored = reference_quantized.dequantize_float8(gate_up)[96:]
        assert (restored - up.float()).norm() < 0.05 * up.float().norm()


def test_weights_whose_inputs_no_group_divides_keep_their_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama(tmp_path / "odd", intermediate_size=80, tie_word_embeddings=False)
    packed = reference_table(monkeypatch)
    prompt_logits(loaded(folder, quantize="int4"), [[1, 2, 3]])
    # All but the products of 80 inputs, and the head.
    assert [len(weight.values) for weight in packed] == 2 * [128, 64, 160]


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_experts_are_packed_one_by_one_in_fewer_bits_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: str
) -> None:
    small = {**SMALL, "hidden_size": 128, "num_local_experts": 3}
    random_model(MixtralConfig(**small)).save_pretrained(tmp_path)
    packed = reference_table(monkeypatch)
    prompt_logits(loaded(tmp_path, quantize=quantize), [[1, 2, 3]])
    assert [len(weight.values) for weight in packed] == 2 * ([256, 128] + 3 * [192, 128])


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_products_of_tensor_cores_are_not_of_float32(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quantize: str
) -> None:
    reference_table(monkeypatch)
    with pytest.raises(
        ConfigError, match=f"quantize {quantize} multiplies bfloat16 or float16, and the dtype is float32"
    ):
        loaded(folder, dtype=torch.float32, quantize=quantize)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_what_a_gpu_holds_of_quantised_weights_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: str, tied: bool
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 16, "num_key_value_heads": 8}
    folder = tiny_llama(tmp_path / "model", tie_word_embeddings=tied, **sizes)
    capacity = kv_capacity(EngineConfig(str(folder), dtype="bfloat16", quantize=quantize), 24 * 2**30)
    assert capacity is not None
    packed = reference_table(monkeypatch)
    loaded(folder, quantize=quantize)
    held = sum(tensor.nbytes for weight in packed for tensor in weight if tensor is not None)
    kept = 320 * 256 * (1 if tied else 2) + 5 * 256
    assert capacity.weight_bytes == held + 2 * kept


class Answers(NamedTuple):
    """Of one precision: logits of the prompts' tokens, and greedy answers."""

    logits: Tensor
    tokens: list[list[int]]


def answers(num_questions: int, **options: Any) -> Answers:
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[:num_questions]
    chats = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    dtype = getattr(torch, options["dtype"])
    model = load("demo", device=CPU, dtype=dtype, quantize=options.get("quantize"))
    assert isinstance(model, LoadedModel)
    assert model.tokenizer is not None
    prompts = [
        model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    config = EngineConfig("demo", device="cpu", num_kv_blocks=1000, **options)
    core = assemble_engine(config, model, CPU)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    core.add_requests([NewRequest(index, prompt, params) for index, prompt in enumerate(prompts)])
    tokens: list[list[int]] = [[] for _ in prompts]
    while core.has_unfinished:
        for output in core.step():
            tokens[output.index] = list(output.outputs[0].token_ids)
    return Answers(prompt_logits(model, prompts[:_PROMPTS], kv_cache_dtype(config, dtype)), tokens)


@cache
def exact_answers(num_questions: int) -> Answers:
    """In float32, which takes the most of what these comparisons take."""
    return answers(num_questions, dtype="float32")


def check_bounds(exact: Answers, found: Answers, *, divergence: float, cosine: float, likeliest: float) -> None:
    p, q = exact.logits.log_softmax(-1), found.logits.log_softmax(-1)
    assert (p.exp() * (p - q)).sum(-1).mean() < divergence
    assert F.cosine_similarity(exact.logits, found.logits, dim=-1).mean() > cosine
    assert (p.argmax(-1) == q.argmax(-1)).float().mean() > likeliest


def check_agreement(exact: Answers, found: Answers, first_8: float, first_16: float) -> None:
    for length, share in ((8, first_8), (16, first_16)):
        same = [a[:length] == b[:length] for a, b in zip(exact.tokens, found.tokens, strict=True)]
        assert sum(same) / len(same) >= share, f"first {length} tokens: {sum(same)} of {len(same)}"


def check_smollm2(num_questions: int) -> None:
    exact = exact_answers(num_questions)
    for quantize, bounds, agreement in (
        (None, {"divergence": 0.003, "cosine": 0.999, "likeliest": 0.96}, (0.8, 0.6)),
        ("int8", {"divergence": 0.022, "cosine": 0.995, "likeliest": 0.88}, (0.65, 0.35)),
    ):
        found = answers(num_questions, dtype="bfloat16", quantize=quantize)
        check_bounds(exact, found, **bounds)
        check_agreement(exact, found, *agreement)


@pytest.mark.model
def test_smollm2_stays_within_the_bounds() -> None:
    check_smollm2(24)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_stays_within_the_bounds_over_many_questions() -> None:
    check_smollm2(200)
