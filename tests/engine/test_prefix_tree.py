"""The radix tree hands out prompts depth first: held against the definition of that, over plain lists."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import block_hash, root_hash
from engine.prefix_tree import Leaf, PrefixTree

RANKS = 4


def hashes(blocks):
    """The hashes of a prompt of one-token blocks."""
    chain = [root_hash(b"")]
    for token in blocks:
        chain.append(block_hash(chain[-1], [token]))
    return chain[1:]


def num_common(one, other):
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class PlainTree:
    """The prompts in a list. Of those that share most with the last one, the next is found block by block: by the rank
    of the best that begins so.
    """

    def __init__(self):
        self.waiting = {}  # rank -> blocks
        self.last = ()

    def take(self):
        most = max(num_common(blocks, self.last) for blocks in self.waiting.values())
        nearest = {rank: blocks for rank, blocks in self.waiting.items() if num_common(blocks, self.last) == most}
        # By rank alone: the best of them all is the best below each node on the way to it.
        rank = min(nearest)
        self.last = self.waiting.pop(rank)
        return rank


prompts = st.lists(st.integers(0, 2), max_size=5)
steps = st.lists(st.one_of(st.tuples(st.integers(0, RANKS), prompts), st.none(), st.integers(0, 99)), max_size=60)


@settings(deadline=None, max_examples=500)
@given(steps)
def test_next_is_the_first_by_rank_of_those_that_share_most_with_the_last(steps):
    """A tuple of a step is a prompt that comes, None asks for the next, and a number takes one out."""
    tree, plain, leaves = PrefixTree(), PlainTree(), {}
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            rank = (step[0], number)
            leaves[rank] = Leaf(rank, hashes(step[1]), rank)
            tree.add(leaves[rank])
            plain.waiting[rank] = step[1]
        elif plain.waiting and step is None:
            rank = tree.take()
            assert rank == plain.take()
            del leaves[rank]
        elif plain.waiting:
            rank = sorted(plain.waiting)[step % len(plain.waiting)]
            del plain.waiting[rank]
            tree.remove(leaves.pop(rank))
        assert len(tree) == len(plain.waiting)
    while plain.waiting:
        assert tree.take() == plain.take()


def test_a_tree_that_is_filled_and_emptied_for_ever_keeps_nothing():
    tree = PrefixTree()
    tree.add(Leaf("stays", hashes([0]), (9, 0)))
    for number in range(1, 5_000):
        leaf = Leaf(number, hashes([number % 7, number % 5]), (number % 3, number))
        tree.add(leaf)
        tree.remove(leaf)
    assert len(tree) == 1
    assert len(tree._root.heap) < 100
    assert len(tree._root.children) == 1
    assert tree.take() == "stays"
