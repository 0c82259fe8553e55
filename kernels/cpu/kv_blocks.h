// How keys and values lie in their blocks, and the writing of them.
//
//     one head of a key block:    [head_dim / 2][block_size][2]   a `dot` serves 16 keys of a pair of dimensions
//     one head of a value block:  [block_size / 2][head_dim][2]   a `dot` serves 16 dimensions of a pair of keys
//
// so that neither product of attention ever sums across lanes, and nothing is gathered or transposed. They are bfloat16,
// or int8 with a float32 scale for each key and one for each value of a head, quantised as `kernels.reference` does.
#pragma once

#include <cstddef>

#include "quantize.h"
#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

template <class Stored>
inline void write_key(const Stored* key, Stored* block, int offset, int block_size, int head_dim) {
  for (int d = 0; d < head_dim; d += 2)
    std::memcpy(block + (d * block_size + offset * 2), key + d, 2 * sizeof(Stored));
}

// `second` is the value of the other key of the pair, or null: then its place becomes zero, since the null of a weight
// does not silence what a block's former owner left there. A pair's two numbers are written as one word of 32 bits.
inline void write_values(const bf16* first, const bf16* second, bf16* pair, int head_dim) {
  uint32_t* words = (uint32_t*)pair;
  if (second)
    for (int d = 0; d < head_dim; ++d) words[d] = first[d] | uint32_t(second[d]) << 16;
  else
    for (int d = 0; d < head_dim; ++d) words[d] = first[d];
}

inline void write_second_values(const bf16* second, bf16* pair, int head_dim) {
  uint32_t* words = (uint32_t*)pair;
  for (int d = 0; d < head_dim; ++d) words[d] = (words[d] & 0xffff) | uint32_t(second[d]) << 16;
}

// One token's `key` [num_kv_heads * head_dim], and its value from where the call has it, quantised. Nothing is stale in
// a pair: an integer times a weight of 0 is 0.
inline void write_quantized_token(const WriteCall& call, int64_t token, const bf16* key) {
  const int64_t slot = call.slots[token];
  if (slot < 0) return;
  const ptrdiff_t block = slot / call.block_size, offset = slot % call.block_size;
  int8_t quantized[kLargestInt8Head];
  for (int head = 0; head < call.num_kv_heads; ++head) {
    const ptrdiff_t row = (block * call.num_kv_heads + head) * call.block_size, base = row * call.head_dim;
    call.key_scales[row + offset] = quantize_head(key + head * call.head_dim, call.head_dim, quantized);
    write_key(quantized, (int8_t*)call.key_cache + base, int(offset), call.block_size, call.head_dim);
    const bf16* value = call.value + token * call.value_stride + head * call.head_dim;
    call.value_scales[row + offset] = quantize_head(value, call.head_dim, quantized);
    int8_t* pair = (int8_t*)call.value_cache + base + offset / 2 * 2 * call.head_dim + offset % 2;
    for (int d = 0; d < call.head_dim; ++d) pair[2 * d] = quantized[d];
  }
}

// One token's `key` [num_kv_heads * head_dim], and its value from where the call has it.
inline void write_token(const WriteCall& call, int64_t token, const bf16* key) {
  if (call.key_scales) return write_quantized_token(call, token, key);
  const int64_t slot = call.slots[token];
  if (slot < 0) return;
  const ptrdiff_t block = slot / call.block_size, offset = slot % call.block_size;
  const bool odd = offset % 2, after_partner = odd && token > 0 && call.slots[token - 1] == slot - 1;
  const bool before_partner = !odd && token + 1 < call.num_tokens && call.slots[token + 1] == slot + 1;
  for (int head = 0; head < call.num_kv_heads; ++head) {
    const bf16* value = call.value + token * call.value_stride + head * call.head_dim;
    const ptrdiff_t base = (block * call.num_kv_heads + head) * call.block_size * call.head_dim;
    write_key(key + head * call.head_dim, (bf16*)call.key_cache + base, int(offset), call.block_size, call.head_dim);
    bf16* pair = (bf16*)call.value_cache + base + offset / 2 * 2 * call.head_dim;
    // A pair has one writer, so that no two threads touch the same word.
    if (after_partner) continue;
    if (odd)
      write_second_values(value, pair, call.head_dim);
    else
      write_values(value, before_partner ? value + call.value_stride : nullptr, pair, call.head_dim);
  }
}

// Lets the lines that a token's key is scattered over come while something else is computed.
inline void prefetch_token(const WriteCall& call, int64_t token) {
  const int64_t slot = call.slots[token];
  if (slot < 0) return;
  const ptrdiff_t block = slot / call.block_size, offset = slot % call.block_size;
  const ptrdiff_t bytes = call.key_scales ? sizeof(int8_t) : sizeof(bf16);
  const char* key = (const char*)call.key_cache +
                    (block * call.num_kv_heads * call.block_size * call.head_dim + offset * 2) * bytes;
  for (int pair = 0; pair < call.num_kv_heads * call.head_dim / 2; ++pair)
    __builtin_prefetch(key + pair * call.block_size * 2 * bytes, 1);
}

void write_kv(const WriteCall& call) {
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < call.num_tokens; ++token)
    write_token(call, token, call.key + token * call.key_stride);
}

}  // namespace PAGEMILL_ISA
