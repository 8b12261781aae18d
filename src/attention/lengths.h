// Lengths that only the data tells: key_lengths and cu_seqlens.
#pragma once

#include <cstdint>

#include "flashmoe/attention.h"

namespace flashmoe {

// Element number `index`, in row-major order of its own shape, of an int32 or int64 tensor.
int64_t read_int(const TensorSpec& spec, const void* data, int64_t index);

// Ok when the lengths in memory fit the problem, which has passed check(). After this every
// sequence and every packed bias block can be addressed without looking again.
Status check_lengths(const AttentionProblem& problem, const AttentionTensors& tensors);

}  // namespace flashmoe
