"""What a step needs of a device: work in stream order, transfers that nobody waits for, and graphs.

    host     launch i+1 ─► wait for i's tokens ─► commit i ─► sample i+1 ─► launch i+2 ─► wait for i+1's tokens
    device   ── forward i+1 ─────────────────────────────────┬ sample i+1 ┬─ forward i+2 ──────────────────
    copies   ◄─ tokens of i                                  └────────────┴► tokens of i+1

Work is a function without arguments. It may run when it is submitted or later, but in the order of submission, and what
it reads of the host must be its own: by then requests and queues have changed.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16


class Download(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[np.ndarray]:
        """Return them when they are there. The arrays are the caller's."""
        ...


class Graph(Protocol):
    """Work that was captured. Its `output` is one tensor, at the same place for ever: each replay writes it anew."""

    @property
    def output(self) -> Tensor: ...

    def replay(self) -> None:
        """Run the work, in stream order, on what its tensors hold by then."""
        ...


class Device(Protocol):
    """`place` is where its tensors are."""

    @property
    def place(self) -> torch.device: ...

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` in stream order. What it raises may be raised here."""
        ...

    def upload(self, *arrays: np.ndarray) -> list[Tensor]:
        """Copy arrays to the device, in stream order and in one transfer.

        They must not be written again: where the device is the host, the tensors are the arrays.
        """
        ...

    def write(self, target: Tensor, array: np.ndarray) -> None:
        """Overwrite a tensor of the device with an array of its shape and dtype, in stream order, allocating nothing.

        The array must not be written again.
        """
        ...

    def download(self, work: Callable[[], Sequence[Tensor]]) -> Download:
        """Run `work` in stream order, and copy the tensors that it returns to the host."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        """Run `work` once, to warm up, and record what it does on the device.

        On the host it does not run again: integers that it reads are as they were, tensors are read at each replay.
        Graphs of one device share their memory: of two, the output of the one that was replayed last is there.
        """
        ...

    def release_memory(self) -> None:
        """After running out of memory: give back what no tensor holds."""
        ...


class _Arrived:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[np.ndarray]:
        return [tensor.numpy() for tensor in self._tensors]


class CpuDevice:
    """The host itself: everything runs at once, and nothing is copied. It has no graphs: there is nothing to save."""

    place = torch.device("cpu")

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def upload(self, *arrays: np.ndarray) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def write(self, target: Tensor, array: np.ndarray) -> None:
        target.copy_(torch.from_numpy(array))

    def download(self, work: Callable[[], Sequence[Tensor]]) -> Download:
        return _Arrived(work())

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        raise NotImplementedError("a CPU captures no graphs")

    def release_memory(self) -> None:
        """torch's allocator for CPUs holds nothing back."""


class _CudaDownload:
    def __init__(self, sources: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        # Held until they are copied: their memory belongs to another stream than the one that reads it.
        self._sources = sources
        with torch.cuda.stream(stream):
            self._pinned = [torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources]
            for pinned, source in zip(self._pinned, sources, strict=True):
                pinned.copy_(source, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def wait(self) -> list[np.ndarray]:
        self._done.synchronize()
        return [pinned.numpy() for pinned in self._pinned]


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice:
    """An NVIDIA GPU. Work runs in the default stream, where weights and adapters are loaded as well.

    Copies to the host have a stream of their own, so that they do not wait for work that comes after what they copy.
    """

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._downloads = torch.cuda.Stream(place)
        self._graph_pool = torch.cuda.graph_pool_handle()

    def submit(self, work: Callable[[], None]) -> None:
        # Kernels are launched on the current device, which is another one if this is not the first.
        with torch.cuda.device(self.place):
            work()

    def upload(self, *arrays: np.ndarray) -> list[Tensor]:
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        starts = accumulate(sizes, initial=0)
        places = [slice(start, start + array.nbytes) for start, array in zip(starts, arrays, strict=False)]
        # Let go while it is read, pinned memory stays as it is until the copy has run: torch's allocator sees to that.
        pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        staged = pinned.numpy()
        for place, array in zip(places, arrays, strict=True):
            staged[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with torch.cuda.device(self.place):
            packed = pinned.to(self.place, non_blocking=True)
        dtypes = [torch.from_numpy(array[:0]).dtype for array in arrays]
        return [
            packed[place].view(dtype).view(array.shape)
            for place, dtype, array in zip(places, dtypes, arrays, strict=True)
        ]

    def write(self, target: Tensor, array: np.ndarray) -> None:
        with torch.cuda.device(self.place):
            target.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)

    def download(self, work: Callable[[], Sequence[Tensor]]) -> Download:
        with torch.cuda.device(self.place):
            sources = work()
            self._downloads.wait_stream(torch.cuda.current_stream(self.place))
            return _CudaDownload(sources, self._downloads)

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        with torch.cuda.device(self.place):
            # What is set up on first use, as libraries' workspaces and compiled kernels are, must not be captured.
            work()
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate meanwhile: adapters are loaded in some.
            with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
                output = work()
        return _CudaGraph(graph, output)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


def device_of(place: torch.device) -> Device:
    """The device on which tensors at `place` are computed."""
    return CudaDevice(place) if place.type == "cuda" else CpuDevice()
