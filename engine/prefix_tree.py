"""Prompts that wait, as a radix tree of their blocks: in it, those that begin alike are neighbours.

    root ─┬─ A A A ─┬─ B ─┬─ C   1        A node is where prompts part; an edge is the blocks that all below it have
          │         │     └─ D   2        in common. Depth first, 1, 2, 3, 4: what two neighbours share is computed
          │         └─ E E E     3        once, and can be forgotten when the last prompt below its node has started.
          └─ F F                 4

A block's hash names the block and all before it (`engine.blocks.block_hash`), so that two prompts have as many blocks
in common as the last hash in which they agree says: it is found by bisection. An insertion and a removal take as many
steps as there are nodes above a prompt.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from engine.blocks import BlockHash

T = TypeVar("T")
Rank = tuple[int, int]
# A heap is rebuilt when so many times more entries are in it than can be current.
_MOST_STALE = 4


class Leaf(Generic[T]):
    """One prompt: the hashes of its full blocks. Of two, the one with the lower rank, unique in the tree, is first."""

    __slots__ = ("hashes", "parent", "rank", "size", "value")

    def __init__(self, value: T, hashes: Sequence[BlockHash], rank: Rank) -> None:
        self.value = value
        self.hashes = hashes
        self.rank = rank
        self.size = 0  # 1 while it is in a tree
        self.parent: _Node[T] | None = None

    @property
    def depth(self) -> int:
        return len(self.hashes)


class _Node(Generic[T]):
    """The prompts that agree in the first `depth` blocks of `hashes`.

    `rank` is the lowest of any prompt below. `heap` has what is directly below, and what was so once, or had another
    rank: such entries are dropped when they come up.
    """

    __slots__ = ("children", "depth", "hashes", "heap", "num_pushed", "parent", "rank", "size")

    def __init__(self, hashes: Sequence[BlockHash], depth: int, rank: Rank, parent: "_Node[T] | None") -> None:
        self.hashes = hashes
        self.depth = depth
        self.rank = rank
        self.parent = parent
        self.size = 0  # prompts below
        self.children: dict[BlockHash, Leaf[T] | _Node[T]] = {}  # by their next block; a prompt that ends here has none
        self.heap: list[tuple[Rank, int, Leaf[T] | _Node[T]]] = []
        self.num_pushed = 0

    def hold(self, child: "Leaf[T] | _Node[T]") -> None:
        """Have an entry directly below this node, which is in the tree already or is being put into it."""
        child.parent = self
        if child.depth > self.depth:
            self.children[child.hashes[self.depth]] = child
        self.push(child)

    def push(self, child: "Leaf[T] | _Node[T]") -> None:
        # The number is there so that it never comes to comparing children.
        self.num_pushed += 1
        heappush(self.heap, (child.rank, self.num_pushed, child))
        if len(self.heap) > _MOST_STALE * (self.size + 16):
            self.heap = [entry for entry in self.heap if self._is_current(entry)]
            heapify(self.heap)

    def towards(self, hashes: Sequence[BlockHash]) -> "Leaf[T] | _Node[T] | None":
        """The entry directly below that goes on as a prompt does, which agrees so far and may end here."""
        return self.children.get(hashes[self.depth]) if len(hashes) > self.depth else None

    def first(self) -> "Leaf[T] | _Node[T]":
        while not self._is_current(self.heap[0]):
            heappop(self.heap)
        return self.heap[0][2]

    def _is_current(self, entry: "tuple[Rank, int, Leaf[T] | _Node[T]]") -> bool:
        rank, _, child = entry
        return child.size > 0 and child.parent is self and child.rank == rank


class PrefixTree(Generic[T]):
    """Hands out prompts depth first: next, the one that has most blocks in common with the last. Of several, the first
    by rank, where a node has the rank of the first below it. Prompts may come and go at any time.
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node((), 0, (0, 0), None)
        self._last: Sequence[BlockHash] = ()

    def __len__(self) -> int:
        return self._root.size

    def add(self, leaf: Leaf[T]) -> None:
        """Put a prompt in its place."""
        leaf.size = 1
        node = self._root
        node.size += 1
        while (child := node.towards(leaf.hashes)) is not None:
            common = _common_blocks(child.hashes, leaf.hashes, node.depth + 1, child.depth)
            if isinstance(child, Leaf) or common < child.depth:
                child = self._part(node, child, common)
            if leaf.rank < child.rank:
                child.rank = leaf.rank
                node.push(child)
            node = child
            node.size += 1
        node.hold(leaf)

    def take(self) -> T:
        """Remove the next prompt and return its value; there must be one."""
        entry: Leaf[T] | _Node[T] = self._root
        while isinstance(entry, _Node):
            # Along the last prompt as far as it goes: a child that begins with its next block shares more of it than
            # all its siblings. From there on, by rank.
            entry = entry.towards(self._last) or entry.first()
        self.remove(entry)
        self._last = entry.hashes
        return entry.value

    def remove(self, leaf: Leaf[T]) -> None:
        """Take a prompt out of the tree that is in it."""
        leaf.size = 0
        entry: Leaf[T] | _Node[T] = leaf
        while (parent := entry.parent) is not None:
            if not entry.size and entry.depth > parent.depth:
                del parent.children[entry.hashes[parent.depth]]
            parent.size -= 1
            if isinstance(entry, _Node) and entry.size and entry.rank == leaf.rank:
                entry.rank = entry.first().rank
                parent.push(entry)
            entry = parent
        if not self._root.size:
            self._root.heap.clear()

    def _part(self, node: _Node[T], child: "Leaf[T] | _Node[T]", depth: int) -> _Node[T]:
        """Put a new node between two, where a prompt leaves the way from one to the other."""
        fork: _Node[T] = _Node(child.hashes, depth, child.rank, node)
        fork.size = child.size
        fork.hold(child)
        node.hold(fork)
        return fork


def _common_blocks(one: Sequence[BlockHash], other: Sequence[BlockHash], least: int, most: int) -> int:
    """How many blocks two prompts have in common: at least `least`, and counted up to `most`."""
    most = min(most, len(other))
    if one[most - 1] == other[most - 1]:
        return most
    while least < most - 1:
        middle = (least + most) // 2
        if one[middle - 1] == other[middle - 1]:
            least = middle
        else:
            most = middle
    return least
