"""What a workload has to compute, and so how long it takes at least.

A multiplication and an addition are two operations. With a prefix that several rows share computed once,

    linear     2 · (weights of a layer's linears, of experts those that a token visits) · layers · tokens
    lm_head    2 · hidden_size · vocab_size · samples
    attention  4 · num_heads · head_dim · (pairs of a query and a key that it sees), summed over the layers

`tokens` are the prompts' distinct ones and, of each row, all new ones but the last, which nothing is computed from;
`samples` are all new ones. Norms, rotations, activations and the embedding are left out: a few in a thousand.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ModelNotSupported
from engine.loader.gguf_config import read_gguf_config
from engine.loader.gguf_file import GgufFile
from engine.loader.hf_config import read_hf_config
from engine.loader.locate import locate_model
from engine.models.config import LayerConfig, ModelConfig
from workers.bench_workloads import Workload, shared_with_an_earlier


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations by where they are done."""

    linear: float
    lm_head: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.lm_head + self.attention


def read_model_config(config: EngineConfig) -> ModelConfig | None:
    """Return the model's shape by its files' headers; None for one that only Transformers' own code can read."""
    path, _ = locate_model(config.model)
    try:
        return read_hf_config(path)[0] if path.is_dir() else read_gguf_config(GgufFile(path))[0]
    except ModelNotSupported:
        return None


def workload_flops(model: ModelConfig, workload: Workload) -> Flops:
    """Count the operations of a workload with each shared prefix computed once."""
    new_tokens = {id(row.prompt): row.new_tokens for row in workload.rows}
    spans = [
        (shared, len(prompt) + new_tokens[id(prompt)] - 1)
        for prompt, shared in shared_with_an_earlier([row.prompt for row in workload.rows])
    ]
    return flops(model, spans, samples=workload.new_tokens)


def flops(model: ModelConfig, spans: Iterable[tuple[int, int]], samples: int) -> Flops:
    """Count the operations of computing positions `start` to `end` of some sequences, and of `samples` logits."""
    spans = list(spans)
    tokens = sum(end - start for start, end in spans)
    pairs = sum(_pairs(layer, start, end) for layer in model.layers for start, end in spans)
    weights = sum(_linear_weights(model, layer) for layer in range(model.num_layers))
    return Flops(
        linear=2.0 * weights * tokens,
        lm_head=2.0 * model.hidden_size * model.vocab_size * samples,
        attention=4.0 * model.num_heads * model.head_dim * pairs,
    )


def _pairs(layer: LayerConfig, start: int, end: int) -> int:
    """Keys that the queries at positions `start` to `end` see, all together: `position + 1` each, or the window."""
    if layer.window is None:
        return _triangle(end) - _triangle(start)
    growing = _triangle(min(end, layer.window)) - _triangle(min(start, layer.window))
    return growing + layer.window * (max(end, layer.window) - max(start, layer.window))


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


def _linear_weights(model: ModelConfig, layer: int) -> int:
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    mixture = model.mixture_of(layer)
    if mixture is None:
        return attention + 3 * model.hidden_size * model.intermediate_size
    experts = mixture.experts_per_token * 3 * model.hidden_size * mixture.intermediate_size
    return attention + experts + model.hidden_size * mixture.num_experts
