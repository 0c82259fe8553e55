"""The engine's options: `EngineConfig` is what was asked for, `SchedulerConfig` what the loop runs with.

Both are frozen. The first is resolved into the second exactly once, when the model is loaded and the KV pool sized.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from engine.errors import ConfigError

MAX_LORA_RANK = 256

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ModelImpl = Literal["auto", "native", "transformers"]
Quantize = Literal["int8", "fp8", "int4"]
KvCacheDtype = Literal["auto", "bfloat16", "float16", "int8", "fp8"]
SchedulingPolicy = Literal["prefix", "fcfs"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the caller wants; None or `auto` leaves the choice to the engine. An unknown option is a `TypeError`.

    Raises `ConfigError` for a value out of range, or two that contradict each other.

    Attributes:
        model: A folder, a GGUF file, a hub id, which `@revision` may pin to a branch, a tag or a commit, `demo`, or
            `demo-embed`.
        model_impl: Whose code computes the model: `native`, the engine's; `transformers`, Transformers' own with the
            engine's attention; `auto`, the engine's where it knows the family, else Transformers'.
        trust_remote_code: Run Python files that come with a model, for families that Transformers does not know.
        dtype: Of weights, activations and KV cache. `auto`: what suits the model and the device.
        kv_cache_dtype: Of the KV cache alone; `auto`: that of the model. In 8 bits, `int8` on a CPU and `fp8` (E4M3) on
            a GPU, each token's head has a scale of its own, and the same memory holds almost twice the tokens of
            bfloat16. A model in float32 or float16 on a CPU meets a cache of bfloat16 or int8 in bfloat16.
        quantize: Quantise the linears of a decoder as it is loaded. Embeddings, routers, norms and adapters keep their
            dtype. None: as the checkpoint has them. See `engine.loader.quantized` for checkpoints that come quantised.
            `int8`, on a CPU: 8-bit integers with a scale for each output, and what they multiply token by token (W8A8);
            the language head as well. `fp8`, on a GPU from sm_89 on: E4M3 with a scale for each block of 128 by 128,
            and what they multiply in groups of 128 (W8A8). `int4`, on a GPU from sm_80 on: rounded to 16 levels in
            groups of 128 inputs, of 64 or 32 where 128 does not divide them, and none where 32 does not (W4A16).
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        max_num_seqs: Row budget: most requests in one step.
        max_num_batched_tokens: Token budget: most tokens in one step, prefill and decode together.
        max_model_len: Most tokens of prompt and answer together. None: the model's limit, or what the KV pool holds.
            Rotary embeddings that depend on the length follow it: see `engine.loader.hf_rope`.
        block_size: Tokens in one KV block.
        num_kv_blocks: Size of the KV pool in blocks, the null block among them; else `kv_cache_memory` decides.
        kv_cache_memory: Size of the KV pool in bytes. None: sized from the machine, see `engine.memory`.
        preallocate_kv: Touch all of the KV pool while loading: no step waits for memory, and a pool that the machine
            cannot give fails at once. Takes from a tenth of a second for each GiB to two on a virtual machine.
        swap_space: Host memory in bytes to which the blocks of preempted requests are moved; 0: computed again.
            None: 4 GiB with a GPU, if the machine can spare it; 0 without.
        gpu_memory_utilization: Share of a GPU's memory to use for everything, KV pool included; 0.9 by default.
        enable_prefix_caching: Keep computed blocks and reuse them for prompts that begin alike.
        scheduling_policy: In which order requests start: `prefix`, prompts that begin alike together, and long answers
            early; `fcfs`, as they come. No answer depends on it. See `engine.waiting`.
        max_loras: LoRA adapters in memory at a time, and so at most in one step; 0: requests cannot ask for any.
        max_lora_rank: The highest rank of an adapter, at most 256. Memory for `max_loras` of it is kept for them.
        async_scheduling: Launch a step before the tokens of the one before it are on the host, see `engine.loop`. No
            answer depends on it. None: with a GPU; a CPU has nothing to do meanwhile.
        enforce_eager: Launch every kernel of a step by itself, as on a CPU, instead of replaying CUDA graphs of decode
            steps: slower, but the engine loads faster and has their memory for other things.
        seed: From which the seeds of requests without one are derived.
        num_threads: CPU threads for one step. None: the physical cores that this process may use.
    """

    model: str
    _: KW_ONLY
    model_impl: ModelImpl = "auto"
    trust_remote_code: bool = False
    dtype: Dtype = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    quantize: Quantize | None = None
    device: str = "auto"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 32
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    preallocate_kv: bool = False
    swap_space: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "prefix"
    max_loras: int = 0
    max_lora_rank: int = 64
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    seed: int = 0
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a path or a name, not {self.model!r}.")
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype must be one of {', '.join(get_args(Dtype))}, not {self.dtype!r}.")
        if self.kv_cache_dtype not in get_args(KvCacheDtype):
            raise ConfigError(
                f"kv_cache_dtype must be one of {', '.join(get_args(KvCacheDtype))}, not {self.kv_cache_dtype!r}."
            )
        if self.model_impl not in get_args(ModelImpl):
            raise ConfigError(f"model_impl must be one of {', '.join(get_args(ModelImpl))}, not {self.model_impl!r}.")
        if self.quantize is not None and self.quantize not in get_args(Quantize):
            raise ConfigError(f"quantize must be one of {', '.join(get_args(Quantize))}, not {self.quantize!r}.")
        if self.quantize and self.model_impl == "transformers":
            raise ConfigError(
                "quantize is for the engine's own code, and model_impl is transformers.", hint="Leave out one of them."
            )
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            raise ConfigError(
                f"scheduling_policy must be one of {', '.join(get_args(SchedulingPolicy))}, "
                f"not {self.scheduling_policy!r}."
            )
        for name in ("trust_remote_code", "preallocate_kv", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if not isinstance(self.async_scheduling, bool | None):
            raise ConfigError(f"async_scheduling must be True, False or None, not {self.async_scheduling!r}.")
        _check_int("block_size", self.block_size, at_least=1)
        _check_int("num_kv_blocks", self.num_kv_blocks, at_least=2)
        _check_int("max_model_len", self.max_model_len, at_least=2)
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory", "num_threads"):
            _check_int(name, getattr(self, name), at_least=1)
        for name in ("seed", "swap_space"):
            _check_int(name, getattr(self, name), at_least=0)
        _check_int("max_loras", self.max_loras, at_least=0)
        _check_int("max_lora_rank", self.max_lora_rank, at_least=1)
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(f"max_lora_rank must be at most {MAX_LORA_RANK}, not {self.max_lora_rank}.")
        utilization = self.gpu_memory_utilization
        if utilization is not None and not (math.isfinite(utilization) and 0 < utilization <= 1):
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {utilization!r}.")
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_kv_blocks and kv_cache_memory both size the KV pool.", hint="Give one of them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of the loop. Raises `ConfigError` if no step, or not one request of full length, could fit them.

    That a request of `max_model_len` fits the pool alone is what lets the scheduler promise that everything finishes:
    with all others preempted, the oldest request always gets its blocks. `num_host_blocks` are there beside the pool to
    keep the blocks of those that are preempted.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    num_host_blocks: int = 0
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "prefix"

    def __post_init__(self) -> None:
        if self.max_model_len > self.kv_capacity_tokens:
            raise ConfigError(
                f"max_model_len ({self.max_model_len}) does not fit the KV pool of {self.kv_capacity_tokens} tokens.",
                hint="Lower max_model_len, or enlarge num_kv_blocks or kv_cache_memory.",
            )

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the pool holds; block 0 is the null block and holds none."""
        return (self.num_kv_blocks - 1) * self.block_size


def _check_int(name: str, value: Any, *, at_least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name} must be an integer of at least {at_least}, not {value!r}.")
