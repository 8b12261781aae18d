// The oracle: a mixture of experts, its router and their gradients exactly as docs/semantics.md
// defines them, in float64, one token and one expert at a time. Every input becomes a dense array
// of doubles first and every result is rounded once at the end, so what lies between is only the
// mathematics.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/text.h"
#include "cpu/oracle.h"
#include "moe/problem.h"

namespace flashmoe {
namespace {

using namespace cpu::oracle;

// A function of one number, and its derivative there.
struct Value {
  double value, slope;
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// What a gate does to its number, and all there is where there is no gate.
Value nonlinearity(Activation activation, double x) {
  switch (activation) {
    case Activation::kSwiglu:
    case Activation::kSilu: {
      const double s = sigmoid(x);
      return {x * s, s * (1 + x * (1 - s))};
    }
    case Activation::kGeglu:
    case Activation::kGelu: {
      const double cdf = std::erfc(-x / std::sqrt(2)) / 2;  // of the normal distribution
      const double pdf = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
      return {x * cdf, cdf + x * pdf};
    }
    case Activation::kReglu:
    case Activation::kRelu:
      return {x < 0 ? 0 : x, x > 0 ? 1. : 0.};  // a NaN stays one
  }
  return {};
}

class MoeOracle {
 public:
  MoeOracle(const MoeProblem& problem, const MoeTensors& tensors)
      : problem_(problem),
        tensors_(tensors),
        s_(sizes(problem)),
        x_(load(problem.x, tensors.x)),
        gate_up_(load(problem.gate_up, tensors.gate_up)),
        down_(load(problem.down, tensors.down)),
        up_bias_(load(problem.up_bias, tensors.up_bias)),
        down_bias_(load(problem.down_bias, tensors.down_bias)),
        weights_(load(problem.weights, tensors.weights)) {
    if (!problem.weights) weights_.assign(s_.rows, 1);
    for (double id : load(problem.ids, tensors.ids)) {
      ids_.push_back(id >= 0 && id < s_.experts ? static_cast<int64_t>(id) : s_.experts);
    }
    pairs_.resize(s_.rows);
    std::iota(pairs_.begin(), pairs_.end(), 0);
    std::stable_sort(pairs_.begin(), pairs_.end(),
                     [&](int64_t a, int64_t b) { return ids_[a] < ids_[b]; });
  }

  void forward() const {
    Array out(s_.tokens * s_.width), pre(s_.rows * s_.gates * s_.inner);
    for_each_row([&](int64_t row, int64_t pair, int64_t e) {
      const Array h = pre_activations(pair, e), a = activations(h), y = expert_output(a, e);
      add(out.data() + pair / s_.top_k * s_.width, y.data(), weights_[pair], s_.width);
      std::copy(h.begin(), h.end(), pre.begin() + row * s_.gates * s_.inner);
    });
    store(problem_.out, tensors_.out, out);
    store(problem_.pre, tensors_.pre, pre);
    store(problem_.routing, tensors_.routing, routing());
  }

  void backward() const {
    const int64_t d = s_.width, n = s_.inner;
    Array grad_x(x_.size()), grad_gate_up(gate_up_.size()), grad_down(down_.size());
    Array grad_up_bias(up_bias_.size()), grad_down_bias(down_bias_.size());
    Array grad_weights(s_.rows);
    const Array grad_out = load(problem_.grad_out, tensors_.grad_out);

    for_each_row([&](int64_t, int64_t pair, int64_t e) {
      if (!problem_.grad_out) return;  // nothing follows from nothing, whatever the inputs are
      const int64_t t = pair / s_.top_k;
      const Array h = pre_activations(pair, e), a = activations(h), y = expert_output(a, e);
      grad_weights[pair] = dot(grad_out.data() + t * d, y.data(), d);

      Array grad_y(d), grad_a(n);
      add(grad_y.data(), grad_out.data() + t * d, weights_[pair], d);
      for (int64_t c = 0; c < d; ++c) {
        const int64_t at = (e * d + c) * n;
        add(grad_a.data(), down_.data() + at, grad_y[c], n);
        add(grad_down.data() + at, a.data(), grad_y[c], n);
      }
      if (!down_bias_.empty()) add(grad_down_bias.data() + e * d, grad_y.data(), 1, d);

      const Array grad_h = activation_gradient(h, grad_a);
      for (int64_t r = 0; r < s_.gates * n; ++r) {
        const int64_t at = (e * s_.gates * n + r) * d;
        add(grad_x.data() + t * d, gate_up_.data() + at, grad_h[r], d);
        add(grad_gate_up.data() + at, x_.data() + t * d, grad_h[r], d);
      }
      if (!up_bias_.empty()) {
        add(grad_up_bias.data() + e * s_.gates * n, grad_h.data(), 1, s_.gates * n);
      }
    });
    store(problem_.grad_x, tensors_.grad_x, grad_x);
    store(problem_.grad_gate_up, tensors_.grad_gate_up, grad_gate_up);
    store(problem_.grad_down, tensors_.grad_down, grad_down);
    store(problem_.grad_up_bias, tensors_.grad_up_bias, grad_up_bias);
    store(problem_.grad_down_bias, tensors_.grad_down_bias, grad_down_bias);
    store(problem_.grad_weights, tensors_.grad_weights, grad_weights);
  }

 private:
  // Calls visit(row, pair, expert) for every pair (token, choice) that has an expert, in the order
  // of routing.
  template <class Visit>
  void for_each_row(Visit&& visit) const {
    for (int64_t row = 0; row < s_.rows && ids_[pairs_[row]] < s_.experts; ++row) {
      visit(row, pairs_[row], ids_[pairs_[row]]);
    }
  }

  // The rows of gate first, then those of up.
  Array pre_activations(int64_t pair, int64_t e) const {
    const double* x = x_.data() + pair / s_.top_k * s_.width;
    const int64_t rows = s_.gates * s_.inner;
    Array h(rows);
    for (int64_t r = 0; r < rows; ++r) {
      h[r] = dot(x, gate_up_.data() + (e * rows + r) * s_.width, s_.width);
      if (!up_bias_.empty()) h[r] += up_bias_[e * rows + r];
    }
    return h;
  }

  Array activations(const Array& h) const {
    Array a(s_.inner);
    for (int64_t i = 0; i < s_.inner; ++i) {
      a[i] = nonlinearity(problem_.activation, h[i]).value * up(h, i);
    }
    return a;
  }

  Array activation_gradient(const Array& h, const Array& grad_a) const {
    Array grad_h(h.size());
    for (int64_t i = 0; i < s_.inner; ++i) {
      const Value gate = nonlinearity(problem_.activation, h[i]);
      grad_h[i] = grad_a[i] * gate.slope * up(h, i);
      if (s_.gates == 2) grad_h[s_.inner + i] = grad_a[i] * gate.value;
    }
    return grad_h;
  }

  // What a gate is multiplied by.
  double up(const Array& h, int64_t i) const { return s_.gates == 2 ? h[s_.inner + i] : 1; }

  Array expert_output(const Array& a, int64_t e) const {
    Array y(s_.width);
    for (int64_t c = 0; c < s_.width; ++c) {
      y[c] = dot(a.data(), down_.data() + (e * s_.width + c) * s_.inner, s_.inner);
      if (!down_bias_.empty()) y[c] += down_bias_[e * s_.width + c];
    }
    return y;
  }

  // Offsets, then pairs: see routing_elems().
  Array routing() const {
    Array result(s_.experts + 1);
    for_each_row([&](int64_t, int64_t, int64_t e) { ++result[e + 1]; });
    std::partial_sum(result.begin(), result.end(), result.begin());
    result.insert(result.end(), pairs_.begin(), pairs_.end());
    return result;
  }

  const MoeProblem& problem_;
  const MoeTensors& tensors_;
  const MoeSizes s_;
  Array x_, gate_up_, down_, up_bias_, down_bias_, weights_;
  std::vector<int64_t> ids_;    // by pair; E: no expert
  std::vector<int64_t> pairs_;  // by row: sorted by expert, in rising order within one
};

class RouteOracle {
 public:
  RouteOracle(const RouteProblem& problem, const RouteTensors& tensors)
      : problem_(problem),
        tensors_(tensors),
        tokens_(problem.logits.shape[0]),
        experts_(problem.logits.shape[1]),
        top_k_(problem.ids.shape[1]),
        logits_(load(problem.logits, tensors.logits)),
        bias_(load(problem.bias, tensors.bias)) {}

  void forward() const {
    Array ids, weights;
    for (int64_t t = 0; t < tokens_; ++t) {
      const std::vector<int64_t> chosen = choose(t);
      const Array w = chosen_weights(scores(t), chosen);
      ids.insert(ids.end(), chosen.begin(), chosen.end());
      weights.insert(weights.end(), w.begin(), w.end());
    }
    store(problem_.ids, tensors_.ids, ids);
    store(problem_.weights, tensors_.weights, weights);
  }

  void backward() const {
    if (!problem_.grad_logits) return;
    Array grad_logits(logits_.size());
    Array grad_weights = load(problem_.grad_weights, tensors_.grad_weights);
    grad_weights.resize(tokens_ * top_k_);  // absent: 0
    const Array ids = load(problem_.ids, tensors_.ids);
    for (int64_t t = 0; t < tokens_; ++t) {
      // A choice outside of the experts has no score, and no part in the sum.
      std::vector<int64_t> chosen;
      Array grad_w;
      for (int64_t j = 0; j < top_k_; ++j) {
        const double id = ids[t * top_k_ + j];
        if (id < 0 || id >= experts_) continue;
        chosen.push_back(static_cast<int64_t>(id));
        grad_w.push_back(grad_weights[t * top_k_ + j]);
      }
      const Array s = scores(t), w = chosen_weights(s, chosen);
      double sum = 0;
      for (int64_t e : chosen) sum += s[e];
      const double mean = dot(grad_w.data(), w.data(), w.size());
      Array grad_s(experts_);
      for (size_t j = 0; j < chosen.size(); ++j) {
        grad_s[chosen[j]] += problem_.normalize ? (grad_w[j] - mean) / sum : grad_w[j];
      }
      const double softmax_mean = dot(grad_s.data(), s.data(), experts_);
      for (int64_t e = 0; e < experts_; ++e) {
        grad_logits[t * experts_ + e] =
            s[e] * (problem_.scoring == Scoring::kSoftmax ? grad_s[e] - softmax_mean
                                                          : grad_s[e] * (1 - s[e]));
      }
    }
    store(*problem_.grad_logits, tensors_.grad_logits, grad_logits);
  }

 private:
  Array scores(int64_t t) const {
    Array s(logits_.begin() + t * experts_, logits_.begin() + (t + 1) * experts_);
    if (problem_.scoring == Scoring::kSigmoid) {
      for (double& x : s) x = sigmoid(x);
      return s;
    }
    // The largest is taken out of the exponent, so that nothing overflows.
    const double largest = s.empty() ? 0 : *std::max_element(s.begin(), s.end());
    double sum = 0;
    for (double& x : s) sum += x = std::exp(x - largest);
    for (double& x : s) x /= sum;
    return s;
  }

  // The order of the logits is the order of the scores, and is exact.
  std::vector<int64_t> choose(int64_t t) const {
    Array key(logits_.begin() + t * experts_, logits_.begin() + (t + 1) * experts_);
    if (problem_.bias) {
      key = scores(t);
      add(key.data(), bias_.data(), 1, experts_);
    }
    std::vector<int64_t> order(experts_);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return std::isnan(key[b]) ? false : std::isnan(key[a]) || key[a] > key[b];
    });
    order.resize(top_k_);
    return order;
  }

  Array chosen_weights(const Array& scores, const std::vector<int64_t>& chosen) const {
    Array w;
    for (int64_t e : chosen) w.push_back(scores[e]);
    if (!problem_.normalize) return w;
    const double sum = std::accumulate(w.begin(), w.end(), 0.);
    for (double& x : w) x /= sum;
    return w;
  }

  const RouteProblem& problem_;
  const RouteTensors& tensors_;
  const int64_t tokens_, experts_, top_k_;
  Array logits_, bias_;
};

template <class Oracle, class Problem, class Tensors>
Status run_oracle(const Problem& problem, const Tensors& tensors) {
  if (Status status = check(problem); !status.ok()) return status;
  if (problem.device.type != DeviceType::kCpu) {
    return unsupported("the reference runs on host memory only");
  }
  return with_memory([&] {
    const Oracle oracle(problem, tensors);
    if (problem.pass == Pass::kForward) {
      oracle.forward();
    } else {
      oracle.backward();
    }
  });
}

}  // namespace

Status run_reference(const MoeProblem& problem, const MoeTensors& tensors) {
  return run_oracle<MoeOracle>(problem, tensors);
}

Status run_reference(const RouteProblem& problem, const RouteTensors& tensors) {
  return run_oracle<RouteOracle>(problem, tensors);
}

}  // namespace flashmoe
