"""Engines whose kernels are of a table that a test makes up: what a GPU's has, computed by what a CPU has."""

from importlib import import_module
from typing import Any

import pytest
import torch

from kernels.ops import Kernels, kernels_for

_READERS = ("engine.loader.assemble", "engine.models.decoder")


def use_kernels(monkeypatch: pytest.MonkeyPatch, **entries: Any) -> Kernels:
    """Give models that are loaded from now on the CPU's table with these entries in place of its own."""
    table = kernels_for(torch.device("cpu"))._replace(**entries)
    for reader in _READERS:
        monkeypatch.setattr(import_module(reader), "kernels_for", lambda device: table)
    return table
