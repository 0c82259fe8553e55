"""What is read for one expert of a mixture, in any layout of `engine.models.expert_names`."""

import torch
from torch import Tensor

from engine.loader.mxfp4 import dequantize_mxfp4
from engine.loader.sources import TensorSource
from engine.models.expert_names import ExpertNames
from kernels.experts import ExpertWeights


class ExpertReader:
    """Reads experts one by one, in `dtype` and on `device`; `bias` says whether they have biases."""

    def __init__(
        self, source: TensorSource, names: ExpertNames, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._names = names
        self._bias = bias
        self._dtype = dtype
        self._device = device

    def read(self, layer: int, expert: int) -> ExpertWeights:
        """Return copies of one expert's tensors, having read nothing of the others."""
        names = self._names
        if names.layout == "separate":
            gate_up = [template.format(layer=layer, expert=expert) for template in names.gate_up]
            down = [names.down.format(layer=layer, expert=expert)]
            return ExpertWeights(
                gate_up=self._joined(gate_up, "weight"),
                gate_up_bias=self._joined(gate_up, "bias") if self._bias else None,
                down=self._joined(down, "weight"),
                down_bias=self._joined(down, "bias") if self._bias else None,
            )
        (gate_up_name,), down_name = (
            (name.format(layer=layer) for name in names.gate_up),
            names.down.format(layer=layer),
        )
        return ExpertWeights(
            gate_up=_gate_first(self._matrix(gate_up_name, expert)),
            gate_up_bias=_gate_first(self._part(f"{gate_up_name}_bias", expert)) if self._bias else None,
            down=self._matrix(down_name, expert),
            down_bias=self._part(f"{down_name}_bias", expert) if self._bias else None,
        )

    def _joined(self, modules: list[str], kind: str) -> Tensor:
        return torch.cat([self._source.read(f"{module}.{kind}") for module in modules]).to(self._device, self._dtype)

    def _matrix(self, name: str, expert: int) -> Tensor:
        """Return one expert's `[out_features, in_features]` of a tensor of all."""
        if self._names.layout == "stacked":
            return self._part(name, expert).T.contiguous()
        blocks, scales = (self._source.read(f"{name}_{kind}")[expert] for kind in ("blocks", "scales"))
        return dequantize_mxfp4(blocks.to(self._device), scales.to(self._device), self._dtype)

    def _part(self, name: str, expert: int) -> Tensor:
        part: Tensor = self._source.read(name)[expert].to(self._device, self._dtype, copy=True)
        return part


def _gate_first(outputs: Tensor) -> Tensor:
    return torch.cat((outputs[::2], outputs[1::2]))
