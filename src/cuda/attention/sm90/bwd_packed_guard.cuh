// A row of the packed backward pass once more, pair by pair, from the pairs that are seen: for rows
// whose gradients are not finite. Slow, and rarely needed.
#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/attention/sm90/packed_rows.cuh"
#include "cuda/attention/sm90/warpgroup.cuh"
#include "cuda/attention/softmax.cuh"

namespace flashmoe::cuda::sm90 {

// The gradient of the bias from a head on.
__device__ __forceinline__ BoxOfBias grad_bias_of(int head, const Sm90PackedBwdParams& p) {
  return {static_cast<uint16_t*>(p.grad_bias) + head * p.grad_bias_strides.head,
          static_cast<int>(p.grad_bias_column), p.grad_bias_strides.head, p.heads_q - head,
          p.grad_bias_of_box != 0};
}

template <class Type, bool kKeys, bool kBias>
class PackedRowGuard {
  static constexpr int kColumns = 2;  // of a lane, 32 apart
  // A tensor, and how many columns it has.
  struct Tensor {
    const void* data;
    const Strides& strides;
    int dim;
  };
  using Row = float[kColumns];

 public:
  __device__ __forceinline__ explicit PackedRowGuard(const Sm90PackedBwdParams& p) : p_(p) {}

  // Row `token` of a head of queries, or of keys, by the whole warp.
  __device__ __forceinline__ void recompute(int token, int head, const RowBounds& bounds,
                                            const PairRow& pairs) const {
    const int heads = kKeys ? p_.heads_q / p_.group : p_.heads_q;
    const int pitch = kKeys ? p_.pitch_k : p_.pitch_q,
              other_pitch = kKeys ? p_.pitch_q : p_.pitch_k;
    const int tokens = static_cast<int>(kKeys ? p_.ragged.key.tokens : p_.ragged.query.tokens);
    const TokenPlace at(token, pitch);
    if (!is_token(at, pitch ? (kKeys ? p_.len_k : p_.len_q) : tokens, p_) || head >= heads) return;
    const Tensor q{p_.query, p_.query_strides, p_.head_dim};
    const Tensor k{p_.key, p_.key_strides, p_.head_dim};
    const Tensor v{p_.value, p_.value_strides, p_.head_dim_v};
    const Tensor dO{p_.grad_out, p_.grad_out_strides, p_.head_dim_v};
    Row x1, x2, dx1 = {}, dx2 = {};
    read(x1, kKeys ? k : q, at, head);
    read(x2, kKeys ? v : dO, at, head);
    const int rounds = kKeys ? p_.group : 1;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int other_head = kKeys ? head * p_.group + round : head / p_.group;
      const float2* lse_delta =
          reinterpret_cast<const float2*>(p_.lse_delta) + (kKeys ? other_head : head) * p_.rows;
#pragma unroll 1
      for (int other = bounds.begin(); other < bounds.end; ++other) {
        const float2 row = lse_delta[kKeys ? other : token];
        Row y1, y2;
        const TokenPlace of_other(other, other_pitch);
        read(y1, kKeys ? q : k, of_other, other_head);
        read(y2, kKeys ? dO : v, of_other, other_head);
        float s = 0, dp = 0;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          s += x1[j] * y1[j];
          dp += x2[j] * y2[j];
        }
        s = warp_sum(s);
        dp = warp_sum(dp) + row.y;
        const ScoreRule<Sm90PackedBwdParams> rule(p_);
        if constexpr (kBias) {
          const uint32_t pair = pairs.first + other * pairs.step;
          const float bias = Type::unpack(*bias_of(head, p_.heads_q, p_).at(pair));
          // -inf hides the token.
          s = bias == -INFINITY ? 0.f : ptx::ex2_approx_ftz(rule.score(s, bias) - row.x);
          dp = bias == -INFINITY ? 0.f : dp * s;
          if (!kKeys && p_.grad_bias && lane() == 0) {
            *grad_bias_of(head, p_).at(pair) = static_cast<uint16_t>(Type::pack(dp, 0) & 0xffff);
          }
          if (bias == -INFINITY) continue;
        } else {
          rule.differentiate(s, dp, row.x);
        }
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          dx1[j] += dp * y1[j];
          dx2[j] += s * y2[j];
        }
      }
    }
    if constexpr (kKeys) {
      write(p_.grad_key, p_.grad_key_strides, p_.head_dim, dx1, p_.scale, at, head);
      write(p_.grad_value, p_.grad_value_strides, p_.head_dim_v, dx2, 1, at, head);
    } else {
      write(p_.grad_query, p_.grad_query_strides, p_.head_dim, dx1, p_.scale, at, head);
    }
  }

 private:
  // Zeros beyond the last column, and where there is no tensor.
  __device__ __forceinline__ void read(Row& x, const Tensor& tensor, const TokenPlace& at,
                                       int head) const {
    const uint16_t* row =
        static_cast<const uint16_t*>(tensor.data) + mapped_offset(tensor.strides, at, head, p_);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = lane() + 32 * j;
      x[j] = tensor.data && column < tensor.dim ? Type::unpack(row[column]) : 0.f;
    }
  }
  __device__ __forceinline__ void write(void* data, const Strides& strides, int dim, const Row& x,
                                        float scale, const TokenPlace& at, int head) const {
    if (!data) return;
    uint16_t* row = static_cast<uint16_t*>(data) + mapped_offset(strides, at, head, p_);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = lane() + 32 * j;
      const uint32_t rounded = Type::pack(x[j] * scale, 0) & 0xffff;
      if (column < dim) row[column] = static_cast<uint16_t>(rounded);
    }
  }

  const Sm90PackedBwdParams& p_;
};

}  // namespace flashmoe::cuda::sm90
