"""From a configuration to an engine that is ready to step."""

from collections.abc import Mapping

import torch

from engine.adapter_slots import AdapterSlots
from engine.block_moves import BatchedMoves, BlockMover, SingleMoves, num_staged_blocks
from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.device import Device, device_of
from engine.encoder.build import assemble_encoder_engine
from engine.errors import ConfigError
from engine.graphs import DecodeGraphs, graph_sizes
from engine.info import EngineInfo
from engine.inputs import HostInputs, InputBuilder
from engine.loader import LoadedEncoder, LoadedModel, load
from engine.loader.packing import check_quantize
from engine.loader.peft import AdapterTarget, PeftLoader, adapter_shapes, adapter_targets
from engine.loop import OverlappedLoop, PlainLoop
from engine.lora import LoraAdapter, LoraCache
from engine.machine import keep_freed_memory, usable_cores
from engine.memory import kv_cache_dtype, size_host_pool, size_kv_pool
from engine.models.decoder import Decoder
from engine.pooling.intake import PoolingIntake, PoolingModel
from engine.request import Request
from engine.row_state import RowInputs
from engine.runner import Runner
from engine.sampling.params import MAX_LOGPROBS, SamplingParams
from engine.scheduler import Scheduler
from kernels.ops import KVCache, allocate_kv_cache, kernels_for, kv_bytes_per_token
from kernels.reference_blocks import allocate_staged_blocks

# Rows and tokens of one step. On a CPU a step is bound by arithmetic from a few dozen rows on, and a larger one only
# takes more memory; a GPU wants all the rows that its KV pool holds.
CPU_BUDGETS = (96, 2048)
CUDA_BUDGETS = (1024, 8192)
_FLOAT8_CAPABILITY = (8, 9)
# Options and their values that one kind of device has, and what the other has instead.
_OF_ONE_DEVICE = (
    ("kv_cache_dtype", "fp8", "cuda", "int8"),
    ("kv_cache_dtype", "int8", "cpu", "fp8"),
    ("quantize", "int8", "cpu", "fp8 or int4"),
    ("quantize", "fp8", "cuda", "int8"),
    ("quantize", "int4", "cuda", "int8"),
)
# How many batches of requests may overtake one that waits for a slot of its adapter: enough that a queue in which
# adapters alternate does not run one request at a time.
_OVERTAKING_BATCHES = 4


def build_engine(config: EngineConfig) -> EngineCore:
    """Load the model and make an engine of it. Sets the number of torch's threads on a CPU.

    Raises `ConfigError` if the options do not fit the machine or the model, and what `engine.loader.load` raises.
    """
    device = _device(config)
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or usable_cores())
        keep_freed_memory()
    try:
        return _load_and_assemble(config, device)
    except torch.OutOfMemoryError as error:
        # It says how much other processes hold.
        raise ConfigError(
            f"The model and its KV cache do not fit the GPU: {error}",
            hint="Free some of its memory, lower kv_cache_memory or num_kv_blocks, or take a smaller model.",
        ) from error


def _load_and_assemble(config: EngineConfig, device: torch.device) -> EngineCore:
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    loaded = load(
        config.model,
        dtype=dtype,
        device=device,
        quantize=config.quantize,
        model_impl=config.model_impl,
        trust_remote_code=config.trust_remote_code,
        max_model_len=config.max_model_len,
    )
    if isinstance(loaded, LoadedEncoder):
        return assemble_encoder_engine(config, loaded, device)
    return assemble_engine(config, loaded, device)


def assemble_engine(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> EngineCore:
    """Size the KV pool, and put the loop together around a model that is loaded on `device`."""
    home = device_of(device)
    targets = _adapter_targets(config, loaded) if config.max_loras else {}
    slots = _adapter_slots(config, loaded, targets, home) if targets else None
    limits = _resolve(config, loaded, device, slots)
    adapters = _adapter_cache(config, loaded, targets, slots, limits) if slots else None
    model_dtype = str(loaded.config.dtype).removeprefix("torch.")
    info = EngineInfo(
        model=config.model,
        dtype=model_dtype,
        quantize=config.quantize,
        kv_cache_dtype=model_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        device=str(device),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=loaded.config.vocab_size,
        num_kv_blocks=limits.num_kv_blocks,
        block_size=limits.block_size,
        tasks=loaded.tasks,
        revision=loaded.revision,
    )
    kv_dtype = kv_cache_dtype(config, loaded.config.dtype)
    kv = _kv_cache(loaded, limits, kv_dtype, device)
    if config.preallocate_kv:
        for tensor in kv.tensors:
            tensor.zero_()
    scheduler = Scheduler(limits, adapters)
    sizes = graph_sizes(limits.max_num_seqs)
    graphs = _decode_graphs(config, loaded, kv, home, slots, sizes, limits.max_model_len)
    mover = _block_mover(loaded, limits, kv, home)
    inputs = _input_builder(kv, home, graphs, limits.max_num_seqs, limits.max_model_len)
    runner = Runner(loaded.decoder, kv, home, mover, inputs, slots, max_num_seqs=limits.max_num_seqs)
    overlaps = device.type == "cuda" and config.async_scheduling is not False
    loop = OverlappedLoop if overlaps else PlainLoop
    return EngineCore(
        scheduler,
        loop(scheduler, runner, limits.max_num_batched_tokens),
        info,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        seed=config.seed,
        adapters=adapters,
        pooling=_pooling_intake(loaded, info),
    )


def _pooling_intake(loaded: LoadedModel, info: EngineInfo) -> PoolingIntake:
    defaults = loaded.pooling
    model = PoolingModel(
        task="embed",
        size=loaded.config.hidden_size,
        pooling=defaults.pooling,
        normalize=defaults.normalize,
        lowercase=defaults.lowercase,
    )
    max_length = min(info.max_model_len, defaults.max_length or info.max_model_len)
    return PoolingIntake(model, loaded.tokenizer, vocab_size=info.vocab_size, max_length=max_length)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        try:
            device = torch.device(config.device)
        except RuntimeError as error:
            raise ConfigError(f"device {config.device!r} is none that torch knows.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {config.device!r} is not supported.", hint="Take cpu or cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device here.")
    check_device(config, device.type)
    if config.quantize and device.type == "cuda":
        check_quantize(config.quantize, kernels_for(device))
    if config.kv_cache_dtype == "fp8" and torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype fp8 needs a GPU that computes in 8-bit floating point, and "
            f"{torch.cuda.get_device_name(device)} does not.",
            hint="Leave it out, or take one from sm_89 on: Ada, Hopper or newer.",
        )
    if device.type == "cpu" and config.gpu_memory_utilization is not None:
        raise ConfigError("gpu_memory_utilization says nothing on a CPU.", hint="Use kv_cache_memory.")
    if device.type == "cpu" and config.async_scheduling:
        raise ConfigError("async_scheduling is for GPUs: a CPU computes beside nothing.", hint="Leave it out.")
    return device


def check_device(config: EngineConfig, device_type: str) -> None:
    """Raise `ConfigError` if `config` asks for what a `cpu` or `cuda` does not do."""
    asked = {"kv_cache_dtype": config.kv_cache_dtype, "quantize": config.quantize}
    for option, value, wanted, other in _OF_ONE_DEVICE:
        if asked[option] == value and device_type != wanted:
            raise ConfigError(
                f"{option} {value} is for {'GPUs' if wanted == 'cuda' else 'CPUs'}, and the device is a "
                f"{'GPU' if device_type == 'cuda' else 'CPU'}.",
                hint=f"Take {other}.",
            )


def _adapter_targets(config: EngineConfig, loaded: LoadedModel) -> dict[str, AdapterTarget]:
    if not isinstance(loaded.decoder, Decoder):
        raise ConfigError(
            f"{config.model} runs by Transformers' own code, which takes no LoRA adapters here.",
            hint="Set max_loras to 0, and merge the adapter into the model.",
        )
    return adapter_targets(loaded.decoder.config)


def _adapter_slots(
    config: EngineConfig, loaded: LoadedModel, targets: Mapping[str, AdapterTarget], device: Device
) -> AdapterSlots:
    return AdapterSlots(
        adapter_shapes(targets),
        kernels_for(device.place).lora,
        device,
        num_slots=config.max_loras,
        max_rank=config.max_lora_rank,
        dtype=loaded.config.dtype,
    )


def _adapter_cache(
    config: EngineConfig,
    loaded: LoadedModel,
    targets: Mapping[str, AdapterTarget],
    slots: AdapterSlots,
    limits: SchedulerConfig,
) -> LoraCache:
    peft = PeftLoader(targets, slots.stage, max_rank=config.max_lora_rank, dtype=loaded.config.dtype)
    overtakes = _OVERTAKING_BATCHES * limits.max_num_seqs
    return LoraCache(peft.load, slots.put, max_loras=config.max_loras, max_overtakes=overtakes)


def _resolve(
    config: EngineConfig, loaded: LoadedModel, device: torch.device, slots: AdapterSlots | None
) -> SchedulerConfig:
    model = loaded.config
    default_seqs, default_tokens = CUDA_BUDGETS if device.type == "cuda" else CPU_BUDGETS
    max_num_seqs = config.max_num_seqs or default_seqs
    max_num_batched_tokens = config.max_num_batched_tokens or default_tokens
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len ({config.max_model_len}) is beyond the model's own limit of {longest}.")
    tokens_per_request = config.max_model_len or longest
    kv_dtype = kv_cache_dtype(config, model.dtype)
    bytes_per_token = _bytes_per_token(loaded, kv_dtype)
    num_host_blocks = size_host_pool(config, device, bytes_per_token=bytes_per_token)
    block_bytes = bytes_per_token * config.block_size
    staged_bytes = block_bytes * num_staged_blocks(block_bytes, num_host_blocks) if device.type == "cuda" else 0
    num_kv_blocks = size_kv_pool(
        config,
        device,
        bytes_per_token=bytes_per_token,
        tokens_per_request=tokens_per_request,
        max_num_seqs=max_num_seqs,
        reserved_bytes=staged_bytes + (slots.bytes_to_come if slots else 0),
        run_full_step=lambda: _run_full_step(config, loaded, device, slots, max_num_seqs, max_num_batched_tokens),
    )
    pool_tokens = (num_kv_blocks - 1) * config.block_size
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        # Asked for, it must fit, and SchedulerConfig says if it does not; left open, it is what fits.
        max_model_len=config.max_model_len or min(longest, pool_tokens),
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
    )


def _bytes_per_token(loaded: LoadedModel, dtype: torch.dtype) -> int:
    model = loaded.config
    return kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, dtype)


def _kv_cache(loaded: LoadedModel, limits: SchedulerConfig, dtype: torch.dtype, device: torch.device) -> KVCache:
    model = loaded.config
    return allocate_kv_cache(
        model.num_layers,
        limits.num_kv_blocks,
        limits.block_size,
        model.num_kv_heads,
        model.head_dim,
        dtype,
        device,
    )


def _block_mover(loaded: LoadedModel, limits: SchedulerConfig, kv: KVCache, device: Device) -> BlockMover:
    """What moves blocks, with the host's pool if there is one: pinned beside a GPU, so that copies do not wait."""
    num_blocks = limits.num_host_blocks and limits.num_host_blocks + 1
    host, pin_memory = torch.device("cpu"), device.place.type == "cuda"
    kernels = kernels_for(device.place)
    if kernels.block_moves and kernels.block_moves.serves(kv):
        stored = allocate_staged_blocks(kv, num_blocks, host, pin_memory=pin_memory) if num_blocks else None
        block_bytes = kv.block_size * _bytes_per_token(loaded, kv.data.dtype)
        num_staged = num_staged_blocks(block_bytes, limits.num_host_blocks)
        return BatchedMoves(kv, device, kernels.block_moves, stored, num_staged)
    if not num_blocks:
        return SingleMoves(kv, device)
    model = loaded.config
    sizes = (model.num_layers, num_blocks, kv.block_size, model.num_kv_heads, model.head_dim)
    return SingleMoves(kv, device, allocate_kv_cache(*sizes, kv.data.dtype, host, pin_memory=pin_memory))


def _input_builder(
    kv: KVCache, device: Device, graphs: DecodeGraphs | None, max_num_seqs: int, max_model_len: int
) -> InputBuilder:
    if device.place.type == "cpu":
        return HostInputs(kv.block_size, device)
    return RowInputs(
        kv.block_size,
        device,
        kernels_for(device.place),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        graphs=graphs,
    )


def _decode_graphs(
    config: EngineConfig,
    loaded: LoadedModel,
    kv: KVCache,
    device: Device,
    slots: AdapterSlots | None,
    sizes: list[int],
    max_model_len: int,
) -> DecodeGraphs | None:
    """Capture CUDA graphs for these numbers of rows; None where that cannot be done, or is not wanted."""
    decoder = loaded.decoder
    if device.place.type != "cuda" or config.enforce_eager or not isinstance(decoder, Decoder):
        return None
    if not decoder.capturable(kv):
        return None
    return DecodeGraphs(decoder, kv, device, slots, sizes=sizes, max_model_len=max_model_len)


def _run_full_step(
    config: EngineConfig,
    loaded: LoadedModel,
    device: torch.device,
    slots: AdapterSlots | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> None:
    """A real step of all the tokens and all the rows of the budgets, each row with the costliest way of sampling, and
    an adapter where there are any.

    The largest CUDA graph holds its memory meanwhile, which the others share.
    """
    tokens_per_row = max(1, max_num_batched_tokens // max_num_seqs)
    blocks_per_row = -(-(tokens_per_row + 1) // config.block_size)
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=tokens_per_row + 1,
        block_size=config.block_size,
        num_kv_blocks=max_num_seqs * blocks_per_row + 1,
        enable_prefix_caching=False,
    )
    scheduler = Scheduler(limits)
    params = SamplingParams(
        max_tokens=1,
        repetition_penalty=1.1,
        top_k=loaded.config.vocab_size - 1,
        top_p=0.99,
        min_p=0.01,
        logprobs=MAX_LOGPROBS,
    )
    for index in range(max_num_seqs):
        request = Request(index, [0] * tokens_per_row, params, seed=index)
        request.adapter = LoraAdapter(b"", (), slot=0) if slots else None
        scheduler.add(request)
    kv, home = _kv_cache(loaded, limits, kv_cache_dtype(config, loaded.config.dtype), device), device_of(device)
    longest = config.max_model_len or loaded.config.max_position_embeddings
    graphs = _decode_graphs(config, loaded, kv, home, slots, graph_sizes(max_num_seqs)[:1], longest)
    mover, inputs = _block_mover(loaded, limits, kv, home), _input_builder(kv, home, graphs, max_num_seqs, longest)
    runner = Runner(loaded.decoder, kv, home, mover, inputs, slots, max_num_seqs=max_num_seqs)
    plan = scheduler.schedule()
    # Twice: what the first step leaves behind, as the counts of penalised tokens, is there while the second one runs.
    for _ in range(2):
        runner.execute(plan)
