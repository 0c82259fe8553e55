// What becomes of the sums of a tile, on their way to memory.
//
// A panel of a plain product is 32 outputs. One of gate and up is 16 gates and the 16 that they weigh, so that all that
// an activation needs is there.
#pragma once

#include "glue.h"
#include "panels.h"
#include "shapes.h"

namespace PAGEMILL_ISA {

// Sums come by way of the first-level cache: an activation needs the registers that they were in.
struct ProductTile {
  const int64_t row;  // the first
  const int rows;
  const ptrdiff_t panel;
  alignas(64) float sums[kTileRows][kPanel];

  // Leaves the sums unset.
  ProductTile(int64_t row, int rows, ptrdiff_t panel) : row(row), rows(rows), panel(panel) {}
  void set(int r, Floats first, Floats second) {
    store(sums[r], first);
    store(sums[r] + 16, second);
  }
  Floats first(int r) const { return load(sums[r]); }
  Floats second(int r) const { return load(sums[r] + 16); }
};

inline void store_plain(const Outputs& outputs, const ProductTile& tile) {
  const ptrdiff_t column = tile.panel * kPanel, left = outputs.size - column;
  for (int r = 0; r < tile.rows; ++r) {
    bf16* out = outputs.out + (tile.row + r) * outputs.size + column;
    store_some(out, tile.first(r), left);
    if (left > 16) store_some(out + 16, tile.second(r), left - 16);
  }
}

inline void store_gate_up(const Outputs& outputs, const ProductTile& tile) {
  const ptrdiff_t column = tile.panel * (kPanel / 2), left = outputs.size - column;
  for (int r = 0; r < tile.rows; ++r) {
    bf16* out = outputs.out + (tile.row + r) * 2 * outputs.size + column;
    store_some(out, tile.first(r), left);
    store_some(out + outputs.size, tile.second(r), left);
  }
}

// Rounded where `activate_and_mul` of a stored product rounds.
template <Floats (*activate)(Floats)>
inline void store_activated(const Outputs& outputs, const ProductTile& tile) {
  const ptrdiff_t column = tile.panel * (kPanel / 2), left = outputs.size - column;
  for (int r = 0; r < tile.rows; ++r) {
    const Floats gate = rounded(tile.first(r)), up = rounded(tile.second(r));
    store_some(outputs.out + (tile.row + r) * outputs.size + column, weighed<activate>(gate, up), left);
  }
}

// Not inlined: there is a caller for each number of rows.
inline __attribute__((noinline)) void store_tile(const Outputs& outputs, const ProductTile& tile) {
  switch (outputs.kind) {
    case OutputKind::plain: return store_plain(outputs, tile);
    case OutputKind::gate_up: return store_gate_up(outputs, tile);
    case OutputKind::silu: return store_activated<silu>(outputs, tile);
    case OutputKind::gelu: return store_activated<gelu>(outputs, tile);
    case OutputKind::gelu_tanh: return store_activated<gelu_tanh>(outputs, tile);
  }
}

}  // namespace PAGEMILL_ISA
