// The router: scores of all experts of a token, the k largest, and their weights. One warp a token.
//
// Scores are kept as numbers that compare like them: a NaN is the largest, 0 means taken. Each lane
// knows its best; k times the warp finds the best of these, with ties to the lower id, and its lane
// looks for the next. Without a bias the order is that of the logits, exactly: scores of fp32 may
// be equal where logits are not.
//
// Up to 32 * kRouteEach experts, of which at most 32 are chosen, stay in registers: a lane has
// neighbouring experts, so that ties go to the lowest lane, and lane j ends up with choice j.
// Others are in shared memory, expert e with lane e % 32.
//
// Backward, with g the gradient of the weights w and the chosen in C (p is the softmax over all):
//   softmax                 dl_i = p_i (g_i [i in C] - sum over C of g p)
//   softmax, normalised     dl_i = w_i (g_i - sum over C of g w)                  in C, else 0
//   sigmoid                 dl_i = g_i s_i (1 - s_i)                              in C, else 0
//   sigmoid, normalised     dl_i = w_i (1 - s_i) (g_i - sum over C of g w)        in C, else 0
#pragma once

#include "cuda/moe/params.h"
#include "cuda/moe/tiles.h"
#include "cuda/tile/dtype.cuh"
#include "cuda/tile/scan.cuh"

namespace flashmoe::cuda::moe {

// A number that compares like x: larger for a larger x, the largest for a NaN, never 0.
__device__ __forceinline__ uint32_t order_of(float x) {
  if (!(x == x)) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 is 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// A token's logits.
template <class T>
struct TokenLogits {
  const RouteParams& p;
  int64_t token;

  __device__ __forceinline__ float operator[](int expert) const {
    const int64_t at = token * p.logits_row + expert * p.logits_col;
    if (p.logits_are_fp32) return static_cast<const float*>(p.logits)[at];
    return T::unpack(static_cast<const typename T::Storage*>(p.logits)[at]);
  }
};

// Of the softmax over all experts: the largest logit and the sum of exponentials, a NaN where any
// score is one.
struct Softmax {
  float largest, sum;
  __device__ __forceinline__ bool is_nan() const { return !(sum == sum); }
  __device__ __forceinline__ float of(float logit) const { return expf(logit - largest) / sum; }
};
template <class T>
__device__ __forceinline__ Softmax softmax_of(const TokenLogits<T>& logits) {
  const int lane = threadIdx.x % 32;
  float largest = -INFINITY, sum = 0;
  for (int e = lane; e < logits.p.experts; e += 32) largest = fmaxf(largest, logits[e]);
  largest = max_of_lanes(largest);
  for (int e = lane; e < logits.p.experts; e += 32) sum += expf(logits[e] - largest);
  return {largest, sum_of_lanes(sum)};
}

// Of a token's chosen experts: expert j has the weight score(j) / total. In a backward pass a
// choice outside of the experts has no score, and no part in the sum.
template <class T>
struct ChosenScores {
  const RouteParams& p;
  TokenLogits<T> logits;
  Softmax softmax;
  float shift = 0;  // normalised softmax: the largest chosen logit, so that no sum is 0
  float total = 1;

  __device__ __forceinline__ int id(int j) const {
    return p.ids[logits.token * p.ids_row + j * p.ids_col];
  }
  __device__ __forceinline__ bool has(int j) const { return id(j) >= 0 && id(j) < p.experts; }
  __device__ __forceinline__ float score(int j) const {
    if (!has(j)) return 0.f;
    const float logit = logits[id(j)];
    if (p.sigmoid) return sigmoid(logit);
    if (softmax.is_nan()) return NAN;
    return p.normalize ? expf(logit - shift) : softmax.of(logit);
  }
  __device__ __forceinline__ ChosenScores(const RouteParams& p, const TokenLogits<T>& logits,
                                          const Softmax& softmax)
      : p(p), logits(logits), softmax(softmax) {
    if (!p.normalize) return;
    const int lane = threadIdx.x % 32;
    if (!p.sigmoid) {
      shift = -INFINITY;
      for (int j = lane; j < p.top_k; j += 32) {
        if (has(j)) shift = fmaxf(shift, logits[id(j)]);
      }
      shift = max_of_lanes(shift);
    }
    total = 0;
    for (int j = lane; j < p.top_k; j += 32) total += score(j);
    total = sum_of_lanes(total);
  }
};

// Logits first .. first + kEach - 1 of a token, -inf where there is no such expert.
template <class T, int kEach>
__device__ __forceinline__ void load_logits(float (&x)[kEach], const TokenLogits<T>& logits,
                                            int first) {
  static_assert(kEach == 4 || kEach == 8);
  const RouteParams& p = logits.p;
  const int bytes = p.logits_are_fp32 ? 4 : T::kBytes;
  const int64_t at = (logits.token * p.logits_row + first) * bytes;
  // Rows of whole groups of kEach, 8 bytes of 16-bit numbers at least.
  const bool whole = p.logits_col == 1 && p.experts % kEach == 0 && p.logits_row % kEach == 0 &&
                     reinterpret_cast<uint64_t>(p.logits) % (4 * bytes) == 0;
  const char* const from = static_cast<const char*>(p.logits) + at;
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = -INFINITY;
  if (whole && first < p.experts) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      if (p.logits_are_fp32) {
        const float4 four = reinterpret_cast<const float4*>(from)[i / 4];
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      } else {
        const uint2 four = reinterpret_cast<const uint2*>(from)[i / 4];
        x[i] = T::unpack(static_cast<typename T::Storage>(four.x));
        x[i + 1] = T::unpack(static_cast<typename T::Storage>(four.x >> 16));
        x[i + 2] = T::unpack(static_cast<typename T::Storage>(four.y));
        x[i + 3] = T::unpack(static_cast<typename T::Storage>(four.y >> 16));
      }
    }
  } else if (!whole) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + i < p.experts) x[i] = logits[first + i];
    }
  }
}

// At most 32 * kEach experts, at most 32 of them chosen.
template <class T, int kEach>
__device__ __forceinline__ void route_in_registers(const RouteParams& p, int64_t token) {
  const int lane = threadIdx.x % 32, first = lane * kEach;
  float logits[kEach];
  load_logits<T>(logits, TokenLogits<T>{p, token}, first);
  Softmax softmax{0, 1};
  if (!p.sigmoid) {
    float largest = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, logits[i]);
    largest = max_of_lanes(largest);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + i < p.experts) sum += expf(logits[i] - largest);
    }
    softmax = {largest, sum_of_lanes(sum)};
  }
  uint32_t order[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    order[i] = 0;
    if (first + i >= p.experts) continue;
    float key = logits[i];
    if (p.bias) {
      key = (p.sigmoid ? sigmoid(key) : softmax.of(key)) + p.bias[(first + i) * p.bias_col];
    }
    order[i] = order_of(key);
  }
  const auto best_of = [&] {
    uint32_t best = order[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) best = max(best, order[i]);
    return best;
  };
  uint32_t best = best_of();
  int id = 0;  // of choice `lane`
  float logit = 0;
  for (int j = 0; j < p.top_k; ++j) {
    const uint32_t winner = max_of_lanes(best);
    const int owner = __ffs(__ballot_sync(kWholeWarp, best == winner)) - 1;
    int found = 0;  // the lowest of the owner's that is the best
    float its = 0;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (order[i] == winner) found = i, its = logits[i];
    }
    found = __shfl_sync(kWholeWarp, found, owner);
    its = __shfl_sync(kWholeWarp, its, owner);
    if (lane == j) id = owner * kEach + found, logit = its;
    if (lane == owner) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (i == found) order[i] = 0;
      }
      best = best_of();
    }
  }
  // As ChosenScores has it.
  const bool mine = lane < p.top_k;
  float score = 0, total = 1;
  if (mine) score = p.sigmoid ? sigmoid(logit) : softmax.of(logit);
  if (p.normalize) {
    if (!p.sigmoid) {
      const float shift = max_of_lanes(mine ? logit : -INFINITY);
      if (mine) score = expf(logit - shift);
    }
    total = sum_of_lanes(score);
  }
  if (!mine) return;
  p.ids[token * p.ids_row + lane * p.ids_col] = id;
  p.weights[token * p.weights_row + lane * p.weights_col] = softmax.is_nan() ? NAN : score / total;
}

// Grid: CTAs of some warps, a token each.
template <class T>
__device__ __forceinline__ void moe_route(const RouteParams& p) {
  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (token >= p.tokens) return;
  if (p.top_k <= 32 && p.experts <= 32 * kRouteEach) {
    if (p.experts <= 128) {
      route_in_registers<T, 4>(p, token);
    } else {
      route_in_registers<T, kRouteEach>(p, token);
    }
    return;
  }
  uint32_t* const order = reinterpret_cast<uint32_t*>(shared) + warp * p.experts;
  const TokenLogits<T> logits{p, token};
  const Softmax softmax = p.sigmoid ? Softmax{0, 1} : softmax_of(logits);

  // Larger for a larger score, and for a lower id where scores are equal.
  uint64_t best = 0;
  const auto look_at = [&](int e) {
    const uint64_t mine = static_cast<uint64_t>(order[e]) << 32 | (0xffffffffu - e);
    if (order[e] != 0 && mine > best) best = mine;
  };
  for (int e = lane; e < p.experts; e += 32) {
    float key = logits[e];
    if (p.bias) {
      key = (p.sigmoid ? sigmoid(key) : softmax.of(key)) + p.bias[e * p.bias_col];
    }
    order[e] = order_of(key);
    look_at(e);
  }
  for (int j = 0; j < p.top_k; ++j) {
    const uint64_t winner = join_lanes(best, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
    const int id = static_cast<int>(0xffffffffu - static_cast<uint32_t>(winner));
    if (lane == j % 32) p.ids[token * p.ids_row + j * p.ids_col] = id;
    if (lane == id % 32) {
      order[id] = 0;
      best = 0;
      for (int e = lane; e < p.experts; e += 32) look_at(e);
    }
  }
  // Lane j % 32 wrote id j, and reads it again.
  const ChosenScores<T> chosen(p, logits, softmax);
  for (int j = lane; j < p.top_k; j += 32) {
    p.weights[token * p.weights_row + j * p.weights_col] = chosen.score(j) / chosen.total;
  }
}

// Grid: CTAs of some warps, a token each.
template <class T>
__device__ __forceinline__ void moe_route_bwd(const RouteParams& p) {
  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (token >= p.tokens) return;
  float* const gradient = reinterpret_cast<float*>(shared) + warp * p.experts;
  const TokenLogits<T> logits{p, token};
  const Softmax softmax = p.sigmoid ? Softmax{0, 1} : softmax_of(logits);
  const ChosenScores<T> chosen(p, logits, softmax);
  const auto grad_weight = [&](int j) {
    return p.grad_weights ? p.grad_weights[token * p.grad_weights_row + j * p.grad_weights_col]
                          : 0.f;
  };
  float mean = 0;  // sum over C of g w, where a weight depends on other logits than its own
  if (p.normalize || !p.sigmoid) {
    for (int j = lane; j < p.top_k; j += 32) {
      if (chosen.has(j)) mean += grad_weight(j) * (chosen.score(j) / chosen.total);
    }
    mean = sum_of_lanes(mean);
  }
  // A lane works on its own experts only, so nobody waits. The softmax over all gives every logit a
  // gradient.
  const bool all = !p.sigmoid && !p.normalize;
  for (int e = lane; e < p.experts; e += 32) {
    const float logit = logits[e];
    const bool is_nan = p.sigmoid ? !(logit == logit) : softmax.is_nan();
    gradient[e] = is_nan ? NAN : all ? softmax.of(logit) * -mean : 0.f;
  }
  for (int j = 0; j < p.top_k; ++j) {
    if (!chosen.has(j) || chosen.id(j) % 32 != lane) continue;
    const float score = chosen.score(j);
    const float slope = p.sigmoid ? sigmoid(-logits[chosen.id(j)]) : 1.f;  // 1 - s, exact near 0
    gradient[chosen.id(j)] += score / chosen.total * slope * (grad_weight(j) - (all ? 0.f : mean));
  }
  for (int e = lane; e < p.experts; e += 32) {
    const int64_t at = token * p.grad_logits_row + e * p.grad_logits_col;
    if (p.logits_are_fp32) {
      static_cast<float*>(p.grad_logits)[at] = gradient[e];
    } else {
      static_cast<typename T::Storage*>(p.grad_logits)[at] =
          static_cast<typename T::Storage>(T::pack(gradient[e], 0.f));
    }
  }
}

}  // namespace flashmoe::cuda::moe
