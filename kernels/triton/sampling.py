"""The largest of each row of logits, and draws by Gumbel noise.

A row is cut into chunks, each a program's, so that a handful of rows fills a card; a second kernel finds the largest of
the chunks. The noise is made where it is added, and lies in no memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import Specialisation, launch_for


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.largest`; each row of `logits` is contiguous."""
    return _best_chunk(*largest_by_chunk(logits))


def gumbel_argmax(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, floors: Tensor | None = None
) -> Tensor:
    """As `kernels.reference.gumbel_argmax`, or with floors as `kernels.reference_sampling.gumbel_argmax_above`.

    Each row of `logits` is contiguous.
    """
    maxima, _ = largest_by_chunk(logits)
    launch = launch_for("gumbel_argmax", logits.device)
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, launch.meta["CHUNK"])
    sums, places = _room_for_chunks(num_rows, num_chunks, logits.device)
    if num_rows:
        gumbel_kernel[(num_rows, num_chunks)](
            logits,
            maxima,
            temperatures,
            seeds,
            positions,
            floors,
            sums,
            places,
            logits.stride(0),
            vocab_size,
            maxima.shape[1],
            MAXIMA=triton.next_power_of_2(maxima.shape[1]),
            **launch.options,
        )
    return _best_chunk(sums, places)[1]


def largest_by_chunk(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each chunk of each row, float32, and its place in the row, int32: `[R, num_chunks]` each.

    NaN counts as inf, which is as bad.
    """
    num_rows, vocab_size = logits.shape
    launch = launch_for("largest", logits.device)
    num_chunks = triton.cdiv(vocab_size, launch.meta["CHUNK"])
    values, places = _room_for_chunks(num_rows, num_chunks, logits.device)
    if num_rows:
        largest_kernel[(num_rows, num_chunks)](logits, values, places, logits.stride(0), vocab_size, **launch.options)
    return values, places


def _room_for_chunks(num_rows: int, num_chunks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    return values, torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)


def _best_chunk(values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row of `values`, of equals the first, and its place as int64: `[R]` each."""
    num_rows, num_chunks = values.shape
    best = torch.empty(num_rows, dtype=torch.float32, device=values.device)
    place = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    if num_rows:
        best_chunk_kernel[(num_rows,)](
            values,
            places,
            best,
            place,
            num_chunks,
            BLOCK=triton.next_power_of_2(num_chunks),
            **launch_for("best_chunk", values.device).options,
        )
    return best, place


@triton.jit
def largest_kernel(logits_ptr, values_ptr, places_ptr, logits_stride, vocab_size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    value, place = tl.max(x, axis=0, return_indices=True)
    partial = row * tl.num_programs(1) + chunk
    tl.store(values_ptr + partial, value)
    tl.store(places_ptr + partial, chunk * CHUNK + place)


@triton.jit
def gumbel_kernel(
    logits_ptr,
    maxima_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    floors_ptr,
    sums_ptr,
    places_ptr,
    logits_stride,
    vocab_size,
    num_maxima,
    CHUNK: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    score = tl.div_rn(x - row_maximum(maxima_ptr, row, num_maxima, MAXIMA), tl.load(temperatures_ptr + row))
    if floors_ptr is not None:
        score = tl.where(score < tl.load(floors_ptr + row), float("-inf"), score)
    words = philox_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), chunk * CHUNK, CHUNK)
    total = score + gumbel_of_words(words)
    value, place = tl.max(tl.where(total == total, total, float("-inf")), axis=0, return_indices=True)
    partial = row * tl.num_programs(1) + chunk
    tl.store(sums_ptr + partial, value)
    tl.store(places_ptr + partial, chunk * CHUNK + place)


@triton.jit
def best_chunk_kernel(values_ptr, places_ptr, best_ptr, place_ptr, num_chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    best, winner = tl.max(values, axis=0, return_indices=True)
    tl.store(best_ptr + row, best)
    tl.store(place_ptr + row, tl.load(places_ptr + row * num_chunks + winner).to(tl.int64))


@triton.jit
def row_maximum(maxima_ptr, row, num_maxima, BLOCK: tl.constexpr):
    """Return the largest of a row's chunks, as `largest_by_chunk` found them."""
    chunk = tl.arange(0, BLOCK)
    return tl.max(tl.load(maxima_ptr + row * num_maxima + chunk, mask=chunk < num_maxima, other=float("-inf")), axis=0)


@triton.jit
def philox_words(seed, position, first, SIZE: tl.constexpr):
    """Return the random words, uint32, of the tokens from `first` on, a multiple of 4: those of `gumbel_noise`."""
    counter = (first // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
    zeros = counter * 0
    low, high = (position & 0xFFFFFFFF).to(tl.uint32) + zeros, ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + zeros
    word0, word1, word2, word3 = tl.philox(seed, counter, low, high, zeros)
    return tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))


@triton.jit
def gumbel_of_words(words):
    """As `kernels.reference.gumbel_of_words`."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # log1p(-u), by how much 1 - u was rounded: Triton has no log1p that its interpreter knows.
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * tl.div_rn(u, tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(exponential)


_LOGITS = ("fp32", "bf16", "fp16")

SPECIALISATIONS: tuple[Specialisation, ...] = (
    *(
        Specialisation(
            largest_kernel,
            "largest",
            {
                "logits_ptr": f"*{dtype}:16",
                "values_ptr": "*fp32:16",
                "places_ptr": "*i32:16",
                "logits_stride": "i32:16",
                "vocab_size": "i32:16",
            },
            hot=True,
            variant=dtype,
        )
        for dtype in _LOGITS
    ),
    *(
        Specialisation(
            gumbel_kernel,
            "gumbel_argmax",
            {
                "logits_ptr": f"*{dtype}:16",
                "maxima_ptr": "*fp32:16",
                "temperatures_ptr": "*fp32:16",
                "seeds_ptr": "*i64:16",
                "positions_ptr": "*i64:16",
                "floors_ptr": floors,
                "sums_ptr": "*fp32:16",
                "places_ptr": "*i32:16",
                "logits_stride": "i32:16",
                "vocab_size": "i32:16",
                "num_maxima": "i32",
                "MAXIMA": 32,
            },
            hot=True,
            variant=dtype + (" floors" if floors else ""),
        )
        for dtype, floors in (("fp32", "*fp32:16"), ("fp32", None), ("bf16", None), ("bf16", "*fp32:16"))
    ),
    Specialisation(
        best_chunk_kernel,
        "best_chunk",
        {
            "values_ptr": "*fp32:16",
            "places_ptr": "*i32:16",
            "best_ptr": "*fp32:16",
            "place_ptr": "*i64:16",
            "num_chunks": "i32",
            "BLOCK": 32,
        },
        hot=True,
    ),
)
