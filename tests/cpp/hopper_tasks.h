// Calls of Hopper's kernels whose tasks are looked at without a GPU: what tests of both passes
// share. Calls run with a driver that only looks on (fake_libcuda.cc): it is given what kernels
// would be. Then the kernels' own code for tasks runs here, one task after the other in the order
// in which they are given out, on the workspace of the call.
#pragma once

#include <cstring>
#include <initializer_list>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "fake_libcuda.h"
#include "plans.h"
// Behind all others, and before device code: programs include theirs behind this header.
#include "emulator/device.h"
//
#include "cuda/attention/ragged.cuh"
#include "cuda/attention/sm90/params.h"

namespace testing {

using namespace flashmoe;
using namespace flashmoe::cuda;

// What the driver was asked to launch.
struct Launched {
  std::string symbol;
  CUlaunchConfig config;
  Sm90BwdParams backward{};
  Sm90FwdParams forward{};
  RaggedParams ragged{};

  bool is(const char* role) const { return symbol.find(role) != std::string::npos; }
  bool lists_blocks() const { return is("ragged_blocks"); }
};
inline std::vector<Launched> launched;

inline void record(const char* symbol, const CUlaunchConfig& config, const void* params) {
  Launched one{.symbol = symbol, .config = config};
  const bool whole = one.is("18Sm90WholeBwdParams");  // which begin with the others
  if (whole || one.is("13Sm90BwdParams")) std::memcpy(&one.backward, params, sizeof(one.backward));
  if (one.is("13Sm90FwdParams")) std::memcpy(&one.forward, params, sizeof(one.forward));
  if (one.lists_blocks()) std::memcpy(&one.ragged, params, sizeof(one.ragged));
  launched.push_back(one);
}

// A call whose tensors nobody reads or writes, but lengths.
struct Problem {
  AttentionProblem problem;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k;
  std::vector<int64_t> key_lengths;
  AttentionPlan plan;
  std::vector<char> workspace;

  char* memory() {
    const auto at = reinterpret_cast<uintptr_t>(workspace.data());
    return workspace.data() + (256 - at % 256);
  }
  bool contains(const void* data, size_t bytes) {
    const char* const first = static_cast<const char*>(data);
    return memory() <= first && first + bytes <= memory() + plan.workspace_bytes;
  }
  // Plans it and runs it up to the driver.
  void launch() {
    launched.clear();
    plan = plan_of(problem);
    workspace.assign(plan.workspace_bytes + 512, '\xff');  // NaN, and -1
    char* address = reinterpret_cast<char*>(uintptr_t{1} << 50);
    const auto somewhere = [&](bool wanted) -> char* {
      return wanted ? address += 1ll << 40 : nullptr;
    };
    AttentionTensors t;
    t.query = somewhere(true);
    t.key = somewhere(true);
    t.value = somewhere(true);
    t.out = somewhere(true);
    t.lse = somewhere(true);
    t.bias = somewhere(problem.bias.has_value());
    t.grad_out = somewhere(problem.grad_out.has_value());
    t.grad_query = somewhere(problem.grad_query.has_value());
    t.grad_key = somewhere(problem.grad_key.has_value());
    t.grad_value = somewhere(problem.grad_value.has_value());
    t.grad_bias = somewhere(problem.grad_bias.has_value());
    if (problem.key_lengths) t.key_lengths = key_lengths.data();
    if (problem.ragged) {
      t.cu_seqlens_q = cu_seqlens_q.data();
      t.cu_seqlens_k = cu_seqlens_k.data();
    }
    const Status status = flashmoe::run(plan, t, memory());
    CHECK(status.ok(), status.message());
    for (const Launched& one : launched) {
      if (one.lists_blocks()) list_blocks(one.ragged);
    }
  }

 private:
  // As attention_ragged_blocks() does, whose threads share out the sequences.
  static void list_blocks(const RaggedParams& p) {
    for (const RaggedList& list : p.lists) {
      if (!list.blocks) continue;
      std::fill(list.blocks, list.blocks + list.slots, RaggedBlock{});
      RaggedBefore before{};
      for (int i = 0; i <= p.batch; ++i) {
        const RaggedSequence s = find_ragged(before, i, list, p);
        for (int n = 0; n < s.blocks && before.slot + n < list.slots; ++n) {
          list.blocks[before.slot + n] = ragged_block(before, i, s, n, list, p);
        }
        before = after(before, s);
      }
      CHECK(before.slot <= list.slots, before.slot, "blocks,", list.slots, "slots");
    }
  }
};

// f(index) for the tile of a table that the plan's kernel has; false where there is none.
template <const auto& kTiles, class F>
bool for_tile(const AttentionPlan& plan, const F& f) {
  const CudaKernel& kernel = *find(plan.kernel);
  const auto is_it = [&](const auto& tile) {
    return tile.head_dim == kernel.head_dim && tile.block_q == kernel.block_q &&
           tile.block_k == kernel.block_k;
  };
  return [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    return ((is_it(kTiles[kIndices]) && (f(std::integral_constant<size_t, kIndices>()), true)) ||
            ...);
  }
  (std::make_index_sequence<std::size(kTiles)>());
}

inline bool is_hopper(const AttentionPlan& plan) {
  return plan.family == "sm90" && plan.kernel.find("packed") == std::string::npos;
}
// By a kernel in which a cluster has all of a head.
inline bool is_whole(const AttentionPlan& plan) {
  return plan.kernel.find("_bwd_whole_") != std::string::npos;
}

// Whether any of the rows [first, last] of a sequence sees any of the keys [begin, end).
inline bool sees(const Sequence& seq, int first, int last, int begin, int end,
                 const AttentionParams& p) {
  for (int row = first; row <= std::min(last, seq.len_q - 1); ++row) {
    const int64_t lowest = std::max<int64_t>(int64_t{row} + seq.shift - p.left, begin);
    const int64_t highest =
        std::min<int64_t>(int64_t{row} + seq.shift + p.right, std::min(end, seq.len_k) - 1);
    if (lowest <= highest) return true;
  }
  return false;
}
inline bool sees_all(const Sequence& seq, int first, int last, int begin, int end,
                     const AttentionParams& p) {
  for (int row = first; row <= std::min(last, seq.len_q - 1); ++row) {
    if (int64_t{row} + seq.shift - p.left > begin || end > seq.len_k ||
        int64_t{row} + seq.shift + p.right < end - 1) {
      return false;
    }
  }
  return true;
}

inline int pick(std::mt19937& random, std::initializer_list<int> from) {
  return from.begin()[random() % from.size()];
}
inline int between(std::mt19937& random, int first, int last) {
  return first + static_cast<int>(random() % (last - first + 1));
}

// None, causal or a window, by `kind` of four.
inline void choose_mask(std::mt19937& random, unsigned kind, AttentionOptions& options) {
  switch (kind) {
    case 0:
      options.causal = true;
      break;
    case 1:
      options.window_left = between(random, 0, 300);
      options.window_right = between(random, 0, 300);
      break;
    case 2:
      options.causal = true;
      if (random() % 2) options.window_left = between(random, 0, 500);
  }
}
// Some of them wrong.
inline void choose_key_lengths(std::mt19937& random, Problem& made, const Sizes& s) {
  made.problem.key_lengths = contiguous(DType::kInt64, {s.batch});
  for (int i = 0; i < s.batch; ++i) {
    made.key_lengths.push_back(between(random, 0, static_cast<int>(s.len_k)));
    if (random() % 8 == 0) made.key_lengths.back() = pick(random, {-1, 100000});
  }
}

inline Problem random_problem(std::mt19937& random, Pass pass) {
  const int dim = pick(random, {32, 64, 64, 80, 96, 128, 128, 128, 192, 256});
  const bool ragged = random() % 4 == 0;
  Sizes s;
  s.batch = between(random, 1, 4);
  s.heads_k = between(random, 1, 4);
  s.heads_q = s.heads_k * pick(random, {1, 1, 2, 3, 4, 5, 8});
  s.len_q = between(random, 1, pick(random, {100, 700, 1500}));
  s.len_k = random() % 2 ? s.len_q : between(random, 1, 1200);
  // Long enough for zeros and, with enough heads that share theirs, for pairs; or with tasks that
  // CTAs have a few of each, and so in splits.
  const bool is_long = random() % 12 == 0, has_few = is_long && random() % 3 == 0;
  if (is_long) s.len_q = s.len_k = between(random, 3000, 6000);
  if (has_few) s.batch = 1;
  if (has_few) s.heads_q = 4 * s.heads_k;
  if (is_long && !has_few && random() % 2) s.heads_q = 6 * s.heads_k;
  Problem made;
  AttentionProblem& p = made.problem;
  p = cuda_problem(90, pass, DType::kBFloat16, dim, dim, s, ragged);
  p.device.ordinal = 1;  // of the fake driver's
  p.device.multiprocessors =
      has_few ? pick(random, {6, 10, 16, 132}) : pick(random, {2, 4, 6, 10, 16, 24, 132});
  choose_mask(random, has_few ? random() % 2 : is_long ? 0 : random() % 4, p.options);
  p.options.deterministic = pass == Pass::kBackward && random() % 3 == 0;
  if (ragged) {
    // One end may lie, and then its neighbours may be wrong as well.
    for (auto* ends : {&made.cu_seqlens_q, &made.cu_seqlens_k}) {
      const int tokens =
          static_cast<int>(ends == &made.cu_seqlens_q ? p.query.shape[0] : p.key.shape[0]);
      const int longest = tokens / static_cast<int>(s.batch);
      ends->push_back(0);
      for (int i = 0; i < s.batch; ++i) {
        ends->push_back(ends->back() + between(random, random() % 4 ? 1 : 0, longest));
      }
      if (random() % 4 == 0) (*ends)[between(random, 0, s.batch)] += between(random, -9, 9);
    }
  } else if (random() % 3 == 0) {
    choose_key_lengths(random, made, s);
  } else if (pass == Pass::kBackward && dim <= 128 && random() % 4 == 0) {
    p.bias = contiguous(DType::kBFloat16, {s.batch, s.heads_q, s.len_q, s.len_k / 8 * 8 + 8});
    p.bias->shape[3] = s.len_k;
  }
  if (pass == Pass::kBackward && random() % 8 == 0) p.grad_query.reset();
  return made;
}

inline std::string words(const Problem& made) {
  const AttentionProblem& p = made.problem;
  std::ostringstream s;
  s << made.plan.kernel << " batch " << made.plan.batch << " heads " << made.plan.heads_q << "/"
    << made.plan.heads_k << " " << made.plan.len_q << " x " << made.plan.len_k
    << (p.options.causal ? " causal" : "") << " window " << p.options.window_left << " "
    << p.options.window_right << (p.options.deterministic ? " deterministic" : "")
    << (p.grad_query ? "" : " without dQ") << ", " << p.device.multiprocessors << " SMs, splits "
    << made.plan.splits << " of " << made.plan.split_tiles << ", slices " << made.plan.slices;
  for (auto& ends : {made.cu_seqlens_q, made.cu_seqlens_k}) {
    for (int end : ends) s << " " << end;
  }
  for (int64_t length : made.key_lengths) s << " " << length;
  return s.str();
}

inline void prepare() {
  fake_cuda.static_shared_bytes = 0;
  fake_cuda.on_launch = record;
}

}  // namespace testing
