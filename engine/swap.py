"""Host memory for the blocks of preempted sequences, so that they need not be computed again.

    device pool                              host pool
    A ─► 4 ─► 7 ─► 2        swap out         A ─► 1 ─► 2 ─► 3
    B ─► 4 ─► 7 ─► 9     ───────────────►    B ─► 1 ─► 2 ─► 4         1 and 2 are stored once

Two continuations of a prompt share its blocks on the device, and here as well: a full block is found by its hash, like
in the device's cache. The tail has no hash, and is stored for each of them. A block that was read back keeps its hash
until it is needed for another, so that a sequence which is preempted again soon costs few copies.
"""

from collections.abc import Sequence

from engine.blocks import BlockHash, BlockPool
from engine.plan import BlockMove, MoveKind


class SwapSpace:
    """A pool of `num_blocks` blocks on the host. It says what is to be moved; the runner moves it."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks + 1)
        self.num_blocks_out = self.num_blocks_in = 0

    def store(self, block_ids: Sequence[int], hashes: Sequence[BlockHash], moves: list[BlockMove]) -> list[int]:
        """Take in a device's block table, and return the table of the host's blocks; empty if there is no room for all.

        `hashes` are those of the first blocks, all of which are full. What must be copied is added to `moves`.
        """
        stored = self.pool.match_prefix(hashes)
        missing = block_ids[len(stored) :]
        if len(missing) > self.pool.num_free - self.pool.num_free_among(stored):
            return []
        self.pool.acquire(stored)
        fresh = self.pool.allocate(len(missing))
        for host_id, key in zip(fresh, hashes[len(stored) :], strict=False):
            self.pool.register(host_id, key)
        moves += [BlockMove(MoveKind.SWAP_OUT, src, dst) for src, dst in zip(missing, fresh, strict=True)]
        self.num_blocks_out += len(missing)
        return stored + fresh

    def load(self, host_ids: Sequence[int], block_ids: Sequence[int], moves: list[BlockMove]) -> None:
        """Have blocks of the host copied to the device's blocks `block_ids`."""
        moves += [BlockMove(MoveKind.SWAP_IN, src, dst) for src, dst in zip(host_ids, block_ids, strict=True)]
        self.num_blocks_in += len(host_ids)
