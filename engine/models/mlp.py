"""What follows attention in a layer: the interface, and the dense kind."""

from typing import Protocol

from torch import Tensor

from engine.models.adapters import Adapters, project
from kernels.ops import GateUp, Linear


class FeedForward(Protocol):
    """The part of a layer that looks at each token alone."""

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the same shape, with what the adapters add to its projections."""


class DenseFeedForward:
    """`down(activation(gate(x)) * up(x))`, with gate and up as one product; `layer` is its place in the decoder."""

    def __init__(self, layer: int, gate_up: GateUp, down: Linear) -> None:
        self._layer = layer
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        return project(self._down, self._activated(x, adapters), self._layer, "down", adapters)

    def _activated(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        if adapters is None:
            return self._gate_up.activated(x)
        return self._gate_up.activate_and_mul(project(self._gate_up.product, x, self._layer, "gate_up", adapters))
