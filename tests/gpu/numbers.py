"""What kernel cases share: numbers at random, and how far two results of one definition may differ."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.triton.launch import architecture_of
from tests.gpu.cases import LeftOut, Setting

FLOAT8 = torch.float8_e4m3fn
# Units in the last place, where two results of one rounding each may differ by one.
ULP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}

Check = Callable[[], None]
"""Raises if a kernel differs from its definition."""


def randn(setting: Setting, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
    """Standard normal numbers times `scale`, made on the CPU, so that a seed means the same on every machine."""
    return (torch.randn(shape) * scale).to(setting.device, dtype or setting.dtype)


def dtypes(setting: Setting) -> tuple[torch.dtype, ...]:
    """What a kernel of any floating dtype is tried with."""
    return (setting.dtype, torch.float32)


def wants_float8(setting: Setting, dtype: torch.dtype = FLOAT8) -> None:
    """Raise `LeftOut` if the device has no float8, unless `dtype` is another one."""
    if dtype != FLOAT8:
        return
    if setting.interpreted:
        raise LeftOut("the interpreter does not cast to float8 as cards do")
    if architecture_of(setting.device) < 89:
        raise LeftOut("this card has no float8")


def short(dtype: torch.dtype) -> str:
    """torch's name without its module."""
    return str(dtype).removeprefix("torch.")
