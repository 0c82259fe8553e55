// How the rows of a batch go through a packed weight, whatever the numbers are.
//
// A weight lies in panels of 32 outputs. The sums of a tile, up to kTileRows rows and one panel, stay in registers all
// along the inputs; `multiply<rows>(row, panel)` of a `Tiles`, of one kind of numbers, computes it.
#pragma once

#include <cstddef>

namespace PAGEMILL_ISA {

constexpr ptrdiff_t kPanel = 32;   // outputs of a tile
constexpr int64_t kRowBlock = 96;  // rows that one thread takes through a panel, from the second-level cache
#ifdef PAGEMILL_AVX512
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 2;
#endif

// Where part `index` of `parts` begins: all are of one size, or differ by one.
inline int64_t begin_of(int64_t index, int64_t parts, int64_t size) { return size * index / parts; }

template <int most, typename Tiles>
inline void multiply_rows(const Tiles& tiles, int64_t row, int64_t rows, ptrdiff_t panel) {
  if constexpr (most > 1) {
    if (rows < most) return multiply_rows<most - 1>(tiles, row, rows, panel);
  }
  tiles.template multiply<most>(row, panel);
}

template <typename Tiles>
inline void multiply_block(const Tiles& tiles, int64_t first, int64_t rows, ptrdiff_t panel) {
  const int64_t count = (rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < count; ++tile) {
    const int64_t row = begin_of(tile, count, rows);
    multiply_rows<kTileRows>(tiles, first + row, begin_of(tile + 1, count, rows) - row, panel);
  }
}

// All rows through all panels; by all threads of a parallel region together.
template <typename Tiles>
inline void multiply_panels(const Tiles& tiles) {
  const ptrdiff_t panels = tiles.call.panels;
  const int64_t blocks = (tiles.call.rows + kRowBlock - 1) / kRowBlock;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < blocks * panels; ++item) {
    const int64_t block = item / panels, first = begin_of(block, blocks, tiles.call.rows);
    multiply_block(tiles, first, begin_of(block + 1, blocks, tiles.call.rows) - first, item % panels);
  }
}

}  // namespace PAGEMILL_ISA
