"""Memory for weights that live only until they are packed."""

import math
import mmap

import torch
from torch import Tensor

# Smaller tensors are the allocator's to reuse.
_LEAST_BYTES = 1 << 20


def empty_in_own_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor which, on a CPU, gives its memory back to the system as soon as it is freed.

    The C library keeps what large tensors leave behind for the next one, and fits the packed weights in between: a
    model of half a gigabyte that is packed matrix by matrix then takes up to a quarter more than its weights.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
