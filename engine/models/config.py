"""What a checkpoint says about its model, read once and frozen."""

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.linear import Activation


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: how fast each pair of dimensions turns, the same at every length of a sequence.

    The first `rotary_dim` dimensions of a head turn; cosine and sine are multiplied by `attention_factor`. `kind` is

        default   theta alone
        linear    positions divided by `factor`
        llama3    low frequencies divided by `factor`, with a ramp between the two frequency factors
        yarn      frequencies that turn less than `beta_slow` times in the original context divided by `factor`, those
                  that turn more than `beta_fast` times kept, and a ramp between them
        factors   each frequency divided by its own of `frequency_factors`, rotary_dim / 2 of them

    Kinds that depend on a sequence's length, `longrope` and `dynamic`, become one of these when the configuration is
    read: see `engine.loader.hf_rope`.
    """

    rotary_dim: int
    kind: Literal["default", "linear", "llama3", "yarn", "factors"] = "default"
    theta: float = 10000.0
    attention_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_max_position_embeddings: int = 8192
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What sets one layer's attention apart from another's.

    `rope` is None where queries and keys are not turned. `window` counts the keys that a query sees, its own among
    them; None is all.
    """

    rope: RopeConfig | None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """The mixtures of experts that are the feed-forward of every layer but `dense_layers`.

    A token's weights are the softmax over its own experts' router logits if `normalized`, else their shares of the
    softmax over all. `bias` is that of the router and of the experts. `clamped_swiglu` is alpha and limit of the kernel
    of that name, which takes the place of the model's activation.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalized: bool
    bias: bool
    clamped_swiglu: tuple[float, float] | None
    dense_layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model and the switches that its family and its checkpoint set.

    `max_position_embeddings` is the longest sequence for which the layers' rotary embeddings were chosen. Softcaps
    bound scores and logits smoothly to plus and minus themselves; None leaves them as they are.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
    attention_scale: float
    activation: Activation = "silu"
    float32_norms: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    mixture: MixtureConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def mixture_of(self, layer: int) -> MixtureConfig | None:
        """Return the mixture of experts that is this layer's feed-forward, or None if that is dense."""
        return None if self.mixture is None or layer in self.mixture.dense_layers else self.mixture
