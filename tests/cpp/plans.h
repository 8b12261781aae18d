// Problems to plan, and what must be so of every CUDA plan. Nothing of this needs a GPU, but CUDA
// plans need kernels in the build.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>

#include "cases.h"
#include "testing.h"

namespace testing {

using flashmoe::AttentionPlan;
using flashmoe::contiguous;
using flashmoe::CudaKernel;

constexpr Pass kEveryPass[] = {Pass::kForward, Pass::kBackward, Pass::kTangent, Pass::kSecond};

inline AttentionProblem problem(Pass pass, int64_t batch, int64_t heads, int64_t length,
                                int64_t dim, DType dtype = DType::kFloat32) {
  AttentionProblem p;
  p.pass = pass;
  p.query = p.key = p.value = p.out = contiguous(dtype, {batch, heads, length, dim});
  p.lse = contiguous(dtype == DType::kFloat64 ? dtype : DType::kFloat32, {batch, heads, length});
  if (pass == Pass::kBackward || pass == Pass::kSecond) {
    p.grad_out = p.grad_query = p.grad_key = p.grad_value = p.out;
  }
  if (pass == Pass::kTangent || pass == Pass::kSecond) {
    p.tangent_query = p.tangent_key = p.tangent_value = p.tangent_out = p.out;
    p.tangent_lse = p.lse;
  }
  return p;
}

inline AttentionPlan plan_for(AttentionProblem p, int num_threads) {
  p.device.num_threads = num_threads;
  const auto plan = flashmoe::plan(p);
  CHECK(plan.ok(), plan.status().message());
  return plan.value();
}

struct Chip {
  int compute_capability;
  size_t shared_bytes;  // that one block may have: the CUDA programming guide
  int multiprocessors;  // of its usual card
};
constexpr size_t kKB = 1024;
constexpr Chip kChips[] = {{75, 64 * kKB, 40},  {80, 163 * kKB, 108}, {86, 99 * kKB, 84},
                           {87, 163 * kKB, 16}, {89, 99 * kKB, 58},   {100, 227 * kKB, 148},
                           {120, 99 * kKB, 84}};
constexpr int kBuckets[] = {16, 32, 48, 64, 96, 128, 192, 256};

inline const CudaKernel* find(const std::string& name) {
  static const std::map<std::string, CudaKernel> all = [] {
    std::map<std::string, CudaKernel> by_name;
    for (const CudaKernel& k : flashmoe::cuda_kernels()) by_name[k.name] = k;
    return by_name;
  }();
  const auto found = all.find(name);
  return found == all.end() ? nullptr : &found->second;
}

inline bool has_family(const std::string& name) {
  const auto all = flashmoe::cuda_kernels();
  return std::any_of(all.begin(), all.end(), [&](const CudaKernel& k) { return k.family == name; });
}
inline bool all_families() { return has_family("sm75") && has_family("sm80"); }

// What the tests ask of a plan's launches: the kernel that does most of the work, and those before
// and after it in their order. One that is launched twice in a row is named once.
inline const flashmoe::AttentionLaunch& main_launch(const AttentionPlan& plan) {
  static const flashmoe::AttentionLaunch none;
  for (const flashmoe::AttentionLaunch& step : plan.launches) {
    if (step.kernel == plan.kernel) return step;
  }
  CHECK(false, plan.kernel, "is not among the launches");
  return none;
}
inline std::vector<std::string> kernels_around(const AttentionPlan& plan, bool before) {
  std::vector<std::string> names[2];
  bool after = false;
  for (const flashmoe::AttentionLaunch& step : plan.launches) {
    if (step.kernel == plan.kernel) {
      after = true;
    } else if (names[after].empty() || names[after].back() != step.kernel) {
      names[after].push_back(step.kernel);
    }
  }
  return names[before ? 0 : 1];
}
inline std::vector<std::string> kernels_before(const AttentionPlan& plan) {
  return kernels_around(plan, true);
}
inline std::vector<std::string> kernels_after(const AttentionPlan& plan) {
  return kernels_around(plan, false);
}
inline int64_t slices(const AttentionPlan& plan) { return plan.slices; }

// How explain() begins the line of a launch.
inline std::string launch_line(const std::string& kernel) { return "\n    " + kernel + ": grid "; }

// As the torch ops lay tensors out: rows begin at multiples of 16 bytes.
inline TensorSpec with_rows(DType dtype, std::initializer_list<int64_t> lead, int64_t dim) {
  TensorSpec spec;
  spec.dtype = dtype;
  for (int64_t size : lead) spec.shape[spec.rank++] = size;
  spec.shape[spec.rank++] = dim;
  spec.stride[spec.rank - 1] = 1;
  int64_t step = (dim + 7) / 8 * 8;
  for (int i = spec.rank - 2; i >= 0; --i) {
    spec.stride[i] = step;
    step *= spec.shape[i];
  }
  return spec;
}

struct Sizes {
  int64_t batch = 2, heads_q = 6, heads_k = 2, len_q = 300, len_k = 517;
};

inline AttentionProblem cuda_problem(int compute_capability, Pass pass, DType dtype, int64_t dim,
                                     int64_t dim_v, const Sizes& s = {}, bool ragged = false) {
  AttentionProblem p;
  p.pass = pass;
  p.device = {.type = flashmoe::DeviceType::kCuda, .compute_capability = compute_capability};
  if (ragged) {
    const int64_t tokens_q = s.batch * s.len_q, tokens_k = s.batch * s.len_k;
    p.query = with_rows(dtype, {tokens_q, s.heads_q}, dim);
    p.key = with_rows(dtype, {tokens_k, s.heads_k}, dim);
    p.value = with_rows(dtype, {tokens_k, s.heads_k}, dim_v);
    p.out = with_rows(dtype, {tokens_q, s.heads_q}, dim_v);
    p.lse = contiguous(DType::kFloat32, {tokens_q, s.heads_q});
    const TensorSpec cu = contiguous(DType::kInt32, {s.batch + 1});
    p.ragged = flashmoe::Ragged{cu, cu, s.len_q, s.len_k};
  } else {
    p.query = with_rows(dtype, {s.batch, s.heads_q, s.len_q}, dim);
    p.key = with_rows(dtype, {s.batch, s.heads_k, s.len_k}, dim);
    p.value = with_rows(dtype, {s.batch, s.heads_k, s.len_k}, dim_v);
    p.out = with_rows(dtype, {s.batch, s.heads_q, s.len_q}, dim_v);
    p.lse = contiguous(DType::kFloat32, {s.batch, s.heads_q, s.len_q});
  }
  if (pass == Pass::kBackward) {
    p.grad_out = p.out;
    p.grad_query = p.query;
    p.grad_key = p.key;
    p.grad_value = p.value;
  }
  return p;
}

inline AttentionPlan plan_of(const AttentionProblem& p) {
  const auto plan = flashmoe::plan(p);
  CHECK(plan.ok(), plan.status().message());
  return plan.ok() ? plan.value() : AttentionPlan{};
}

// Refused, with a message that has all of these words.
inline void check_refused(const AttentionProblem& p, std::initializer_list<const char*> words) {
  const auto plan = flashmoe::plan(p);
  CHECK(!plan.ok(), plan.ok() ? plan.value().kernel : "");
  if (plan.ok()) return;
  for (const char* word : words) CHECK_CONTAINS(plan.status().message(), word);
  CHECK_CONTAINS(flashmoe::explain(p), "cannot run: " + plan.status().message());
}

// A kernel of the plan that is in the build, does that, and is of the plan's family and dtype.
inline void check_helper(const AttentionPlan& plan, const std::string& name, const char* role) {
  const CudaKernel* kernel = find(name);
  CHECK(kernel, name, "is not in the build");
  if (!kernel) return;
  CHECK_EQ(kernel->role, role);
  CHECK_EQ(kernel->family, plan.family);
  CHECK(kernel->dtype == plan.problem.query.dtype);
  CHECK_CONTAINS(flashmoe::explain(plan.problem), name);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A tile for thousands of short sequences.
inline bool for_short(const CudaKernel& k) {
  return k.head_dim <= 64 && k.block_q == 32 && k.block_k == 32;
}

// How many bytes a bias (rows, len_k) takes in rows of whole chunks.
inline size_t copy_bytes(int64_t rows, int64_t len_k) {
  return static_cast<size_t>(ceil_div(rows * ceil_div(len_k, 8) * 16, 256) * 256);
}

// What surrounds a call with a bias.
struct Around {
  bool sums = false;  // the gradient of a shared one is wanted
  size_t copied = 0;  // bytes of the copy, where it is copied first
};

// The bias of a ragged batch with several heads is copied to pairs side by side.
inline bool copies_pairs(const AttentionProblem& p) {
  return p.ragged && p.bias && p.bias->dtype != DType::kFloat32 && p.bias->shape[1] > 1 &&
         p.bias->stride[0] != 1;
}

inline void check_names(const AttentionPlan& plan, const std::vector<std::string>& names,
                        const std::vector<std::string>& roles) {
  CHECK_EQ(names.size(), roles.size());
  for (size_t i = 0; i < std::min(names.size(), roles.size()); ++i) {
    check_helper(plan, names[i], roles[i].c_str());
  }
}

inline void check_grid(const AttentionPlan& plan, const Sizes& s) {
  const bool backward = plan.problem.pass == Pass::kBackward;
  CHECK(slices(plan) >= 1);
  if (plan.problem.ragged) {  // all that there may be, the tokens after the last sequence counted
    const int64_t slots = backward ? s.batch * s.len_k / plan.block_k + s.batch + 1
                                   : s.batch * s.len_q / plan.block_q + s.batch + 1;
    const int64_t heads = backward ? s.heads_k : s.heads_q;
    CHECK_EQ(heads % slices(plan), 0);
    CHECK_EQ(int64_t{main_launch(plan).grid[0]}, slots * (heads / slices(plan)));
    CHECK_EQ(main_launch(plan).grid[1], 1u);
    CHECK_EQ(main_launch(plan).grid[2], 1u);
    CHECK_EQ(plan.work_items, int64_t{main_launch(plan).grid[0]} * slices(plan));
    return;
  }
  const int64_t in_x =
      backward ? ceil_div(s.len_k, plan.block_k) : ceil_div(s.len_q, plan.block_q) * plan.splits;
  const int64_t of_a_slice = ceil_div(s.batch, slices(plan));
  CHECK_EQ(ceil_div(s.batch, of_a_slice), slices(plan));  // none of them is empty
  CHECK_EQ(int64_t{main_launch(plan).grid[0]}, in_x);
  CHECK_EQ(int64_t{main_launch(plan).grid[1]}, backward ? s.heads_k : s.heads_q);
  CHECK_EQ(int64_t{main_launch(plan).grid[2]}, std::min<int64_t>(of_a_slice, 65535));
  CHECK_EQ(plan.work_items, in_x * main_launch(plan).grid[1] * s.batch);
}

inline void check_candidates(const AttentionPlan& plan) {
  const flashmoe::Candidate& last = plan.candidates.back();
  CHECK_EQ(last.name, plan.kernel);
  CHECK_CONTAINS(last.verdict, "chosen");
  const bool is_short = for_short(*find(plan.kernel));
  for (const flashmoe::Candidate& c : plan.candidates) {
    if (&c == &last) continue;
    CHECK(c.verdict.starts_with("passed over: "), c.verdict);
    const CudaKernel* kernel = find(c.name);
    if (!kernel || for_short(*kernel) == is_short) continue;
    CHECK_EQ(c.verdict, is_short ? "passed over: made for longer sequences"
                                 : "passed over: made for many sequences of at most a few dozen "
                                   "tokens");
  }
}

inline void check_plan(const AttentionPlan& plan, const Chip& chip, const Sizes& s,
                       const Around& around = {}) {
  const AttentionProblem& p = plan.problem;
  const bool backward = p.pass == Pass::kBackward;
  const CudaKernel* kernel = find(plan.kernel);
  CHECK(kernel, plan.kernel, "is not in the build");
  if (!kernel) return;
  const char* roles[2][2] = {{"attention_fwd", "attention_fwd_bias"},
                             {"attention_bwd", "attention_bwd_bias"}};
  check_helper(plan, plan.kernel, roles[backward][p.bias.has_value()]);
  CHECK_EQ(plan.family, chip.compute_capability < 80 ? "sm75" : "sm80");
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  CHECK_EQ(int64_t{kernel->head_dim}, int64_t{*std::lower_bound(kBuckets, kBuckets + 8, dim)});
  CHECK_EQ(main_launch(plan).threads, static_cast<uint32_t>(kernel->threads));
  CHECK_EQ(plan.block_q, int64_t{kernel->block_q});
  CHECK_EQ(plan.block_k, int64_t{kernel->block_k});
  CHECK_EQ(main_launch(plan).shared_bytes, static_cast<uint32_t>(kernel->shared_bytes));
  CHECK(main_launch(plan).shared_bytes <= chip.shared_bytes, main_launch(plan).shared_bytes);
  // All sequences of a size are equally long here.
  const bool many_short = std::max(s.len_q, s.len_k) <= (p.ragged ? 48 : 32) &&
                          s.batch * s.heads_k >= 4 * chip.multiprocessors;
  CHECK_EQ(for_short(*kernel), many_short && dim <= 64);

  check_grid(plan, s);
  CHECK(plan.splits == 1 || (!backward && !p.ragged));
  const int64_t by_grid = p.ragged ? 1 : std::max<int64_t>(ceil_div(s.batch, 65535), 1);
  CHECK(slices(plan) == by_grid || copies_pairs(p) ||
        (backward && (p.bias || p.ragged) && !for_short(*kernel)));
  CHECK(plan.bias_splits == 1 || (around.sums && !p.ragged));
  if (!backward) {
    const size_t partial = s.batch * s.heads_q * s.len_q * (kernel->head_dim + 1) * sizeof(float);
    const int64_t heads = s.heads_q / slices(plan);
    const size_t list = p.ragged ? ceil_div(main_launch(plan).grid[0] / heads * 48, 256) * 256 : 0;
    const size_t pairs =
        copies_pairs(p) ? ceil_div(heads * (p.bias->shape[0] / 8 * 8 + 8) * 2, 256) * 256 : 0;
    CHECK_EQ(plan.workspace_bytes,
             list + pairs + around.copied + (plan.splits > 1 ? plan.splits * partial : 0));
  }

  std::vector<std::string> before, after;
  if (p.ragged) before.push_back("attention_ragged_blocks");
  if (copies_pairs(p)) before.push_back("attention_bias_transpose");
  if (around.copied > 0) before.push_back("attention_bias_align");
  if (backward) before.push_back("attention_bwd_preprocess");
  if (plan.splits > 1) after.push_back("attention_combine");
  // Of short sequences it also makes the gradient of a bias that is not shared.
  const bool finishes =
      backward && (p.grad_query || (for_short(*kernel) && p.grad_bias && !around.sums));
  if (finishes) after.push_back(p.bias ? "attention_bwd_bias_dq" : "attention_bwd_dq");
  if (around.sums) after.push_back("attention_bwd_bias_sum");
  if (backward && p.grad_bias && copies_pairs(p)) after.push_back("attention_bias_transpose");
  check_names(plan, kernels_before(plan), before);
  check_names(plan, kernels_after(plan), after);
  if (kernels_after(plan).size() != after.size()) return;  // reported
  if (finishes) {  // of the same tile: it knows how the sums lie
    const CudaKernel* finish = find(kernels_after(plan)[0]);
    CHECK_EQ(finish->image, kernel->image);
    CHECK_EQ(finish->block_q, kernel->block_q);
    CHECK_EQ(finish->block_k, kernel->block_k);
    CHECK_EQ(finish->threads, kernel->threads);
    CHECK(static_cast<size_t>(finish->shared_bytes) <= chip.shared_bytes, finish->shared_bytes);
  }
  if (around.sums) {
    const CudaKernel* sum = find(kernels_after(plan).back());
    CHECK_EQ(sum->image, kernel->image);  // of its dtype and head dim; the tile is its own
    CHECK_EQ(sum->head_dim, kernel->head_dim);
    CHECK(static_cast<size_t>(sum->shared_bytes) <= chip.shared_bytes, sum->shared_bytes);
  }
  check_candidates(plan);
}

// Sets a variable of the environment for as long as it lives.
struct Environment {
  Environment(const char* name, const std::string& value) : name(name) {
    setenv(name, value.c_str(), 1);
  }
  ~Environment() { unsetenv(name); }
  const char* name;
};

}  // namespace testing
