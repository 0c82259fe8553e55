"""A device whose work runs late: what a GPU does to a host that reads too early, or writes too soon.

Work is queued and runs in order, some of it now and then, and all of it up to a download only when that is waited for.
Uploads are copied from the host's arrays when their turn comes, until then their tensors hold garbage. Graphs run with
what they read of the host when they were captured.
"""

from collections import deque
from functools import partial
from random import Random

import torch

from engine.block_moves import BatchedMoves
from engine.loop import OverlappedLoop
from engine.row_state import RowInputs
from engine.runner import Runner
from kernels import reference_blocks
from kernels.ops import BlockMoves, kernels_for
from kernels.reference_blocks import allocate_staged_blocks

GARBAGE = -(10**6)
DEFINED_MOVES = BlockMoves(
    lambda kv: True,
    reference_blocks.copy_blocks,
    reference_blocks.gather_blocks,
    reference_blocks.scatter_blocks,
)


class LateDevice:
    """`seed` decides how much of the queue runs early; None: nothing does."""

    place = torch.device("cpu")

    def __init__(self, seed: int | None = None) -> None:
        self._queue = deque()
        self._running = False
        self._random = None if seed is None else Random(seed)
        self.num_replays = 0
        self.captured = []
        self.longest_queue = 0

    def submit(self, work):
        if self._running:
            work()
            return
        self._queue.append(work)
        self.longest_queue = max(self.longest_queue, len(self._queue))
        if self._random and self._random.random() < 0.3:
            for _ in range(self._random.randint(1, len(self._queue))):
                self.run_next()

    def run_next(self):
        work = self._queue.popleft()
        self._running = True
        try:
            work()
        finally:
            self._running = False

    def upload(self, *arrays):
        sources = [torch.from_numpy(array) for array in arrays]
        with torch.inference_mode():
            targets = [torch.full_like(source, GARBAGE) for source in sources]
        self.submit(partial(_copy, targets, sources))
        return targets

    def write(self, target, array):
        self.submit(partial(_copy, [target], [torch.from_numpy(array)]))

    def download(self, work):
        return LateDownload(self, work)

    def capture(self, work):
        self.synchronize()
        graph = LateGraph(self, work)
        self.captured.append(len(graph.output))
        return graph

    def synchronize(self):
        while self._queue:
            self.run_next()

    def release_memory(self):
        pass


class LateDownload:
    def __init__(self, device, work):
        self._device = device
        self._work = work
        self._arrays = None
        device.submit(self._run)

    def _run(self):
        self._arrays = [tensor.clone().numpy() for tensor in self._work()]
        self._work = None

    def wait(self):
        while self._arrays is None:
            self._device.run_next()
        return self._arrays


class LateGraph:
    def __init__(self, device, work):
        self._device = device
        self._work = work
        work()
        self.output = work()

    def replay(self):
        self._device.num_replays += 1
        self._device.submit(self._run)

    @torch.inference_mode()
    def _run(self):
        self.output.copy_(self._work())


@torch.inference_mode()
def _copy(targets, sources):
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def row_runner(model, kv, device, limits, *, graphs=None, adapters=None, **entries):
    """A runner as a GPU has it: inputs are built from rows, and blocks are moved many at once.

    By the definitions of both, or by the table's `entries`.
    """
    table = kernels_for(device.place)._replace(**{"block_moves": DEFINED_MOVES, **entries})
    inputs = RowInputs(
        kv.block_size,
        device,
        table,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        graphs=graphs,
    )
    num_host_blocks = limits.num_host_blocks
    host = allocate_staged_blocks(kv, num_host_blocks + 1, device.place) if num_host_blocks else None
    mover = BatchedMoves(kv, device, table.block_moves, host, min(2, num_host_blocks))
    return Runner(model, kv, device, mover, inputs, adapters, max_num_seqs=limits.max_num_seqs)


def overlapped(core, device):
    """The same engine, with its steps launched ahead on this device."""
    plain = core._loop._runner
    runner = row_runner(plain._model, plain._kv, device, core.scheduler.config, adapters=plain._adapters)
    core._loop = OverlappedLoop(core.scheduler, runner, core.info.max_num_batched_tokens)
    return core
