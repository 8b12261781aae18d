// Tensor maps: what TMA (sm_90 on) reads to copy a box of a tensor into shared memory. Encoding is
// host arithmetic, for which the driver wants a current context all the same; the result goes to
// the kernel by value, as a
// __grid_constant__ parameter.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/runtime/driver_types.h"
#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

namespace flashmoe::cuda {

inline constexpr int kMaxTensorMapRank = 5;

// How 16-byte chunks are permuted within rows of the box, so that reading a column of the tile
// meets no bank twice. The number is the span of the pattern in bytes.
enum class Swizzle { kNone = 0, k32 = 32, k64 = 64, k128 = 128 };

// A map of `tensor` at device address `data`, copied in boxes of `box` elements: one number per
// dimension, in the order of tensor.shape. What a box holds beyond the tensor's edge reads as zero
// and is not written. 16-bit dtypes, rank 1 to 5, a unit last stride.
Result<CUtensorMap> encode_tensor_map(const TensorSpec& tensor, const void* data,
                                      std::span<const int> box, Swizzle swizzle = Swizzle::k128);

}  // namespace flashmoe::cuda
