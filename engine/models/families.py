"""The table of families: which weights a checkpoint of each architecture holds, under which names."""

from dataclasses import dataclass

from engine.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of a checkpoint's modules; those of a layer hold `{layer}`. A tensor is a module's `.weight` or `.bias`."""

    embedding: str
    final_norm: str
    lm_head: str
    input_norm: str
    query: str
    key: str
    value: str
    attention_out: str
    post_attention_norm: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Family:
    """What sets an architecture apart.

    `attention_bias_flag` and `mlp_bias_flag` name the configuration fields that give its projections a bias, or None
    where it has none. `permuted_rope` marks files whose query and key rows pair neighbours instead of halves.
    """

    names: WeightNames
    attention_bias_flag: str | None = None
    mlp_bias_flag: str | None = None
    permuted_rope: bool = False


_LLAMA_NAMES = WeightNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    lm_head="lm_head",
    input_norm="model.layers.{layer}.input_layernorm",
    query="model.layers.{layer}.self_attn.q_proj",
    key="model.layers.{layer}.self_attn.k_proj",
    value="model.layers.{layer}.self_attn.v_proj",
    attention_out="model.layers.{layer}.self_attn.o_proj",
    post_attention_norm="model.layers.{layer}.post_attention_layernorm",
    gate="model.layers.{layer}.mlp.gate_proj",
    up="model.layers.{layer}.mlp.up_proj",
    down="model.layers.{layer}.mlp.down_proj",
)

_GGUF_NAMES = WeightNames(
    embedding="token_embd",
    final_norm="output_norm",
    lm_head="output",
    input_norm="blk.{layer}.attn_norm",
    query="blk.{layer}.attn_q",
    key="blk.{layer}.attn_k",
    value="blk.{layer}.attn_v",
    attention_out="blk.{layer}.attn_output",
    post_attention_norm="blk.{layer}.ffn_norm",
    gate="blk.{layer}.ffn_gate",
    up="blk.{layer}.ffn_up",
    down="blk.{layer}.ffn_down",
)

# By the name in a config.json's `architectures`.
FAMILIES = {
    "LlamaForCausalLM": Family(_LLAMA_NAMES, attention_bias_flag="attention_bias", mlp_bias_flag="mlp_bias"),
    "MistralForCausalLM": Family(_LLAMA_NAMES),
}

# By a GGUF file's `general.architecture`. Llama's converter reorders query and key rows for its own rotary layout.
GGUF_FAMILIES = {
    "llama": Family(_GGUF_NAMES, permuted_rope=True),
}


def expected_shapes(config: ModelConfig, names: WeightNames) -> Shapes:
    """Return every tensor that a checkpoint of this model has to hold, by name."""
    shapes: Shapes = {
        f"{names.embedding}.weight": (config.vocab_size, config.hidden_size),
        f"{names.final_norm}.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[f"{names.lm_head}.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update(_layer_shapes(config, names, layer))
    return shapes


def _layer_shapes(config: ModelConfig, names: WeightNames, layer: int) -> Shapes:
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = (
        (names.query, query_size, config.hidden_size, config.qkv_bias),
        (names.key, kv_size, config.hidden_size, config.qkv_bias),
        (names.value, kv_size, config.hidden_size, config.qkv_bias),
        (names.attention_out, config.hidden_size, query_size, config.attention_out_bias),
        (names.gate, config.intermediate_size, config.hidden_size, config.mlp_bias),
        (names.up, config.intermediate_size, config.hidden_size, config.mlp_bias),
        (names.down, config.hidden_size, config.intermediate_size, config.mlp_bias),
    )
    shapes: Shapes = {}
    for template, out_features, in_features, bias in linears:
        module = template.format(layer=layer)
        shapes[f"{module}.weight"] = (out_features, in_features)
        if bias:
            shapes[f"{module}.bias"] = (out_features,)
    for template in (names.input_norm, names.post_attention_norm):
        shapes[f"{template.format(layer=layer)}.weight"] = (config.hidden_size,)
    return shapes
