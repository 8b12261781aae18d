// Lengths that only the data tells: key_lengths, cu_seqlens, and what is in pages.
#pragma once

#include <cstdint>

#include "flashmoe/attention.h"

namespace flashmoe {

// Element number `index`, in row-major order of its own shape, of an int32 or int64 tensor.
int64_t read_int(const TensorSpec& spec, const void* data, int64_t index);

// How many queries a sequence over pages has.
int64_t paged_rows(const Paged& paged, const void* cu_seqlens_q, int64_t sequence);

// Ok when the lengths in memory fit the problem, which has passed check(). After this every
// sequence, every packed bias block and every page that is looked at can be addressed without
// looking again.
Status check_lengths(const AttentionProblem& problem, const AttentionTensors& tensors);

}  // namespace flashmoe
