// The router: scores of all experts, the largest of them and their weights, one token at a time.
#pragma once

#include "cpu/moe/activation.h"
#include "cpu/moe/kernels.h"
#include "cpu/tile.h"

namespace flashmoe::cpu::moe {
namespace {

template <class A>
struct RouteScratch {
  int64_t ld;       // experts, padded to whole vectors
  A* scores;        // ld
  A* keys;          // ld   what the choice is by
  Int<A>* best;     // k    their keys in falling order
  int64_t* chosen;  // k    and whose they are
  A* weights;       // k
  A* grads;         // k
  size_t bytes;

  RouteScratch(const RouteParams& p, void* memory) {
    Arena arena(memory);
    ld = round_up(p.experts, kLanes<A>);
    scores = arena.take<A>(ld);
    keys = arena.take<A>(ld);
    best = arena.take<Int<A>>(p.top_k);
    chosen = arena.take<int64_t>(p.top_k);
    weights = arena.take<A>(p.top_k);
    grads = arena.take<A>(p.top_k);
    bytes = arena.used();
  }
};

template <class A>
A sum_of(const A* from, int64_t ld) {
  Vec<A> sum = {};
  for (int64_t i = 0; i < ld; i += kLanes<A>) sum += load<Vec<A>>(from + i);
  A total = 0;
  for (int i = 0; i < kLanes<A>; ++i) total += sum[i];
  return total;
}

// x[i] = e^(x[i] - largest), and their sum. A NaN makes everything one.
template <class A>
A exponentials(A* x, int64_t n, int64_t ld) {
  A largest = -kInf<A>;
  for (int64_t i = 0; i < n; ++i) largest = x[i] > largest || x[i] != x[i] ? x[i] : largest;
  for (int64_t i = n; i < ld; ++i) x[i] = -kInf<A>;
  for (int64_t i = 0; i < ld; i += kLanes<A>) {
    store(x + i, exp2((load<Vec<A>>(x + i) - largest) * A(kLog2e)));
  }
  for (int64_t i = n; i < ld; ++i) x[i] = 0;
  return sum_of(x, ld);
}

template <class A>
Vec<A> sigmoid(Vec<A> x) {
  const Vec<A> t = x * A(-kLog2e);
  return A(1) / (exp2(t > kMaxExponent<A> ? splat(kMaxExponent<A>) : t) + A(1));  // a NaN is kept
}

// Scores of all experts from their logits, in place.
template <class A>
void score(const RouteParams& p, A* x, int64_t ld) {
  if (p.scoring == Scoring::kSigmoid) {
    for (int64_t i = p.experts; i < ld; ++i) x[i] = 0;
    for (int64_t i = 0; i < ld; i += kLanes<A>) store(x + i, sigmoid<A>(load<Vec<A>>(x + i)));
    return;
  }
  const A sum = exponentials(x, p.experts, ld);
  for (int64_t i = 0; i < ld; ++i) x[i] /= sum;
}

// The order of floats as that of integers; NaN is the largest, both zeros are the same.
template <class A>
Int<A> rank(A x) {
  constexpr Int<A> kLargest = static_cast<Int<A>>(~(Int<A>(1) << (8 * sizeof(A) - 1)));
  if (x != x) return kLargest;
  const Int<A> bits = bits_as<Int<A>>(x + A(0));
  return bits < 0 ? bits ^ kLargest : bits;
}

// The k largest keys in falling order, ties to the lower expert: a list that each larger key enters
// at its place.
template <class A>
void choose(const A* keys, int64_t experts, int64_t k, Int<A>* best, int64_t* chosen) {
  int64_t count = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const Int<A> r = rank(keys[e]);
    if (count == k && r <= best[k - 1]) continue;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && best[at - 1] < r; --at) {
      best[at] = best[at - 1];
      chosen[at] = chosen[at - 1];
    }
    best[at] = r;
    chosen[at] = e;
  }
}

// The weights of `count` chosen experts: their scores, or those as parts of their sum. Softmax as
// parts of their sum is that of the chosen alone, which is exact however small their scores are.
template <class A>
void weigh(const RouteParams& p, int64_t token, const RouteScratch<A>& t, int64_t count) {
  const bool alone = p.scoring == Scoring::kSoftmax && p.normalize;
  if (!alone) {
    for (int64_t j = 0; j < count; ++j) t.weights[j] = t.scores[t.chosen[j]];
  } else {
    A largest = -kInf<A>;
    for (int64_t j = 0; j < count; ++j) {
      load_row(p.logits.dtype, element(p.logits, token, t.chosen[j]), 1, 1, &t.weights[j]);
      if (t.weights[j] > largest) largest = t.weights[j];
    }
    for (int64_t j = 0; j < count; ++j) {
      t.weights[j] = exp2(splat((t.weights[j] - largest) * A(kLog2e)))[0];
    }
  }
  if (!p.normalize) return;
  A sum = 0;
  for (int64_t j = 0; j < count; ++j) sum += t.weights[j];
  for (int64_t j = 0; j < count; ++j) t.weights[j] /= sum;
}

template <class A>
void route_forward(const RouteParams& p, int64_t item, void* memory) {
  const RouteScratch<A> t(p, memory);
  for (int64_t token = item * kTokenBlock; token < smaller((item + 1) * kTokenBlock, p.tokens);
       ++token) {
    load_row(p.logits.dtype, element(p.logits, token, 0), p.logits.col, p.experts, t.scores);
    // Without a bias the order of the logits is that of the scores, and is exact.
    if (!p.bias) choose(t.scores, p.experts, p.top_k, t.best, t.chosen);
    if (p.bias || !p.normalize || p.scoring == Scoring::kSigmoid) score(p, t.scores, t.ld);
    if (p.bias) {
      load_row(p.bias.dtype, p.bias.data, p.bias.col, p.experts, t.keys);
      for (int64_t e = 0; e < p.experts; ++e) t.keys[e] += t.scores[e];
      choose(t.keys, p.experts, p.top_k, t.best, t.chosen);
    }
    weigh(p, token, t, p.top_k);
    for (int64_t j = 0; j < p.top_k; ++j) {
      *reinterpret_cast<int32_t*>(element(p.ids, token, j)) = static_cast<int32_t>(t.chosen[j]);
    }
    store_row(p.weights.dtype, element(p.weights, token, 0), p.weights.col, p.top_k, t.weights);
  }
}

template <class A>
void route_backward(const RouteParams& p, int64_t item, void* memory) {
  const RouteScratch<A> t(p, memory);
  const bool softmax = p.scoring == Scoring::kSoftmax;
  for (int64_t token = item * kTokenBlock; token < smaller((item + 1) * kTokenBlock, p.tokens);
       ++token) {
    int64_t count = 0;  // a choice outside of the experts has no score
    for (int64_t j = 0; j < p.top_k && p.grad_weights; ++j) {
      const int64_t id = *reinterpret_cast<const int32_t*>(element(p.ids, token, j));
      if (id < 0 || id >= p.experts) continue;
      t.chosen[count] = id;
      t.grads[count++] = *reinterpret_cast<const A*>(element(p.grad_weights, token, j));
    }
    if (count > 0 && !(softmax && p.normalize)) {
      load_row(p.logits.dtype, element(p.logits, token, 0), p.logits.col, p.experts, t.scores);
      score(p, t.scores, t.ld);
    }
    weigh(p, token, t, count);
    A mean = 0, sum = 0;
    for (int64_t j = 0; j < count; ++j) {
      mean += t.grads[j] * t.weights[j];
      if (!softmax || !p.normalize) sum += t.scores[t.chosen[j]];
    }
    A* const grad = t.keys;
    for (int64_t e = 0; e < p.experts; ++e) {
      grad[e] = count > 0 && softmax && !p.normalize ? -mean * t.scores[e] : 0;
    }
    for (int64_t j = 0; j < count; ++j) {
      const int64_t e = t.chosen[j];
      if (softmax) {
        grad[e] += t.weights[j] * (p.normalize ? t.grads[j] - mean : t.grads[j]);
      } else {
        const A grad_score = p.normalize ? (t.grads[j] - mean) / sum : t.grads[j];
        grad[e] += grad_score * t.scores[e] * (1 - t.scores[e]);
      }
    }
    store_row(p.grad_logits.dtype, element(p.grad_logits, token, 0), p.grad_logits.col, p.experts,
              grad);
  }
}

template <class A>
size_t route_scratch(const RouteParams& p) {
  return RouteScratch<A>(p, nullptr).bytes;
}

}  // namespace
}  // namespace flashmoe::cpu::moe
