"""The table: which implementation serves which operation on which device, behind one signature per operation.

`kernels.reference` defines what each operation means; an entry here may be faster, never different beyond rounding.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels import (
    bitmask,
    gumbel_cpu,
    int8,
    linear,
    logprobs_cpu,
    penalties_cpu,
    reference,
    reference_inputs,
    reference_sampling,
    torch_attention,
    torch_moe,
)
from kernels.cache import AttentionBatch, KVCache, LayerKV, allocate_kv_cache, copy_block, kv_bytes_per_token
from kernels.cpu import attention, extension, glue, sampling
from kernels.cpu import int8 as compiled_int8
from kernels.cpu import linear as compiled_linear
from kernels.experts import StackExperts
from kernels.floors_cpu import Draw, draws_by
from kernels.linear import (
    ActivateAndMul,
    Activation,
    GateUp,
    Linear,
    Packers,
    PackGateUp,
    PackLinear,
    gate_up_packer,
    packers,
)
from kernels.lora import LoraKernels, packed_lora
from kernels.reference import Expert, QueryKeyNorms
from kernels.reference_blocks import StagedBlocks
from kernels.reference_inputs import InputTensors, RowState, StepRows
from kernels.reference_quantized import Float8Weight, Int4Weight
from kernels.reference_sampling import Likeliest, Limits, LogprobTensors, NewTokens, Penalties

__all__ = [
    "ActivateAndMul",
    "Activation",
    "AttentionBatch",
    "AttentionPlan",
    "BlockMoves",
    "Expert",
    "GateUp",
    "GraphPlans",
    "KVCache",
    "Kernels",
    "LayerKV",
    "Likeliest",
    "Limits",
    "Linear",
    "LogprobTensors",
    "NewTokens",
    "Penalties",
    "QueryKeyNorms",
    "TokenCounts",
    "allocate_kv_cache",
    "copy_block",
    "kernels_for",
    "kv_bytes_per_token",
]


AttentionPlan = Any
"""What `plan_attention` made, for `paged_attention` of the same table."""

TokenCounts = Any
"""What `allocate_counts` made, for `count_tokens` and `apply_penalties` of the same table."""


class _RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class _AddRmsNorm(Protocol):
    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...


class _RotaryEmbedding(Protocol):
    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...


class _ClampedSwiglu(Protocol):
    def __call__(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor: ...


class _MixtureOfExperts(Protocol):
    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Sequence[Expert]) -> Tensor: ...


class _WriteKV(Protocol):
    def __call__(self, key: Tensor, value: Tensor, layer: LayerKV, slot_mapping: Tensor) -> None: ...


class _WriteQkv(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        norms: QueryKeyNorms,
        rotation: tuple[Tensor, Tensor] | None,
        layer: LayerKV,
        slot_mapping: Tensor,
    ) -> Tensor: ...


class _PlanAttention(Protocol):
    def __call__(
        self, batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None = None
    ) -> AttentionPlan: ...


class _PagedAttention(Protocol):
    def __call__(
        self,
        query: Tensor,
        layer: LayerKV,
        plan: AttentionPlan,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class _ReservePlan(Protocol):
    def __call__(
        self, batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None, max_context_len: int
    ) -> AttentionPlan: ...


class _RefillPlan(Protocol):
    def __call__(self, plan: AttentionPlan, batch: AttentionBatch, kv: KVCache, num_heads: int) -> None: ...


class _ServesCache(Protocol):
    def __call__(self, kv: KVCache) -> bool: ...


class GraphPlans(NamedTuple):
    """Plans for `paged_attention` in a CUDA graph, whose tensors stay where they are. Not every cache is served so.

    `reserve` makes one for up to as many rows as a batch has, of one query each, and of up to `max_context_len` tokens;
    no row is planned then. `refill` puts those of a step in its place, in stream order.
    """

    serves: _ServesCache
    reserve: _ReservePlan
    refill: _RefillPlan


class _BuildInputs(Protocol):
    def __call__(self, rows: RowState, step: StepRows, block_size: int, inputs: InputTensors) -> None: ...


class _AdvanceRows(Protocol):
    def __call__(self, rows: RowState, idx_mapping: Tensor, draws: Tensor, sampled: Tensor) -> None: ...


class _CopyBlocks(Protocol):
    def __call__(self, kv: KVCache, pairs: Tensor) -> None: ...


class _GatherBlocks(Protocol):
    def __call__(self, kv: KVCache, block_ids: Tensor, staged: StagedBlocks) -> None: ...


class _ScatterBlocks(Protocol):
    def __call__(self, staged: StagedBlocks, kv: KVCache, block_ids: Tensor) -> None: ...


class BlockMoves(NamedTuple):
    """Moves of many blocks in one launch, see `kernels.reference_blocks`. Not every cache is served so."""

    serves: _ServesCache
    copy: _CopyBlocks
    gather: _GatherBlocks
    scatter: _ScatterBlocks


class _Largest(Protocol):
    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...


class _ApplyTokenBitmask(Protocol):
    def __call__(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None: ...


class _AllocateCounts(Protocol):
    def __call__(self, num_slots: int, vocab_size: int, device: torch.device) -> TokenCounts: ...


class _CountTokens(Protocol):
    def __call__(self, counts: TokenCounts, new: NewTokens) -> None: ...


class _ApplyPenalties(Protocol):
    def __call__(self, logits: Tensor, counts: TokenCounts, penalties: Penalties) -> None: ...


class _TokenLogprobs(Protocol):
    def __call__(self, logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors: ...


class _LikeliestTokens(Protocol):
    def __call__(self, scores: Tensor, count: int) -> Likeliest: ...


class Kernels(NamedTuple):
    """One implementation of each operation; `plan_attention` prepares what a step's layers of one window share."""

    rms_norm: _RmsNorm
    add_rms_norm: _AddRmsNorm
    rms_norm_float32: _RmsNorm
    add_rms_norm_float32: _AddRmsNorm
    rotary_embedding: _RotaryEmbedding
    silu_and_mul: ActivateAndMul
    gelu_and_mul: ActivateAndMul
    gelu_tanh_and_mul: ActivateAndMul
    clamped_swiglu: _ClampedSwiglu
    mixture_of_experts: _MixtureOfExperts
    stack_experts: StackExperts | None  # None: each is packed by itself, as linears are
    lora: LoraKernels
    write_kv: _WriteKV
    write_qkv: _WriteQkv
    plan_attention: _PlanAttention
    paged_attention: _PagedAttention
    graph_plans: GraphPlans | None  # None: the operations of this table cannot be captured
    block_moves: BlockMoves | None  # None: blocks are moved one by one
    build_inputs: _BuildInputs
    advance_rows: _AdvanceRows
    pack_linear: PackLinear[Tensor]
    pack_gate_up: PackGateUp[Tensor]
    int8: Packers[Tensor]  # quantised as they are packed
    int4: Packers[Int4Weight] | None  # None: there are no such products, of bfloat16 and float16 at least
    float8: Packers[Float8Weight] | None  # the same
    largest: _Largest
    draw: Draw  # may overwrite the logits
    apply_token_bitmask: _ApplyTokenBitmask
    allocate_counts: _AllocateCounts
    count_tokens: _CountTokens
    apply_penalties: _ApplyPenalties
    token_logprobs: _TokenLogprobs
    likeliest: _LikeliestTokens

    def activate_and_mul(self, activation: Activation) -> ActivateAndMul:
        """Return the operation that applies `activation`."""
        return {"silu": self.silu_and_mul, "gelu": self.gelu_and_mul, "gelu_tanh": self.gelu_tanh_and_mul}[activation]


_TORCH = Kernels(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    rms_norm_float32=reference.rms_norm_float32,
    add_rms_norm_float32=reference.add_rms_norm_float32,
    rotary_embedding=reference.rotary_embedding,
    silu_and_mul=reference.silu_and_mul,
    gelu_and_mul=reference.gelu_and_mul,
    gelu_tanh_and_mul=reference.gelu_tanh_and_mul,
    clamped_swiglu=reference.clamped_swiglu,
    mixture_of_experts=torch_moe.mixture_of_experts,
    stack_experts=None,
    lora=packed_lora(linear.plain_linear),
    write_kv=reference.write_kv,
    write_qkv=reference.write_qkv,
    plan_attention=torch_attention.plan_attention,
    paged_attention=torch_attention.paged_attention,
    graph_plans=None,
    block_moves=None,
    build_inputs=reference_inputs.build_inputs,
    advance_rows=reference_inputs.advance_rows,
    pack_linear=linear.plain_linear,
    pack_gate_up=gate_up_packer(linear.plain_linear),
    int8=packers(int8.int8_linear),
    int4=None,
    float8=None,
    largest=reference.largest,
    draw=reference_sampling.draw,
    apply_token_bitmask=bitmask.apply_token_bitmask,
    allocate_counts=reference_sampling.allocate_counts,
    count_tokens=reference_sampling.count_tokens,
    apply_penalties=reference_sampling.apply_penalties,
    token_logprobs=reference_sampling.token_logprobs,
    likeliest=reference_sampling.likeliest,
)


@cache
def _of_cpu() -> Kernels:
    kernels = _TORCH._replace(
        pack_linear=linear.onednn_linear,
        lora=packed_lora(linear.onednn_linear),
        pack_gate_up=gate_up_packer(linear.onednn_linear),
        draw=draws_by(gumbel_cpu.gumbel_argmax),
        allocate_counts=penalties_cpu.allocate_counts,
        count_tokens=penalties_cpu.count_tokens,
        apply_penalties=penalties_cpu.apply_penalties,
        token_logprobs=logprobs_cpu.token_logprobs,
        likeliest=logprobs_cpu.likeliest,
    )
    if not extension.is_served():
        return kernels
    return kernels._replace(
        rms_norm=glue.rms_norm,
        add_rms_norm=glue.add_rms_norm,
        rms_norm_float32=glue.rms_norm_float32,
        add_rms_norm_float32=glue.add_rms_norm_float32,
        rotary_embedding=glue.rotary_embedding,
        silu_and_mul=glue.silu_and_mul,
        gelu_and_mul=glue.gelu_and_mul,
        gelu_tanh_and_mul=glue.gelu_tanh_and_mul,
        write_kv=attention.write_kv,
        write_qkv=attention.write_qkv,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
        pack_linear=compiled_linear.packed_linear,
        lora=packed_lora(compiled_linear.packed_linear),
        pack_gate_up=compiled_linear.packed_gate_up,
        int8=Packers(compiled_int8.int8_linear, compiled_int8.int8_gate_up),
        largest=sampling.largest,
        draw=draws_by(sampling.gumbel_argmax),
    )


@cache
def _of_cuda(device: torch.device) -> Kernels:
    """Triton's kernels where there is triton, and an NVIDIA GPU with what they use: sm_80 has it first."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda is None or capability < (8, 0) or find_spec("triton") is None:
        return _TORCH
    # A machine without such a GPU has no triton.
    from kernels.triton import cuda_kernels

    return cuda_kernels(_TORCH, capability)


def kernels_for(device: torch.device) -> Kernels:
    """Return the implementations that serve `device`. For a CPU, C++ is compiled when this is first called."""
    if device.type == "cpu":
        return _of_cpu()
    return _of_cuda(device) if device.type == "cuda" else _TORCH
