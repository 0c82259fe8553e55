"""Every Triton kernel against its definition: for each case three seeds, in memory that torch poisons.

A case computes both sides on the device, from numbers made on the CPU, so that a seed means the same on every machine.
The first seed of all cases comes before the others: it compiles, and says most.
"""

import pkgutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

import kernels.triton
from kernels import reference, reference_blocks, reference_inputs
from kernels.cache import KVCache, allocate_kv_cache
from kernels.reference import QueryKeyNorms
from kernels.reference_blocks import StagedBlocks, allocate_staged_blocks
from kernels.reference_inputs import PLACEHOLDER, InputTensors, RowState, StepRows
from kernels.triton import activations, blocks, inputs, kv, norms
from tests.gpu.attention_cases import attention_cases
from tests.gpu.cases import Case, Setting, close, equal
from tests.gpu.numbers import FLOAT8, ULP, Check, dtypes, randn, short, wants_float8
from tests.gpu.product_cases import product_cases
from tests.gpu.sampling_cases import sampling_cases
from tests.kernels.triton.kv_cases import check_same, poisoned_cache, some_slots
from tests.kernels.triton.poison import poisoned

SEEDS = (0, 1, 2)
# Modules without a kernel that is launched by itself: they are used by the others.
_WITHOUT_CASES = {"decode", "groups", "heads", "launch", "plan", "split_k", "tiles"}


def cases(setting: Setting) -> list[Case]:
    """All cases, seed by seed. A module of kernels that none of them is named after has one that says so."""
    makers = (attention_cases, _kv, product_cases, _norms, _activations, sampling_cases, _blocks, _inputs)
    checks = [named for make in makers for named in make(setting)]
    found = [Case(f"{name}, seed {seed}", partial(_checked, check, seed)) for seed in SEEDS for name, check in checks]
    named = {name.split(":")[0].split(".")[0] for name, _ in checks}
    modules = {module.name for module in pkgutil.iter_modules(kernels.triton.__path__)} - _WITHOUT_CASES
    return found + [Case(f"{module}: cases", _missing) for module in sorted(modules - named)]


def _missing() -> None:
    raise AssertionError("these kernels have no case here")


def _checked(check: Check, seed: int) -> None:
    torch.manual_seed(seed)
    with poisoned_memory():
        check()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it, memory that torch hands out is full of NaN and of the largest integers: what nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def _norms(setting: Setting) -> Iterator[tuple[str, Check]]:
    sizes = [(1, 7), (3, 576)] if setting.interpreted else [(1, 7), (3, 80), (130, 576), (33, 5120), (9, 16384)]

    def check(name: str, rows: int, size: int, dtype: torch.dtype) -> None:
        x, residual = (randn(setting, rows, size, dtype=dtype, scale=3) for _ in range(2))
        weight = randn(setting, size, dtype=dtype)
        arguments = (x, residual, weight) if name.startswith("add") else (x, weight)
        before = [argument.clone() for argument in arguments]
        got, wanted = (getattr(module, name)(*arguments, 1e-5) for module in (norms, reference))
        for argument, kept in zip(arguments, before, strict=True):
            equal(argument, kept)
        if name.startswith("add"):
            equal(got[1], wanted[1])
            got, wanted = got[0], wanted[0]
        close(got, wanted, ULP[dtype], ULP[dtype] * 1e-2)

    for name in ("rms_norm", "add_rms_norm", "rms_norm_float32", "add_rms_norm_float32"):
        for rows, size in sizes:
            for dtype in dtypes(setting):
                yield f"norms.{name}: {rows}x{size} {short(dtype)}", partial(check, name, rows, size, dtype)

    def check_float8(rows: int, size: int) -> None:
        wants_float8(setting)
        x, residual, weight = (randn(setting, *shape) for shape in ((rows, size), (rows, size), (size,)))
        got = norms.add_rms_norm_float8(x, residual, weight, 1e-5, in_float32=True)
        wanted = reference.add_rms_norm_float8(x, residual, weight, 1e-5, in_float32=True)
        close(got[1], wanted[1], 2 * ULP[x.dtype])
        close(got[0].float(), wanted[0].float(), 0.13, 2**-9)
        equal(got[2], wanted[2])

    for rows, size in sizes:
        yield f"norms.add_rms_norm_float8: {rows}x{size}", partial(check_float8, rows, size)


def _activations(setting: Setting) -> Iterator[tuple[str, Check]]:
    sizes = [(2, 48), (1, 1025)] if setting.interpreted else [(1, 1), (3, 1025), (130, 2880), (33, 14336)]

    def check(name: str, arguments: tuple[float, ...], rows: int, size: int, dtype: torch.dtype) -> None:
        x = randn(setting, rows, 2 * size, dtype=dtype, scale=4)
        got, wanted = (getattr(module, name)(x, *arguments) for module in (activations, reference))
        # Where a gate is all but shut the definition itself has few right bits.
        close(got, wanted, max(2 * ULP[dtype], 1e-5), 1e-5)

    swiglu = (1.702, 7.0)
    for name, arguments in {
        "silu_and_mul": (),
        "gelu_and_mul": (),
        "gelu_tanh_and_mul": (),
        "clamped_swiglu": swiglu,
    }.items():
        for rows, size in sizes:
            for dtype in dtypes(setting):
                label = f"activations.{name}: {rows}x{size} {short(dtype)}"
                yield label, partial(check, name, arguments, rows, size, dtype)


def _kv(setting: Setting) -> Iterator[tuple[str, Check]]:
    device = setting.device

    def check_write(kv_heads: int, head_dim: int, stored: torch.dtype) -> None:
        wants_float8(setting, stored)
        key, value = (randn(setting, 37, kv_heads, head_dim) for _ in range(2))
        slots = some_slots(37, 4, 32).to(device)
        cache, expected = (poisoned_cache(4, kv_heads, 32, head_dim, stored, device) for _ in range(2))
        kv.write_kv(key, value, cache.layer(0), slots)
        reference.write_kv(key, value, expected.layer(0), slots)
        check_same(cache, expected, slots)

    def check_projection(heads: tuple[int, int], dims: tuple[int, int], norm: bool, stored: torch.dtype) -> None:
        wants_float8(setting, stored)
        (num_heads, kv_heads), (head_dim, rotary_dim), rows = heads, dims, 5 if setting.interpreted else 67
        qkv = randn(setting, rows, (num_heads + 2 * kv_heads) * head_dim)
        weights = [1 + randn(setting, head_dim, scale=0.25) for _ in range(2)] if norm else [None, None]
        angles = (torch.rand(rows, rotary_dim // 2) * 6).to(device)
        slots = some_slots(rows, 6, 16).to(device)
        cache, expected = (poisoned_cache(6, kv_heads, 16, head_dim, stored, device) for _ in range(2))
        given = (qkv, QueryKeyNorms(*weights, 1e-5, False), (angles.cos(), angles.sin()))
        got = kv.write_qkv(*given, cache.layer(0), slots)
        wanted = reference.write_qkv(*given, expected.layer(0), slots)
        # A norm and a turn, each rounded once.
        close(got, wanted, 2 * ULP[qkv.dtype], 2 * ULP[qkv.dtype])
        check_same(cache, expected, slots, 2 * ULP[qkv.dtype])

    for stored in (setting.dtype, FLOAT8):
        for kv_heads, head_dim in [(1, 64), (3, 80)] if setting.interpreted else [(1, 64), (3, 80), (8, 128), (2, 256)]:
            yield (
                f"kv.write_kv: {kv_heads}x{head_dim} {short(stored)}",
                partial(check_write, kv_heads, head_dim, stored),
            )
        for heads, dims, norm in [
            ((7, 1), (64, 64), False),
            ((10, 2), (128, 128), True),
            ((9, 3), (80, 80), False),
            ((4, 4), (96, 48), True),
            ((2, 1), (256, 256), True),
        ]:
            label = f"kv.write_qkv: {heads[0]}:{heads[1]}x{dims[0]} turned {dims[1]}{' normed' * norm} {short(stored)}"
            yield label, partial(check_projection, heads, dims, norm, stored)


def _blocks(setting: Setting) -> Iterator[tuple[str, Check]]:
    num_blocks = 12

    def filled(dtype: torch.dtype) -> KVCache:
        cache = allocate_kv_cache(3, num_blocks, 16, 2, 36, dtype, setting.device)
        for tensor in cache.tensors:
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
        return cache

    def same(got: KVCache | StagedBlocks, wanted: KVCache | StagedBlocks) -> None:
        for one, other in zip(got.tensors, wanted.tensors, strict=True):
            equal(one.view(torch.uint8), other.view(torch.uint8))

    def check_copies(dtype: torch.dtype) -> None:
        cache = filled(dtype)
        expected = KVCache(*(tensor.clone() for tensor in cache.tensors))
        pairs = (torch.randperm(num_blocks - 1)[:10] + 1).view(-1, 2).to(setting.device)
        blocks.copy_blocks(cache, pairs)
        reference_blocks.copy_blocks(expected, pairs)
        same(cache, expected)

    def check_moves(dtype: torch.dtype) -> None:
        cache = filled(dtype)
        staged, expected_staged = (allocate_staged_blocks(cache, 6, setting.device) for _ in range(2))
        for tensor in (*staged.tensors, *expected_staged.tensors):
            tensor.view(torch.uint8).fill_(0x5A)
        expected = KVCache(*(tensor.clone() for tensor in cache.tensors))
        out, back = (torch.randperm(num_blocks - 1)[:10] + 1).int().to(setting.device).view(2, -1)
        blocks.gather_blocks(cache, out, staged)
        reference_blocks.gather_blocks(expected, out, expected_staged)
        same(staged, expected_staged)
        blocks.scatter_blocks(staged, cache, back)
        reference_blocks.scatter_blocks(expected_staged, expected, back)
        same(cache, expected)

    for dtype in (torch.float32, torch.bfloat16, FLOAT8):
        yield f"blocks.copy_blocks: {short(dtype)}", partial(check_copies, dtype)
        yield f"blocks.gather_blocks and scatter_blocks: {short(dtype)}", partial(check_moves, dtype)


def _inputs(setting: Setting) -> Iterator[tuple[str, Check]]:
    device = setting.device

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32).to(device)

    def room(num_tokens: int, num_seqs: int) -> InputTensors:
        flat = (poisoned(num_tokens, dtype=torch.int64, device=device) for _ in range(3))
        per_seq = (poisoned(size, dtype=torch.int32, device=device) for size in (num_seqs + 1, num_seqs))
        return InputTensors(*flat, *per_seq, poisoned(num_seqs, 326, dtype=torch.int32, device=device)[:, :300])

    def check(lengths: tuple[int, ...], padding: int) -> None:
        rows = RowState((1 + torch.randperm(6 * 326)).int().view(6, 326).to(device), integers(50_000, 6))
        num_seqs, num_tokens = len(lengths), sum(lengths)
        order = torch.randperm(6)[:num_seqs].int().to(device)
        starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        step = StepRows(order, starts, integers(60, num_seqs), integers(50_000, num_tokens))
        step.token_ids[lengths[0] - 1] = PLACEHOLDER
        got, wanted = (room(num_tokens + padding, num_seqs + padding) for _ in range(2))
        inputs.build_inputs(rows, step, 4, got)
        reference_inputs.build_inputs(rows, step, 4, wanted)
        for one, other in zip(got, wanted, strict=True):
            equal(one, other)
        advanced = RowState(*(tensor.clone() for tensor in rows))
        draws, sampled = integers(9, num_seqs), torch.arange(100, 109).to(device)
        inputs.advance_rows(rows, order, draws, sampled)
        reference_inputs.advance_rows(advanced, order, draws, sampled)
        for one, other in zip(rows, advanced, strict=True):
            equal(one, other)

    for lengths, padding in (((1, 1, 1), 5), ((1,), 0), ((1100, 1, 9, 2), 1)):
        yield f"inputs: {lengths} and {padding} padded", partial(check, lengths, padding)
