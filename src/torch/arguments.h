// The arguments every attention op has.
#pragma once

#include <initializer_list>
#include <utility>

#include "convert.h"

namespace flashmoe::ops {

// In the order of the schemas (schema.cc).
struct Arguments {
  const Tensor &query, &key, &value;
  const OptionalTensor &bias, &key_lengths, &cu_seqlens_q, &cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  bool causal;
  int64_t window_left, window_right;
  std::optional<double> scale;
  double softcap;
};

// Fails unless all of them, and the tensors that an op has besides, are where query is.
using NamedTensor = std::pair<const char*, const Tensor*>;
void check_same_device(const Arguments& a, std::initializer_list<NamedTensor> more = {});

// Null where there is none.
inline const Tensor* pointer_to(const OptionalTensor& tensor) {
  return tensor ? &*tensor : nullptr;
}

// Addresses of the inputs, with query, key and value where the kernels read them.
AttentionTensors addresses(const Arguments& a, const Tensor& query, const Tensor& key,
                           const Tensor& value);

}  // namespace flashmoe::ops
