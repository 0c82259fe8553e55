"""What a model leaves of a machine's memory for its KV pool, by its files' headers: no weights are read."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.build import CPU_BUDGETS, CUDA_BUDGETS, check_device
from engine.config import EngineConfig, Quantize
from engine.errors import ConfigError, ModelNotSupported
from engine.loader.encoder_config import is_encoder
from engine.loader.gguf_config import read_gguf_config
from engine.loader.gguf_file import GgufFile
from engine.loader.hf_config import read_hf_config
from engine.loader.locate import locate_model
from engine.loader.packing import multiplies
from engine.loader.peft import adapter_shapes, adapter_targets
from engine.loader.quantization import folder_tensors
from engine.loader.quantized import QuantizedTensors
from engine.loader.sources import TensorSource
from engine.memory import DEFAULT_GPU_UTILIZATION, kv_cache_dtype, size_kv_pool
from engine.models.config import ModelConfig
from engine.row_state import row_state_bytes
from kernels.ops import kernels_for, kv_bytes_per_token
from kernels.quantize import int4_group_size
from kernels.reference_quantized import FLOAT8_BLOCK
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
    device: torch.device | None = None
    if gpu_memory is None:
        device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
        gpu_memory = torch.cuda.mem_get_info()[1] if device.type == "cuda" else None
    check_device(config, "cpu" if gpu_memory is None else "cuda")
    weights = _weight_bytes(config, model, source, dtype) - _bytes_saved(source, dtype, device)
    kv_dtype = kv_cache_dtype(config, dtype)
    per_token = kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, kv_dtype)
    max_num_seqs = config.max_num_seqs or (CPU_BUDGETS if gpu_memory is None else CUDA_BUDGETS)[0]
    longest = config.max_model_len or model.max_position_embeddings
    taken = weights + _adapter_bytes(config, model, dtype, stacked=gpu_memory is not None)
    if gpu_memory is not None:
        taken += row_state_bytes(max_num_seqs, longest, config.block_size)
    tokens = _pool_tokens(config, gpu_memory, taken, per_token, longest, max_num_seqs)
    return Capacity(tokens, max_num_seqs, min(longest, tokens), config.block_size, weights, per_token)


def _headers(path: Path) -> tuple[ModelConfig, TensorSource]:
    if path.is_dir():
        config, _ = read_hf_config(path)
        return config, folder_tensors(path, config.dtype)
    file = GgufFile(path)
    return read_gguf_config(file)[0], file


def _weight_bytes(config: EngineConfig, model: ModelConfig, source: TensorSource, dtype: torch.dtype) -> int:
    """Of weights once loaded; of quantised mixtures to a percent or two, which routers and biases are."""
    embedding = (model.vocab_size, model.hidden_size)
    total = 0
    for name, shape in source.shapes.items():
        # A byte of MXFP4 blocks becomes two values, and their scales are gone.
        elements = math.prod(shape) * (2 if name.endswith("_blocks") else not name.endswith("_scales"))
        in_features = shape[-1] if len(shape) == 2 else model.hidden_size
        is_linear = len(shape) > 1 and shape != embedding
        total += round(elements * _bytes_per_value(config.quantize if is_linear else None, in_features, dtype))
    if config.quantize != "int8":
        return total
    # The head is quantised as well; where it and the embedding are one, it is a copy of it.
    head = math.prod(embedding)
    return total + (head if model.tie_word_embeddings else head - head * dtype.itemsize)


def _bytes_per_value(quantize: Quantize | None, in_features: int, dtype: torch.dtype) -> float:
    if quantize == "int4" and (group_size := int4_group_size(in_features)):
        return 0.5 + (dtype.itemsize + 1) / group_size
    if quantize == "fp8":
        return 1 + torch.float32.itemsize / FLOAT8_BLOCK**2
    return 1 if quantize == "int8" else dtype.itemsize


def _bytes_saved(source: TensorSource, dtype: torch.dtype, device: torch.device | None) -> int:
    """Return by how much less than dequantised the linears are that come quantised, and that the device keeps so.

    `device` None is a GPU that has products of all of them.
    """
    if not isinstance(source, QuantizedTensors) or (device and device.type == "cpu"):
        return 0
    if not multiplies(source.layout.kind, dtype, kernels_for(device) if device else None):
        return 0
    return sum(math.prod(source.shapes[name]) * dtype.itemsize - size for name, size in source.quantized_bytes.items())


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
