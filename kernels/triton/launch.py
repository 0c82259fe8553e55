"""How kernels are launched on each architecture, and what of them is compiled without a card to see that it would run.

To add a kernel:

1. Name the rows of its launch parameters in `_TABLE` below: constexprs that are tuned (tile sizes), warps and stages. A
   kernel whose tiles depend on a shape has a row for each case (`attention/256` for heads of 256, say). An architecture
   without an entry takes that of the next lower one, so most rows need one for 80 only.
2. Launch it with them: `launch = launch_for("rms_norm", x.device)`, then `kernel[grid](..., **launch.options)`.
3. List what runs in production in `SPECIALISATIONS: tuple[Specialisation, ...]` at the end of the kernel's module: the
   dtypes of the arguments, and the constexprs that are not in the row. Every function named `..._kernel` is in such a
   list; `tests/kernels/triton/test_compile.py` finds them, and fails if one is left out. It compiles each for every
   architecture, fails if a `hot` one spills registers or any needs more shared memory than there is, and wants `wgmma`
   in those that are `matrix`. For a table of some modules' kernels: `python -m tests.kernels.triton.offline norms kv`.

Nothing is tuned while a job runs: a first batch that times ten variants of a kernel stalls, and each process might
choose another one, with other bits in the results.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """Launch parameters: constexprs by name, and how many warps and software-pipeline stages a program has."""

    meta: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a launch."""
        return {**self.meta, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Specialisation(NamedTuple):
    """One variant of a kernel that is compiled by itself.

    Attributes:
        kernel: A function under `triton.jit`.
        launch: The row of the launch table whose parameters it takes.
        arguments: By name, without those that the row holds. For a constexpr, its value; for others the type as in
            Triton's signatures (`*bf16`, `i32`, `fp32`), followed by `:16` where it is a multiple of 16, as pointers to
            tensors nearly always are; None for a tensor that is left out.
        hot: Whether a step of the engine spends enough in it for spilled registers to be an error.
        matrix: Whether it multiplies matrices of more than a few rows, so that sm_90 must do so by `wgmma`.
        float8: Whether it handles float8_e4m3fn, which sm_89 is the first to have.
        variant: What tells it from other specialisations of the kernel in the same row.
    """

    kernel: Any
    launch: str
    arguments: Mapping[str, Any]
    hot: bool = False
    matrix: bool = False
    float8: bool = False
    variant: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kernel.__name__, self.launch, self.variant)))

    @property
    def architectures(self) -> tuple[int, ...]:
        """What it is compiled for."""
        return (89, 90, 100) if self.float8 else (80, 86, 90, 100)


# Bytes that one program may have. What 100 and 90 have is 228 KiB, of which the driver keeps one.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Columns of sm_100's memory for the operands and sums of its matrix instructions.
TENSOR_MEMORY_COLUMNS = 512

# By row, then architecture.
_TABLE: dict[str, dict[int, Launch]] = {
    "activate_and_mul": {80: Launch({"BLOCK": 1024})},
    "advance_rows": {80: Launch({"BLOCK": 256})},
    "best_chunk": {80: Launch({}, num_warps=1)},
    "build_inputs": {80: Launch({"BLOCK": 1024})},
    "move_blocks": {80: Launch({"BLOCK": 1024})},
    "gumbel_argmax": {80: Launch({"CHUNK": 4096}, num_warps=8)},
    "largest": {80: Launch({"CHUNK": 8192}, num_warps=8)},
    "likeliest": {80: Launch({"CHUNK": 2048})},
    "penalties": {80: Launch({"BLOCK": 1024})},
    "rank": {80: Launch({"CHUNK": 8192}, num_warps=8)},
    "score_floors": {80: Launch({"BLOCK": 4096}, num_warps=16)},
    "softmax_sums": {80: Launch({"CHUNK": 8192}, num_warps=8)},
    "token_bitmask": {80: Launch({"WORDS": 64})},
    # By the longest row.
    "rms_norm/1024": {80: Launch({}, num_warps=4)},
    "rms_norm/4096": {80: Launch({}, num_warps=8)},
    "rms_norm/8192": {80: Launch({}, num_warps=16)},
    "rms_norm": {80: Launch({}, num_warps=32)},
    # By the head's size, padded to a power of two. A tile of queries has BLOCK_M rows, one of keys BLOCK_N. Half of the
    # stages are those of the block table, which says where the keys are.
    "attention/64": {80: Launch({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=5)},
    "attention/128": {
        80: Launch({"BLOCK_M": 128, "BLOCK_N": 32}, num_warps=8, num_stages=5),
        90: Launch({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=5),
    },
    "attention/256": {
        80: Launch({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=8, num_stages=3),
        90: Launch({"BLOCK_M": 128, "BLOCK_N": 32}, num_warps=8, num_stages=4),
    },
    "attention/float32": {80: Launch({"BLOCK_M": 16, "BLOCK_N": 16}, num_stages=1)},
    "decode/64": {
        80: Launch({"BLOCK_N": 64}, num_warps=8, num_stages=5),
        90: Launch({"BLOCK_N": 64}, num_warps=8, num_stages=7),
    },
    "decode/128": {
        80: Launch({"BLOCK_N": 64}, num_warps=8, num_stages=5),
        100: Launch({"BLOCK_N": 64}, num_warps=4, num_stages=7),
    },
    "decode/256": {
        80: Launch({"BLOCK_N": 64}, num_warps=8, num_stages=4),
        90: Launch({"BLOCK_N": 64}, num_warps=8, num_stages=5),
    },
    "decode/64/float8": {89: Launch({"BLOCK_N": 64}, num_warps=4, num_stages=7)},
    "decode/128/float8": {89: Launch({"BLOCK_N": 64}, num_warps=4, num_stages=7)},
    "decode/256/float8": {
        89: Launch({"BLOCK_N": 64}, num_warps=8, num_stages=4),
        90: Launch({"BLOCK_N": 64}, num_warps=8, num_stages=5),
    },
    "decode/float32": {80: Launch({"BLOCK_N": 32}, num_stages=1)},
    "merge": {80: Launch({})},
    "write_kv": {80: Launch({})},
    "write_qkv": {80: Launch({})},
    "dequantize_int4": {80: Launch({"BLOCK_N": 32})},
    # By the largest rank, as is `shrink`.
    "expand/64": {80: Launch({"BLOCK_N": 64, "BLOCK_M": 16})},
    "expand/256": {80: Launch({"BLOCK_N": 32, "BLOCK_M": 16}), 90: Launch({"BLOCK_N": 64, "BLOCK_M": 16})},
    "expand/float32": {80: Launch({"BLOCK_N": 32, "BLOCK_M": 16}, num_stages=1)},
    # By the most rows that a tile takes.
    "experts/16": {
        80: Launch({"BLOCK_N": 64, "BLOCK_M": 16, "BLOCK_K": 64}, num_stages=4),
        90: Launch({"BLOCK_N": 128, "BLOCK_M": 16, "BLOCK_K": 64}, num_stages=5),
    },
    "experts/64": {
        80: Launch({"BLOCK_N": 64, "BLOCK_M": 64, "BLOCK_K": 64}, num_stages=3),
        90: Launch({"BLOCK_N": 128, "BLOCK_M": 64, "BLOCK_K": 64}, num_stages=4),
    },
    "experts/128": {
        80: Launch({"BLOCK_N": 128, "BLOCK_M": 128, "BLOCK_K": 64}, num_warps=8, num_stages=3),
        90: Launch({"BLOCK_N": 128, "BLOCK_M": 128, "BLOCK_K": 64}, num_warps=8, num_stages=4),
    },
    "experts/float32": {80: Launch({"BLOCK_N": 32, "BLOCK_M": 16, "BLOCK_K": 32}, num_stages=1)},
    # By the most tokens that a tile takes.
    "float8/16": {
        89: Launch({"BLOCK_N": 64, "BLOCK_M": 16}, num_stages=4),
        90: Launch({"BLOCK_N": 128, "BLOCK_M": 16}, num_stages=5),
        100: Launch({"BLOCK_N": 128, "BLOCK_M": 16}, num_warps=8, num_stages=5),
    },
    "float8/64": {
        89: Launch({"BLOCK_N": 64, "BLOCK_M": 64}, num_stages=3),
        90: Launch({"BLOCK_N": 128, "BLOCK_M": 64}, num_warps=8, num_stages=4),
    },
    "float8/128": {
        89: Launch({"BLOCK_N": 64, "BLOCK_M": 128}, num_warps=8, num_stages=4),
        90: Launch({"BLOCK_N": 128, "BLOCK_M": 128}, num_warps=16, num_stages=3),
        100: Launch({"BLOCK_N": 64, "BLOCK_M": 128}, num_warps=8, num_stages=4),
    },
    "quantize_float8": {89: Launch({"BLOCK_M": 8})},
    "shrink/64": {80: Launch({"BLOCK_M": 16, "BLOCK_K": 128}, num_stages=3)},
    "shrink/256": {80: Launch({"BLOCK_M": 16, "BLOCK_K": 64}, num_stages=2)},
    "shrink/float32": {80: Launch({"BLOCK_M": 16, "BLOCK_K": 32}, num_stages=1)},
    "sum_experts": {80: Launch({"BLOCK": 1024})},
    "sum_splits": {80: Launch({"BLOCK": 512})},
    # By the most tokens that a tile takes.
    "w4a16/16": {
        80: Launch({"BLOCK_N": 64, "BLOCK_M": 16}, num_stages=5),
        90: Launch({"BLOCK_N": 128, "BLOCK_M": 16}, num_stages=5),
    },
    "w4a16/64": {
        80: Launch({"BLOCK_N": 64, "BLOCK_M": 64}, num_stages=3),
        90: Launch({"BLOCK_N": 128, "BLOCK_M": 64}, num_warps=8, num_stages=4),
        # Triton 3.7 makes a trap of 128 outputs in groups of 32.
        100: Launch({"BLOCK_N": 64, "BLOCK_M": 64}, num_stages=4),
    },
}


def launch_for(row: str, device: torch.device) -> Launch:
    """Return the launch parameters of `row` of the table for the architecture of `device`."""
    return launch_on(row, architecture_of(device))


@cache
def launch_on(row: str, architecture: int) -> Launch:
    """Return the launch parameters of `row` of the table for an architecture, such as 90 for sm_90.

    Raises `LookupError` if no architecture as low as this has an entry.
    """
    entries = _TABLE[row]
    # sm_120 follows sm_100 in number only: it has the shared memory and the matrix instructions of sm_89.
    ceiling = 89 if architecture // 10 == 12 else architecture
    fitting = [known for known in entries if known <= ceiling]
    if not fitting:
        raise LookupError(f"{row} does not run on sm_{architecture}: it needs sm_{min(entries)}.")
    return entries[max(fitting)]


@cache
def architecture_of(device: torch.device) -> int:
    """Return a CUDA device's compute capability as a number, such as 90.

    Of a CPU, on which only Triton's interpreter runs, it is 100: every kernel has launch parameters for that.
    """
    if device.type == "cpu":
        return 100
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
