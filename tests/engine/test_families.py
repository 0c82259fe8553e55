"""Every family and every kind of rotary embedding against Transformers' own model, however tokens are cut into steps.

A case is a line of the table: a configuration class of Transformers with sizes that are small, and odd where real ones
are. Prompts are longer than the windows; norms and biases are random, so that a switch that is not heeded shows.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from engine import LLM, SamplingParams
from engine.loader import load
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES
from tests.engine.models_fixture import PagedRun

CPU = torch.device("cpu")
PROMPT, ANSWER = 70, 32
SMALL = {
    "vocab_size": 320,
    "hidden_size": 112,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class Case(NamedTuple):
    """A model of Transformers, and the longest sequence that the engine is asked to admit."""

    config: type[PreTrainedConfig]
    fields: dict
    max_model_len: int | None = None


def rope(kind: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def longrope(original: int) -> dict:
    factors = {"short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [1.0 + i for i in range(16)]}
    return {"original_max_position_embeddings": original, **rope("longrope", **factors)}


GEMMA = {"sliding_window": 24, "query_pre_attn_scalar": 100}
FAMILY_CASES = {
    "llama": Case(
        LlamaConfig, {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    ),
    "llama, tied": Case(LlamaConfig, {"tie_word_embeddings": True}),
    "llama, biases": Case(LlamaConfig, {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "mistral": Case(MistralConfig, {"sliding_window": None, "head_dim": 80}),
    "mistral, window": Case(MistralConfig, {"sliding_window": 17, "hidden_act": "gelu_new"}),
    "qwen2": Case(Qwen2Config, {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}),
    "qwen2, window": Case(
        Qwen2Config, {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "qwen3": Case(Qwen3Config, {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 128}),
    "qwen3, biases": Case(Qwen3Config, {"attention_bias": True, "head_dim": 96}),
    "smollm3": Case(SmolLM3Config, {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3, window": Case(
        SmolLM3Config,
        {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9},
    ),
    "gemma2": Case(Gemma2Config, {**GEMMA, "head_dim": 256, "attn_logit_softcapping": 2.0}),
    "gemma2, no caps": Case(
        Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True},
    ),
    "gemma3": Case(
        Gemma3TextConfig,
        {
            **GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 64,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": Case(Phi3Config, {"hidden_size": 128}),
    "phi3, window and partial rotation": Case(
        Phi3Config, {"hidden_size": 384, "sliding_window": 31, "partial_rotary_factor": 0.75}
    ),
    "olmo2": Case(Olmo2Config, {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 80}),
    "granite": Case(
        GraniteConfig,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.05,
            "logits_scaling": 3.0,
        },
    ),
}
QWEN3_MOE = {"head_dim": 64, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
FAMILY_CASES |= {
    # Two of 40 experts for 70 tokens: some get none.
    "mixtral": Case(MixtralConfig, {"num_local_experts": 40, "num_experts_per_tok": 2, "head_dim": 80}),
    "mixtral, window": Case(MixtralConfig, {"num_local_experts": 5, "sliding_window": 17, "hidden_act": "gelu"}),
    "qwen3 moe": Case(Qwen3MoeConfig, {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3 moe, shares of all": Case(Qwen3MoeConfig, {**QWEN3_MOE, "norm_topk_prob": False, "attention_bias": True}),
    "qwen3 moe, dense layers": Case(
        Qwen3MoeConfig, {**QWEN3_MOE, "num_hidden_layers": 5, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    ),
    "qwen3 moe, window": Case(Qwen3MoeConfig, {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 20}),
    "gpt-oss": Case(
        GptOssConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "head_dim": 64,
            "sliding_window": 24,
            "swiglu_limit": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gpt-oss, no biases of attention": Case(
        GptOssConfig, {"num_local_experts": 3, "num_experts_per_tok": 1, "attention_bias": False, "head_dim": 32}
    ),
    "olmoe": Case(OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False}),
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
WIDER_YARN = {"factor": 2.0, "original_max_position_embeddings": 256}
ROPE_CASES = {
    "linear": Case(LlamaConfig, rope("linear", factor=4.0)),
    "llama3": Case(
        LlamaConfig,
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "yarn": Case(LlamaConfig, rope("yarn", **YARN)),
    "yarn, not truncated": Case(LlamaConfig, rope("yarn", **WIDER_YARN, truncate=False, beta_fast=8.0, beta_slow=2.0)),
    "yarn, attention factor": Case(LlamaConfig, rope("yarn", **YARN, attention_factor=0.8)),
    "yarn, mscale": Case(LlamaConfig, rope("yarn", **YARN, mscale=2.0, mscale_all_dim=0.7)),
    "yarn, no factor": Case(LlamaConfig, rope("yarn", factor=None, original_max_position_embeddings=32)),
    "dynamic, within": Case(LlamaConfig, rope("dynamic", factor=4.0)),
    "dynamic, beyond": Case(LlamaConfig, {**rope("dynamic", factor=4.0), "max_position_embeddings": 64}, 160),
    "longrope, within": Case(Phi3Config, {"hidden_size": 128, **longrope(256)}),
    "longrope, beyond": Case(Phi3Config, {"hidden_size": 128, **longrope(64)}, 512),
    "longrope, partial": Case(Phi3Config, {"hidden_size": 256, "partial_rotary_factor": 0.5, **longrope(256)}),
    "partial": Case(Phi3Config, {"hidden_size": 128, "partial_rotary_factor": 0.5}),
}
CASES = FAMILY_CASES | {f"{name} rope": case for name, case in ROPE_CASES.items()}


class Pair(NamedTuple):
    """The same model twice: Transformers' and ours, in float32."""

    reference: PreTrainedModel
    decoder: Decoder


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    return randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model weights with which its logits are a few units wide, and nothing is left at its first one or zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            else:
                parameter.normal_(std=2 * parameter.shape[1] ** -0.5)
    return model.eval()


def build(case: Case, folder: Path) -> Pair:
    reference = random_model(case.config(**{**SMALL, **case.fields}))
    reference.save_pretrained(folder)
    loaded = load(str(folder), dtype=torch.float32, device=CPU, model_impl="native", max_model_len=case.max_model_len)
    if case.max_model_len is not None:
        # Transformers derives dynamic frequencies from the longest sequence so far.
        with torch.inference_mode():
            reference(torch.zeros(1, case.max_model_len, dtype=torch.int64))
    return Pair(reference, loaded.decoder)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    return build(CASES[request.param], tmp_path_factory.mktemp("model"))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(pair: Pair, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return pair.reference(torch.tensor([ids])).logits[0]


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_has_the_logits_of_transformers(pair):
    ids = tokens(PROMPT)
    expected = reference_logits(pair, ids)
    assert expected.std() > 0.5
    assert_close(PagedRun(pair.decoder).step({"a": ids})["a"], expected)


def test_a_prompt_in_chunks_among_others_has_the_logits_of_transformers(pair):
    ids, other = tokens(PROMPT), tokens(50, 1)
    run = PagedRun(pair.decoder)
    steps = [
        run.step({"other": other[:20], "a": ids[:33]}),
        run.step({"a": ids[33:34], "other": other[20:21]}),
        run.step({"a": ids[34:69]}),
        run.step({"other": other[21:], "a": ids[69:]}),
    ]
    assert_close(torch.cat([step["a"] for step in steps]), reference_logits(pair, ids))


def test_greedy_decoding_has_the_tokens_and_the_logits_of_transformers(pair):
    ids = tokens(PROMPT, 2)
    run = PagedRun(pair.decoder)
    logits = [run.step({"a": ids})["a"][-1:]]
    answer = []
    while len(answer) < ANSWER:
        answer.append(int(logits[-1].argmax()))
        logits.append(run.step({"a": answer[-1:]})["a"])
    generated = pair.reference.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, PROMPT), max_new_tokens=ANSWER, do_sample=False
    )
    assert answer == generated[0, PROMPT:].tolist()
    assert_close(torch.cat(logits), reference_logits(pair, ids + answer)[PROMPT - 1 :])


def test_every_family_has_a_case():
    covered = {AutoModelForCausalLM._model_mapping[case.config].__name__ for case in FAMILY_CASES.values()}
    assert covered >= FAMILIES.keys() - {"Gemma3ForConditionalGeneration"}


@pytest.mark.parametrize(("max_model_len", "prompt", "admitted"), [(None, 30, 64), (128, 70, 128)])
def test_the_longest_sequence_that_an_engine_admits_decides_how_longrope_turns(
    tmp_path, max_model_len, prompt, admitted
):
    case = Case(Phi3Config, {"hidden_size": 128, **longrope(64)})
    reference = random_model(case.config(**{**SMALL, **case.fields}))
    reference.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", num_kv_blocks=65, max_model_len=max_model_len)
    assert llm.info.max_model_len == admitted
    ids = tokens(prompt)
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=ANSWER))
    generated = reference.generate(torch.tensor([ids]), max_new_tokens=ANSWER, do_sample=False)
    assert list(output.outputs[0].token_ids) == generated[0, prompt:].tolist()


# Families by how they round: what is added to norm weights, where norms round, what scales embeddings.
ROUNDING = {
    "llama": LlamaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "granite": GraniteConfig,
    "olmo2": Olmo2Config,
}


@pytest.mark.parametrize("name", ROUNDING)
def test_in_bfloat16_embeddings_and_norms_round_as_in_transformers(tmp_path, name):
    fields = {"vocab_size": 112, "final_logit_softcapping": None, "embedding_multiplier": 1.5}
    model = random_model(ROUNDING[name](**{**SMALL, **fields})).bfloat16()
    with torch.no_grad():
        for module, parameter in model.named_parameters():
            if "layers" in module:
                # With layers that add nothing, and a head that selects, logits are the final norm of embeddings.
                parameter.zero_()
        model.lm_head.weight.copy_(torch.eye(112))
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    foreign = {"final_logit_softcapping", "embedding_multiplier"} - FAMILIES[fields["architectures"][0]].fields
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if k not in foreign}))
    decoder = load(str(tmp_path), dtype=None, device=CPU, model_impl="native").decoder
    ids = list(range(112))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert torch.equal(PagedRun(decoder).step({"a": ids})["a"], expected.float())
