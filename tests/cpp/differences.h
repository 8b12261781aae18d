// Gradients against finite differences.
#pragma once

#include <cmath>

#include "tensors.h"
#include "testing.h"

namespace testing {

// `gradient` is that of loss(c) by `input`, a tensor of c.
template <class Loss, class Case>
void check_gradient(const char* name, const Loss& loss, Case& c, Tensor& input,
                    const Tensor& gradient) {
  if (!input || !gradient) return;
  const Values start = input.values(), got = gradient.values();
  constexpr double kStep =
      1e-5;  // error of the difference: step^2 and 1e-16 / step, both near 1e-10
  for (size_t i = 0; i < start.size(); ++i) {
    if (!std::isfinite(start[i])) {
      CHECK_EQ(got[i], 0.);  // a mask
      continue;
    }
    Values values = start;
    values[i] = start[i] + kStep;
    input.set(values);
    const double above = loss(c);
    values[i] = start[i] - kStep;
    input.set(values);
    const double want = (above - loss(c)) / (2 * kStep);
    CHECK(std::fabs(got[i] - want) < 1e-7 * (1 + std::fabs(want)), name, "element", i, "is", got[i],
          "and by differences", want);
  }
  input.set(start);
}

}  // namespace testing
