"""The tests of the Triton kernels: numbers come from Triton's interpreter, on CPU tensors.

tests/conftest.py turns it on, since Triton reads the switch when it is imported, and Transformers, say, imports it.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter

from kernels.triton import launch


@pytest.fixture(scope="session", autouse=True)
def _interpreted() -> None:
    """Without the interpreter every test here would ask for a card."""
    if not triton.knobs.runtime.interpret:
        pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set: set it for this run of pytest.")


@pytest.fixture(autouse=True)
def _cast_to_float8_as_cards_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own cast loses the carry, so that 1.95 becomes 1.0, and cuts small numbers off."""
    cast: Callable[..., np.ndarray] = interpreter._convert_float

    def cast_as_torch(numbers: np.ndarray, source: triton.language.dtype, target: triton.language.dtype, rounding):
        if target != triton.language.float8e4nv or source != triton.language.float32:
            return cast(numbers, source, target, rounding)
        exact = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
        return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", cast_as_torch)


@pytest.fixture
def as_on_sm_80(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels launch with the parameters of sm_80; without this, with those of sm_100."""
    monkeypatch.setattr(launch, "architecture_of", lambda device: 80)
