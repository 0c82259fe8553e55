"""The block pool: references, the cache of hashed blocks, and the order of eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool, block_hash, root_hash


def keys(count, salt=b""):
    chain = [root_hash(salt)]
    for index in range(count):
        chain.append(block_hash(chain[-1], [index, index + 1]))
    return chain[1:]


def fill(pool, hashes):
    blocks = pool.allocate(len(hashes))
    for block, key in zip(blocks, hashes, strict=True):
        pool.register(block, key)
    return blocks


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert 0 not in pool.allocate(4)
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_a_hash_names_the_tokens_the_order_all_before_and_the_salt():
    root = root_hash(b"")
    names = {
        block_hash(root, [1, 2]),
        block_hash(root, [2, 1]),
        block_hash(root, [1, 2, 0]),
        block_hash(block_hash(root, [1, 2]), [1, 2]),
        block_hash(root_hash(b"tenant"), [1, 2]),
    }
    assert len(names) == 5
    assert all(len(name) == 16 for name in names)
    assert block_hash(root, [1, 2]).hex() == "0f54826c1d744fb1dfa00fe74398138f", "the same in every process"


def test_a_released_block_is_found_again_and_revived():
    pool = BlockPool(5)
    hashes = keys(3)
    blocks = fill(pool, hashes)
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.match_prefix(hashes) == blocks
    pool.acquire(blocks[:2])
    assert pool.num_free == 2
    pool.check_integrity()


def test_only_an_unbroken_run_from_the_start_is_a_match():
    pool = BlockPool(5)
    hashes = keys(3)
    blocks = pool.allocate(3)
    pool.register(blocks[0], hashes[0])
    pool.register(blocks[2], hashes[2])
    assert pool.match_prefix(hashes) == blocks[:1]
    assert pool.match_prefix(hashes[1:]) == []


def test_blocks_without_a_hash_are_reused_before_cached_ones_and_tails_before_heads():
    pool = BlockPool(7)
    hashes = keys(3)
    cached = fill(pool, hashes)
    plain = pool.allocate(3)
    pool.release(cached)
    pool.release(plain)
    assert pool.allocate(3) == plain
    assert pool.allocate(3) == cached[::-1]
    assert pool.match_prefix(hashes) == []


def test_the_least_recently_released_is_evicted_first():
    pool = BlockPool(4)
    first, second, third = keys(1, b"1"), keys(1, b"2"), keys(1, b"3")
    blocks = {name: fill(pool, name)[0] for name in map(tuple, (first, second, third))}
    for block in blocks.values():
        pool.release([block])
    pool.acquire([blocks[tuple(first)]])
    pool.release([blocks[tuple(first)]])
    pool.allocate(1)
    assert pool.match_prefix(first)
    assert not pool.match_prefix(second)


def test_of_two_blocks_with_the_same_contents_the_first_stays_the_one_that_is_found():
    pool = BlockPool(4)
    (key,) = keys(1)
    first, second = pool.allocate(2)
    pool.register(first, key)
    pool.register(second, key)
    assert pool.match_prefix([key]) == [first]
    pool.release([first, second])
    pool.check_integrity()


def test_a_block_released_too_often_is_an_error():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([block])


def test_the_integrity_check_sees_a_leaked_block():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool._blocks[block].ref = 0
    with pytest.raises(RuntimeError, match="without holders is not in the free list"):
        pool.check_integrity()


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables that share prefixes come and go, against a plain model of who holds what."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(9)
        self.tables = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def start_a_table(self, tokens):
        chain = [root_hash(b"")]
        for token in tokens:
            chain.append(block_hash(chain[-1], [token]))
        hashes = chain[1:]
        hits = self.pool.match_prefix(hashes)
        need = len(hashes) - len(hits)
        if need > self.pool.num_free - self.pool.num_free_among(hits):
            return
        self.pool.acquire(hits)
        table = hits + self.pool.allocate(need)
        for block, key in zip(table, hashes, strict=True):
            self.pool.register(block, key)
        assert len(set(table)) == len(table)
        self.tables.append(table)

    @rule(count=st.integers(1, 3))
    def take_blocks_without_contents(self, count):
        if count <= self.pool.num_free:
            self.tables.append(self.pool.allocate(count))

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def release_a_table(self, data):
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def every_block_is_accounted_for(self):
        self.pool.check_integrity()
        expected = {}
        for block in (block for table in self.tables for block in table):
            expected[block] = expected.get(block, 0) + 1
        assert self.pool.references() == expected
        assert self.pool.num_free == self.pool.num_usable - len(expected)

    def teardown(self):
        for table in self.tables:
            self.pool.release(table)
        assert self.pool.num_free == self.pool.num_usable


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
