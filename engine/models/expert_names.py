"""Which tensors of a checkpoint hold the experts of a mixture, in each of the layouts that occur.

separate   a module for each projection of each expert
stacked    one tensor for all experts of a layer, `[num_experts, in_features, out_features]`, in which the outputs of
           gate and up alternate; biases under the name and `_bias`
mxfp4      as stacked, quantised: `_blocks` and `_scales`, and output by output (see `engine.loader.mxfp4`)
"""

from dataclasses import dataclass
from typing import Literal

from engine.models.config import MixtureConfig

ExpertLayout = Literal["separate", "stacked", "mxfp4"]

_MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture's modules and tensors, which hold `{layer}`; those of one expert hold `{expert}` as well.

    `gate_up` lists what one product joins, in the order of its outputs.
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    layout: ExpertLayout = "separate"

    def shapes(self, mixture: MixtureConfig, hidden_size: int, layer: int) -> dict[str, tuple[int, ...]]:
        """Return every tensor of a layer's mixture, by name."""
        router = self.router.format(layer=layer)
        shapes: dict[str, tuple[int, ...]] = {f"{router}.weight": (mixture.num_experts, hidden_size)}
        if mixture.bias:
            shapes[f"{router}.bias"] = (mixture.num_experts,)
        for expert in range(mixture.num_experts if self.layout == "separate" else 1):
            gate_up_size = 2 * mixture.intermediate_size // len(self.gate_up)
            for template in self.gate_up:
                name = template.format(layer=layer, expert=expert)
                shapes |= self._weight(name, mixture, gate_up_size, hidden_size)
            name = self.down.format(layer=layer, expert=expert)
            shapes |= self._weight(name, mixture, hidden_size, mixture.intermediate_size)
        return shapes

    def _weight(self, name: str, mixture: MixtureConfig, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        count = mixture.num_experts
        bias: dict[str, tuple[int, ...]]
        match self.layout:
            case "separate":
                weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
                bias = {f"{name}.bias": (outputs,)}
            case "stacked":
                weight = {name: (count, inputs, outputs)}
                bias = {f"{name}_bias": (count, outputs)}
            case "mxfp4":
                groups = (count, outputs, inputs // _MXFP4_GROUP)
                weight = {f"{name}_blocks": (*groups, _MXFP4_GROUP // 2), f"{name}_scales": groups}
                bias = {f"{name}_bias": (count, outputs)}
        return weight | bias if mixture.bias else weight
