"""Carrying out the moves of a plan: blocks copied within the device's pool, and between it and the host's.

in their order, one by one      COPY 3►8   COPY 3►9   COPY 8►4   OUT 5►1   OUT 6►2   OUT 7►3   IN 1►5
in runs                         COPY 3►8, 3►9   ───►  COPY 8►4   OUT 5►1, 6►2, 7►3   ───────►  IN 1►5

All moves of a run may be made at once, or in any order: one launch makes its copies. A run to the host is gathered into
a buffer on the device, whose blocks are one piece each, as the host's are: neighbours on the host are one transfer.

    cache    [num_layers, 2, num_blocks, ...]  ──gather──►  staged [n, num_layers, 2, ...]  ──copy──►  host [..., ...]
                                               ◄─scatter──                                  ◄─copy───
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from engine.device import Device
from engine.plan import BlockMove, MoveKind
from kernels.ops import BlockMoves, KVCache, copy_block
from kernels.reference_blocks import StagedBlocks, allocate_staged_blocks

_STAGED_BYTES = 64 << 20
_MOST_COPIES = 256


class BlockMover(Protocol):
    def move(self, moves: Iterable[BlockMove]) -> None:
        """Carry out moves in their order, in stream order. Nothing is allocated on the device: it never runs out."""
        ...


class SingleMoves:
    """A `BlockMover` that makes each move by itself, between `kv` and, if anybody swaps, `host`."""

    def __init__(self, kv: KVCache, device: Device, host: KVCache | None = None) -> None:
        self._caches = {MoveKind.COPY: (kv, kv)}
        if host:
            self._caches |= {MoveKind.SWAP_OUT: (kv, host), MoveKind.SWAP_IN: (host, kv)}
        self._device = device

    def move(self, moves: Iterable[BlockMove]) -> None:
        """See `BlockMover`."""
        for kind, src, dst in moves:
            source, target = self._caches[kind]
            self._device.submit(partial(copy_block, source, src, target, dst))


class BatchedMoves:
    """A `BlockMover` that makes moves in runs, between `kv` and, if anybody swaps, `host` in pinned memory.

    `num_staged` is how many blocks there are between the two at a time, see `num_staged_blocks`. The buffer, and the
    one for the blocks' numbers, are written again by the next run: in stream order, that is after they were read.
    """

    def __init__(
        self, kv: KVCache, device: Device, kernels: BlockMoves, host: StagedBlocks | None = None, num_staged: int = 0
    ) -> None:
        self._kv = kv
        self._device = device
        self._kernels = kernels
        self._host = host
        self._staged = allocate_staged_blocks(kv, num_staged, device.place)
        self._most = {MoveKind.COPY: _MOST_COPIES, MoveKind.SWAP_OUT: num_staged, MoveKind.SWAP_IN: num_staged}
        self._ids = torch.empty(max(2 * _MOST_COPIES, num_staged), dtype=torch.int32, device=device.place)

    def move(self, moves: Iterable[BlockMove]) -> None:
        """See `BlockMover`."""
        for run in runs(moves, self._most):
            if run[0].kind is MoveKind.COPY:
                self._copy(run)
            else:
                self._swap(run)

    def _copy(self, run: list[BlockMove]) -> None:
        pairs = self._ids[: 2 * len(run)].view(-1, 2)
        self._device.write(pairs, np.array([(move.src, move.dst) for move in run], dtype=np.int32))
        self._device.submit(partial(self._kernels.copy, self._kv, pairs))

    def _swap(self, run: list[BlockMove]) -> None:
        out = run[0].kind is MoveKind.SWAP_OUT
        ids = self._ids[: len(run)]
        self._device.write(ids, np.array([move.src if out else move.dst for move in run], dtype=np.int32))
        stretches = _stretches([move.dst if out else move.src for move in run])
        self._device.submit(partial(self._store if out else self._load, ids, stretches))

    @torch.inference_mode()
    def _store(self, ids: torch.Tensor, stretches: list[tuple[slice, slice]]) -> None:
        assert self._host is not None
        self._kernels.gather(self._kv, ids, self._staged)
        for staged, stored in zip(self._staged.tensors, self._host.tensors, strict=True):
            for places, host_ids in stretches:
                stored[host_ids].copy_(staged[places], non_blocking=True)

    @torch.inference_mode()
    def _load(self, ids: torch.Tensor, stretches: list[tuple[slice, slice]]) -> None:
        assert self._host is not None
        for staged, stored in zip(self._staged.tensors, self._host.tensors, strict=True):
            for places, host_ids in stretches:
                staged[places].copy_(stored[host_ids], non_blocking=True)
        self._kernels.scatter(self._staged, self._kv, ids)


def num_staged_blocks(block_bytes: int, num_host_blocks: int) -> int:
    """How many blocks there is room for, in a buffer of bounded size, between the device's pool and the host's."""
    return min(num_host_blocks, max(1, _STAGED_BYTES // block_bytes))


def runs(moves: Iterable[BlockMove], most: dict[MoveKind, int]) -> Iterator[list[BlockMove]]:
    """Cut moves, in their order, where they may not be made at once, and into no more than `most` of a kind.

    Those of a run are of one kind. No block is written twice in it, and none is read and written.
    """
    run: list[BlockMove] = []
    read: set[int] = set()
    written: set[int] = set()
    for move in moves:
        # Between two pools, what is read is never what is written.
        within = move.kind is MoveKind.COPY
        clash = move.dst in written or (within and (move.dst in read or move.src in written))
        if run and (clash or move.kind is not run[0].kind or len(run) == most[move.kind]):
            yield run
            run, read, written = [], set(), set()
        run.append(move)
        read.add(move.src)
        written.add(move.dst)
    if run:
        yield run


def _stretches(host_ids: list[int]) -> list[tuple[slice, slice]]:
    """Places in a run, and the host's blocks, that belong together, where both go on one by one."""
    cuts = [place for place, (one, next_one) in enumerate(pairwise(host_ids), 1) if next_one != one + 1]
    return [
        (slice(start, end), slice(host_ids[start], host_ids[start] + end - start))
        for start, end in pairwise([0, *cuts, len(host_ids)])
    ]
