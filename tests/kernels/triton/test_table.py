"""Which kernels an NVIDIA GPU gets."""

import importlib.util

import pytest
import torch

from kernels import experts, ops, reference
from kernels.ops import kernels_for
from kernels.triton import attention, blocks, fp8, inputs, kv, lora, w4a16

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_table_is_kept():
    ops._of_cuda.cache_clear()
    yield
    ops._of_cuda.cache_clear()


def with_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_a_gpu_gets_tritons_kernels(monkeypatch, capability):
    with_gpu(monkeypatch, capability)
    table = kernels_for(GPU)
    assert table.paged_attention is attention.paged_attention
    assert table.plan_attention is attention.plan_attention
    assert table.write_qkv is kv.write_qkv
    assert table.stack_experts is experts.stack_experts
    assert table.lora is lora.STACKED_LORA
    assert table.block_moves is not None
    assert table.block_moves.gather is blocks.gather_blocks
    assert table.build_inputs is inputs.build_inputs
    kernels = [kernel for kernel in table if kernel is not None]
    of_triton = [kernel for kernel in kernels if kernel.__module__.startswith("kernels.triton.")]
    assert len(of_triton) == 21
    linear = torch.nn.Linear(16, 64).half()
    gate_up = table.pack_gate_up(linear.weight.detach(), None, "gelu_tanh")
    x = torch.randn(3, 16).half()
    expected = reference.gelu_tanh_and_mul(linear(x) - linear.bias)
    torch.testing.assert_close(gate_up.activated(x), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("capability", "has_float8"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_weights_in_four_bits_run_on_all_of_these_and_float8_from_ada_on(monkeypatch, capability, has_float8):
    with_gpu(monkeypatch, capability)
    table = kernels_for(GPU)
    assert table.int4.linear is w4a16.pack_int4_linear
    assert (table.float8 is not None) == has_float8
    if table.float8:
        assert table.float8.linear is fp8.pack_float8_linear


def test_a_gpu_that_is_too_old_gets_torchs(monkeypatch):
    with_gpu(monkeypatch, (7, 5))
    assert kernels_for(GPU).write_kv is reference.write_kv


def test_a_gpu_that_is_not_nvidias_gets_torchs(monkeypatch):
    with_gpu(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert kernels_for(GPU).write_kv is reference.write_kv


def test_without_triton_a_gpu_gets_torchs(monkeypatch):
    with_gpu(monkeypatch, (9, 0))
    found = importlib.util.find_spec
    monkeypatch.setattr(ops, "find_spec", lambda name: None if name == "triton" else found(name))
    assert kernels_for(GPU).write_kv is reference.write_kv


def test_other_devices_get_torchs():
    assert kernels_for(torch.device("meta")).write_kv is reference.write_kv
