"""What a model leaves of a machine's memory for its KV pool, by its files' headers: no weights are read."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.build import CPU_BUDGETS, CUDA_BUDGETS, check_device
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelNotSupported
from engine.loader.encoder_config import is_encoder
from engine.loader.gguf_config import read_gguf_config
from engine.loader.gguf_file import GgufFile
from engine.loader.hf_config import read_hf_config
from engine.loader.locate import locate_model
from engine.loader.peft import adapter_shapes, adapter_targets
from engine.loader.sources import SafetensorsSource, TensorSource
from engine.memory import DEFAULT_GPU_UTILIZATION, kv_cache_dtype, size_kv_pool
from engine.models.config import ModelConfig
from kernels.ops import kv_bytes_per_token
from kernels.stacked_lora import padded_rank


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of an engine that was not built. `kv_tokens` is 0 where the weights alone do not fit.

    What a step's activations take is not known without one, so that on a GPU the pool will be somewhat smaller.
    """

    kv_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    weight_bytes: int
    kv_bytes_per_token: int


def kv_capacity(config: EngineConfig, gpu_memory: int | None = None) -> Capacity | None:
    """The capacity of the engine that `config` describes, on a GPU of so many bytes, or on this machine's device.

    None for a model without a KV cache, and for one that only Transformers' own code can read. Raises ModelNotFound and
    ModelFileInvalid, and ConfigError for what the engine refuses on the device.
    """
    path, _ = locate_model(config.model)
    if path.is_dir() and is_encoder(path):
        return None
    try:
        model, source = _headers(path)
    except ModelNotSupported:
        return None
    dtype = model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    weights = _weight_bytes(config, model, _elements(source), dtype)
    kv_dtype = kv_cache_dtype(config, dtype)
    per_token = kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, kv_dtype)
    if gpu_memory is None and config.device != "cpu" and torch.cuda.is_available():
        gpu_memory = torch.cuda.mem_get_info()[1]
    check_device(config, "cpu" if gpu_memory is None else "cuda")
    max_num_seqs = config.max_num_seqs or (CPU_BUDGETS if gpu_memory is None else CUDA_BUDGETS)[0]
    longest = config.max_model_len or model.max_position_embeddings
    taken = weights + _adapter_bytes(config, model, dtype, stacked=gpu_memory is not None)
    tokens = _pool_tokens(config, gpu_memory, taken, per_token, longest, max_num_seqs)
    return Capacity(tokens, max_num_seqs, min(longest, tokens), config.block_size, weights, per_token)


def _headers(path: Path) -> tuple[ModelConfig, TensorSource]:
    if path.is_dir():
        return read_hf_config(path)[0], SafetensorsSource(path)
    file = GgufFile(path)
    return read_gguf_config(file)[0], file


def _weight_bytes(config: EngineConfig, model: ModelConfig, elements: int, dtype: torch.dtype) -> int:
    """Of weights once loaded; of quantised ones to a percent or two, which scales and norms are."""
    if config.quantize is None:
        return elements * dtype.itemsize
    embedding = model.vocab_size * model.hidden_size
    # Where head and embedding are one, the head is a quantised copy of it.
    linears = elements if model.tie_word_embeddings else elements - embedding
    return linears + embedding * dtype.itemsize


def _elements(source: TensorSource) -> int:
    """Of all weights as they are once loaded: a byte of MXFP4 blocks becomes two, and their scales are gone."""
    sizes = {name: math.prod(shape) for name, shape in source.shapes.items()}
    return sum(size * (2 if name.endswith("_blocks") else not name.endswith("_scales")) for name, size in sizes.items())


def _adapter_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, *, stacked: bool) -> int:
    """Of as many adapters as may be in memory, each of the highest rank, or what that is padded to in stacks."""
    if not config.max_loras:
        return 0
    elements = sum(shape.elements_per_rank for shape in adapter_shapes(adapter_targets(model)).values())
    rank = padded_rank(config.max_lora_rank) if stacked else config.max_lora_rank
    return config.max_loras * rank * elements * dtype.itemsize


def _pool_tokens(
    config: EngineConfig, gpu_memory: int | None, taken: int, per_token: int, longest: int, max_num_seqs: int
) -> int:
    if gpu_memory is not None:
        available = int((config.gpu_memory_utilization or DEFAULT_GPU_UTILIZATION) * gpu_memory) - taken
        if available <= 0:
            return 0
        config = replace(config, kv_cache_memory=available)
    try:
        blocks = size_kv_pool(
            config,
            torch.device("cpu"),
            bytes_per_token=per_token,
            tokens_per_request=longest,
            max_num_seqs=max_num_seqs,
            reserved_bytes=taken,
            run_full_step=lambda: None,
        )
    except ConfigError:
        return 0
    return (blocks - 1) * config.block_size
