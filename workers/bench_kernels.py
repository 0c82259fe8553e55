"""How near each kernel comes to what the machine can do: a model's own shapes, one kernel at a time.

A kernel's limit is the roofline: its operations at the measured rate of large products, or its bytes at the measured
rate of large reads, whichever takes longer. Weights and KV caches are walked through, layer after layer, as in a step,
so that they come from memory. What is small, the activations of norms and gates, stays in the caches of the processor,
and may be above the memory's limit.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelNotSupported
from engine.loader import LoadedEncoder, load
from engine.machine import usable_cores
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from kernels.ops import Kernels, Linear, kernels_for, kv_bytes_per_token
from workers.bench_ceilings import GemmCeilings, MemoryCeilings, measure_gemm, measure_memory, seconds_of
from workers.bench_step import StepShares, batch_of, step_shares

_ROWS = (1, 8, 64, 512, 2048)
_DECODE = ((1, 2048), (16, 512), (64, 128), (64, 512), (64, 2048))  # rows, tokens of context of each
_PREFILL = ((16, 128), (4, 512), (1, 2048), (1, 8192))  # prompts, tokens of each
# Of KV caches so much is walked through, where the model has so many layers: more than any cache holds.
_WALK_BYTES = 1 << 30
_GLUE_ROWS = (64, 2048)
_SECONDS_EACH = 0.08


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One kernel at one shape: its time, what it has to do, and how long the machine would need for that at least."""

    name: str
    shape: str
    seconds: float
    flops: float
    bytes: float
    limit_seconds: float
    bound: str  # by products, or by memory

    @property
    def share(self) -> float:
        return self.limit_seconds / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


@dataclass(frozen=True, slots=True)
class KernelBench:
    """All of it, and the ceilings that it was held against."""

    gemm: GemmCeilings
    memory: MemoryCeilings
    kernels: tuple[KernelRun, ...]
    steps: tuple[StepShares, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "gemm": asdict(self.gemm),
            "memory": asdict(self.memory),
            "kernels": [run.as_dict() for run in self.kernels],
            "steps": [step.as_dict() for step in self.steps],
        }


def bench_kernels(model: str, num_threads: int | None = None) -> KernelBench:
    """Measure the kernels at the shapes of `model` in bfloat16, and two forward passes of it.

    Raises `ModelNotSupported` for an encoder and for what only Transformers' own code can run, and what loading does.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(num_threads or usable_cores())
    decoder = _load(model, device)
    gemm, memory = measure_gemm(device), measure_memory(device)
    bench = _Bench(decoder.config, device, gemm, memory)
    with torch.inference_mode():
        runs = (*bench.linears(), *bench.attention(), *bench.glue())
        steps = (step_shares(decoder, device, 64, 1, 512), step_shares(decoder, device, 4, 512, 512))
    return KernelBench(gemm, memory, runs, steps)


def _load(model: str, device: torch.device) -> Decoder:
    loaded = load(model, dtype=torch.bfloat16, device=device, model_impl="native")
    if isinstance(loaded, LoadedEncoder) or not isinstance(loaded.decoder, Decoder):
        raise ModelNotSupported(f"{model} is no decoder of the engine's own.", hint="Name a model that generates text.")
    return loaded.decoder


class _Bench:
    def __init__(self, config: ModelConfig, device: torch.device, gemm: GemmCeilings, memory: MemoryCeilings) -> None:
        self._config = config
        self._device = device
        self._gemm = gemm
        self._memory = memory
        self._kernels: Kernels = kernels_for(device)

    def linears(self) -> Iterator[KernelRun]:
        config = self._config
        heads = config.num_heads + 2 * config.num_kv_heads
        yield from self._linear("qkv", heads * config.head_dim, config.hidden_size)
        yield from self._linear("attention out", config.hidden_size, config.num_heads * config.head_dim)
        yield from self._linear("gate-up", 2 * config.intermediate_size, config.hidden_size)
        yield from self._linear("down", config.hidden_size, config.intermediate_size)
        yield from self._linear("lm_head", config.vocab_size, config.hidden_size, layers=1)

    def _linear(self, name: str, out_features: int, in_features: int, layers: int | None = None) -> Iterator[KernelRun]:
        weight = self._random(out_features, in_features)
        kinds = [(name, self._kernels.pack_linear, self._gemm.bf16, weight.nbytes)]
        if self._device.type == "cpu":
            kinds.append((f"{name} int8", self._kernels.int8.linear, self._gemm.int8, weight.numel()))
        for kind, pack, ceiling, weight_bytes in kinds:
            packed = [pack(weight.clone(), None) for _ in range(layers or self._config.num_layers)]
            for rows in _ROWS:
                x = self._random(rows, in_features)
                moved = weight_bytes + x.nbytes + rows * out_features * x.itemsize
                work = 2.0 * rows * in_features * out_features
                yield self._run(kind, f"M={rows:,}", partial(_walk, cycle(packed), x), work, moved, ceiling)

    def attention(self) -> Iterator[KernelRun]:
        for rows, context in _DECODE:
            yield self._attention("decode attention", rows, 1, context)
            if self._device.type == "cpu":
                yield self._attention("decode attention int8", rows, 1, context, torch.int8)
        for prompts, length in _PREFILL:
            yield self._attention("prefill attention", prompts, length, length)
            if self._device.type == "cpu":
                yield self._attention("prefill attention int8", prompts, length, length, torch.int8)

    def _attention(
        self, name: str, rows: int, new: int, context: int, kv_dtype: torch.dtype = torch.bfloat16
    ) -> KernelRun:
        config = self._config
        context_bytes = rows * context * kv_bytes_per_token(1, config.num_kv_heads, config.head_dim, kv_dtype)
        layers = max(1, min(config.num_layers, _WALK_BYTES // context_bytes))
        sizes = {"rows": rows, "new": new, "context": context, "layers": layers}
        kv, batch = batch_of(config, self._device, **sizes, kv_dtype=kv_dtype)
        # On a machine that others share, memory's rate of a moment ago is not that of now.
        self._memory = measure_memory(self._device, _SECONDS_EACH)
        plan = self._kernels.plan_attention(batch, kv, config.num_heads)
        query = self._random(rows * new, config.num_heads, config.head_dim)
        walk = cycle([kv.layer(index) for index in range(layers)])

        def attend() -> Tensor:
            return self._kernels.paged_attention(query, next(walk), plan, config.attention_scale)

        pairs = rows * sum(range(context - new + 1, context + 1))
        work = 4.0 * config.num_heads * config.head_dim * pairs
        return self._run(name, f"{rows} × {context:,} tokens", attend, work, context_bytes + 2 * query.nbytes)

    def glue(self) -> Iterator[KernelRun]:
        for rows in _GLUE_ROWS:
            yield from self._glue(rows)

    def _glue(self, rows: int) -> Iterator[KernelRun]:
        config, kernels, shape = self._config, self._kernels, f"M={rows:,}"
        x, residual = self._random(rows, config.hidden_size), self._random(rows, config.hidden_size)
        norm, eps = self._random(config.hidden_size), config.rms_norm_eps
        query = self._random(rows, config.num_heads, config.head_dim)
        key = self._random(rows, config.num_kv_heads, config.head_dim)
        cos, sin = torch.rand(2, rows, config.head_dim // 2, device=self._device)
        gate_up = self._random(rows, 2 * config.intermediate_size)
        kv, batch = batch_of(config, self._device, rows=rows, new=1, context=1, layers=1)
        layer = kv.layer(0)
        yield self._run("add + RMSNorm", shape, lambda: kernels.add_rms_norm(x, residual, norm, eps), 0, 4 * x.nbytes)
        turned = 2 * (query.nbytes + key.nbytes)
        yield self._run("RoPE", shape, lambda: kernels.rotary_embedding(query, key, cos, sin), 0, turned)
        yield self._run("SiLU · mul", shape, lambda: kernels.silu_and_mul(gate_up), 0, gate_up.nbytes * 3 // 2)
        written = 4 * key.nbytes
        yield self._run("KV write", shape, lambda: kernels.write_kv(key, key, layer, batch.slot_mapping), 0, written)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).mul_(0.1).bfloat16()

    def _run(
        self, name: str, shape: str, call: Callable[[], object], work: float, moved: float, ceiling: float | None = None
    ) -> KernelRun:
        by_products, by_memory = work / (ceiling or self._gemm.bf16), moved / self._memory.read
        limit, bound = max((by_products, "products"), (by_memory, "memory"))
        return KernelRun(name, shape, seconds_of(call, _SECONDS_EACH), work, moved, limit, bound)


def _walk(linears: Iterator[Linear], x: Tensor) -> Tensor:
    return next(linears)(x)
