"""The kernels for NVIDIA GPUs, in Triton. Importing this imports triton: only where the device is such a GPU."""

from collections.abc import Mapping

from kernels import int8, linear
from kernels.experts import stack_experts
from kernels.linear import ActivateAndMul, Activation, gate_up_packer, packers
from kernels.ops import BlockMoves, GraphPlans, Kernels
from kernels.triton import (
    activations,
    attention,
    blocks,
    experts,
    floors,
    fp8,
    grammar,
    inputs,
    kv,
    logprobs,
    lora,
    norms,
    penalties,
    sampling,
    tiles,
    w4a16,
)

_ACTIVATIONS: Mapping[Activation, ActivateAndMul] = {
    "silu": activations.silu_and_mul,
    "gelu": activations.gelu_and_mul,
    "gelu_tanh": activations.gelu_tanh_and_mul,
}


# sm_89, Ada, is the first to multiply float8.
_FLOAT8_CAPABILITY = (8, 9)


def cuda_kernels(rest: Kernels, capability: tuple[int, int]) -> Kernels:
    """Return the table of what serves an NVIDIA GPU of `capability`, sm_80 or later.

    `rest` says what is left to torch's operations.
    """
    has_float8 = capability >= _FLOAT8_CAPABILITY
    return rest._replace(
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        rms_norm_float32=norms.rms_norm_float32,
        add_rms_norm_float32=norms.add_rms_norm_float32,
        silu_and_mul=activations.silu_and_mul,
        gelu_and_mul=activations.gelu_and_mul,
        gelu_tanh_and_mul=activations.gelu_tanh_and_mul,
        clamped_swiglu=activations.clamped_swiglu,
        mixture_of_experts=experts.mixture_of_experts,
        stack_experts=stack_experts,
        lora=lora.STACKED_LORA,
        write_kv=kv.write_kv,
        write_qkv=kv.write_qkv,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
        build_inputs=inputs.build_inputs,
        advance_rows=inputs.advance_rows,
        block_moves=BlockMoves(blocks.serves, blocks.copy_blocks, blocks.gather_blocks, blocks.scatter_blocks),
        graph_plans=GraphPlans(tiles.serves, reserve=attention.reserve_plan, refill=attention.refill_plan),
        pack_gate_up=gate_up_packer(linear.plain_linear, _ACTIVATIONS),
        int8=packers(int8.int8_linear, _ACTIVATIONS),
        int4=packers(w4a16.pack_int4_linear, _ACTIVATIONS),
        float8=packers(fp8.pack_float8_linear, _ACTIVATIONS) if has_float8 else None,
        largest=sampling.largest,
        draw=floors.draw,
        apply_token_bitmask=grammar.apply_token_bitmask,
        apply_penalties=penalties.apply_penalties,
        token_logprobs=logprobs.token_logprobs,
        likeliest=logprobs.likeliest,
    )
