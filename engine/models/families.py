"""The table of families: what sets each architecture apart, and under which names its checkpoints hold its weights."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from engine.models.adapters import Projection
from engine.models.config import ModelConfig
from engine.models.expert_names import ExpertLayout, ExpertNames
from kernels.linear import Activation

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of a checkpoint's modules; those of a layer hold `{layer}`. A tensor is a module's `.weight` or `.bias`.

    `qkv` and `gate_up` list the modules that one product joins, in the order of its outputs: one module where the
    checkpoint holds them joined already. What a family does not have is None; `sinks` is a tensor, `[num_heads]`.
    """

    embedding: str
    final_norm: str
    lm_head: str
    layer: str
    qkv: tuple[str, ...]
    attention_out: str
    gate_up: tuple[str, ...]
    down: str
    input_norm: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    attention_out_norm: str | None = None
    feed_forward_norm: str | None = None
    feed_forward_out_norm: str | None = None
    sinks: str | None = None
    experts: ExpertNames | None = None

    @property
    def telltale(self) -> str:
        """A tensor by which a checkpoint shows that it follows these names, and not others of the same family."""
        if self.experts is not None and self.experts.layout == "mxfp4":
            return f"{self.experts.down.format(layer=0)}_blocks"
        return f"{self.embedding}.weight"


class LinearPart(NamedTuple):
    """A linear module of a checkpoint's layer, as the decoder has it: outputs `start` to `stop` of `projection`."""

    module: str
    projection: Projection
    start: int
    stop: int
    in_features: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Family:
    """What sets an architecture apart. Weights and arithmetic:

    other_names       names of other layouts in which checkpoints hold the same model
    qkv_bias          query, key and value always have a bias
    qk_norm_over      what a norm of queries and keys spans: each head, or all heads together
    norm_offset       what is added to each stored norm weight
    float32_norms     norms multiply by their weight before they round to the model's dtype
    scaled_embedding  embeddings are multiplied by the square root of their size
    permuted_rope     a file whose query and key rows pair neighbours instead of halves
    expert_bias       the router and the experts of a mixture have a bias
    clamped_swiglu    experts have the gate of gpt-oss

    What its configuration may set:

    fields            those of `SWITCHES` that its model reads
    windows           which layers `sliding_window` is for: none, all, or those that `layer_types` names
    """

    names: WeightNames
    other_names: tuple[WeightNames, ...] = ()
    qkv_bias: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    norm_offset: float = 0.0
    float32_norms: bool = False
    scaled_embedding: bool = False
    permuted_rope: bool = False
    expert_bias: bool = False
    clamped_swiglu: bool = False
    fields: frozenset[str] = frozenset()
    windows: Literal["none", "all", "layer_types"] = "none"

    def names_in(self, tensors: Container[str]) -> WeightNames:
        """Return the names that a checkpoint holding `tensors` follows; those of today where it follows none."""
        for names in (self.names, *self.other_names):
            if names.telltale in tensors:
                return names
        return self.names


# Fields of a configuration that change the model, and the value with which they do not. A family that does not read a
# field is refused where the field is set.
SWITCHES: dict[str, float | None] = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "no_rope_layers": None,
    "partial_rotary_factor": 1.0,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "use_bidirectional_attention": False,
}


def _llama_names(model: str = "model.") -> WeightNames:
    layer = model + "layers.{layer}."
    return WeightNames(
        embedding=f"{model}embed_tokens",
        final_norm=f"{model}norm",
        lm_head="lm_head",
        layer=layer,
        qkv=(f"{layer}self_attn.q_proj", f"{layer}self_attn.k_proj", f"{layer}self_attn.v_proj"),
        attention_out=f"{layer}self_attn.o_proj",
        gate_up=(f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
        down=f"{layer}mlp.down_proj",
        input_norm=f"{layer}input_layernorm",
        feed_forward_norm=f"{layer}post_attention_layernorm",
    )


def _with_qk_norm(names: WeightNames) -> WeightNames:
    attention = f"{names.layer}self_attn."
    return replace(names, query_norm=f"{attention}q_norm", key_norm=f"{attention}k_norm")


def _gemma_names(model: str = "model.") -> WeightNames:
    names = _llama_names(model)
    return replace(
        names,
        attention_out_norm=f"{names.layer}post_attention_layernorm",
        feed_forward_norm=f"{names.layer}pre_feedforward_layernorm",
        feed_forward_out_norm=f"{names.layer}post_feedforward_layernorm",
    )


def _olmo2_names() -> WeightNames:
    names = _with_qk_norm(_llama_names())
    return replace(
        names,
        input_norm=None,
        attention_out_norm=f"{names.layer}post_attention_layernorm",
        feed_forward_norm=None,
        feed_forward_out_norm=f"{names.layer}post_feedforward_layernorm",
    )


def _phi3_names() -> WeightNames:
    names = _llama_names()
    return replace(names, qkv=(f"{names.layer}self_attn.qkv_proj",), gate_up=(f"{names.layer}mlp.gate_up_proj",))


def _with_experts(names: WeightNames, block: str, gate: str, up: str, down: str) -> WeightNames:
    block = f"{names.layer}{block}."
    expert = f"{block}experts.{{expert}}."
    return replace(names, experts=ExpertNames(f"{block}gate", (f"{expert}{gate}", f"{expert}{up}"), f"{expert}{down}"))


def _qwen_moe_names() -> WeightNames:
    return _with_experts(_with_qk_norm(_llama_names()), "mlp", "gate_proj", "up_proj", "down_proj")


def _gpt_oss_names(layout: ExpertLayout) -> WeightNames:
    names = _llama_names()
    mlp = f"{names.layer}mlp."
    experts = ExpertNames(f"{mlp}router", (f"{mlp}experts.gate_up_proj",), f"{mlp}experts.down_proj", layout)
    return replace(names, sinks=f"{names.layer}self_attn.sinks", experts=experts)


_BIASES = frozenset({"attention_bias", "mlp_bias"})
_GRANITE_FIELDS = {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}
_GEMMA2 = Family(
    _gemma_names(),
    norm_offset=1.0,
    float32_norms=True,
    scaled_embedding=True,
    fields=frozenset({"attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"}),
    windows="layer_types",
)
_GEMMA3 = replace(
    _GEMMA2,
    names=_with_qk_norm(_gemma_names()),
    fields=_GEMMA2.fields - {"attn_logit_softcapping"},
)

# By the name in a config.json's `architectures`.
FAMILIES = {
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    # The text model alone: images are not read.
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        names=_with_qk_norm(_gemma_names("model.language_model.")),
        other_names=(_with_qk_norm(_gemma_names("language_model.model.")),),
    ),
    "GptOssForCausalLM": Family(
        _gpt_oss_names("mxfp4"),
        other_names=(_gpt_oss_names("stacked"),),
        float32_norms=True,
        expert_bias=True,
        clamped_swiglu=True,
        fields=frozenset({"attention_bias"}),
        windows="layer_types",
    ),
    "GraniteForCausalLM": Family(_llama_names(), fields=_BIASES | _GRANITE_FIELDS),
    "LlamaForCausalLM": Family(_llama_names(), fields=_BIASES),
    "MistralForCausalLM": Family(_llama_names(), windows="all"),
    "MixtralForCausalLM": Family(_with_experts(_llama_names(), "block_sparse_moe", "w1", "w3", "w2"), windows="all"),
    "Olmo2ForCausalLM": Family(
        _olmo2_names(), qk_norm_over="projection", float32_norms=True, fields=frozenset({"attention_bias"})
    ),
    "OlmoeForCausalLM": Family(_qwen_moe_names(), qk_norm_over="projection", fields=frozenset({"attention_bias"})),
    "Phi3ForCausalLM": Family(_phi3_names(), fields=frozenset({"partial_rotary_factor"}), windows="all"),
    "Qwen2ForCausalLM": Family(_llama_names(), qkv_bias=True, windows="layer_types"),
    "Qwen3ForCausalLM": Family(
        _with_qk_norm(_llama_names()), fields=frozenset({"attention_bias"}), windows="layer_types"
    ),
    "Qwen3MoeForCausalLM": Family(_qwen_moe_names(), fields=frozenset({"attention_bias"}), windows="all"),
    "SmolLM3ForCausalLM": Family(_llama_names(), fields=_BIASES | {"no_rope_layers"}, windows="layer_types"),
}

_GGUF_NAMES = WeightNames(
    embedding="token_embd",
    final_norm="output_norm",
    lm_head="output",
    layer="blk.{layer}.",
    qkv=("blk.{layer}.attn_q", "blk.{layer}.attn_k", "blk.{layer}.attn_v"),
    attention_out="blk.{layer}.attn_output",
    gate_up=("blk.{layer}.ffn_gate", "blk.{layer}.ffn_up"),
    down="blk.{layer}.ffn_down",
    input_norm="blk.{layer}.attn_norm",
    feed_forward_norm="blk.{layer}.ffn_norm",
)

_GGUF_GEMMA_NAMES = replace(
    _GGUF_NAMES,
    attention_out_norm="blk.{layer}.post_attention_norm",
    feed_forward_out_norm="blk.{layer}.post_ffw_norm",
)


def _with_gguf_qk_norm(names: WeightNames) -> WeightNames:
    return replace(names, query_norm="blk.{layer}.attn_q_norm", key_norm="blk.{layer}.attn_k_norm")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family as GGUF files hold it, and what its files leave unsaid.

    keys            metadata keys, after the architecture's name, that set switches and that the family's model reads
    full_every      every so many layers one sees all keys and the others the window; None is the window everywhere
    window_theta    the rotary base of layers with a window, which do not scale it either; None is that of the others
    head_dim        the one head size for which the scale of attention is known without being said; None is any
    """

    family: Family
    activation: Activation = "silu"
    keys: frozenset[str] = frozenset()
    full_every: int | None = None
    window_theta: float | None = None
    head_dim: int | None = None


# Gemma's converter adds the one to norm weights. In files of its largest models, whose heads are of another size, the
# scale of attention would have to be guessed.
_GGUF_GEMMA2 = GgufFamily(
    Family(_GGUF_GEMMA_NAMES, float32_norms=True, scaled_embedding=True),
    activation="gelu_tanh",
    keys=frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
    full_every=2,
    head_dim=256,
)

# By a GGUF file's `general.architecture`. Llama's converter reorders query and key rows for its own rotary layout.
GGUF_FAMILIES = {
    "gemma2": _GGUF_GEMMA2,
    "gemma3": replace(
        _GGUF_GEMMA2,
        family=replace(_GGUF_GEMMA2.family, names=_with_gguf_qk_norm(_GGUF_GEMMA_NAMES)),
        keys=_GGUF_GEMMA2.keys - {"attn_logit_softcapping"},
        full_every=6,
        window_theta=10000.0,
    ),
    "llama": GgufFamily(Family(_GGUF_NAMES, permuted_rope=True)),
    "phi3": GgufFamily(
        Family(replace(_GGUF_NAMES, qkv=("blk.{layer}.attn_qkv",), gate_up=("blk.{layer}.ffn_up",))),
        keys=frozenset({"attention.sliding_window"}),
    ),
    "qwen2": GgufFamily(Family(_GGUF_NAMES)),
    "qwen3": GgufFamily(Family(_with_gguf_qk_norm(_GGUF_NAMES))),
}


def expected_shapes(config: ModelConfig, family: Family, names: WeightNames) -> Shapes:
    """Return every tensor that a checkpoint of this model has to hold, by name."""
    shapes: Shapes = {
        f"{names.embedding}.weight": (config.vocab_size, config.hidden_size),
        f"{names.final_norm}.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[f"{names.lm_head}.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for part in linear_parts(config, names, layer):
            out_features = part.stop - part.start
            shapes[f"{part.module}.weight"] = (out_features, part.in_features)
            if part.bias:
                shapes[f"{part.module}.bias"] = (out_features,)
        for norm, size in _norms(config, family, names):
            if norm is not None:
                shapes[f"{norm.format(layer=layer)}.weight"] = (size,)
        if names.sinks is not None:
            shapes[names.sinks.format(layer=layer)] = (config.num_heads,)
        if names.experts is not None and (mixture := config.mixture_of(layer)) is not None:
            shapes.update(names.experts.shapes(mixture, config.hidden_size, layer))
    return shapes


def linear_parts(config: ModelConfig, names: WeightNames, layer: int) -> Iterator[LinearPart]:
    """Yield every linear module that a checkpoint holds for a layer, but those of a mixture of experts."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    joined: list[tuple[Projection, tuple[str, ...], tuple[int, ...], int, bool]] = [
        ("qkv", names.qkv, (query, kv, kv), hidden, config.qkv_bias),
        ("attention_out", (names.attention_out,), (hidden,), query, config.attention_out_bias),
    ]
    if config.mixture_of(layer) is None:
        joined += [
            ("gate_up", names.gate_up, (intermediate, intermediate), hidden, config.mlp_bias),
            ("down", (names.down,), (hidden,), intermediate, config.mlp_bias),
        ]
    for projection, modules, sizes, in_features, bias in joined:
        start = 0
        for module, size in zip(modules, sizes if len(modules) > 1 else (sum(sizes),), strict=True):
            yield LinearPart(module.format(layer=layer), projection, start, start + size, in_features, bias)
            start += size


def _norms(config: ModelConfig, family: Family, names: WeightNames) -> Iterator[tuple[str | None, int]]:
    per_head = family.qk_norm_over == "head"
    yield names.query_norm, config.head_dim * (1 if per_head else config.num_heads)
    yield names.key_norm, config.head_dim * (1 if per_head else config.num_kv_heads)
    for module in (names.input_norm, names.attention_out_norm, names.feed_forward_norm, names.feed_forward_out_norm):
        yield module, config.hidden_size
