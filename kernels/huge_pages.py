"""Memory in pages of 2 MiB, where the system has them for who asks: fewer places to look up than with 4 KiB."""

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK = 16 * _HUGE_PAGE
_CACHE_LINE = 64


def empty_in_huge_pages(size: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised vector on the host. One smaller than a huge page is torch's own."""
    num_bytes = size * dtype.itemsize
    if sys.platform != "linux" or num_bytes < _HUGE_PAGE:
        return torch.empty(size, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return torch.frombuffer(memory, dtype=dtype, count=size, offset=-start % _HUGE_PAGE)


class Arena:
    """Deals out huge pages to vectors side by side, each from a new cache line on: most weights fill no whole page.

    A chunk of 32 MiB is freed with the last of its vectors.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised vector; a large one has pages of its own."""
        num_bytes = -(-size * dtype.itemsize // _CACHE_LINE) * _CACHE_LINE
        if num_bytes >= _CHUNK:
            return empty_in_huge_pages(size, dtype)
        if num_bytes > len(self._left):
            self._left = empty_in_huge_pages(_CHUNK, torch.uint8)
        vector, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return vector.view(dtype)[:size]
