// How torch calls an op: by a stack of values, in the order of the schema (schema.cc). An op's
// arguments are read from it into one struct, in one place.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "error.h"

namespace flashmoe::ops {

// Takes the values of a call off its stack, one after the other.
class ArgumentReader {
 public:
  ArgumentReader(const StableIValue* stack, uint64_t count) : next_(stack), end_(stack + count) {}

  template <class T>
  T next() {
    if (next_ == end_) fail("an op's schema has fewer arguments than its kernel reads");
    return torch::stable::detail::to<T>(*next_++);
  }

  bool at_end() const { return next_ == end_; }

 private:
  const StableIValue* next_;
  const StableIValue* end_;
};

// An op from `kernel`, which takes a struct with `static Arguments read(ArgumentReader&)`, and
// returns a tuple.
template <auto kernel>
struct Boxed;

template <class... Results, class Arguments, std::tuple<Results...> (*kernel)(const Arguments&)>
struct Boxed<kernel> {
  static void call(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
    ArgumentReader reader(stack, num_arguments);
    const Arguments arguments = Arguments::read(reader);
    if (!reader.at_end() || num_results != sizeof...(Results)) {
      fail("an op's schema has more arguments than its kernel reads, or other results");
    }
    torch::stable::detail::box_from_tuple(stack, kernel(arguments));
  }
};

}  // namespace flashmoe::ops
