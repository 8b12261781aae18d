// Which rows of the sm80 family's tables an sm_90 image needs not have.
#pragma once

#include <cstddef>

#include "cuda/attention/tiles.h"

namespace flashmoe::cuda {

// Whether the planner ever takes this backward tile on compute capability 9.0: it takes the first
// of a head dim of which an SM holds as many CTAs as the tile was made for (tile_choice.cc), so the
// rows after that one are for chips with less shared memory. sm_90 images leave them out, 8 of 32
// rows; who forces one with FLASHMOE_TILE on an H200 gets it from PTX.
template <size_t kRows>
constexpr bool runs_on_hopper(const BwdTile (&table)[kRows], size_t row, bool bias) {
  constexpr int kSharedOfSm = 228 * 1024, kReserved = 1024;
  for (size_t i = 0; i < row; ++i) {
    const BwdTile& before = table[i];
    if (before.head_dim == table[row].head_dim && before.for_short() == table[row].for_short() &&
        before.ctas * (before.shared_bytes(bias) + kReserved) <= kSharedOfSm) {
      return false;
    }
  }
  return true;
}
// Which forward tile is taken depends on the problem, and there is one sum of a head dim.
template <class Tile, size_t kRows>
constexpr bool runs_on_hopper(const Tile (&)[kRows], size_t, bool) {
  return true;
}

}  // namespace flashmoe::cuda
