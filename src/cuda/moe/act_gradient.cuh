// What follows from dA of eight neighbours of a row, with the activation computed once more from
// the pre-activations.
#pragma once

#include "cuda/moe/activation.cuh"
#include "cuda/tile/chunk.cuh"

namespace flashmoe::cuda::moe {

// Stores dh and the weighted activation, as far as they are wanted, and returns the chunk's part of
// dA . act, the gradient of the routing weight. `h` are the chunk of the gate and that of up,
// `bytes` is where the chunk begins in a row, `left` how many columns there are from there on;
// without kPartial at least 8.
template <Kind kKind, class T, bool kPartial>
__device__ __forceinline__ float store_act_gradient(const BwdActParams& p, const float (&grad)[8],
                                                    const uint4 (&h)[2], float scale, int64_t row,
                                                    int64_t bytes, int left) {
  const uint32_t h_gate[4] = {h[0].x, h[0].y, h[0].z, h[0].w};
  const uint32_t h_up[4] = {h[1].x, h[1].y, h[1].z, h[1].w};
  uint32_t gate[4], up[4], act[4];  // gradients of gate and up; two numbers each
  float row_sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // packed at once: registers are few
    float dgate[2], dup[2], weighted[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const auto number = [&](uint32_t two) {
        return T::unpack(static_cast<typename T::Storage>(two >> (16 * j)));
      };
      const Curve curve = activation_curve(kKind, number(h_gate[i]));
      const float factor = p.gated ? number(h_up[i]) : 1.f;
      const float value = curve.value * factor, of_row = grad[2 * i + j];
      if (!kPartial || 2 * i + j < left) row_sum += of_row * value;
      const float scaled = of_row * scale;
      weighted[j] = value * scale;
      dgate[j] = scaled * curve.slope * factor;
      dup[j] = scaled * curve.value;
    }
    gate[i] = T::pack(dgate[0], dgate[1]);
    up[i] = T::pack(dup[0], dup[1]);
    act[i] = T::pack(weighted[0], weighted[1]);
  }
  const auto store = [&](char* to, const uint32_t(&words)[4]) {
    store_chunk<T>(to, uint4{words[0], words[1], words[2], words[3]}, kPartial ? left : 8);
  };
  if (p.grad_pre) {
    char* const gTo = static_cast<char*>(p.grad_pre) + row * p.grad_pre_row_bytes + bytes;
    store(gTo, gate);
    if (p.gated) store(gTo + p.grad_pre_half_bytes, up);
  }
  if (p.weighted_act) {
    store(static_cast<char*>(p.weighted_act) + row * p.weighted_act_row_bytes + bytes, act);
  }
  return row_sum;
}

}  // namespace flashmoe::cuda::moe
