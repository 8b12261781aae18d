// The pages of a cache of keys and values: what all who use one ask of it, and whether writing to
// one is legal.
#pragma once

#include "flashmoe/cache.h"

namespace flashmoe {

// Both are (blocks, page, heads, head dim), of one dtype and alike but in their head dim.
Status check_cache(const char* key_name, const TensorSpec& key, const char* value_name,
                   const TensorSpec& value);

// fp32, () or one for each head of `cache`, which is e4m3; absent for any cache.
Status check_scale(const char* name, const std::optional<TensorSpec>& scale,
                   const TensorSpec& cache);

// Ok exactly when the problem is legal, whatever the device.
Status check(const AppendProblem& problem);

}  // namespace flashmoe
