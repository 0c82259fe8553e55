"""The experts of a layer in one tensor for each product, for kernels that multiply by all of them in one launch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, overload

from torch import Tensor
from torch.nn import functional as F

from kernels.linear import ActivateAndMul
from kernels.reference import Expert


class ExpertWeights(NamedTuple):
    """One expert: gate_up `[2 * intermediate_size, hidden_size]`, gate first; down `[hidden_size, intermediate_size]`.

    The biases are those of the two products' outputs.
    """

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class StackExperts(Protocol):
    """Lays out the `num_experts` experts of a layer, which come one by one, for a `mixture_of_experts`."""

    def __call__(
        self, experts: Iterable[ExpertWeights], num_experts: int, activate_and_mul: ActivateAndMul
    ) -> Sequence[Expert]: ...


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
    activate_and_mul: ActivateAndMul

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

    def put(self, index: int, weights: ExpertWeights) -> None:
        """Copy one expert to its place."""
        self.gate_up[index], self.down[index] = weights.gate_up, weights.down
        for stack, bias in ((self.gate_up_bias, weights.gate_up_bias), (self.down_bias, weights.down_bias)):
            if stack is not None and bias is not None:
                stack[index] = bias


def stack_experts(
    experts: Iterable[ExpertWeights], num_experts: int, activate_and_mul: ActivateAndMul
) -> StackedExperts:
    """Return the experts stacked. Each is copied to its place as it comes: there is never a second one of all."""
    coming = iter(experts)
    first = next(coming)

    def room(part: Tensor) -> Tensor:
        return part.new_empty((num_experts, *part.shape))

    stacked = StackedExperts(
        gate_up=room(first.gate_up),
        gate_up_bias=None if first.gate_up_bias is None else room(first.gate_up_bias),
        down=room(first.down),
        down_bias=None if first.down_bias is None else room(first.down_bias),
        activate_and_mul=activate_and_mul,
    )
    for expert, weights in zip(range(num_experts), chain((first,), coming), strict=True):
        stacked.put(expert, weights)
    return stacked
