"""A device whose work runs late: what a GPU does to a host that reads too early, or writes too soon.

Work is queued and runs in order, some of it now and then, and all of it up to a download only when that is waited for.
Uploads are copied from the host's arrays when their turn comes, until then their tensors hold garbage. Graphs run with
what they read of the host when they were captured.
"""

from collections import deque
from functools import partial
from random import Random

import torch

from engine.loop import OverlappedLoop
from engine.plan import MoveKind
from engine.runner import Runner

GARBAGE = -(10**6)


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


def overlapped(core, device):
    """The same engine, with its steps launched ahead on this device."""
    plain = core._loop._runner
    _, host = plain._caches.get(MoveKind.SWAP_OUT, (None, None))
    runner = Runner(plain._model, plain._kv, device, host, max_num_seqs=core.info.max_num_seqs)
    core._loop = OverlappedLoop(core.scheduler, runner, core.info.max_num_batched_tokens)
    return core
