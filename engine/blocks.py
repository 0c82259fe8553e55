"""The KV block pool: who holds which block, and which free block is worth keeping.

    id     0        1         2         3         4         5
         ┌────────┬─────────┬─────────┬─────────┬─────────┬─────────┐
         │ null   │ ref 2   │ ref 1   │ ref 0   │ ref 0   │ ref 0   │
         │        │ hash a  │ -       │ -       │ hash b  │ hash c  │
         └────────┴─────────┴─────────┴─────────┴─────────┴─────────┘
                    held, by   held: the   free ──────────────────────────►
                    two        tail that   3 ⇄ 4 ⇄ 5   taken from the left
                    requests   is filled

The free list is doubly linked, and its order is the order of eviction. Blocks without a hash stand in front: nobody can
want them again. Behind them come cached blocks, the least recently released first. A cached free block keeps its hash
until it is handed out anew, and is revived from the middle of the list in O(1) when a prompt asks for it. Of a finished
request the tail is released first, and so evicted first: a head is useful to more prompts than what follows it.

A continuation that is forked off holds all of its parent's blocks. Full ones are never written again. The tail is, by
both: who writes into a block that has another holder copies it first, and the last holder writes in place.

    parent  ─► 0 ─► 1 ─► 2        parent  ─► 0 ─► 1 ─► 3        3: a copy of 2, and one more token
                ref 2     ref 2               ref 2     ref 1
    child   ─► 0 ─► 1 ─► 2        child   ─► 0 ─► 1 ─► 2        2: the child's alone, to be written in place

Every block is in exactly one state: null (block 0, which padding points at and nobody gets), held (`ref` > 0, in no
list), or free (`ref` = 0, in the list). `check_integrity` says so.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from kernels.cache import NULL_BLOCK

BlockHash = bytes


def root_hash(salt: bytes, adapter: bytes = b"") -> BlockHash:
    """The parent of a request's first block. Requests never share one with another salt, or another adapter.

    `adapter` is the revision of a LoRA adapter, at most 64 bytes, or empty.
    """
    return blake2b(salt, key=adapter, digest_size=16).digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """blake2b-128 of the parent's hash and one full block's tokens: it names the block's tokens and all before them.

    The same in every process and on every machine. At 128 bits of a cryptographic hash, equal hashes are taken as equal
    tokens without comparing them.
    """
    return blake2b(array("q", token_ids).tobytes(), key=parent, digest_size=16).digest()


class Block:
    __slots__ = ("hash", "id", "next", "prev", "ref")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref = 0
        self.hash: BlockHash | None = None
        # Itself when in no list, so that the links are never None.
        self.prev: Block = self
        self.next: Block = self


class FreeList:
    """A circular doubly linked list through the blocks themselves, around a sentinel that stands for both ends."""

    def __init__(self) -> None:
        self._ends = Block(-1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next
        while block is not self._ends:
            yield block
            block = block.next

    def push_front(self, block: Block) -> None:
        self._insert(block, after=self._ends)

    def push_back(self, block: Block) -> None:
        self._insert(block, after=self._ends.prev)

    def pop_front(self) -> Block:
        block = self._ends.next
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self._length -= 1

    def _insert(self, block: Block, *, after: Block) -> None:
        block.prev, block.next = after, after.next
        after.next.prev = block
        after.next = block
        self._length += 1


class BlockPool:
    """Owns all blocks of the KV cache. Callers hold block ids, one reference for each time they were given one."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList()
        self._cached: dict[BlockHash, Block] = {}
        for block in self._blocks[NULL_BLOCK + 1 :]:
            self._free.push_back(block)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones included."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return len(self._blocks) - 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, the least valuable first; `count` must not exceed `num_free`."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        return [self._take(self._free.pop_front()) for _ in range(count)]

    def _take(self, block: Block) -> int:
        if block.hash is not None:
            del self._cached[block.hash]
            block.hash = None
        block.ref = 1
        return block.id

    def match_prefix(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the ids of the longest cached run at the start of `hashes`, without taking hold of them."""
        matched = []
        for key in hashes:
            block = self._cached.get(key)
            if block is None:
                break
            matched.append(block.id)
        return matched

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks `acquire` would take out of the free list."""
        return sum(self._blocks[block_id].ref == 0 for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each of these matched blocks, reviving those that are free."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref == 0:
                self._free.remove(block)
            block.ref += 1

    def is_shared(self, block_id: int) -> bool:
        """Whether a held block has another holder, who would see what is written into it."""
        return self._blocks[block_id].ref > 1

    def register(self, block_id: int, key: BlockHash) -> None:
        """Make a held, full and computed block findable under its hash.

        A block with the same contents that is there already stays the one that is found.
        """
        if key not in self._cached:
            block = self._blocks[block_id]
            block.hash = key
            self._cached[key] = block

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block of a table, in the table's order; the last block is evicted first."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.ref == 0:
                raise ValueError(f"block {block_id} is released more often than it was taken")
            block.ref -= 1
            if block.ref == 0:
                if block.hash is None:
                    self._free.push_front(block)
                else:
                    self._free.push_back(block)

    def references(self) -> dict[int, int]:
        """The number of references to each held block."""
        return {block.id: block.ref for block in self._blocks if block.ref}

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every block is null, held or free, and only cached blocks are in the cache."""
        free = list(self._free)
        faults = []
        if len(free) != len(self._free) or len({block.id for block in free}) != len(free):
            faults.append("the free list's links and its length disagree")
        if any(block.ref for block in free):
            faults.append("a held block is in the free list")
        if len(free) != sum(block.ref == 0 for block in self._blocks) - 1:
            faults.append("a block without holders is not in the free list")
        if self._blocks[NULL_BLOCK].ref or self._blocks[NULL_BLOCK].hash:
            faults.append("the null block was handed out")
        if {block.hash: block for block in self._blocks if block.hash} != self._cached:
            faults.append("the cache and the blocks' hashes disagree")
        if faults:
            raise RuntimeError(f"block pool: {'; '.join(faults)}")
