// Small helpers for messages: everything a user reads is put together here or with these.
//
// No streams: their locales are shared by all copies of the C++ runtime in a process, and a library
// that was linked with a copy of its own next to torch's crashes in them.
#pragma once

#include <cstdio>
#include <string>
#include <type_traits>

#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

namespace flashmoe {

template <class T>
void append(std::string& to, const T& part) {
  if constexpr (std::is_same_v<T, char>) {
    to += part;
  } else if constexpr (std::is_floating_point_v<T>) {
    char number[32];
    std::snprintf(number, sizeof(number), "%g", static_cast<double>(part));
    to += number;
  } else if constexpr (std::is_same_v<T, const void*>) {
    char number[32];
    std::snprintf(number, sizeof(number), "%p", part);
    to += number;
  } else if constexpr (std::is_arithmetic_v<T>) {
    to += std::to_string(part);
  } else {
    to += part;
  }
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string result;
  (append(result, parts), ...);
  return result;
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
