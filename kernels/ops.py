"""The table: which implementation serves which operation on which device, behind one signature per operation.

`kernels.reference` defines what each operation means; an entry here may be faster, never different beyond rounding.
"""

from torch import Tensor

from kernels import reference
from kernels.cache import AttentionBatch, KVCache, LayerKV, allocate_kv_cache, kv_bytes_per_token
from kernels.linear import Linear, plain_linear

__all__ = [
    "AttentionBatch",
    "KVCache",
    "LayerKV",
    "Linear",
    "add_rms_norm",
    "allocate_kv_cache",
    "copy_blocks",
    "gumbel_noise",
    "kv_bytes_per_token",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "write_kv",
]

rms_norm = reference.rms_norm
add_rms_norm = reference.add_rms_norm
rotary_embedding = reference.rotary_embedding
silu_and_mul = reference.silu_and_mul
write_kv = reference.write_kv
paged_attention = reference.paged_attention
copy_blocks = reference.copy_blocks
gumbel_noise = reference.gumbel_noise


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    return plain_linear(weight, bias)
