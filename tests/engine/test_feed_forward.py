"""The dense feed-forward: gate and up activated in one, or around what adapters add."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.adapters import Projection
from engine.models.mlp import DenseFeedForward
from kernels.ops import kernels_for

HIDDEN, INTERMEDIATE = 48, 40
KERNELS = kernels_for(torch.device("cpu"))


class Shift:
    """Adds a number to one projection's outputs."""

    def __init__(self, projection: Projection, number: float) -> None:
        self._projection = projection
        self._number = number

    def add(self, layer: int, projection: Projection, x: Tensor, y: Tensor) -> None:
        if projection == self._projection:
            y += self._number


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(2 * INTERMEDIATE, HIDDEN).to(dtype) / 4, torch.randn(HIDDEN, INTERMEDIATE).to(dtype) / 4


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_that_add_nothing_leave_the_bits(dtype: torch.dtype, quantized: bool) -> None:
    gate_up, down = weights(dtype)
    pack = KERNELS.int8.gate_up if quantized else KERNELS.pack_gate_up
    feed_forward = DenseFeedForward(0, pack(gate_up, None, "silu"), KERNELS.pack_linear(down, None))
    x = torch.randn(13, HIDDEN).to(dtype)
    assert torch.equal(feed_forward(x, Shift("qkv", 1.0)), feed_forward(x, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_adapters_add_to_gate_and_up_is_activated(dtype: torch.dtype) -> None:
    gate_up, down = weights(dtype)
    feed_forward = DenseFeedForward(0, KERNELS.pack_gate_up(gate_up, None, "silu"), KERNELS.pack_linear(down, None))
    x = torch.randn(13, HIDDEN).to(dtype)
    gate, up = (x.double() @ gate_up.double().T + 0.5).chunk(2, dim=-1)
    exact = (F.silu(gate) * up) @ down.double().T
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    got = feed_forward(x, Shift("gate_up", 0.5)).double()
    assert (got - exact).norm() < tolerance * exact.norm()
    assert (feed_forward(x, None).double() - exact).norm() > 0.05 * exact.norm()
