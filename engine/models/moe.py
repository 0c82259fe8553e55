"""The feed-forward that is a mixture of experts: a router gives each token a few of them, and what each counts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.models.adapters import Adapters
from engine.models.config import MixtureConfig
from kernels.experts import StackedExperts
from kernels.ops import Expert, GateUp, Kernels, Linear


@dataclass(frozen=True, slots=True)
class GatedExpert:
    """One expert: `down(activation(gate(x)) * up(x))`, with gate and up as one product."""

    gate_up: GateUp
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up.activated(x))


class MixtureOfExperts:
    """A feed-forward of which each token passes `experts_per_token` experts, those with its highest router logits.

    `router` maps `[num_tokens, hidden_size]` to `[num_tokens, num_experts]`.
    """

    def __init__(self, config: MixtureConfig, router: Linear, experts: Sequence[Expert], kernels: Kernels) -> None:
        self._config = config
        self._router = router
        self._experts = experts
        self._kernels = kernels

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold it: experts that are called one by one are not called for every step."""
        return isinstance(self._experts, StackedExperts)

    def __call__(self, x: Tensor, adapters: Adapters | None) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the same shape.

        The experts are no projections of `engine.models.adapters`: an adapter that names one is refused when it loads.
        """
        expert_ids, weights = self.route(x)
        return self._kernels.mixture_of_experts(x, expert_ids, weights, self._experts)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, `[num_tokens, experts_per_token]` int64 and float32.

        Of equal logits the expert of the lower number comes first, on every device.
        """
        logits = self._router(x).float()
        top, expert_ids = (
            part[:, : self._config.experts_per_token] for part in logits.sort(dim=-1, descending=True, stable=True)
        )
        if self._config.normalized:
            return expert_ids, top.softmax(-1)
        return expert_ids, (top - logits.logsumexp(-1, keepdim=True)).exp()
