// What the .cu files share. Each is compiled once for every family, dtype and head dim that has it:
//   -DFLASHMOE_FAMILY=sm80 -DFLASHMOE_DTYPE=bf16 -DFLASHMOE_HEAD_DIM=64
//   -DFLASHMOE_TABLE="cuda/attention/kernels/sm80.h" -DFLASHMOE_CHIP="cuda/tile/chip_sm80.cuh"
// so that an image is small, is loaded only when needed, and has no dtype that its chip lacks.
//
// A kernel is a template over its tile, sm80_attention_fwd_bf16<64, 128, 128>; the rest of its
// configuration is in that tile's row of the family's table. cuda/attention/catalogue.cc makes the
// same symbol on the host.
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "cuda/attention/kernels/hopper_rows.h"
#include "cuda/tile/dtype.cuh"
#include FLASHMOE_TABLE
#if defined(FLASHMOE_CHIP)
#include FLASHMOE_CHIP
#endif

#define FLASHMOE_PASTE(FAMILY, NAME, DTYPE) FAMILY##_##NAME##_##DTYPE
#define FLASHMOE_PASTE_VALUES(FAMILY, NAME, DTYPE) FLASHMOE_PASTE(FAMILY, NAME, DTYPE)
// FLASHMOE_KERNEL(attention_fwd) is sm80_attention_fwd_bf16.
#define FLASHMOE_KERNEL(NAME) FLASHMOE_PASTE_VALUES(FLASHMOE_FAMILY, NAME, FLASHMOE_DTYPE)

// The family's own type of that name, where it has one.
namespace flashmoe::cuda::FLASHMOE_FAMILY {
namespace dtypes {
using fp16 = Fp16;
using bf16 = Bf16;
}  // namespace dtypes
using KernelType = dtypes::FLASHMOE_DTYPE;
}  // namespace flashmoe::cuda::FLASHMOE_FAMILY

namespace family = flashmoe::cuda::FLASHMOE_FAMILY;

namespace flashmoe::cuda {

#if defined(FLASHMOE_HEAD_DIM)
#if defined(FLASHMOE_HOPPER_ROWS)
inline constexpr bool kHopperRows = true;
#else
inline constexpr bool kHopperRows = false;
#endif

// The rows of a table for FLASHMOE_HEAD_DIM; with FLASHMOE_HOPPER_ROWS only those that Hopper runs.
template <const auto& kTable, bool kBias = false>
constexpr auto rows_of() {
  constexpr auto wanted = [](size_t row) {
    return kTable[row].head_dim == FLASHMOE_HEAD_DIM &&
           (!kHopperRows || runs_on_hopper(kTable, row, kBias));
  };
  constexpr size_t kCount = [wanted] {
    size_t count = 0;
    for (size_t row = 0; row < std::size(kTable); ++row) count += wanted(row);
    return count;
  }();
  std::array<std::remove_cvref_t<decltype(kTable[0])>, kCount> rows{};
  for (size_t row = 0, next = 0; row < std::size(kTable); ++row) {
    if (wanted(row)) rows[next++] = kTable[row];
  }
  return rows;
}

// The row with this tile.
template <class Rows>
constexpr auto find_row(const Rows& rows, int block_q, int block_k) {
  size_t row = 0;
  while (rows[row].block_q != block_q || rows[row].block_k != block_k) ++row;
  return rows[row];
}

// Takes the address of a kernel, which instantiates it. Nothing ever runs this.
template <class Params>
void use(void (*)(Params)) {}
#endif

}  // namespace flashmoe::cuda

// Instantiates the kernel NAME<head_dim, block_q, block_k> for each of ROWS.
#define FLASHMOE_INSTANTIATE(NAME, ROWS)                                                         \
  template <size_t... kRow>                                                                      \
  void instantiate_##NAME(std::index_sequence<kRow...>) {                                        \
    (use(FLASHMOE_KERNEL(NAME) < ROWS[kRow].head_dim, ROWS[kRow].block_q, ROWS[kRow].block_k >), \
     ...);                                                                                       \
  }                                                                                              \
  template void instantiate_##NAME(std::make_index_sequence<ROWS.size()>);
