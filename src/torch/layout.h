// How results and copies lie in memory. Pure arithmetic on strides, so that a call is planned, and
// refused, before anything is allocated, and explain() knows what a call would do.
#pragma once

#include "flashmoe/tensor.h"

namespace flashmoe::ops {

// Row-major without gaps: torch.empty().
TensorSpec packed(TensorSpec spec);

// The order of dimensions kept, without gaps: torch.empty_like(). Traced graphs rely on results
// that lie so, because the fake kernels in _library.py promise it.
TensorSpec packed_like(TensorSpec spec);

// Row-major with the last dimension padded in memory to a multiple of 16 bytes: what every CUDA
// kernel can address. Head dim 20 in 16 bits has rows of 20 elements, 24 apart.
TensorSpec padded(TensorSpec spec);

}  // namespace flashmoe::ops
