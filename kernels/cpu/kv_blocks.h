// How keys and values lie in their blocks, and the writing of them.
//
//     one head of a key block:    [head_dim / 2][block_size][2]   a `dot` serves 16 keys of a pair of dimensions
//     one head of a value block:  [block_size / 2][head_dim][2]   a `dot` serves 16 dimensions of a pair of keys
//
// so that neither product of attention ever sums across lanes, and nothing is gathered or transposed.
#pragma once

#include <cstddef>

#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

inline void write_key(const bf16* key, bf16* block, int offset, int block_size, int head_dim) {
  for (int d = 0; d < head_dim; d += 2) std::memcpy(block + (d * block_size + offset * 2), key + d, 4);
}

// `second` is the value of the other key of the pair, or null: then its place becomes zero, since the null of a weight
// does not silence what a block's former owner left there.
inline void write_values(const bf16* first, const bf16* second, bf16* pair, int head_dim) {
  for (int d = 0; d < head_dim; ++d) {
    pair[d * 2] = first[d];
    pair[d * 2 + 1] = second ? second[d] : 0;
  }
}

void write_kv(const WriteCall& call) {
  const ptrdiff_t block_elements = ptrdiff_t(call.block_size) * call.head_dim;
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    const int64_t slot = call.slots[token];
    if (slot < 0) continue;
    const ptrdiff_t block = slot / call.block_size, offset = slot % call.block_size;
    const bool odd = offset % 2, after_partner = odd && token > 0 && call.slots[token - 1] == slot - 1;
    const bool before_partner = !odd && token + 1 < call.num_tokens && call.slots[token + 1] == slot + 1;
    for (int head = 0; head < call.num_kv_heads; ++head) {
      const bf16* value = call.value + token * call.value_stride + head * call.head_dim;
      const ptrdiff_t base = (block * call.num_kv_heads + head) * block_elements;
      write_key(call.key + token * call.key_stride + head * call.head_dim, call.key_cache + base, int(offset),
                call.block_size, call.head_dim);
      bf16* pair = call.value_cache + base + offset / 2 * 2 * call.head_dim;
      // A pair has one writer, so that no two threads touch the same word.
      if (after_partner) continue;
      if (odd)
        for (int d = 0; d < call.head_dim; ++d) pair[d * 2 + 1] = value[d];
      else
        write_values(value, before_partner ? value + call.value_stride : nullptr, pair, call.head_dim);
    }
  }
}

}  // namespace PAGEMILL_ISA
