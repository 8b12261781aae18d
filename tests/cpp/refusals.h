// Problems that are not legal, and what is said about them.
#pragma once

#include <functional>
#include <initializer_list>
#include <vector>

#include "flashmoe/status.h"
#include "flashmoe/tensor.h"
#include "testing.h"

namespace testing {

// A row-major spec whose element count need not fit 64 bits.
inline flashmoe::TensorSpec huge_spec(flashmoe::DType dtype, std::initializer_list<int64_t> shape) {
  flashmoe::TensorSpec spec = flashmoe::contiguous(dtype, {});
  for (int64_t size : shape) {
    spec.shape[spec.rank] = size;
    spec.stride[spec.rank++] = 1;
  }
  return spec;
}

template <class Problem>
struct BadProblem {
  const char* what;
  std::function<void(Problem&)> spoil;
  std::vector<const char*> said;  // each must be in the message
};

// plan() and run_reference() say the same about it.
template <class Problem>
void check_refused(const Problem& good, const BadProblem<Problem>& bad) {
  const Note note(bad.what);
  CHECK(plan(good).ok(), plan(good).status().message());
  Problem problem = good;
  bad.spoil(problem);
  const auto planned = plan(problem);
  CHECK(!planned.ok());
  CHECK(planned.status().code() == flashmoe::StatusCode::kInvalidArgument);
  for (const char* part : bad.said) CHECK_CONTAINS(planned.status().message(), part);
  CHECK_EQ(run_reference(problem, {}).message(), planned.status().message());
  if constexpr (requires { explain(problem); }) {
    CHECK_CONTAINS(explain(problem), planned.status().message());
  }
}

}  // namespace testing
