// Paged attention over blocks in place, by the products of tiles.h.
//
// A query's keys are taken in tiles of 64 from the beginning of its context, with a running maximum, and in segments of
// 2048, each summed by itself and then joined in order. Where a tile or segment ends depends on positions alone, and
// each row has sums of its own: a token's result has the same bits whatever shares its step, however its prompt was cut
// into chunks, whoever shares the keys that it reads, and on however many threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>

#include "quantize.h"
#include "shapes.h"
#include "simd.h"
#include "tiles.h"

namespace PAGEMILL_ISA {

constexpr int kSegment = 2048;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.4426950408889634f;
// A row's maximum is raised only by what exceeds it by so many powers of two: weights of 256 are as good as those of 1.
constexpr float kSlack = 8;

// What rows have summed so far: weighted values, weights in lanes, and the score, as a power of two, that both are
// relative to.
struct RowSums {
  float* out;      // [rows][head_dim]
  float* weights;  // [rows][16]
  float* maxima;   // [rows]

  static size_t size(int rows, int head_dim) { return size_t(rows) * (head_dim + 16) + (rows + 15) / 16 * 16; }

  RowSums(float* at, int rows, int head_dim)
      : out(at), weights(out + size_t(rows) * head_dim), maxima(weights + size_t(rows) * 16) {}

  void clear(int rows, int head_dim) const {
    std::fill_n(out, size_t(rows) * head_dim, 0.0f);
    std::fill_n(weights, size_t(rows) * 16, 0.0f);
    std::fill_n(maxima, rows, kNothing);
  }
};

// What one work item computes in; for one thread.
struct Scratch {
  std::unique_ptr<char[]> memory;
  RowSums segment, joined;
  float* scores;        // [kRows][kTile]
  float* query_scales;  // [rows], of queries that are integers
  int32_t* position;    // [rows]
  uint16_t* weights;    // [kRows][kTile], bfloat16 or integers
  uint16_t* query;      // [rows][head_dim], as the weights
  int value_exponent;   // of a tile's largest scale of values

  Scratch(int rows, int head_dim)
      : memory(new char[bytes(rows, head_dim)]),
        segment(aligned(), rows, head_dim),
        joined(aligned() + RowSums::size(rows, head_dim), rows, head_dim) {
    scores = aligned() + 2 * RowSums::size(rows, head_dim);
    query_scales = scores + kRows * kTile;
    position = (int32_t*)(query_scales + (rows + 15) / 16 * 16);
    weights = (uint16_t*)(position + (rows + 15) / 16 * 16);
    query = weights + kRows * kTile;
  }

  static size_t bytes(int rows, int head_dim) {
    size_t words = 2 * RowSums::size(rows, head_dim) + kRows * kTile + 2 * ((rows + 15) / 16 * 16);
    return words * 4 + (kRows * kTile + size_t(rows) * head_dim) * sizeof(uint16_t) + 64;
  }
  float* aligned() const { return (float*)((uintptr_t(memory.get()) + 63) / 64 * 64); }
};

// The weights of scores, times the scales of their values, as integers below 2^15. What is above bounds both: no score,
// as a power of two, exceeds `before` by more than `excess`, and no scale has a larger exponent than the one given.
inline float store_scaled_weights(const Addresses<OfInt8>& tile, int panels, int first, int last, float factor,
                                  float before, float excess, int exponent, const float* scores, uint16_t* weights,
                                  float* totals) {
  if (exponent == 255) return std::numeric_limits<float>::quiet_NaN();
  // Where the bounds are those of next to nothing, it is counted in what a float32 still holds.
  const int least = int(std::max(-100.0f, std::ceil(excess))) + std::max(exponent, 40);
  const int up = std::min(141 - least, 126);
  const bool whole = first <= 0 && last >= panels * 16;
  Floats total = load(totals);
  for (int n = 0; n < panels; ++n) {
    Floats weight = exp2_of_weight(fma(load(scores + n * 16), fill(factor), fill(up - before)));
    Floats scaled = mul(weight, load(tile.value_scales[n]));
    if (!whole) {
      weight = keep(weight, first - n * 16, last - n * 16, zeros());
      scaled = keep(scaled, first - n * 16, last - n * 16, zeros());
    }
    total = fma(weight, fill(power_of_two(-up)), total);
    store_int16((int16_t*)weights + n * 16, scaled);
  }
  store(totals, total);
  return power_of_two(-up);
}

// The scores of a row's first `panels` panels become weights, relative to its maximum; where that is raised, what was
// summed is rescaled to it. The row sees the keys of the tile from `first` on and before `last`. Returns what its
// weights, where they are integers, are counted in.
template <class Cache>
inline float weigh(const Addresses<Cache>& tile, int panels, int first, int last, int row, float* scores,
                   uint16_t* weights, const AttentionCall& call, const Scratch& s) {
  const RowSums& sums = s.segment;
  const bool whole = first <= 0 && last >= panels * 16;
  const float unit = Cache::kHasScales ? call.scale * s.query_scales[row] : call.scale;
  const float factor = call.softcap > 0 ? 1 : unit * kLog2e;
  Floats highest = fill(kNothing);
  for (int n = 0; n < panels; ++n) {
    Floats score = load(scores + n * 16);
    if constexpr (Cache::kHasScales) score = mul(score, load(tile.key_scales[n]));
    if (call.softcap > 0) {
      // tanh(x) = 1 - 2 / (e^2x + 1)
      Floats x = min(fill(15), max(fill(-15), mul(score, fill(unit / call.softcap))));
      Floats e = exp2(mul(x, fill(2 * kLog2e)));
      score = mul(sub(fill(1), div(fill(2), add(e, fill(1)))), fill(call.softcap * kLog2e));
    }
    if (!whole) score = keep(score, first - n * 16, last - n * 16, fill(kNothing));
    if (Cache::kHasScales || !whole || call.softcap > 0) store(scores + n * 16, score);
    highest = max(highest, score);
  }
  float before = sums.maxima[row], top = max_of(highest) * factor;
  if (!(top <= before + kSlack)) {
    if (before != kNothing) {
      float scale = std::exp2(before - top);
      store(sums.weights + row * 16, mul(load(sums.weights + row * 16), fill(scale)));
      for (int d = 0; d < call.head_dim; d += 16)
        store(sums.out + row * call.head_dim + d, mul(load(sums.out + row * call.head_dim + d), fill(scale)));
    }
    sums.maxima[row] = before = top;
  }
  if (before == kNothing) {  // it sees none of these keys, nor of those before
    std::memset(weights, 0, panels * 16 * sizeof(uint16_t));
    return 0;
  }
  if constexpr (Cache::kHasScales) {
    const int exponent = first <= 0 && last >= kTile ? s.value_exponent : tile.value_exponent(panels, first, last);
    return store_scaled_weights(tile, panels, first, last, factor, before, top - before, exponent, scores, weights,
                                sums.weights + row * 16);
  }
  Floats total = load(sums.weights + row * 16);
  for (int n = 0; n < panels; ++n) {
    Floats weight = exp2_of_weight(fma(load(scores + n * 16), fill(factor), fill(-before)));
    if (!whole) weight = keep(weight, first - n * 16, last - n * 16, zeros());
    total = add(total, weight);
    store_weights(weights + n * 16, weight);
  }
  store(sums.weights + row * 16, total);
  return 1;
}

template <class Cache, int R>
inline void attend_rows(const Tile& tile, const Addresses<Cache>& here, const Addresses<Cache>* next, int row,
                        Scratch& s) {
  const AttentionCall& call = *tile.call;
  const int last_key = std::min(s.position[row + R - 1] + 1, tile.end) - tile.first;
  if (last_key <= 0) return;
  const int num_keys = std::min(kTile, last_key), panels = (num_keys + 15) / 16;
  const uint16_t* query = s.query + size_t(row) * call.head_dim;
  const ptrdiff_t stride = call.block_size * 2;
  switch (panels) {
    case 1: multiply_keys<Cache, R, 1>(query, call.head_dim, here, next, stride, s.scores); break;
    case 2: multiply_keys<Cache, R, 2>(query, call.head_dim, here, next, stride, s.scores); break;
    case 3: multiply_keys<Cache, R, 3>(query, call.head_dim, here, next, stride, s.scores); break;
    case 4: multiply_keys<Cache, R, 4>(query, call.head_dim, here, next, stride, s.scores); break;
  }
  float factors[R];
  for (int r = 0; r < R; ++r) {
    const int position = s.position[row + r];
    const int first = call.window > 0 ? position - call.window + 1 - tile.first : 0;
    factors[r] = weigh(here, panels, first, position + 1 - tile.first, row + r, s.scores + r * kTile,
                       s.weights + r * kTile, call, s);
  }
  float* out = s.segment.out + size_t(row) * call.head_dim;
  const int run = std::min(call.block_size, kTile);
  int column = 0;
  for (; column + 64 <= call.head_dim; column += 64)
    add_values<Cache, R, 4>(s.weights, factors, here, next, run, num_keys, call.head_dim, column, out);
  for (; column < call.head_dim; column += 16)
    add_values<Cache, R, 1>(s.weights, factors, here, next, run, num_keys, call.head_dim, column, out);
}

// Some rows of an item, which all belong to the tile's sequence or share its keys, and the tile that comes after.
template <class Cache>
inline void attend_tile(const Tile& tile, const Tile* after, int row, int end_row, Scratch& s) {
  const Addresses<Cache> here(tile), there(after ? *after : tile), *next = after ? &there : nullptr;
  if (next) next->prefetch_scales();
  if constexpr (Cache::kHasScales) s.value_exponent = here.value_exponent(kPanels, 0, kTile);
  for (; row + kRows <= end_row; row += kRows, next = nullptr) attend_rows<Cache, kRows>(tile, here, next, row, s);
  switch (end_row - row) {
    case 1: return attend_rows<Cache, 1>(tile, here, next, row, s);
    case 2: return attend_rows<Cache, 2>(tile, here, next, row, s);
    case 3: return attend_rows<Cache, 3>(tile, here, next, row, s);
    case 4: return attend_rows<Cache, 4>(tile, here, next, row, s);
    case 5: return attend_rows<Cache, 5>(tile, here, next, row, s);
  }
}

// Some queries of one sequence.
struct Part {
  const int32_t* blocks;
  int first_row, num_queries, first_position;

  int end() const { return first_position + num_queries; }  // of the keys that it reads
};

// One item: parts whose first `shared_keys` keys lie in the same blocks, and with each query all heads of a KV head.
struct Item {
  const AttentionCall* call;
  int kv_head, first_part, num_parts, shared_keys;

  Item(const AttentionCall& call, int64_t index, int kv_head) : call(&call), kv_head(kv_head) {
    const int32_t* item = call.items + index * 3;
    first_part = item[0], num_parts = item[1], shared_keys = item[2];
  }
  Part part(int index) const {
    const int32_t* part = call->parts + ptrdiff_t(first_part + index) * 4;
    return {call->block_tables + ptrdiff_t(part[0]) * call->max_blocks, part[1], part[2], part[3]};
  }
  int first_key() const {
    return call->window > 0 ? std::max(0, part(0).first_position - call->window + 1) / kTile * kTile : 0;
  }
  int end() const {
    int end = 0;
    for (int p = 0; p < num_parts; ++p) end = std::max(end, part(p).end());
    return end;
  }
  Tile tile(const Part& part, int first) const { return {call, part.blocks, kv_head, first, part.end()}; }

  // Calls with each row, the token and the head that it stands for.
  template <typename Function>
  int for_rows(Function function) const {
    int row = 0;
    for (int p = 0; p < num_parts; ++p)
      for (int q = 0, queries = part(p).num_queries; q < queries; ++q)
        for (int g = 0; g < call->group; ++g) function(row++, part(p), q, kv_head * call->group + g);
    return row;
  }
};

template <class Cache>
inline int load_queries(const Item& item, Scratch& s) {
  const AttentionCall& call = *item.call;
  return item.for_rows([&](int row, const Part& part, int query, int head) {
    const bf16* from = call.query + (part.first_row + query) * call.query_stride + ptrdiff_t(head) * call.head_dim;
    uint16_t* to = s.query + size_t(row) * call.head_dim;
    if constexpr (Cache::kHasScales)
      s.query_scales[row] = quantize_query(from, call.head_dim, (int16_t*)to);
    else
      std::memcpy(to, from, call.head_dim * sizeof(bf16));
    s.position[row] = part.first_position + query;
  });
}

// The keys from `first` on and before `end`, of one segment. `after` is a tile that is wanted next, or null.
template <class Cache>
inline void attend_segment(const Item& item, int first, int end, int rows, const Tile* after, Scratch& s) {
  s.segment.clear(rows, item.call->head_dim);
  int key = first;
  for (const int shared_end = std::min(item.shared_keys, end); key < shared_end; key += kTile) {
    // What comes after the last shared tile is the first part's own.
    Tile next = item.tile(item.part(0), key + kTile);
    attend_tile<Cache>(item.tile(item.part(0), key), next.first < next.end ? &next : nullptr, 0, rows, s);
  }
  for (int p = 0, row = 0; p < item.num_parts; ++p) {
    const Part part = item.part(p);
    const int part_end = std::min(part.end(), end), end_row = row + part.num_queries * item.call->group;
    for (int own = key; own < part_end; own += kTile) {
      Tile next = item.tile(part, own + kTile);
      const Tile* then = &next;
      if (next.first >= next.end) {
        then = after;
        if (p + 1 < item.num_parts) {
          next = item.tile(item.part(p + 1), key);
          then = next.first < next.end ? &next : nullptr;
        }
      }
      attend_tile<Cache>(item.tile(part, own), then, row, end_row, s);
    }
    row = end_row;
  }
}

// Begins a row's sums over segments. A sink is a logit without a value.
inline void begin(const Item& item, int rows, const RowSums& joined) {
  joined.clear(rows, item.call->head_dim);
  if (!item.call->sinks) return;
  item.for_rows([&](int row, const Part&, int, int head) {
    joined.maxima[row] = item.call->sinks[head] * kLog2e;
    joined.weights[row * 16] = 1;
  });
}

// Joins a segment to those before it, in place of them.
inline void join(int rows, int head_dim, const RowSums& joined, const RowSums& segment) {
  for (int row = 0; row < rows; ++row) {
    float before = joined.maxima[row], now = std::max(before, segment.maxima[row]);
    if (now == kNothing) continue;
    float old_scale = before == kNothing ? 0 : std::exp2(before - now);
    float new_scale = segment.maxima[row] == kNothing ? 0 : std::exp2(segment.maxima[row] - now);
    auto add_scaled = [&](float* sum, const float* part, int size) {
      for (int i = 0; i < size; i += 16)
        store(sum + i, fma(load(part + i), fill(new_scale), mul(load(sum + i), fill(old_scale))));
    };
    add_scaled(joined.out + size_t(row) * head_dim, segment.out + size_t(row) * head_dim, head_dim);
    add_scaled(joined.weights + row * 16, segment.weights + row * 16, 16);
    joined.maxima[row] = now;
  }
}

inline void store_results(const Item& item, const RowSums& sums) {
  const AttentionCall& call = *item.call;
  item.for_rows([&](int row, const Part& part, int query, int head) {
    Floats share = fill(1 / sum_of(load(sums.weights + row * 16)));
    bf16* out = call.out + (ptrdiff_t(part.first_row + query) * call.num_kv_heads * call.group + head) * call.head_dim;
    for (int d = 0; d < call.head_dim; d += 16)
      store_narrow(out + d, mul(load(sums.out + size_t(row) * call.head_dim + d), share));
  });
}

template <class Cache>
inline void attend(const Item& item, const Item* after, Scratch& s) {
  const int rows = load_queries<Cache>(item, s), end = item.end();
  Tile wanted;
  if (after) wanted = after->tile(after->part(0), after->first_key());
  int key = item.first_key(), segment_end = (key / kSegment + 1) * kSegment;
  if (end <= segment_end && !item.call->sinks) {  // joined to nothing it would be the same
    attend_segment<Cache>(item, key, end, rows, after ? &wanted : nullptr, s);
    return store_results(item, s.segment);
  }
  begin(item, rows, s.joined);
  for (; key < end; key = segment_end) {
    segment_end = std::min(end, (key / kSegment + 1) * kSegment);
    attend_segment<Cache>(item, key, segment_end, rows, after && segment_end == end ? &wanted : nullptr, s);
    join(rows, item.call->head_dim, s.joined, s.segment);
  }
  store_results(item, s.joined);
}

// Items one by one; a thread takes some neighbours together, whose keys are neighbours in memory.
template <class Cache>
inline void attend_items(const AttentionCall& call) {
  const int64_t work = int64_t(call.num_items) * call.num_kv_heads;
  const int64_t together = std::clamp<int64_t>(work / (4 * omp_get_max_threads()), 1, call.num_kv_heads);
#pragma omp parallel
  {
    Scratch scratch(call.max_rows, call.head_dim);
#pragma omp for schedule(dynamic, together)
    for (int64_t i = 0; i < work; ++i) {
      Item item(call, i / call.num_kv_heads, int(i % call.num_kv_heads));
      Item after(call, std::min(i + 1, work - 1) / call.num_kv_heads, int((i + 1) % call.num_kv_heads));
      attend<Cache>(item, i + 1 < work ? &after : nullptr, scratch);
    }
  }
}

// For few items of long contexts: their segments one by one, and then joined.
template <class Cache>
inline void attend_segments(const AttentionCall& call) {
  const int64_t items = int64_t(call.num_items) * call.num_kv_heads, work = items * call.num_segments;
  const size_t size = RowSums::size(call.max_rows, call.head_dim);
  std::unique_ptr<float[]> partial(new float[size * work]);
#pragma omp parallel
  {
    Scratch s(call.max_rows, call.head_dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < work; ++i) {
      Item item(call, i / call.num_segments / call.num_kv_heads, int(i / call.num_segments % call.num_kv_heads));
      const int segment = int(i % call.num_segments);
      const int first = std::max(segment * kSegment, item.first_key());
      const int end = std::min((segment + 1) * kSegment, item.end());
      if (first >= end) continue;
      s.segment = RowSums(partial.get() + size * i, call.max_rows, call.head_dim);
      attend_segment<Cache>(item, first, end, load_queries<Cache>(item, s), nullptr, s);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < items; ++i) {
      Item item(call, i / call.num_kv_heads, int(i % call.num_kv_heads));
      const int rows = item.for_rows([](int, const Part&, int, int) {});
      begin(item, rows, s.joined);
      for (int segment = item.first_key() / kSegment; segment * kSegment < item.end(); ++segment)
        join(rows, call.head_dim, s.joined,
             RowSums(partial.get() + size * (i * call.num_segments + segment), call.max_rows, call.head_dim));
      store_results(item, s.joined);
    }
  }
}

template <class Cache>
inline void attend_all(const AttentionCall& call) {
  if (call.num_segments > 1)
    attend_segments<Cache>(call);
  else
    attend_items<Cache>(call);
}

void paged_attention(const AttentionCall& call) {
  if (call.key_scales)
    attend_all<OfInt8>(call);
  else
    attend_all<OfBf16>(call);
}

}  // namespace PAGEMILL_ISA
