// Small helpers for messages: everything a user reads is put together here or with these.
#pragma once

#include <sstream>
#include <string>

#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

namespace flashmoe {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <class... Parts>
Status invalid(const Parts&... parts) {
  return Status(StatusCode::kInvalidArgument, text(parts...));
}

template <class... Parts>
Status unsupported(const Parts&... parts) {
  return Status(StatusCode::kUnsupported, text(parts...));
}

// "(2, 8, 128, 64)"
inline std::string shape_text(const TensorSpec& spec) {
  std::string result = "(";
  for (int i = 0; i < spec.rank; ++i) result += text(i ? ", " : "", spec.shape[i]);
  return result + (spec.rank == 1 ? ",)" : ")");
}

// "int64[3, 5]" style is for programmers; people get "float16 (2, 8, 128, 64)".
inline std::string spec_text(const TensorSpec& spec) {
  return text(dtype_name(spec.dtype), " ", shape_text(spec));
}

}  // namespace flashmoe
