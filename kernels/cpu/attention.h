// Paged attention over blocks in place, whose layout is in kv_blocks.h.
//
// A query's keys are taken in tiles of 64 from the beginning of its context, with a running maximum, and in segments of
// 2048, each summed by itself and then joined in order. Where a tile or segment ends depends on positions alone, and
// each row has sums of its own: a token's result has the same bits whatever shares its step, however its prompt was cut
// into chunks, and on however many threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>

#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

constexpr int kTile = 64;
constexpr int kPanels = kTile / 16;
constexpr int kSegment = 2048;
constexpr int kRows = 6;  // of a product at a time: with four panels, 24 sums in registers
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.4426950408889634f;

// What one work item computes in; for one thread.
struct Scratch {
  int rows, head_dim;
  std::unique_ptr<char[]> memory;
  bf16* query;     // [rows][head_dim]
  bf16* weights;   // [rows][kTile]
  float* scores;   // [rows][kTile]
  float* out;      // [rows][head_dim]
  float* sums;     // [rows][16], of the weights, in lanes
  float* maxima;   // [rows]
  float* joined;   // [rows][head_dim], of the segments before
  float* joined_sums;
  float* joined_maxima;

  Scratch(int rows, int head_dim) : rows(rows), head_dim(head_dim) {
    size_t r = size_t(rows), d = size_t(head_dim);
    size_t floats = r * kTile + 2 * r * d + 2 * r * 16 + 2 * ((r + 15) / 16 * 16);
    size_t bytes = floats * 4 + (r * d + r * kTile) * 2 + 64;
    memory.reset(new char[bytes]);
    float* at = (float*)((uintptr_t(memory.get()) + 63) / 64 * 64);
    scores = at, at += r * kTile;
    out = at, at += r * d;
    joined = at, at += r * d;
    sums = at, at += r * 16;
    joined_sums = at, at += r * 16;
    maxima = at, at += (r + 15) / 16 * 16;
    joined_maxima = at, at += (r + 15) / 16 * 16;
    query = (bf16*)at;
    weights = query + r * d;
  }
};

// scores[R][64] = query[R][pairs * 2] . keys, whose 16-key panels begin at `panel`, a pair of dimensions every `stride`.
template <int R>
inline void multiply_keys(const bf16* query, int head_dim, const bf16* const* panel, ptrdiff_t stride, float* scores) {
  Floats sums[R][kPanels];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < kPanels; ++n) sums[r][n] = zeros();
  for (int pair = 0; pair < head_dim / 2; ++pair) {
    Pairs keys[kPanels];
    for (int n = 0; n < kPanels; ++n) keys[n] = load_pairs(panel[n] + pair * stride);
    for (int r = 0; r < R; ++r) {
      Pairs q = fill_pair(query + r * head_dim + pair * 2);
      for (int n = 0; n < kPanels; ++n) sums[r][n] = dot(sums[r][n], q, keys[n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < kPanels; ++n) store(scores + r * kTile + n * 16, sums[r][n]);
}

// out[R][N * 16] += weights[R][num_keys] . values, whose blocks begin at `block`, a pair of keys every 2 * head_dim.
template <int R, int N>
inline void add_values(const bf16* weights, const bf16* const* block, int block_size, int num_keys, int head_dim,
                       float* out) {
  Floats sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = load(out + r * head_dim + n * 16);
  for (int first = 0; first < num_keys; first += block_size) {
    const bf16* values = block[first / block_size];
    int last = std::min(first + block_size, num_keys);
    for (int key = first; key < last; key += 2, values += 2 * head_dim) {
      Pairs v[N];
      for (int n = 0; n < N; ++n) v[n] = load_pairs(values + n * 32);
      for (int r = 0; r < R; ++r) {
        Pairs w = fill_pair(weights + r * kTile + key);
        for (int n = 0; n < N; ++n) sums[r][n] = dot(sums[r][n], w, v[n]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out + r * head_dim + n * 16, sums[r][n]);
}

// One item: some queries of one sequence, with all query heads that share a KV head.
struct Item {
  const AttentionCall* call;
  int kv_head, first_row, num_queries, first_position;
  const int32_t* blocks;

  int rows() const { return num_queries * call->group; }
  int position(int row) const { return first_position + row / call->group; }

  const bf16* key_block(int key) const { return call->key + block_of(key); }
  const bf16* value_block(int key) const { return call->value + block_of(key); }
  ptrdiff_t block_of(int key) const {
    return (ptrdiff_t(blocks[key / call->block_size]) * call->num_kv_heads + kv_head) * call->block_size * call->head_dim;
  }
};

inline void multiply_keys(const Item& item, int first_key, int end, Scratch& s) {
  const AttentionCall& call = *item.call;
  const bf16* panel[kPanels];
  for (int n = 0; n < kPanels; ++n) {
    // Panels past the end are multiplied with whatever is there, and masked.
    int key = first_key + n * 16 < end ? first_key + n * 16 : first_key;
    panel[n] = item.key_block(key) + (key % call.block_size) * 2;
  }
  ptrdiff_t stride = call.block_size * 2;
  int row = 0, rows = item.rows();
  for (; row + kRows <= rows; row += kRows)
    multiply_keys<kRows>(s.query + row * call.head_dim, call.head_dim, panel, stride, s.scores + row * kTile);
  const bf16* query = s.query + row * call.head_dim;
  float* scores = s.scores + row * kTile;
  switch (rows - row) {
    case 1: return multiply_keys<1>(query, call.head_dim, panel, stride, scores);
    case 2: return multiply_keys<2>(query, call.head_dim, panel, stride, scores);
    case 3: return multiply_keys<3>(query, call.head_dim, panel, stride, scores);
    case 4: return multiply_keys<4>(query, call.head_dim, panel, stride, scores);
    case 5: return multiply_keys<5>(query, call.head_dim, panel, stride, scores);
  }
}

template <int R>
inline void add_values(const AttentionCall& call, const bf16* const* block, int num_keys, int row, Scratch& s) {
  const bf16* weights = s.weights + row * kTile;
  float* out = s.out + row * call.head_dim;
  int column = 0;
  const bf16* moved[kTile / 16];
  auto at_column = [&](int column) {
    for (int b = 0; b * call.block_size < num_keys; ++b) moved[b] = block[b] + column * 2;
    return moved;
  };
  for (; column + 64 <= call.head_dim; column += 64)
    add_values<R, 4>(weights, at_column(column), call.block_size, num_keys, call.head_dim, out + column);
  for (; column < call.head_dim; column += 16)
    add_values<R, 1>(weights, at_column(column), call.block_size, num_keys, call.head_dim, out + column);
}

inline void add_values(const Item& item, int first_key, int num_keys, Scratch& s) {
  const AttentionCall& call = *item.call;
  const bf16* block[kTile / 16];
  for (int key = 0; key < num_keys; key += std::min(call.block_size, kTile))
    block[key / std::min(call.block_size, kTile)] =
        item.value_block(first_key + key) + ptrdiff_t((first_key + key) % call.block_size) * call.head_dim;
  int row = 0, rows = item.rows();
  for (; row + kRows <= rows; row += kRows) add_values<kRows>(call, block, num_keys, row, s);
  switch (rows - row) {
    case 1: return add_values<1>(call, block, num_keys, row, s);
    case 2: return add_values<2>(call, block, num_keys, row, s);
    case 3: return add_values<3>(call, block, num_keys, row, s);
    case 4: return add_values<4>(call, block, num_keys, row, s);
    case 5: return add_values<5>(call, block, num_keys, row, s);
  }
}

// Scores of a tile become weights, relative to the highest score of the row so far; what was summed is rescaled to it.
inline void weigh(const Item& item, int first_key, Scratch& s) {
  const AttentionCall& call = *item.call;
  const float factor = call.softcap > 0 ? call.scale : call.scale * kLog2e;
  for (int row = 0; row < item.rows(); ++row) {
    int position = item.position(row);
    int last = position + 1 - first_key;
    int first = call.window > 0 ? position - call.window + 1 - first_key : 0;
    float* scores = s.scores + row * kTile;
    Floats tile[kPanels], highest = fill(kNothing);
    for (int n = 0; n < kPanels; ++n) {
      tile[n] = mul(load(scores + n * 16), fill(factor));
      if (call.softcap > 0) {
        // tanh(x) = 1 - 2 / (e^2x + 1)
        Floats x = min(fill(15), max(fill(-15), mul(tile[n], fill(1 / call.softcap))));
        Floats e = exp2(mul(x, fill(2 * kLog2e)));
        Floats tanh = sub(fill(1), div(fill(2), add(e, fill(1))));
        tile[n] = mul(tanh, fill(call.softcap * kLog2e));
      }
      tile[n] = keep(tile[n], first - n * 16, last - n * 16, fill(kNothing));
      highest = max(highest, tile[n]);
    }
    float before = s.maxima[row], now = std::max(before, max_of(highest));
    bf16* weights = s.weights + row * kTile;
    if (now == kNothing) {  // it sees none of these keys, nor of those before
      std::memset(weights, 0, kTile * sizeof(bf16));
      continue;
    }
    Floats sums = zeros();
    for (int n = 0; n < kPanels; ++n) {
      Floats weight = keep(exp2(sub(tile[n], fill(now))), first - n * 16, last - n * 16, zeros());
      sums = add(sums, weight);
      store_weights(weights + n * 16, weight);
    }
    if (now != before) {
      float scale = before == kNothing ? 0 : std::exp2(before - now);
      store(s.sums + row * 16, mul(load(s.sums + row * 16), fill(scale)));
      for (int d = 0; d < call.head_dim; d += 16)
        store(s.out + row * call.head_dim + d, mul(load(s.out + row * call.head_dim + d), fill(scale)));
      s.maxima[row] = now;
    }
    store(s.sums + row * 16, add(load(s.sums + row * 16), sums));
  }
}

inline void begin_segment(int rows, Scratch& s) {
  std::fill_n(s.out, rows * s.head_dim, 0.0f);
  std::fill_n(s.sums, rows * 16, 0.0f);
  std::fill_n(s.maxima, rows, kNothing);
}

// Joins a segment to those before it, in place of them.
inline void join_segment(int rows, Scratch& s) {
  for (int row = 0; row < rows; ++row) {
    float before = s.joined_maxima[row], now = std::max(before, s.maxima[row]);
    if (now == kNothing) continue;
    float old_scale = before == kNothing ? 0 : std::exp2(before - now);
    float new_scale = s.maxima[row] == kNothing ? 0 : std::exp2(s.maxima[row] - now);
    auto join = [&](float* joined, const float* segment, int size) {
      for (int i = 0; i < size; i += 16)
        store(joined + i, fma(load(segment + i), fill(new_scale), mul(load(joined + i), fill(old_scale))));
    };
    join(s.joined + row * s.head_dim, s.out + row * s.head_dim, s.head_dim);
    join(s.joined_sums + row * 16, s.sums + row * 16, 16);
    s.joined_maxima[row] = now;
  }
}

inline void attend(const Item& item, Scratch& s) {
  const AttentionCall& call = *item.call;
  const int rows = item.rows(), head_dim = call.head_dim;
  for (int row = 0; row < rows; ++row) {
    ptrdiff_t token = item.first_row + row / call.group, head = item.kv_head * call.group + row % call.group;
    std::memcpy(s.query + row * head_dim, call.query + token * call.query_stride + head * head_dim,
                head_dim * sizeof(bf16));
    // A sink is a logit without a value.
    s.joined_maxima[row] = call.sinks ? call.sinks[head] * kLog2e : kNothing;
    std::fill_n(s.joined_sums + row * 16, 16, 0.0f);
    if (call.sinks) s.joined_sums[row * 16] = 1;
  }
  std::fill_n(s.joined, rows * head_dim, 0.0f);

  const int end = item.position(rows - 1) + 1;
  int key = call.window > 0 ? std::max(0, item.first_position - call.window + 1) / kTile * kTile : 0;
  while (key < end) {
    const int segment_end = std::min(end, (key / kSegment + 1) * kSegment);
    begin_segment(rows, s);
    for (; key < segment_end; key += kTile) {
      multiply_keys(item, key, end, s);
      weigh(item, key, s);
      add_values(item, key, std::min(kTile, end - key), s);
    }
    join_segment(rows, s);
  }
  for (int row = 0; row < rows; ++row) {
    ptrdiff_t token = item.first_row + row / call.group, head = item.kv_head * call.group + row % call.group;
    Floats share = fill(1 / sum_of(load(s.joined_sums + row * 16)));
    bf16* out = call.out + (token * call.num_kv_heads * call.group + head) * head_dim;
    for (int d = 0; d < head_dim; d += 16) store_narrow(out + d, mul(load(s.joined + row * head_dim + d), share));
  }
}

void paged_attention(const AttentionCall& call) {
  const int64_t items = int64_t(call.num_tiles) * call.num_kv_heads;
#pragma omp parallel
  {
    Scratch scratch(call.max_rows, call.head_dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < items; ++i) {
      const int32_t* tile = call.tiles + i / call.num_kv_heads * 4;
      Item item{&call,   int(i % call.num_kv_heads), tile[1], tile[2], tile[3],
                call.block_tables + ptrdiff_t(tile[0]) * call.max_blocks};
      attend(item, scratch);
    }
  }
}

}  // namespace PAGEMILL_ISA
