"""Which blocks hold the tokens of a sequence, on the device and, of one that was swapped out, on the host.

Some changes to a table need a block's contents elsewhere: a copy of a shared tail, a block of the device on the host,
or the other way. Such moves are added to a list, and whoever plans a step has them carried out, in their order, before
its forward pass and before it plans the next, whatever becomes of the step. For in these tables they have happened
already: nothing is planned twice, and what a later change relies on is the contents at its own place in the order.

- The source of a move may be freed in the same plan, when its last holder is preempted, and handed out anew: what is in
  it then was put there by a later move or by the forward pass, when the earlier one had been made. So it is with blocks
  of the host, which are given back as soon as their way to the device is planned.
- The destination of a move belongs to a row of the plan, or is on the host. Victims are younger than all rows of the
  plan, so no row's block is taken away before it is filled.
- A block that is brought back from the host is findable by its hash at once: whoever finds it reads it in the forward
  pass. A block of the host is so too, and whoever finds it has it copied by a later move.
"""

from collections import Counter
from collections.abc import Iterable, Set
from itertools import takewhile

from engine.blocks import BlockHash, BlockPool
from engine.config import SchedulerConfig
from engine.plan import BlockMove, MoveKind, PlanRow
from engine.sequence import Sequence
from engine.swap import SwapSpace


class BlockTables:
    """Keeps `block_ids`, `host_block_ids` and `num_computed_tokens` of all sequences, and the pools they are from."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_kv_blocks)
        self.swap = SwapSpace(config.num_host_blocks)
        self._block_size = config.block_size
        self._prefix_caching = config.enable_prefix_caching

    def find_prefix(self, sequence: Sequence) -> tuple[list[int], BlockHash | None]:
        """The cached blocks that `sequence` begins with, and the hash of the first full block that it lacks, if any.

        The last token is never a hit: its logits are wanted, so it has to be computed. Nor is any token of a request
        that wants something of each: to pool them all, or the prompt's log-probabilities.
        """
        request = sequence.request
        wants_all = request.lacks_prompt_logprobs or (request.pooler and request.pooler.needs_all_tokens)
        if not self._prefix_caching or wants_all:
            return [], None
        hashes = sequence.block_hashes(self._block_size, (sequence.num_tokens - 1) // self._block_size)
        hits = self.pool.match_prefix(hashes)
        num_there = max(len(hits), len(sequence.host_block_ids))
        return hits, hashes[num_there] if num_there < len(hashes) else None

    def num_among(self, sequence: Sequence, first: int, filled: Set[BlockHash]) -> int:
        """How many of its blocks, from the one numbered `first` on, a waiting sequence will find if these are there."""
        hashes = sequence.block_hashes(self._block_size, (sequence.num_tokens - 1) // self._block_size)
        return sum(1 for _ in takewhile(filled.__contains__, hashes[first:]))

    def filled_by(self, rows: Iterable[PlanRow]) -> set[BlockHash]:
        """The hashes of all blocks that these rows fill in their step, but for those of which a token is not known."""
        if not self._prefix_caching:
            return set()
        filled: set[BlockHash] = set()
        for sequence, start, num_tokens, _ in rows:
            known = min(start + num_tokens, sequence.num_known_tokens)
            first, end = start // self._block_size, known // self._block_size
            if end > first:
                filled.update(sequence.block_hashes(self._block_size, end)[first:])
        return filled

    def start(self, sequence: Sequence, hits: list[int], moves: list[BlockMove]) -> None:
        """Give a waiting sequence what there is of it: the blocks that were found, and what the host has beyond."""
        self.pool.acquire(hits)
        stored = sequence.host_block_ids[len(hits) :]
        loaded = self.pool.allocate(len(stored))
        self.swap.load(stored, loaded, moves)
        sequence.block_ids = hits + loaded
        sequence.num_computed_tokens = max(len(hits) * self._block_size, sequence.num_computed_tokens)
        self._make_findable(sequence, len(hits), sequence.num_computed_tokens // self._block_size)
        self._release_host(sequence)

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """How many free blocks it takes to compute the next `num_tokens` of a running sequence."""
        return self._num_new(sequence, num_tokens) + self._writes_shared_block(sequence)

    def extend(self, sequence: Sequence, num_tokens: int, moves: list[BlockMove]) -> None:
        """Reserve the blocks that the next `num_tokens` of a running sequence are written to."""
        if self._writes_shared_block(sequence):
            tail = sequence.num_computed_tokens // self._block_size
            shared = sequence.block_ids[tail]
            (copy,) = self.pool.allocate(1)
            moves.append(BlockMove(MoveKind.COPY, shared, copy))
            sequence.block_ids[tail] = copy
            self.pool.release([shared])
        sequence.block_ids += self.pool.allocate(self._num_new(sequence, num_tokens))

    def anticipate(self, row: PlanRow) -> None:
        """Count a row's tokens as computed for the planning of the next step. Nobody finds the blocks they fill."""
        row.sequence.num_computed_tokens = row.start + row.num_tokens

    def advance(self, row: PlanRow) -> None:
        """Count a row's tokens as computed: the blocks that they filled become findable."""
        end = row.start + row.num_tokens
        row.sequence.num_computed_tokens = end
        self._make_findable(row.sequence, row.start // self._block_size, end // self._block_size)

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Give `child`, which was forked from `parent` and has no blocks, what is computed of its parent."""
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_ids = parent.block_ids[: self._num_blocks(parent.num_computed_tokens)]
        child.host_block_ids = parent.host_block_ids.copy()
        self.pool.acquire(child.block_ids)
        self.swap.pool.acquire(child.host_block_ids)

    def swap_out(self, sequence: Sequence, moves: list[BlockMove]) -> bool:
        """Store on the host what is computed of a running sequence; False if there is nothing, or no room for it.

        It keeps its blocks on the device until they are released.
        """
        hashes = []
        if self._prefix_caching:
            hashes = sequence.block_hashes(self._block_size, sequence.num_computed_tokens // self._block_size)
        computed = sequence.block_ids[: self._num_blocks(sequence.num_computed_tokens)]
        sequence.host_block_ids = self.swap.store(computed, hashes, moves)
        return bool(sequence.host_block_ids)

    def release(self, sequence: Sequence) -> None:
        """Give back the sequence's blocks on the device; cached ones stay findable."""
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []

    def forget(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence that is finished."""
        self.release(sequence)
        self._release_host(sequence)

    def _release_host(self, sequence: Sequence) -> None:
        self.swap.pool.release(sequence.host_block_ids)
        sequence.host_block_ids = []

    def _make_findable(self, sequence: Sequence, first: int, end: int) -> None:
        if self._prefix_caching and end > first:
            hashes = sequence.block_hashes(self._block_size, end)
            for index in range(first, end):
                self.pool.register(sequence.block_ids[index], hashes[index])

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that a continuation with the same beginning holds as well."""
        tail, filled = divmod(sequence.num_computed_tokens, self._block_size)
        return filled > 0 and self.pool.is_shared(sequence.block_ids[tail])

    def _num_new(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, self._num_blocks(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raise `RuntimeError` unless the tables and both pools agree on who holds what."""
        self.pool.check_integrity()
        self.swap.pool.check_integrity()
        running, waiting = list(running), list(waiting)
        if _count(sequence.block_ids for sequence in running) != self.pool.references():
            raise RuntimeError("block tables: the blocks that sequences hold are not those that the pool gave out")
        if _count(sequence.host_block_ids for sequence in waiting) != self.swap.pool.references():
            raise RuntimeError("block tables: the host's blocks are not those that swapped-out sequences hold")
        if any(sequence.block_ids for sequence in waiting) or any(sequence.host_block_ids for sequence in running):
            raise RuntimeError("block tables: a sequence holds blocks where it does not run, or does not wait")
        for table, sequence in [(s.block_ids, s) for s in running] + [(s.host_block_ids, s) for s in waiting]:
            if len(table) < self._num_blocks(sequence.num_computed_tokens):
                raise RuntimeError("block tables: a sequence has computed tokens that no block holds")


def _count(tables: Iterable[list[int]]) -> dict[int, int]:
    return dict(Counter(block_id for table in tables for block_id in table))
