"""The tests of the Triton kernels: numbers come from Triton's interpreter, on CPU tensors.

tests/conftest.py turns it on, since Triton reads the switch when it is imported, and Transformers, say, imports it.
"""

import pytest
import triton

from kernels.triton import launch


@pytest.fixture(scope="session", autouse=True)
def _interpreted() -> None:
    """Without the interpreter every test here would ask for a card."""
    if not triton.knobs.runtime.interpret:
        pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set: set it for this run of pytest.")


@pytest.fixture
def as_on_sm_80(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels launch with the parameters of sm_80; without this, with those of sm_100."""
    monkeypatch.setattr(launch, "architecture_of", lambda device: 80)
