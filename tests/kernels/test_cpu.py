"""The compiled kernels of CPUs: against the definition, in both instruction sets, and where they cannot be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cache import LayerKV, allocate_kv_cache
from kernels.cpu import attention, extension, glue, sampling
from kernels.reference import QueryKeyNorms
from tests.kernels.batches import Chunk, flat_batch
from tests.kernels.test_attention import Variant, attend, filled_cache

pytestmark = pytest.mark.skipif(not extension.is_served(), reason="no compiler, or no processor that is served")

ROOT = Path(__file__).parents[2]
ROUNDINGS = 2**-6
"""Sums are added up in another order than torch's, which may tip a rounding, and that the next one."""
SIZES = [1, 15, 16, 17, 64, 80, 576, 4096]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def unaligned(x: Tensor) -> Tensor:
    """The same numbers, beginning two bytes past where an allocator would put them."""
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return buffer.copy_(x)


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_norms_agree_with_the_definition(rows: int, size: int) -> None:
    x, residual, weight = normal(rows, size), normal(rows, size), normal(size)
    defined = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(glue.rms_norm(x, weight, 1e-5), defined, atol=0, rtol=ROUNDINGS)
    (mine, total), (defined, sums) = (
        norm(x, residual, weight, 1e-5) for norm in (glue.add_rms_norm, reference.add_rms_norm)
    )
    assert torch.equal(total, sums)
    torch.testing.assert_close(mine, defined, atol=0, rtol=ROUNDINGS)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wide_weight", [False, True])
def test_norms_in_float32_agree_with_the_definition(size: int, wide_weight: bool) -> None:
    x, residual = normal(5, size), normal(5, size)
    weight = torch.randn(size) if wide_weight else normal(size)
    defined = reference.rms_norm_float32(x, weight, 1e-5)
    torch.testing.assert_close(glue.rms_norm_float32(x, weight, 1e-5), defined, atol=0, rtol=ROUNDINGS)
    for mine, of_definition in zip(
        glue.add_rms_norm_float32(x, residual, weight, 1e-5),
        reference.add_rms_norm_float32(x, residual, weight, 1e-5),
        strict=True,
    ):
        torch.testing.assert_close(mine, of_definition, atol=0, rtol=ROUNDINGS)


def test_the_heads_of_a_fused_projection_are_normed_where_they_lie() -> None:
    heads = normal(7, 3 * 64)[:, 64:128].unflatten(1, (1, 64))
    weight = normal(64)
    assert torch.equal(glue.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 20), (128, 64), (96, 8), (256, 128), (16, 4)])
def test_rotations_have_the_bits_of_the_definition(head_dim: int, half: int) -> None:
    projected = normal(9, 6 * head_dim)
    query, key = (part.unflatten(1, (-1, head_dim)) for part in projected.split((4 * head_dim, 2 * head_dim), dim=1))
    angles = torch.randn(9, half)
    mine = glue.rotary_embedding(query, key, angles.cos(), angles.sin())
    defined = reference.rotary_embedding(query, key, angles.cos(), angles.sin())
    assert all(torch.equal(one, other) for one, other in zip(mine, defined, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_gates_agree_with_the_definition(size: int) -> None:
    gate_up = normal(5, 2 * size) * 4
    gate_up[0, :size] = 200
    gate_up[1, :size] = -200
    torch.testing.assert_close(glue.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), atol=1e-30, rtol=ROUNDINGS)
    # What torch has of negative gates is a small difference of large numbers.
    for mine, defined in (
        (glue.gelu_and_mul, reference.gelu_and_mul),
        (glue.gelu_tanh_and_mul, reference.gelu_tanh_and_mul),
    ):
        torch.testing.assert_close(mine(gate_up), defined(gate_up), atol=2e-5, rtol=ROUNDINGS)


# Slots of six tokens in blocks of 16: an odd one whose partner is there already, both of a pair, the ends of two
# blocks, one that is nobody's, and one whose partner comes later.
SLOTS = torch.tensor([17, 46, 47, 48, -1, 70])


def filled_layer(num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> LayerKV:
    kv = allocate_kv_cache(1, 6, 16, num_kv_heads, head_dim, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    for tensor in kv.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 10)
    return kv.layer(0)


def in_the_definitions_layout(layer: LayerKV) -> LayerKV:
    """The keys and values of blocks in the layout of kv_blocks.h."""
    blocks, heads, block_size, head_dim = layer.key.shape
    key = layer.key.view(blocks, heads, head_dim // 2, block_size, 2).transpose(2, 3).reshape(layer.key.shape)
    value = layer.value.view(blocks, heads, block_size // 2, head_dim, 2).transpose(3, 4).reshape(layer.value.shape)
    return layer._replace(key=key, value=value)


@pytest.mark.parametrize("norms", [None, "heads", "projection", "heads in float32"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "half"),
    [(9, 3, 64, 32), (14, 2, 64, 32), (4, 4, 80, 20), (2, 1, 256, 128), (2, 2, 96, None), (1, 1, 16, 4)],
)
def test_a_projection_is_normed_turned_and_stored_as_by_one_operation_after_the_other(
    num_heads: int, num_kv_heads: int, head_dim: int, half: int | None, norms: str | None
) -> None:
    wide = normal(len(SLOTS), (num_heads + 2 * num_kv_heads) * head_dim + 8)
    rotation = None
    if half is not None:
        angles = torch.randn(len(SLOTS), half)
        rotation = angles.cos(), angles.sin()
    spans = (1, 1) if norms != "projection" else (num_heads, num_kv_heads)
    weights = [normal(span * head_dim) if norms else None for span in spans]
    query_key_norms = QueryKeyNorms(*weights, eps=1e-6, in_float32=norms == "heads in float32")
    for qkv in (wide[:, :-8].contiguous(), wide[:, :-8], unaligned(wide[:, :-8])):
        mine, apart = filled_layer(num_kv_heads, head_dim), filled_layer(num_kv_heads, head_dim)
        query = attention.write_qkv(qkv, query_key_norms, rotation, mine, SLOTS)
        # The definition's norms add up in another order.
        kv_size = num_kv_heads * head_dim
        parts = qkv.split((num_heads * head_dim, kv_size, kv_size), dim=1)
        norm = glue.rms_norm_float32 if query_key_norms.in_float32 else glue.rms_norm
        normed = [
            part if weight is None else norm(part.unflatten(1, (-1, len(weight))), weight, 1e-6).flatten(1)
            for part, weight in zip(parts[:2], weights, strict=True)
        ]
        expected, key, value = (part.unflatten(1, (-1, head_dim)) for part in (*normed, parts[2]))
        if rotation:
            expected, key = glue.rotary_embedding(expected, key, *rotation)
        attention.write_kv(key, value, apart, SLOTS)
        assert torch.equal(query, expected)
        assert torch.equal(mine.key, apart.key)
        assert torch.equal(mine.value, apart.value)
        assert not torch.equal(mine.value, filled_layer(num_kv_heads, head_dim).value)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 256, 512])
def test_keys_and_values_are_quantised_as_the_definition_does(head_dim: int) -> None:
    key, value = normal(2, len(SLOTS), 3, head_dim)
    key[0, 0], key[1, 1], key[2, 2, 1:] = 0, 1e-39, 1e-30
    value[0, 0, 5], value[1, 1, 7], value[2, 2, 0] = torch.nan, -torch.inf, 3e38
    written = filled_layer(3, head_dim, torch.int8)
    defined = in_the_definitions_layout(written)
    defined = LayerKV(*(tensor.clone() for tensor in defined))
    attention.write_kv(key, value, written, SLOTS)
    # The definition writes zeros over the null block for what has no slot.
    reference.write_kv(key[SLOTS >= 0], value[SLOTS >= 0], defined, SLOTS[SLOTS >= 0])
    for mine, its in zip(in_the_definitions_layout(written), defined, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)
    assert written.value_scales.isnan().sum() == 2


def test_a_projection_is_quantised_as_its_keys_and_values_are() -> None:
    qkv, angles = normal(len(SLOTS), 15 * 64), torch.randn(len(SLOTS), 32)
    rotation, norms = (angles.cos(), angles.sin()), QueryKeyNorms(normal(64), normal(64), 1e-6, in_float32=False)
    mine, apart, narrow = (filled_layer(3, 64, dtype) for dtype in (torch.int8, torch.int8, torch.bfloat16))
    query = attention.write_qkv(qkv, norms, rotation, mine, SLOTS)
    assert torch.equal(query, attention.write_qkv(qkv, norms, rotation, narrow, SLOTS))
    places = SLOTS[SLOTS >= 0]
    key, value = (cache[places // 16, :, places % 16] for cache in in_the_definitions_layout(narrow)[:2])
    attention.write_kv(key, value, apart, places)
    for one, other in zip(mine, apart, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(mine.key, filled_layer(3, 64, torch.int8).key)


def test_a_model_in_float32_has_a_cache_of_int8() -> None:
    qkv, angles = torch.randn(len(SLOTS), 8 * 32), torch.randn(len(SLOTS), 16)
    rotation, norms = (angles.cos(), angles.sin()), QueryKeyNorms(None, torch.randn(32), 1e-6, in_float32=False)
    mine, apart = filled_layer(2, 32, torch.int8), filled_layer(2, 32, torch.int8)
    query = attention.write_qkv(qkv, norms, rotation, mine, SLOTS)
    expected, key, value = reference.split_qkv(qkv, norms, rotation, 2, 32)
    attention.write_kv(key, value, apart, SLOTS)
    assert query.dtype == torch.float32
    assert torch.equal(query, expected)
    assert all(torch.equal(one, other) for one, other in zip(mine, apart, strict=True))


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_over_int8_differs_from_the_definition_by_hardly_more_than_the_rounding_of_results(
    head_dim: int, window: int | None
) -> None:
    chunks = [Chunk(tuple(range(1, 40)), 600, 20), Chunk((41, 40), 20, 1)]
    batch, query = flat_batch(chunks, 16), normal(21, 14, head_dim)
    kv = filled_cache(chunks, 16, 2, head_dim, torch.int8)
    defined = reference.paged_attention(query.float(), kv.layer(0), batch, head_dim**-0.5, window)
    rounding = (defined.bfloat16().float() - defined).norm()
    assert (attend(query, kv, batch, Variant(window)).float() - defined).norm() < 1.01 * rounding


@pytest.mark.parametrize("poisoned", ["key", "value", "query"])
def test_with_int8_what_is_not_finite_spoils_those_that_see_it_and_nobody_else(poisoned: str) -> None:
    chunks = [Chunk((1, 2, 3, 4, 5, 6), 70, 20), Chunk((7, 8), 15, 2)]
    kv, query, batch = filled_cache(chunks, 16, 2, 64, torch.int8), normal(22, 6, 64), flat_batch(chunks, 16)
    before = attend(query, kv, batch)
    if poisoned == "query":
        query[5, 4, 3] = torch.nan
        spoilt = torch.zeros(22, 6, dtype=torch.bool)
        spoilt[5, 4] = True
    else:
        # The key at position 75 of the first sequence, in its fifth block: rows 5 to 19 see it, by the second KV head.
        kv.scales[0, int(poisoned == "value"), 5, 1, 75 % 16] = torch.nan
        spoilt = torch.zeros(22, 6, dtype=torch.bool)
        spoilt[5:20, 3:] = True
    after = attend(query, kv, batch)
    assert after[spoilt].isnan().all()
    assert torch.equal(after[~spoilt], before[~spoilt])


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e15])
def test_with_int8_large_and_small_numbers_are_numbers(size: float) -> None:
    chunks = [Chunk((1, 2, 3, 4, 5, 6), 70, 20)]
    kv, query, batch = filled_cache(chunks, 16, 2, 64, torch.int8), normal(20, 6, 64), flat_batch(chunks, 16)
    before = attend(query, kv, batch)
    kv.scales[:, 0, 1:] *= size
    torch.testing.assert_close(
        attend(query / size, kv, batch) if size > 1e-30 else before, before, atol=0.02, rtol=0.02
    )
    kv.scales[:, 0, 1:] /= size
    kv.scales[:, 1, 1:] *= size
    scaled = attend(query, kv, batch)
    if size > 1e-25:
        torch.testing.assert_close(scaled.float() / size, before.float(), atol=0.02, rtol=0.02)
    else:
        assert scaled.isfinite().all()


def test_a_projection_agrees_with_the_definition_where_the_cache_is_plain() -> None:
    kv = [allocate_kv_cache(1, 6, 16, 2, 24, torch.float32, torch.device("cpu")) for _ in range(2)]
    for cache in kv:
        cache.data.zero_()
    qkv, angles = torch.randn(len(SLOTS), 8 * 24), torch.randn(len(SLOTS), 12)
    norms = QueryKeyNorms(torch.randn(24), None, 1e-6, in_float32=False)
    rotation = angles.cos(), angles.sin()
    query = attention.write_qkv(qkv, norms, rotation, kv[0].layer(0), SLOTS)
    assert torch.equal(query, reference.write_qkv(qkv, norms, rotation, kv[1].layer(0), SLOTS))
    assert torch.equal(kv[0].data, kv[1].data)
    assert query.shape == (len(SLOTS), 4, 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1, 15, 16, 33, 5003])
def test_the_largest_is_that_of_the_definition_and_of_equals_the_first(size: int, dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 3, (7, size)).to(dtype)
    logits[1] = -torch.inf
    logits[2, size // 2] = 100
    logits[3] = -5
    values, places = sampling.largest(logits)
    defined = reference.largest(logits)
    assert torch.equal(values, defined[0])
    assert torch.equal(places, defined[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("nan")])
def test_a_row_that_is_not_finite_shows_in_its_largest_and_in_no_other(bad: float) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = normal(3, 50).to(dtype)
        for place in (0, 17, 49):
            spoilt = logits.clone()
            spoilt[1, place] = bad
            values, places = sampling.largest(spoilt)
            assert not values[1].isfinite()
            assert torch.equal(places[[0, 2]], logits[[0, 2]].max(-1).indices)
            drawn = sampling.gumbel_argmax(spoilt, torch.ones(3), torch.arange(3), torch.arange(3))
            assert 0 <= drawn[1] < 50


def test_where_rounding_decides_a_draw_the_definition_decides() -> None:
    seeds, positions = torch.arange(40), torch.arange(40) + 7
    # All sums of score and noise are the same but for rounding.
    logits = -reference.gumbel_noise(seeds, positions, 300)
    drawn = sampling.gumbel_argmax(logits, torch.ones(40), seeds, positions)
    assert torch.equal(drawn, reference.gumbel_argmax(logits, torch.ones(40), seeds, positions))


def test_nothing_depends_on_where_a_buffer_begins() -> None:
    x, weight, gate_up = normal(5, 80), normal(80), normal(5, 160)
    assert torch.equal(glue.rms_norm(unaligned(x), unaligned(weight), 1e-5), glue.rms_norm(x, weight, 1e-5))
    assert torch.equal(glue.silu_and_mul(unaligned(gate_up)), glue.silu_and_mul(gate_up))


def test_denormal_numbers_are_numbers() -> None:
    x = torch.full((2, 32), 1e-39).bfloat16()
    _, total = glue.add_rms_norm(x, torch.zeros_like(x), normal(32), 1e-5)
    assert torch.equal(total, x)
    assert x.any()


def test_a_nan_stays_one() -> None:
    x = normal(3, 64)
    x[1, 5] = float("nan")
    out = glue.rms_norm(x, normal(64), 1e-5)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    assert glue.silu_and_mul(x)[1].isnan().any()


def test_other_types_are_torchs() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert torch.equal(glue.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(glue.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_result_does_not_depend_on_the_threads(dtype: torch.dtype) -> None:
    chunks = [Chunk(tuple(range(1, 140)), 2200, 9), Chunk(tuple(range(140, 144)), 0, 50), Chunk((144, 145), 20, 1)]
    kv = filled_cache(chunks, 16, 3, 64, dtype)
    query = normal(60, 9, 64)
    threads = torch.get_num_threads()
    attended = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        attended.append(attend(query, kv, flat_batch(chunks, 16)))
    torch.set_num_threads(threads)
    assert all(torch.equal(attended[0], other) for other in attended[1:])


def test_avx2_serves_what_avx512_serves() -> None:
    code = "import sys, pytest; sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    chosen = "norms or rotations or gates or projection or largest or finite or draw or nan or buffer or denormal"
    chosen += " or agrees or same_bits_alone or int8 or quantised"
    args = [f"tests/kernels/test_{name}.py" for name in ("cpu", "attention", "gumbel")] + ["-k", chosen]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PAGEMILL_CPU_ISA": "avx2"}
    done = subprocess.run([sys.executable, "-c", code, *args], env=env, cwd=ROOT, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stdout.decode()[-3000:]
    name = in_a_process(
        "from kernels.cpu import extension; import torch; extension.is_served();"
        "print(torch.ops.pagemill_cpu.instruction_set())",
        PAGEMILL_CPU_ISA="avx2",
    )
    assert name.stdout.strip() == "avx2"


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    code = (
        "from kernels.cpu import extension; assert extension.is_served();"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.rpartition('/')[2]};"
        "print(len({path for path in maps if 'gomp' in path or 'iomp' in path}))"
    )
    assert in_a_process(code).stdout.strip() == "1"


def test_a_library_that_is_there_needs_no_compiler() -> None:
    code = "from kernels.cpu import extension; print(extension.is_served())"
    assert in_a_process(code, CXX="/nowhere/c++").stdout.strip() == "True"


def test_without_a_compiler_torchs_operations_serve_and_the_log_says_so(tmp_path: Path) -> None:
    code = (
        "import torch, logging; logging.basicConfig();"
        "from kernels.ops import kernels_for; from kernels import reference;"
        "kernels = [kernels_for(torch.device('cpu')) for _ in range(3)];"
        "print(kernels[0].write_kv is reference.write_kv)"
    )
    done = in_a_process(code, CXX="/nowhere/c++", PAGEMILL_KERNEL_CACHE=str(tmp_path / "empty"))
    assert done.stdout.strip() == "True", done.stderr
    assert done.stderr.count("torch's own operations serve") == 1
    chosen = in_a_process(code, PAGEMILL_CPU_ISA="torch")
    assert (chosen.stdout.strip(), chosen.stderr) == ("True", "")


def test_what_is_not_served_keeps_the_plain_layout() -> None:
    for block_size, head_dim, dtype in (
        (16, 72, torch.bfloat16),
        (24, 64, torch.bfloat16),
        (16, 64, torch.float32),
        (16, 64, torch.float16),
        (16, 528, torch.int8),
        (8, 64, torch.int8),
    ):
        assert not attention._serves(torch.empty(1, 1, block_size, head_dim, dtype=dtype))
    for dtype in (torch.bfloat16, torch.int8):
        assert attention._serves(torch.empty(1, 1, 16, 80, dtype=dtype))
