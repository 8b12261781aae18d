// What a call means: checks an AttentionProblem and turns it into numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flashmoe/attention.h"

namespace flashmoe {

inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kMaxPagedHeadDim = 512;
inline constexpr int kMaxLead =
    kMaxRank - 3;  // leading dimensions before (heads, length, head_dim)

// Everything about a checked problem that is a number. Leading dimensions are walked as one index,
// the batch; `lead` keeps their sizes so that each tensor's own strides can be applied to it.
struct Geometry {
  int num_lead = 0;
  int64_t lead[kMaxLead] = {};
  int64_t batch = 1;  // product of lead; ragged and paged: the number of sequences
  int64_t heads_q = 0, heads_k = 0, group = 1;
  int64_t len_q = 0, len_k = 0;  // ragged and paged: the stated maxima
  int64_t head_dim = 0, head_dim_v = 0;
  int64_t left = -1, right = -1;  // the window, with causal folded in; -1 = no limit
  double scale = 1;
  double softcap = 0;
  uint32_t dropped = 0;   // of 65,536 pairs: dropout.h; 0 = no dropout
  double kept_scale = 1;  // what the others are multiplied by
  bool ragged = false;
  bool paged = false;
  int64_t page = 0;  // keys of a block

  // Queries are tokens of all sequences, (T, Hq, D).
  bool packed() const { return ragged || paged; }
};

// Passes that give rows of queries something go by queries; those that give gradients go by keys.
constexpr bool by_queries(Pass pass) { return pass == Pass::kForward || pass == Pass::kTangent; }

// Passes in which inputs move along tangents.
constexpr bool has_tangents(Pass pass) { return pass == Pass::kTangent || pass == Pass::kSecond; }

// Ok exactly when the problem is legal, whatever the device.
Status check(const AttentionProblem& problem);

// Only for a problem that passed check().
Geometry geometry(const AttentionProblem& problem);

// The keys that query row i may look at: [begin, end) of `keys` keys, for `rows` queries. Inlined
// always: the CPU's kernels for every instruction set use it, see cpu/kernels.h.
struct KeyRange {
  int64_t begin = 0, end = 0;
};
[[gnu::always_inline]] inline KeyRange allowed_keys(int64_t i, int64_t rows, int64_t keys,
                                                    int64_t left, int64_t right) {
  const int64_t p = i + keys - rows;  // bottom right corners meet
  KeyRange range{0, keys};
  // Compared by subtraction: p + right may overflow for a window of "almost no limit".
  if (left >= 0 && p > left) range.begin = std::min(p - left, keys);
  if (right >= 0 && right < keys - 1 - p) range.end = std::max<int64_t>(p + right + 1, 0);
  if (range.begin > range.end) range.begin = range.end;
  return range;
}

}  // namespace flashmoe
