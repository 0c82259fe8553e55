"""Paged attention against its definition: mixed batches, decode rows alone and in groups, and plans for graphs."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference
from kernels.cache import AttentionBatch
from kernels.triton import attention
from kernels.triton.launch import architecture_of
from kernels.triton.plan import SEGMENT
from tests.gpu.cases import LeftOut, Setting, close, equal
from tests.kernels.batches import Chunk
from tests.kernels.triton.attention_cases import (
    MIXED,
    PLAIN,
    Variant,
    batch_of,
    chunks_of,
    family,
    filled_cache,
    padded,
    queries_of,
)

FLOAT8 = torch.float8_e4m3fn
# Weights are rounded to the query's dtype before they meet values of a few units.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_SMALL_MIX = [(70, 1), (40, 9), (300, 1), (1, 1)]
# Long enough that a card splits rows, and that a window begins behind many tiles.
_LARGE_MIX = [*MIXED, (5000, 1), (2049, 1), (1500, 300), (SEGMENT, 1), (SEGMENT + 1, 1)]


class Shape(NamedTuple):
    """Heads, the cache they read, and what a family adds; `stored` None is the dtype of models here."""

    heads: tuple[int, int]
    head_dim: int
    block_size: int = 32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    stored: torch.dtype | None = None

    @property
    def label(self) -> str:
        stored = None if self.stored is None else str(self.stored).removeprefix("torch.")
        window = f"window {self.window}" if self.window else None
        parts = (f"{self.heads[0]}:{self.heads[1]}x{self.head_dim}", f"blocks of {self.block_size}", window, stored)
        return ", ".join(filter(None, (*parts, "softcap" * bool(self.softcap), "sinks" * self.sinks)))


# The most common first: 32:8x128 is Llama's, 16:8x128 Qwen3's, 14:2x64 Qwen2's, 64:8x64 with sinks gpt-oss's.
SHAPES = (
    Shape((32, 8), 128),
    Shape((14, 2), 64, 16),
    Shape((32, 8), 128, stored=FLOAT8),
    Shape((16, 8), 128, 128, window=300),
    Shape((5, 1), 80),
    Shape((8, 4), 256, 16, window=100, softcap=50.0),
    Shape((64, 8), 64, window=128, sinks=True),
    Shape((4, 4), 96, 64),
    Shape((7, 1), 64, stored=FLOAT8, window=65, softcap=20.0, sinks=True),
    Shape((9, 3), 64, 16, stored=torch.float32),
)
_INTERPRETED = (Shape((14, 2), 64, 16), Shape((5, 1), 80, window=33, softcap=5.0, sinks=True))


def attention_cases(setting: Setting) -> Iterator[tuple[str, Callable[[], None]]]:
    """Names, and what raises if the kernels differ from the definition."""
    shapes = _INTERPRETED if setting.interpreted else SHAPES
    mix = _SMALL_MIX if setting.interpreted else _LARGE_MIX
    for shape in shapes:
        yield f"attention.paged_attention: {shape.label}", partial(_check_mix, setting, shape, mix)
    for shape in (shapes[0], *(() if setting.interpreted else (shapes[2],))):
        yield f"attention.paged_attention: shared prefix, {shape.label}", partial(_check_shared, setting, shape)
        yield f"attention.refill_plan: {shape.label}", partial(_check_reserved, setting, shape)


def _dtypes(setting: Setting, shape: Shape) -> tuple[torch.dtype, torch.dtype]:
    """Those of the query and of the cache."""
    stored = shape.stored or setting.dtype
    if stored == FLOAT8 and not setting.interpreted and architecture_of(setting.device) < 89:
        raise LeftOut("this card has no float8")
    return (torch.float32 if stored == torch.float32 else setting.dtype), stored


def _attend(query: Tensor, kv: object, batch: AttentionBatch, variant: Variant) -> Tensor:
    plan = attention.plan_attention(batch, kv, query.shape[1], variant.window)
    scale = query.shape[2] ** -0.5
    return attention.paged_attention(query, kv.layer(0), plan, scale, variant.softcap, variant.sinks)


def _check(setting: Setting, shape: Shape, chunks: list[Chunk]) -> None:
    dtype, stored = _dtypes(setting, shape)
    kv = filled_cache(chunks, shape.block_size, shape.heads[1], shape.head_dim, stored, setting.device)
    query = queries_of(chunks, shape.heads[0], shape.head_dim, dtype, setting.device)
    sinks = torch.randn(shape.heads[0]).to(setting.device) if shape.sinks else None
    variant = Variant(shape.window, shape.softcap, sinks)
    batch = batch_of(chunks, shape.block_size, setting.device)
    wanted = reference.paged_attention(query, kv.layer(0), batch, query.shape[2] ** -0.5, *variant)
    close(_attend(query, kv, batch, variant), wanted, _TOLERANCE[dtype], _TOLERANCE[dtype])


def _check_mix(setting: Setting, shape: Shape, mix: list[tuple[int, int]]) -> None:
    _check(setting, shape, chunks_of(mix, shape.block_size))


def _check_shared(setting: Setting, shape: Shape) -> None:
    # A prefix that ends within a segment, and rows of which some end in it.
    prefix = SEGMENT + 2 * shape.block_size if setting.interpreted else 4 * SEGMENT + 2 * shape.block_size
    own = [1, 30, 7] if setting.interpreted else [1, 30, 300, 40, 7, 256, 9, 9, 1000]
    _check(setting, shape, family(prefix, own, shape.block_size))


def _check_reserved(setting: Setting, shape: Shape) -> None:
    """One plan for several steps, as a CUDA graph has it: the same bits as with a plan made for each."""
    dtype, stored = _dtypes(setting, shape)
    device, room = setting.device, 6
    chunks = chunks_of([(90, 1), (600, 1), (SEGMENT, 1), (1, 1)], shape.block_size)
    kv = filled_cache(chunks, shape.block_size, shape.heads[1], shape.head_dim, stored, device)
    query = queries_of([*chunks, *chunks], shape.heads[0], shape.head_dim, dtype, device)[:room]
    tables = torch.zeros(room, -(-1024 // shape.block_size), dtype=torch.int32, device=device)
    integers = torch.zeros(room + 1, dtype=torch.int32, device=device)
    empty = AttentionBatch(integers, integers[1:], tables, integers[1:].long(), (1,) * room, (0,) * room)
    plan = attention.reserve_plan(empty, kv, shape.heads[0], None, max_context_len=1024)
    for step in (chunks, chunks[:1], chunks[1:]):
        batch = batch_of(step, shape.block_size, device)
        wanted = _attend(query[: len(step)], kv, batch, PLAIN)
        tables[: len(step), : batch.block_tables.shape[1]] = batch.block_tables
        attention.refill_plan(plan, padded(batch, room - len(step)), kv, shape.heads[0])
        got = attention.paged_attention(query, kv.layer(0), plan, shape.head_dim**-0.5)
        equal(got[: len(step)], wanted)
        equal(got[len(step) :], torch.zeros_like(got[len(step) :]))
