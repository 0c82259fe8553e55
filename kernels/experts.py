"""The experts of a layer in one tensor for each product, for kernels that multiply by all of them in one launch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from torch import Tensor
from torch.nn import functional as F

from kernels.reference import Expert


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts(Sequence[Expert]):
    """The experts of a layer: callables, as `kernels.reference.mixture_of_experts` takes them, and the stacks behind.

    Attributes:
        gate_up: `[num_experts, 2 * intermediate_size, hidden_size]`, gate first.
        gate_up_bias: `[num_experts, 2 * intermediate_size]`, or None.
        down: `[num_experts, hidden_size, intermediate_size]`.
        down_bias: `[num_experts, hidden_size]`, or None.
        activate_and_mul: What is applied between the products, row by row: gate and up `[num_tokens, 2 *
            intermediate_size]` to `[num_tokens, intermediate_size]`.
    """

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    activate_and_mul: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.gate_up)

    @overload
    def __getitem__(self, index: int) -> Expert: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Expert]: ...
    def __getitem__(self, index: int | slice) -> Expert | Sequence[Expert]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        gate_up, down = self.gate_up[index], self.down[index]
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[index]
        down_bias = None if self.down_bias is None else self.down_bias[index]

        def apply(x: Tensor) -> Tensor:
            return F.linear(self.activate_and_mul(F.linear(x, gate_up, gate_up_bias)), down, down_bias)

        return apply
