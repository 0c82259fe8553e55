"""The families as a table: configuration classes of Transformers, with sizes small, and odd where real ones are.

Nothing here needs pytest: `tests.gpu` runs the same table on a card.
"""

from typing import NamedTuple

import torch
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


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
