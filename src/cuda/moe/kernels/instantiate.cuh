// Kernels from the rows of a family's tables. Each .cu file is compiled once for each family and
// dtype, with
//   -DFLASHMOE_FAMILY=sm80 -DFLASHMOE_DTYPE=bf16
//   -DFLASHMOE_TABLE="cuda/moe/kernels/sm80.h" -DFLASHMOE_CHIP="cuda/tile/chip_sm80.cuh"
//
// A kernel with a tile is a template over it, sm80_moe_up_bf16<128, 128>; the rest of its
// configuration is in that tile's row. cuda/moe/catalogue.cc makes the same symbol on the host.
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

#include "cuda/moe/tiles.h"
#include "cuda/tile/dtype.cuh"
#include FLASHMOE_TABLE
#if defined(FLASHMOE_CHIP)
#include FLASHMOE_CHIP
#endif

#define FLASHMOE_PASTE(FAMILY, NAME, DTYPE) FAMILY##_##NAME##_##DTYPE
#define FLASHMOE_PASTE_VALUES(FAMILY, NAME, DTYPE) FLASHMOE_PASTE(FAMILY, NAME, DTYPE)
// FLASHMOE_KERNEL(moe_up) is sm80_moe_up_bf16.
#define FLASHMOE_KERNEL(NAME) FLASHMOE_PASTE_VALUES(FLASHMOE_FAMILY, NAME, FLASHMOE_DTYPE)

namespace flashmoe::cuda::FLASHMOE_FAMILY {
namespace dtypes {
using fp16 = Fp16;
using bf16 = Bf16;
}  // namespace dtypes
}  // namespace flashmoe::cuda::FLASHMOE_FAMILY

namespace flashmoe::cuda::moe {

#if defined(FLASHMOE_CHIP)
using Chip = cuda::FLASHMOE_FAMILY::Chip;
#endif
// The family's own type of that name, where it has one.
using KernelType = cuda::FLASHMOE_FAMILY::dtypes::FLASHMOE_DTYPE;

// The row of a table with this tile.
template <class Tile, size_t kRows>
constexpr Tile find_tile(const Tile (&table)[kRows], int block_m, int block_n) {
  size_t row = 0;
  while (table[row].block_m != block_m || table[row].block_n != block_n) ++row;
  return table[row];
}
template <int kBlockM, int kBlockN>
inline constexpr auto kRowTile = find_tile(moe::FLASHMOE_FAMILY::kRows, kBlockM, kBlockN);
template <int kBlockM, int kBlockN>
inline constexpr auto kTokenTile = find_tile(moe::FLASHMOE_FAMILY::kTokens, kBlockM, kBlockN);

// Takes the address of a kernel, which instantiates it. Nothing ever runs this.
template <class Params>
void use(void (*)(Params)) {}

}  // namespace flashmoe::cuda::moe

// Instantiates the kernel NAME<block_m, block_n> for each row of TABLE.
#define FLASHMOE_INSTANTIATE(NAME, TABLE)                                                          \
  template <size_t... kRow>                                                                        \
  void instantiate_##NAME(std::index_sequence<kRow...>) {                                          \
    (flashmoe::cuda::moe::use(FLASHMOE_KERNEL(NAME) < TABLE[kRow].block_m, TABLE[kRow].block_n >), \
     ...);                                                                                         \
  }                                                                                                \
  template void instantiate_##NAME(std::make_index_sequence<std::size(TABLE)>);
