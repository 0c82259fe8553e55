import gc
import mmap
import sys
import weakref

import pytest
import torch

from kernels.huge_pages import Arena, empty_in_huge_pages

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
def test_a_vector_has_its_size_and_can_be_written_to_its_end(size: int) -> None:
    vector = empty_in_huge_pages(size, torch.uint8).fill_(7)
    assert vector.shape == (size,)
    assert (vector == 7).all()


@pytest.mark.skipif(sys.platform != "linux", reason="only there are huge pages asked for")
def test_a_large_vector_begins_with_a_huge_page() -> None:
    assert empty_in_huge_pages(3 * MIB, torch.uint8).data_ptr() % (2 * MIB) == 0


def test_vectors_of_an_arena_do_not_overlap_and_begin_on_cache_lines() -> None:
    arena = Arena()
    sizes = [1, 1000, 7 * MIB, 9 * MIB, 20 * MIB, 5, 40 * MIB, 3 * MIB]
    vectors = [arena.empty(size, torch.bfloat16) for size in sizes]
    for number, vector in enumerate(vectors):
        vector.fill_(number)
    assert [vector.numel() for vector in vectors] == sizes
    assert all(vector.data_ptr() % 64 == 0 for vector in vectors)
    assert [vector.unique().tolist() for vector in vectors] == [[number] for number in range(len(sizes))]


def test_small_vectors_of_an_arena_lie_side_by_side() -> None:
    arena = Arena()
    first, second = (arena.empty(100, torch.float32) for _ in range(2))
    assert second.data_ptr() - first.data_ptr() == 448


def test_a_chunk_is_freed_with_the_last_of_its_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory(mmap.mmap):
        pass

    chunks: list[weakref.ref[mmap.mmap]] = []

    def watched(*args: int, **options: int) -> mmap.mmap:
        memory = Memory(*args, **options)
        chunks.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(mmap, "mmap", watched)
    arena = Arena()
    vectors = [arena.empty(20 * MIB, torch.uint8) for _ in range(2)]
    first, second = chunks
    vectors.pop(0)
    gc.collect()
    assert first() is None
    assert second() is not None
    vectors.clear()
    gc.collect()
    # What is left of it is for the next ones.
    assert second() is not None
