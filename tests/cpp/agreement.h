// Whether attention agrees with the oracle, on the device under test.
#pragma once

#include "cases.h"
#include "runs.h"
#include "second_cases.h"

namespace testing {

// `twin` with every input changed by one rounding error of dtype.
template <class Case>
Case changed_twin(Random& random, const Case& twin, DType dtype) {
  const double u = unit_roundoff(dtype);
  Case result = float64_twin(twin);
  for (auto& [name, tensor] : result.inputs()) {
    if (*tensor) tensor->set(changed(random, tensor->values(), u));
  }
  // Rounding errors of one score after the other may all point the same way, as when all products
  // in a sum are alike: the scores grow together.
  const double dim_in = static_cast<double>(twin.query.spec().size(-1));
  const double scale = twin.options.scale ? *twin.options.scale : 1 / std::sqrt(dim_in);
  result.options.scale = scale * (1 + std::sqrt(dim_in) * accumulator_roundoff(dtype));
  if (!twin.grad_out) return result;
  // The backward pass needs sum(grad_out * out) of each row, and has out rounded; and it adds up
  // products of grad_out and value. That sum is subtracted where the gradient of lse is added, so
  // its error is put there.
  const Values grad_out = twin.grad_out.values(), out = twin.out.values();
  const double most = largest(twin.value.values());
  const int64_t dim = twin.out.spec().size(-1);
  Values grad_lse(out.size() / dim);
  if (result.grad_lse) grad_lse = result.grad_lse.values();
  for (size_t row = 0; row < grad_lse.size(); ++row) {
    double squares = 0, products = 0;
    for (int64_t d = 0; d < dim; ++d) {
      squares += std::pow(grad_out[row * dim + d] * out[row * dim + d], 2);
      products += std::fabs(grad_out[row * dim + d]) * most;
    }
    const double error = u * std::sqrt(squares) + accumulator_roundoff(dtype) * products;
    grad_lse[row] += chance(random, 0.5) ? error : -error;
  }
  result.grad_lse = Tensor(DType::kFloat64, result.lse.shape());
  result.grad_lse.set(grad_lse);
  return result;
}

// At most how many numbers are added up for one element of a result.
inline double sum_terms(const Case& c, const Tensor& result) {
  const bool ragged = c.ragged();
  const double rows = c.query.spec().size(ragged ? 0 : -2),
               keys = c.key.spec().size(ragged ? 0 : -2);
  const double heads = c.query.spec().size(ragged ? 1 : -3);
  if (&result == &c.grad_bias) {
    return static_cast<double>(c.lse.count()) * keys / std::max<double>(1, c.bias.count());
  }
  if (&result == &c.grad_sinks) return static_cast<double>(c.lse.count()) / heads;
  return std::max({rows * heads, keys, 256.});
}

// Means are taken off, in proportion to weights: tangent_lse off how scores move, and in the second
// pass sum(grad_out * tangent_out) - delta * tangent_lse off their gradients, the first rounded as
// the tangent pass left it. How far that can move a result.
inline double mean_error(const Case&, const Case&, const Tensor&) { return 0; }
inline double mean_error(const SecondCase& c, const SecondCase& twin, const Tensor& result) {
  if (&result == &c.tangent_lse) return 0;
  // How scores move is a sum over the head dim, and its mean over the keys is taken off it.
  const double move = accumulator_roundoff(c.dtype()) * largest(twin.tangent_lse.values()) *
                      std::sqrt(static_cast<double>(c.query.spec().size(-1)));
  if (&result == &c.tangent_out) return move * largest(twin.value.values());
  if (&result == &c.grad_value) {
    const double most = twin.grad_out ? largest(twin.grad_out.values()) : 0;
    return move * most * std::sqrt(sum_terms(c, result));
  }
  const int64_t dim = twin.out.spec().size(-1);
  const Values lse_moves = twin.tangent_lse.values(), out = twin.out.values();
  const Values out_moves = twin.tangent_out.values();
  const Values grad_out = twin.grad_out ? twin.grad_out.values() : Values();
  const Values grad_lse = twin.grad_lse ? twin.grad_lse.values() : Values(lse_moves.size());
  double most = 0;
  for (size_t row = 0; row < lse_moves.size(); ++row) {
    double squares = 0, delta = std::fabs(grad_lse[row]);
    for (size_t d = row * dim; twin.grad_out && d < (row + 1) * dim; ++d) {
      squares += std::pow(grad_out[d] * out_moves[d], 2);
      delta += std::fabs(grad_out[d] * out[d]);
    }
    const double error = unit_roundoff(c.dtype()) * std::sqrt(squares) +
                         accumulator_roundoff(c.dtype()) * delta * std::fabs(lse_moves[row]);
    if (std::isfinite(error)) most = std::max(most, error);
  }
  if (&result == &c.grad_bias) return most * std::sqrt(sum_terms(c, result));
  const double scale = c.options.scale ? std::fabs(*c.options.scale) : 1;
  const double factor = std::max(largest(twin.key.values()), largest(twin.query.values()));
  return most * scale * factor * std::sqrt(sum_terms(c, result));
}

// Two numbers of input number i become NaN. Returns which input that is, or null where it is empty.
template <class Case>
const char* put_nan(Random& random, Case& c, int i) {
  auto inputs = c.inputs();
  auto& [name, tensor] = inputs[i % inputs.size()];
  Values values = *tensor ? tensor->values() : Values();
  if (values.empty()) return nullptr;
  for (int n = 0; n < 2; ++n) values[uniform(random, 0, values.size() - 1)] = std::nan("");
  tensor->set(values);
  return name;
}

template <class Case>
void check_case(Random& random, Case& c) {
  const Note note(describe(c));
  Case twin = float64_twin(c);
  run_oracle(twin);
  // The largest of many movements is much the same every time; of a few it may be small by luck.
  const bool few = (twin.grad_bias && twin.grad_bias.count() < 64) || twin.grad_sinks;
  auto movement =
      movements(twin, few ? 6 : 1, [&] { return changed_twin(random, twin, c.dtype()); });
  // The backward pass computes exp(score - lse) from an lse as large as the scores, and rounded
  // like them.
  const double lse_error = 4 * accumulator_roundoff(c.dtype()) * largest(twin.lse.values());
  for (Pass pass : passes_of<Case>) {
    run_repeatedly(c, pass);
    const auto got = c.results(pass), want = twin.results(pass);
    for (size_t i = 0; i < got.size(); ++i) {
      const auto& [name, tensor] = got[i];
      if (!*tensor) continue;
      compare(name, *tensor, want[i].second->values(), c.dtype(),
              movement[name] + mean_error(c, twin, *tensor), pass == Pass::kForward ? 0 : lse_error,
              sum_terms(c, *tensor));
    }
  }
}

}  // namespace testing
