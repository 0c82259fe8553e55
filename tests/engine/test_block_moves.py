"""Moves of blocks, in runs and one by one: what is where in the end, in what order, and through how much memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_moves import BatchedMoves, SingleMoves, num_staged_blocks, runs
from engine.plan import BlockMove, MoveKind
from kernels import reference_blocks
from kernels.cache import KVCache, allocate_kv_cache, copy_block
from kernels.ops import BlockMoves
from kernels.reference_blocks import allocate_staged_blocks
from tests.engine.late_device import LateDevice

CPU = torch.device("cpu")
NUM_BLOCKS = 7
NUM_HOST_BLOCKS = 5
COPY, OUT, IN = MoveKind


class CountedMoves:
    """The definition of moves in one launch, which refuses what it does not define, and counts its launches."""

    def __init__(self):
        self.launches = []
        self.table = BlockMoves(lambda kv: True, self.copy, self.gather, self.scatter)

    def copy(self, kv, pairs):
        sources, targets = map(set, pairs.T.tolist())
        assert len(targets) == len(pairs), "a block is written twice"
        assert not sources & targets, "a block is read and written"
        self.launches.append("copy")
        reference_blocks.copy_blocks(kv, pairs)

    def gather(self, kv, block_ids, staged):
        self.launches.append("gather")
        reference_blocks.gather_blocks(kv, block_ids, staged)

    def scatter(self, staged, kv, block_ids):
        assert len(set(block_ids.tolist())) == len(block_ids), "a block is written twice"
        self.launches.append("scatter")
        reference_blocks.scatter_blocks(staged, kv, block_ids)


def filled(num_blocks, dtype=torch.float32):
    """A cache whose blocks are all different."""
    kv = allocate_kv_cache(2, num_blocks, 4, 1, 6, dtype, CPU)
    for seed, tensor in enumerate(kv.tensors):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(seed)))
    return kv


def copied(kv):
    return KVCache(*(tensor.clone() for tensor in kv.tensors))


def same(one, other):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def one_by_one(kv, host, moves):
    for kind, src, dst in moves:
        source, target = {COPY: (kv, kv), OUT: (kv, host), IN: (host, kv)}[kind]
        copy_block(source, src, target, dst)


def pools(dtype=torch.float32):
    """Two pairs of pools with the same contents: the first as moves one by one have them, the second as runs do."""
    kv, host = filled(NUM_BLOCKS, dtype), filled(NUM_HOST_BLOCKS, dtype)
    staged = allocate_staged_blocks(kv, NUM_HOST_BLOCKS, CPU)
    for stored, tensor in zip(staged.tensors, host.tensors, strict=True):
        stored.copy_(tensor.movedim(2, 0))
    return (kv, host), (copied(kv), staged)


def check_moves(*plans, num_staged, seed=None, dtype=torch.float32):
    """Make the moves of these plans in both ways, and return what was launched."""
    (kv, host), (moved, moved_host) = pools(dtype)
    device, counted = LateDevice(seed), CountedMoves()
    mover = BatchedMoves(moved, device, counted.table, moved_host, num_staged)
    for moves in plans:
        mover.move(iter(moves))
        one_by_one(kv, host, moves)
    device.synchronize()
    assert same(moved.tensors, kv.tensors)
    assert same(moved_host.tensors, [tensor.movedim(2, 0) for tensor in host.tensors])
    return counted.launches


BLOCK, HOST_BLOCK = st.integers(1, NUM_BLOCKS - 1), st.integers(1, NUM_HOST_BLOCKS - 1)
MOVE = st.one_of(
    st.tuples(BLOCK, BLOCK).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: BlockMove(COPY, *pair)),
    st.builds(BlockMove, st.just(OUT), BLOCK, HOST_BLOCK),
    st.builds(BlockMove, st.just(IN), HOST_BLOCK, BLOCK),
)
# Of each kind several in a row, as a plan has them.
STRETCHES = st.lists(MOVE, max_size=6).map(lambda moves: sorted(moves, key=lambda move: move.kind.value))
MOVES = st.lists(STRETCHES, max_size=5).map(lambda stretches: [move for moves in stretches for move in moves])


@settings(max_examples=300, derandomize=True, deadline=None)
@given(MOVES, MOVES, st.integers(1, 4), st.one_of(st.none(), st.integers(0, 9)))
def test_moves_in_runs_are_the_moves_one_by_one(first, second, num_staged, seed):
    check_moves(first, second, num_staged=num_staged, seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_scales_move_with_what_they_scale(dtype):
    moves = [BlockMove(OUT, 1, 2), BlockMove(OUT, 2, 3), BlockMove(IN, 1, 4), BlockMove(COPY, 4, 5)]
    check_moves(moves, num_staged=2, dtype=dtype)


def test_moves_that_do_not_depend_on_each_other_are_one_launch():
    copies = [BlockMove(COPY, 1, 2), BlockMove(COPY, 1, 3), BlockMove(COPY, 4, 5)]
    swaps = [BlockMove(OUT, src, dst) for src, dst in ((5, 1), (2, 2), (5, 4))]
    back = [BlockMove(IN, src, dst) for src, dst in ((1, 6), (4, 1))]
    assert check_moves([*copies, *swaps, *back], num_staged=3) == ["copy", "gather", "scatter"]


@pytest.mark.parametrize(
    "moves",
    [
        [BlockMove(COPY, 1, 2), BlockMove(COPY, 2, 3)],
        [BlockMove(COPY, 1, 2), BlockMove(COPY, 3, 1)],
        [BlockMove(COPY, 1, 2), BlockMove(COPY, 3, 2)],
        [BlockMove(OUT, 1, 2), BlockMove(OUT, 3, 2)],
        [BlockMove(IN, 1, 2), BlockMove(IN, 3, 2)],
    ],
    ids=["reads what was written", "writes what was read", "writes again", "stores again", "loads again"],
)
def test_a_move_that_must_come_later_is_in_the_next_run(moves):
    assert len(check_moves(moves, num_staged=4)) == 2


def test_numbers_of_different_pools_are_different_blocks():
    moves = [BlockMove(OUT, 1, 2), BlockMove(OUT, 2, 1), BlockMove(OUT, 3, 3)]
    assert [len(run) for run in runs(moves, {OUT: 4})] == [3]


def test_no_more_blocks_are_on_their_way_than_the_buffer_holds():
    moves = [BlockMove(OUT, 1 + n % 6, 1 + n % 4) for n in range(4)] + [BlockMove(IN, 1 + n, 6 - n) for n in range(3)]
    assert check_moves(moves, num_staged=2) == ["gather", "gather", "scatter", "scatter"]


def test_the_buffer_is_bounded_and_holds_one_block_at_least():
    assert num_staged_blocks(2 << 20, 1000) == 32
    assert num_staged_blocks(2 << 20, 5) == 5
    assert num_staged_blocks(1 << 30, 1000) == 1
    assert num_staged_blocks(2 << 20, 0) == 0


def test_neighbours_on_the_host_are_one_transfer(monkeypatch):
    _, (kv, host) = pools()
    mover = BatchedMoves(kv, LateDevice(), CountedMoves().table, host, 4)
    transfers, mover._device.submit = [], lambda work: transfers.append(work.args[1])
    mover.move([BlockMove(OUT, src, dst) for src, dst in ((1, 2), (5, 3), (3, 4), (4, 1))])
    assert transfers[-1] == [(slice(0, 3), slice(2, 5)), (slice(3, 4), slice(1, 2))]


def test_moves_one_by_one_keep_their_order_on_a_late_device():
    (kv, host), _ = pools()
    moved, moved_host, device = copied(kv), copied(host), LateDevice()
    moves = [BlockMove(COPY, 1, 2), BlockMove(OUT, 2, 1), BlockMove(COPY, 3, 2), BlockMove(IN, 1, 4)]
    SingleMoves(moved, device, moved_host).move(moves)
    device.synchronize()
    one_by_one(kv, host, moves)
    assert same(moved.tensors, kv.tensors)
    assert same(moved_host.tensors, host.tensors)
