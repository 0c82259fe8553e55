"""What follows attention in a layer: the interface, and the dense kind."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.models.adapters import Adapters, project
from engine.models.config import Activation
from kernels.ops import Kernels, Linear

ActivateAndMul = Callable[[Tensor], Tensor]
"""Gate and up `[num_tokens, 2 * intermediate_size]` to `activation(gate) * up`."""


class FeedForward(Protocol):
    """The part of a layer that looks at each token alone."""

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the same shape, with what the adapters add to its projections."""


class DenseFeedForward:
    """`down(activation(gate(x)) * up(x))`, with gate and up as one product; `layer` is its place in the decoder."""

    def __init__(self, layer: int, gate_up: Linear, down: Linear, activate_and_mul: ActivateAndMul) -> None:
        self._layer = layer
        self._gate_up = gate_up
        self._down = down
        self._activate_and_mul = activate_and_mul

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        gate_up = project(self._gate_up, x, self._layer, "gate_up", adapters)
        return project(self._down, self._activate_and_mul(gate_up), self._layer, "down", adapters)


def activate_and_mul(kernels: Kernels, activation: Activation) -> ActivateAndMul:
    """Return the kernel that applies `activation` to the gate."""
    by_name: dict[Activation, ActivateAndMul] = {
        "silu": kernels.silu_and_mul,
        "gelu": kernels.gelu_and_mul,
        "gelu_tanh": kernels.gelu_tanh_and_mul,
    }
    return by_name[activation]
