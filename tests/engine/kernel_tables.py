"""Engines whose kernels are of a table that a test makes up: what a GPU's has, computed by what a CPU has.

Nothing here needs pytest: `tests.gpu` runs it on a card.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import reference
from kernels.lora import LoraKernels
from kernels.ops import Kernels, kernels_for
from kernels.stacked_lora import AdapterRows, StackedLowRank, empty_low_rank, pin_factors, sort_by_slot

_READERS = ("engine.build", "engine.loader.assemble", "engine.models.decoder")


@contextmanager
def kernels_replaced(device: torch.device, **entries: Any) -> Iterator[Kernels]:
    """Within it, engines that are built have the device's table with these entries in place of its own."""
    table = kernels_for(device)._replace(**entries)
    with ExitStack() as patches:
        for reader in _READERS:
            patches.enter_context(patch.object(import_module(reader), "kernels_for", lambda device: table))
        yield table


def use_kernels(monkeypatch, **entries: Any) -> Kernels:
    """The same on a CPU, until a test ends: `monkeypatch` is its fixture."""
    table = kernels_for(torch.device("cpu"))._replace(**entries)
    for reader in _READERS:
        monkeypatch.setattr(import_module(reader), "kernels_for", lambda device: table)
    return table


def add_stacked(x: Tensor, y: Tensor, by_slot: AdapterRows, stacked: StackedLowRank) -> None:
    """What `kernels.triton.lora.lora_add` does, by its definition, reading tensors alone."""
    for slot, (start, stop) in enumerate(pairwise(by_slot.offsets.tolist())):
        rows = by_slot.rows[start:stop]
        columns = pairwise(accumulate(stacked.sizes, initial=0))
        for a, (first, last) in zip(stacked.a[slot], columns, strict=True):
            reference.lora_add(x, y, rows, a, stacked.b[slot, first:last], slice(first, last))


STACKED_LORA = LoraKernels(empty_low_rank, pin_factors, sort_by_slot, add_stacked)
