// The Python border: inside the library an error is a value, from here on an exception.
#pragma once

#include <stdexcept>
#include <string>

#include "flashmoe/status.h"

namespace flashmoe::ops {

// RuntimeError in Python.
[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

inline void raise_if_error(const Status& status) {
  if (!status.ok()) fail(status.message());
}

}  // namespace flashmoe::ops
