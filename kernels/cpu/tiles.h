// Tiles of 64 keys in blocks in place, whose layout is in kv_blocks.h: where they lie, and the products with them.
#pragma once

#include <algorithm>
#include <cstddef>

#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

constexpr int kTile = 64;
constexpr int kPanels = kTile / 16;

// The tile of keys from `first` on, of the `end` keys that there are of a sequence.
struct Tile {
  const AttentionCall* call;
  const int32_t* blocks;
  int kv_head, first, end;

  int size() const { return std::min(kTile, end - first); }

  // The panels of 16 keys. Those past the end are the first again: they are multiplied, and masked.
  template <class Stored>
  void key_panels(const Stored** panels) const {
    for (int n = 0; n < kPanels; ++n) {
      const int key = panel(n);
      panels[n] = (const Stored*)call->key + rows_before(key) * call->head_dim + (key % call->block_size) * 2;
    }
  }
  // The values of each run of keys that lie in one block.
  template <class Stored>
  void value_runs(const Stored** runs) const {
    int run = std::min(call->block_size, kTile);
    for (int n = 0; n * run < kTile; ++n) {
      const int key = first + n * run < end ? first + n * run : first;
      runs[n] = (const Stored*)call->value + (rows_before(key) + key % call->block_size) * call->head_dim;
    }
  }
  // The scales of the panels' keys, or of their values.
  void scale_panels(const float* scales, const float** panels) const {
    for (int n = 0; n < kPanels; ++n) panels[n] = scales + rows_before(panel(n)) + panel(n) % call->block_size;
  }

 private:
  int panel(int n) const { return first + n * 16 < end ? first + n * 16 : first; }
  // Of all blocks and heads before those of a key.
  ptrdiff_t rows_before(int key) const {
    const ptrdiff_t block = blocks[key / call->block_size];
    return (block * call->num_kv_heads + kv_head) * call->block_size;
  }
};

// What a tile's rows are multiplied with, and the sums of the products.
struct OfBf16 {
  using Stored = bf16;
  using Sums = Floats;
  static constexpr bool kHasScales = false;
  static Sums nothing() { return zeros(); }
  static Sums add_products(Sums sums, Pairs a, Pairs b) { return dot(sums, a, b); }
  static Floats floats(Sums sums) { return sums; }
};

// Rows are 16-bit integers then: exact sums, of more digits than products of bfloat16 have, and no slower.
struct OfInt8 {
  using Stored = int8_t;
  using Sums = Ints;
  static constexpr bool kHasScales = true;
  static Sums nothing() { return no_ints(); }
  static Sums add_products(Sums sums, Pairs a, Pairs b) { return dot_ints(sums, a, b); }
  static Floats floats(Sums sums) { return to_floats(sums); }
};

// A tile's addresses, and those of the tile after it, which are brought near meanwhile.
template <class Cache>
struct Addresses {
  const typename Cache::Stored *keys[kPanels], *values[kPanels];
  const float *key_scales[kPanels], *value_scales[kPanels];

  explicit Addresses(const Tile& tile) {
    tile.key_panels(keys);
    tile.value_runs(values);
    if constexpr (Cache::kHasScales) {
      tile.scale_panels(tile.call->key_scales, key_scales);
      tile.scale_panels(tile.call->value_scales, value_scales);
    }
  }
  // Of the largest scale of the values that a row sees, as a float32 has it: 255 of what is not finite.
  int value_exponent(int panels, int first, int last) const {
    Ints largest = no_ints();
    for (int n = 0; n < panels; ++n)
      largest = max(largest, bits_of_absolute(keep(load(value_scales[n]), first - n * 16, last - n * 16, zeros())));
    return max_of(largest) >> 23;
  }
  void prefetch_scales() const {
    if constexpr (Cache::kHasScales)
      for (int n = 0; n < kPanels; ++n) prefetch(key_scales[n]), prefetch(value_scales[n]);
  }
};

// scores[R][P * 16] = query[R][head_dim] . keys, a pair of dimensions every `stride`.
template <class Cache, int R, int P>
inline void multiply_keys(const uint16_t* query, int head_dim, const Addresses<Cache>& tile,
                          const Addresses<Cache>* next, ptrdiff_t stride, float* scores) {
  typename Cache::Sums sums[R][P];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < P; ++n) sums[r][n] = Cache::nothing();
  for (int pair = 0; pair < head_dim / 2; ++pair) {
    if (next)
      for (int n = 0; n < kPanels; ++n) prefetch(next->keys[n] + pair * stride);
    Pairs keys[P];
    for (int n = 0; n < P; ++n) keys[n] = load_pairs(tile.keys[n] + pair * stride);
    for (int r = 0; r < R; ++r) {
      Pairs q = fill_pair(query + r * head_dim + pair * 2);
      for (int n = 0; n < P; ++n) sums[r][n] = Cache::add_products(sums[r][n], q, keys[n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < P; ++n) store(scores + r * kTile + n * 16, Cache::floats(sums[r][n]));
}

// out[R][N * 16] += weights[R][num_keys] . values, from `column` on; a pair of keys every 2 * head_dim. Sums of integers
// are added by the factor of their row.
template <class Cache, int R, int N>
inline void add_values(const uint16_t* weights, const float* factors, const Addresses<Cache>& tile,
                       const Addresses<Cache>* next, int run, int num_keys, int head_dim, int column, float* out) {
  typename Cache::Sums sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      if constexpr (Cache::kHasScales)
        sums[r][n] = Cache::nothing();
      else
        sums[r][n] = load(out + r * head_dim + column + n * 16);
  for (int first = 0; first < num_keys; first += run) {
    const auto* values = tile.values[first / run] + column * 2;
    ptrdiff_t ahead = next ? next->values[first / run] + column * 2 - values : 0;
    int last = std::min(first + run, num_keys);
    for (int key = first; key < last; key += 2, values += 2 * head_dim) {
      if (next)
        for (int n = 0; n < N; ++n) prefetch(values + ahead + n * 32);
      Pairs v[N];
      for (int n = 0; n < N; ++n) v[n] = load_pairs(values + n * 32);
      for (int r = 0; r < R; ++r) {
        Pairs w = fill_pair(weights + r * kTile + key);
        for (int n = 0; n < N; ++n) sums[r][n] = Cache::add_products(sums[r][n], w, v[n]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      float* at = out + r * head_dim + column + n * 16;
      if constexpr (Cache::kHasScales)
        store(at, fma(Cache::floats(sums[r][n]), fill(factors[r]), load(at)));
      else
        store(at, sums[r][n]);
    }
}

}  // namespace PAGEMILL_ISA
