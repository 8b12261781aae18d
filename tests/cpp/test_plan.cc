// The plan of a call, looked at as data: no tensor is needed for any of this.
#include <algorithm>
#include <cstdlib>
#include <map>

#include "cases.h"
#include "testing.h"

using namespace testing;
using flashmoe::AttentionPlan;
using flashmoe::contiguous;

namespace {

AttentionProblem problem(Pass pass, int64_t batch, int64_t heads, int64_t length, int64_t dim,
                         DType dtype = DType::kFloat32) {
  AttentionProblem p;
  p.pass = pass;
  p.query = p.key = p.value = p.out = contiguous(dtype, {batch, heads, length, dim});
  p.lse = contiguous(dtype == DType::kFloat64 ? dtype : DType::kFloat32, {batch, heads, length});
  if (pass == Pass::kBackward) p.grad_out = p.grad_query = p.grad_key = p.grad_value = p.out;
  return p;
}

AttentionPlan plan_for(AttentionProblem p, int num_threads) {
  p.device.num_threads = num_threads;
  const auto plan = flashmoe::plan(p);
  CHECK(plan.ok(), plan.status().message());
  return plan.value();
}

}  // namespace

TEST(the_problem_as_numbers) {
  AttentionProblem p;
  p.query = contiguous(DType::kFloat16, {2, 3, 8, 50, 16});
  p.key = contiguous(DType::kFloat16, {2, 3, 2, 70, 16});
  p.value = contiguous(DType::kFloat16, {2, 3, 2, 70, 24});
  p.out = contiguous(DType::kFloat16, {2, 3, 8, 50, 24});
  const AttentionPlan plan = plan_for(p, 1);
  CHECK_EQ(plan.batch, 6);
  CHECK_EQ(plan.heads_q, 8);
  CHECK_EQ(plan.heads_k, 2);
  CHECK_EQ(plan.len_q, 50);
  CHECK_EQ(plan.len_k, 70);
  CHECK_EQ(plan.head_dim, 16);
  CHECK_EQ(plan.head_dim_v, 24);
  CHECK_EQ(*plan.problem.scale, 0.25);
}

TEST(a_given_scale_stays) {
  AttentionProblem p = problem(Pass::kForward, 1, 1, 4, 4);
  p.scale = 0;
  CHECK_EQ(*plan_for(p, 1).problem.scale, 0.);
}

// How the work is cut decides the bits of the result, so the number of threads must not.
TEST(the_cut_does_not_depend_on_threads) {
  for (int i = 0; i < 200; ++i) {
    Random random(i);
    const Case c = random_case(random);
    const Note note(describe(c));
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      const AttentionPlan one = plan_for(c.problem(pass), 1);
      CHECK_EQ(one.workers, 1);
      for (int threads : {2, 3, 64}) {
        const AttentionPlan many = plan_for(c.problem(pass), threads);
        CHECK_EQ(many.kernel, one.kernel);
        CHECK_EQ(many.block_q, one.block_q);
        CHECK_EQ(many.block_k, one.block_k);
        CHECK_EQ(many.chunks, one.chunks);
        CHECK_EQ(many.work_items, one.work_items);
        CHECK_EQ(many.scratch_bytes, one.scratch_bytes);
        CHECK(many.workers >= 1 && many.workers <= threads);
        CHECK_EQ(many.workspace_bytes - one.workspace_bytes,
                 (many.workers - 1) * one.scratch_bytes);
      }
    }
  }
}

TEST(blocks_and_items_are_sensible) {
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (int64_t length : {1, 17, 96, 97, 1000, 100000}) {
      const AttentionPlan plan = plan_for(problem(pass, 2, 3, length, 32), 8);
      CHECK(plan.block_q >= 1 && plan.block_k >= 1);
      CHECK(plan.chunks >= 1);
      CHECK_EQ(plan.work_items, 2 * 3 * plan.chunks);
    }
    for (const AttentionProblem& p : {problem(pass, 0, 3, 20, 8), problem(pass, 2, 3, 0, 8)}) {
      const AttentionPlan plan = plan_for(p, 8);
      CHECK(plan.block_q >= 1 && plan.block_k >= 1 && plan.workers >= 1);
    }
  }
}

// No buffer of size S x S: twice the length takes at most about twice the memory.
TEST(workspace_is_linear_in_length) {
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (bool with_bias : {false, true}) {
      const auto bytes = [&](int64_t length) {
        AttentionProblem p = problem(pass, 1, 4, length, 64);
        if (with_bias) {
          p.bias = contiguous(DType::kFloat32, {length, length});
          if (pass == Pass::kBackward) p.grad_bias = p.bias;
        }
        return static_cast<double>(plan_for(p, 4).workspace_bytes);
      };
      const double base = bytes(1 << 14), twice = bytes(1 << 15), much = bytes(1 << 18);
      CHECK(twice <= 2.1 * base, base, twice);
      CHECK(much <= 16.5 * base, base, much);
    }
  }
}

TEST(shapes_past_2_31_elements_are_planned) {
  const AttentionPlan plan =
      plan_for(problem(Pass::kForward, 64, 32, 1 << 20, 128, DType::kBFloat16), 64);
  CHECK(plan.work_items > 0);
}

TEST(planning_is_pure) {
  Random random(5);
  for (int i = 0; i < 50; ++i) {
    const Case c = random_case(random);
    CHECK_EQ(flashmoe::explain(c.problem(Pass::kBackward)),
             flashmoe::explain(c.problem(Pass::kBackward)));
  }
}

TEST(the_chosen_candidate_is_last_and_says_so) {
  const AttentionPlan plan = plan_for(problem(Pass::kForward, 1, 2, 100, 64), 2);
  CHECK(!plan.candidates.empty());
  CHECK_CONTAINS(plan.kernel, plan.candidates.back().name);
  CHECK_CONTAINS(plan.kernel, flashmoe::cpu_target());
  CHECK_CONTAINS(plan.candidates.back().verdict, "chosen");
  for (const flashmoe::Candidate& c : plan.candidates) CHECK(!c.verdict.empty(), c.name);
}

TEST(explain_names_the_kernel_and_the_options) {
  AttentionProblem p = problem(Pass::kBackward, 2, 4, 300, 24, DType::kFloat16);
  p.causal = true;
  p.softcap = 30;
  p.bias = contiguous(DType::kFloat32, {300, 300});
  const std::string words = flashmoe::explain(p);
  for (const std::string& part :
       {plan_for(p, 0).kernel, std::string("causal"), std::string("softcap 30"),
        std::string("float16"), std::string("backward"), std::string("(300, 300)")}) {
    CHECK_CONTAINS(words, part);
  }
}

TEST(another_machine_is_refused_with_a_reason) {
  AttentionProblem p = problem(Pass::kForward, 1, 2, 100, 64, DType::kFloat64);
  p.device = {.type = flashmoe::DeviceType::kCuda, .compute_capability = 90};
  const auto plan = flashmoe::plan(p);
  CHECK(plan.status().code() == flashmoe::StatusCode::kUnsupported);
  CHECK_CONTAINS(plan.status().message(),
                 "no CUDA kernel of this build can run this call on sm_90");
  CHECK_CONTAINS(plan.status().message(), ".cpu()");

  p.device = {.num_threads = -1};
  CHECK(!flashmoe::plan(p).ok());
  CHECK_CONTAINS(flashmoe::plan(p).status().message(), "num_threads");
}

// CUDA: what another machine would run. Nothing of this needs a GPU, but kernels in the build.

namespace {

using flashmoe::CudaKernel;

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

const CudaKernel* find(const std::string& name) {
  static const std::map<std::string, CudaKernel> all = [] {
    std::map<std::string, CudaKernel> by_name;
    for (const CudaKernel& k : flashmoe::cuda_kernels()) by_name[k.name] = k;
    return by_name;
  }();
  const auto found = all.find(name);
  return found == all.end() ? nullptr : &found->second;
}

bool has_family(const std::string& name) {
  const auto all = flashmoe::cuda_kernels();
  return std::any_of(all.begin(), all.end(), [&](const CudaKernel& k) { return k.family == name; });
}
bool all_families() { return has_family("sm75") && has_family("sm80"); }

// As the torch ops lay tensors out: rows begin at multiples of 16 bytes.
TensorSpec with_rows(DType dtype, std::initializer_list<int64_t> lead, int64_t dim) {
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

AttentionProblem cuda_problem(int compute_capability, Pass pass, DType dtype, int64_t dim,
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

AttentionPlan plan_of(const AttentionProblem& p) {
  const auto plan = flashmoe::plan(p);
  CHECK(plan.ok(), plan.status().message());
  return plan.ok() ? plan.value() : AttentionPlan{};
}

// Refused, with a message that has all of these words.
void check_refused(const AttentionProblem& p, std::initializer_list<const char*> words) {
  const auto plan = flashmoe::plan(p);
  CHECK(!plan.ok(), plan.ok() ? plan.value().kernel : "");
  if (plan.ok()) return;
  for (const char* word : words) CHECK_CONTAINS(plan.status().message(), word);
  CHECK_CONTAINS(flashmoe::explain(p), "cannot run: " + plan.status().message());
}

// A kernel of the plan that is in the build, does that, and is of the plan's family and dtype.
void check_helper(const AttentionPlan& plan, const std::string& name, const char* role) {
  const CudaKernel* kernel = find(name);
  CHECK(kernel, name, "is not in the build");
  if (!kernel) return;
  CHECK_EQ(kernel->role, role);
  CHECK_EQ(kernel->family, plan.family);
  CHECK(kernel->dtype == plan.problem.query.dtype);
  CHECK_CONTAINS(flashmoe::explain(plan.problem), name);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A tile for thousands of short sequences.
bool for_short(const CudaKernel& k) {
  return k.head_dim <= 64 && k.block_q == 32 && k.block_k == 32;
}

// How many bytes a bias (rows, len_k) takes in rows of whole chunks.
size_t copy_bytes(int64_t rows, int64_t len_k) {
  return static_cast<size_t>(ceil_div(rows * ceil_div(len_k, 8) * 16, 256) * 256);
}

// What surrounds a call with a bias.
struct Around {
  bool sums = false;  // the gradient of a shared one is wanted
  size_t copied = 0;  // bytes of the copy, where it is copied first
};

// The bias of a ragged batch with several heads is copied to pairs side by side.
bool copies_pairs(const AttentionProblem& p) {
  return p.ragged && p.bias && p.bias->dtype != DType::kFloat32 && p.bias->shape[1] > 1 &&
         p.bias->stride[0] != 1;
}

void check_names(const AttentionPlan& plan, const std::vector<std::string>& names,
                 const std::vector<std::string>& roles) {
  CHECK_EQ(names.size(), roles.size());
  for (size_t i = 0; i < std::min(names.size(), roles.size()); ++i) {
    check_helper(plan, names[i], roles[i].c_str());
  }
}

void check_grid(const AttentionPlan& plan, const Sizes& s) {
  const bool backward = plan.problem.pass == Pass::kBackward;
  CHECK(plan.rounds >= 1);
  if (plan.problem.ragged) {  // all that there may be, the tokens after the last sequence counted
    const int64_t slots = backward ? s.batch * s.len_k / plan.block_k + s.batch + 1
                                   : s.batch * s.len_q / plan.block_q + s.batch + 1;
    const int64_t heads = backward ? s.heads_k : s.heads_q;
    CHECK_EQ(heads % plan.rounds, 0);
    CHECK_EQ(int64_t{plan.grid[0]}, slots * (heads / plan.rounds));
    CHECK_EQ(plan.grid[1], 1u);
    CHECK_EQ(plan.grid[2], 1u);
    CHECK_EQ(plan.work_items, int64_t{plan.grid[0]} * plan.rounds);
    return;
  }
  const int64_t in_x =
      backward ? ceil_div(s.len_k, plan.block_k) : ceil_div(s.len_q, plan.block_q) * plan.splits;
  const int64_t of_a_round = ceil_div(s.batch, plan.rounds);
  CHECK_EQ(ceil_div(s.batch, of_a_round), plan.rounds);  // none of them is empty
  CHECK_EQ(int64_t{plan.grid[0]}, in_x);
  CHECK_EQ(int64_t{plan.grid[1]}, backward ? s.heads_k : s.heads_q);
  CHECK_EQ(int64_t{plan.grid[2]}, std::min<int64_t>(of_a_round, 65535));
  CHECK_EQ(plan.work_items, in_x * plan.grid[1] * s.batch);
}

void check_candidates(const AttentionPlan& plan) {
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

void check_plan(const AttentionPlan& plan, const Chip& chip, const Sizes& s,
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
  CHECK_EQ(plan.threads, kernel->threads);
  CHECK_EQ(plan.block_q, int64_t{kernel->block_q});
  CHECK_EQ(plan.block_k, int64_t{kernel->block_k});
  CHECK_EQ(plan.shared_bytes, static_cast<size_t>(kernel->shared_bytes));
  CHECK(plan.shared_bytes <= chip.shared_bytes, plan.shared_bytes);
  // All sequences of a size are equally long here.
  const bool many_short = std::max(s.len_q, s.len_k) <= (p.ragged ? 48 : 32) &&
                          s.batch * s.heads_k >= 4 * chip.multiprocessors;
  CHECK_EQ(for_short(*kernel), many_short && dim <= 64);

  check_grid(plan, s);
  CHECK(plan.splits == 1 || (!backward && !p.ragged));
  CHECK(plan.rounds == 1 || copies_pairs(p) ||
        (backward && (p.bias || p.ragged) && !for_short(*kernel)));
  CHECK(plan.bias_splits == 1 || (around.sums && !p.ragged));
  if (!backward) {
    const size_t partial = s.batch * s.heads_q * s.len_q * (kernel->head_dim + 1) * sizeof(float);
    const int64_t heads = s.heads_q / plan.rounds;
    const size_t list = p.ragged ? ceil_div(plan.grid[0] / heads * 48, 256) * 256 : 0;
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
  check_names(plan, plan.before, before);
  check_names(plan, plan.after, after);
  if (plan.after.size() != after.size()) return;  // reported
  if (finishes) {                                 // of the same tile: it knows how the sums lie
    const CudaKernel* finish = find(plan.after[0]);
    CHECK_EQ(finish->image, kernel->image);
    CHECK_EQ(finish->block_q, kernel->block_q);
    CHECK_EQ(finish->block_k, kernel->block_k);
    CHECK_EQ(finish->threads, kernel->threads);
    CHECK(static_cast<size_t>(finish->shared_bytes) <= chip.shared_bytes, finish->shared_bytes);
  }
  if (around.sums) {
    const CudaKernel* sum = find(plan.after.back());
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

}  // namespace

TEST(cuda_plans_name_kernels_that_exist_and_fit) {
  if (!all_families()) return;
  const int64_t dims[] = {1,  7,  8,  16,  17,  24,  32,  33,  40,  48, 64,
                          72, 80, 96, 112, 128, 144, 192, 200, 255, 256};
  const Sizes sizes[] = {{},
                         {.batch = 1, .len_q = 1, .len_k = 1},
                         {.len_q = 63, .len_k = 4096},
                         {.batch = 300, .len_q = 31, .len_k = 32},  // short
                         {.batch = 300, .len_q = 20, .len_k = 33},  // ragged, they are short
                         {.batch = 300, .len_q = 49, .len_k = 1},
                         {.batch = 70000, .heads_q = 1, .heads_k = 1, .len_q = 5, .len_k = 3},
                         {.batch = 40, .heads_q = 4, .heads_k = 4, .len_q = 2048, .len_k = 2048}};
  for (const Chip& chip : kChips) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      if (chip.compute_capability < 80 && dtype == DType::kBFloat16) continue;
      for (Pass pass : {Pass::kForward, Pass::kBackward}) {
        for (int64_t dim : dims) {
          for (int64_t dim_v : {dim, int64_t{64}}) {
            for (const Sizes& s : sizes) {
              for (bool ragged : {false, true}) {
                if (s.len_q == 1 && !ragged && pass == Pass::kForward) continue;  // see below
                const Note note("sm_", chip.compute_capability, " ", dtype_name(dtype),
                                pass == Pass::kForward ? " forward" : " backward", " head dims ",
                                dim, "/", dim_v, ", ", s.len_q, " x ", s.len_k,
                                ragged ? " ragged" : "");
                const auto plan = plan_of(
                    cuda_problem(chip.compute_capability, pass, dtype, dim, dim_v, s, ragged));
                if (plan.kernel.empty()) return;  // reported
                check_plan(plan, chip, s);
              }
            }
          }
        }
      }
    }
  }
}

TEST(cuda_every_option_has_a_plan) {
  if (!all_families()) return;
  for (const Chip& chip : kChips) {
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      AttentionProblem p = cuda_problem(chip.compute_capability, pass, DType::kFloat16, 64, 64, {});
      p.causal = true;
      p.window_left = 100;
      p.softcap = 20;
      p.scale = -0.5;
      p.key_lengths = contiguous(DType::kInt64, {2});
      if (pass == Pass::kBackward) p.grad_lse = p.lse;
      for (bool deterministic : {false, true}) {
        p.deterministic = deterministic;
        check_plan(plan_of(p), chip, {});
      }
      // A gradient that is not asked for needs no kernel.
      if (pass == Pass::kBackward) {
        const size_t with = plan_of(p).workspace_bytes;
        p.grad_query.reset();
        CHECK(plan_of(p).after.empty());
        CHECK(plan_of(p).workspace_bytes < with);
      }
    }
  }
}

// The gradient of a bias of its own for each score is written by the pass itself, that of a shared
// one is summed by a kernel after it, and one that nobody wants takes neither. One in 16 bits that
// eight share is copied first, where its rows are odd: all are here.
TEST(cuda_a_bias_has_its_kernels) {
  if (!all_families()) return;
  struct Shape {
    TensorSpec bias;
    bool ragged, shared;
    int64_t matrices = 0;  // queries x keys, where it has both
  };
  for (const Sizes& s : {Sizes{}, Sizes{.batch = 300, .len_q = 20, .len_k = 31}}) {
    for (DType bias_dtype : {DType::kFloat16, DType::kFloat32}) {
      const int64_t pairs = s.batch * s.len_q * s.len_k, all = s.batch * s.heads_q;
      const Shape shapes[] = {
          {contiguous(bias_dtype, {s.batch, s.heads_q, s.len_q, s.len_k}), false, false, all},
          {contiguous(bias_dtype, {1, s.heads_q, s.len_q, s.len_k}), false, true, s.heads_q},
          {contiguous(bias_dtype, {s.batch, 1, s.len_q, s.len_k}), false, true, s.batch},
          {contiguous(bias_dtype, {s.len_q, s.len_k}), false, true, 1},
          {contiguous(bias_dtype, {s.batch, s.heads_q, 1, s.len_k}), false, true},
          {contiguous(bias_dtype, {s.batch, s.heads_q, s.len_q, 1}), false, true},
          {contiguous(bias_dtype, {1}), false, true},
          {contiguous(bias_dtype, {pairs, s.heads_q}), true, false},
          {contiguous(bias_dtype, {pairs, 1}), true, true},
      };
      for (const Chip& chip : kChips) {
        for (int64_t dim : {8, 16, 32, 48, 64, 96, 128, 192, 256}) {
          for (const auto& [bias, ragged, shared, matrices] : shapes) {
            const Note note("sm_", chip.compute_capability, " head dim ", dim, ", ", s.len_q, " x ",
                            s.len_k, ", bias of rank ", bias.rank, ragged ? " ragged" : "",
                            shared ? " shared" : "");
            const auto with_bias = [&](Pass pass) {
              AttentionProblem p =
                  cuda_problem(chip.compute_capability, pass, DType::kFloat16, dim, dim, s, ragged);
              p.bias = bias;
              return p;
            };
            Around around;
            if (bias_dtype == DType::kFloat16 && matrices > 0 && all >= 8 * matrices) {
              around.copied = copy_bytes(matrices * s.len_q, s.len_k);
            }
            const AttentionPlan forward = plan_of(with_bias(Pass::kForward));
            if (forward.kernel.empty()) return;  // reported
            check_plan(forward, chip, s, around);
            AttentionProblem p = with_bias(Pass::kBackward);
            const AttentionPlan unwanted = plan_of(p);
            check_plan(unwanted, chip, s, around);
            p.grad_bias = p.bias;
            const AttentionPlan wanted = plan_of(p);
            around.sums = shared;
            check_plan(wanted, chip, s, around);
            CHECK_EQ(wanted.kernel, unwanted.kernel);
            // Alone, it takes no turns with anything.
            p.grad_query.reset();
            p.grad_key.reset();
            p.grad_value.reset();
            const AttentionPlan alone = plan_of(p);
            check_plan(alone, chip, s, around);
            CHECK_CONTAINS(flashmoe::explain(p), "\n  bitwise reproducible\n");
          }
        }
      }
    }
  }
}

TEST(cuda_a_bias_adds_no_square_buffer) {
  if (!all_families()) return;
  for (bool full : {false, true}) {
    const auto bytes = [&](int64_t length) {
      const Sizes s{.batch = 1, .heads_q = 4, .heads_k = 4, .len_q = length, .len_k = length};
      AttentionProblem p = cuda_problem(100, Pass::kBackward, DType::kFloat16, 64, 64, s);
      p.bias = p.grad_bias = contiguous(DType::kFloat16, {full ? 4 : 1, length, length});
      return static_cast<double>(plan_of(p).workspace_bytes);
    };
    const double base = bytes(1 << 14);
    CHECK(bytes(1 << 15) <= 2.1 * base, base, bytes(1 << 15));
    CHECK(bytes(1 << 18) <= 17 * base, base, bytes(1 << 18));
  }
}

// Rows that are not whole chunks of 16 bytes are copied to rows that are, where eight or more
// (batch, head) share them; no other bias is.
TEST(cuda_odd_rows_that_many_share_are_copied) {
  if (!all_families()) return;
  const auto strided = [](std::initializer_list<int64_t> shape,
                          std::initializer_list<int64_t> stride) {
    TensorSpec spec = contiguous(DType::kFloat16, shape);
    std::copy(stride.begin(), stride.end(), spec.stride.begin());
    return spec;
  };
  constexpr DType kHalf = DType::kFloat16;
  struct Bias {
    const char* what;
    Sizes sizes;
    TensorSpec spec;
    int64_t rows = 0;  // that are copied
  };
  const Sizes odd{.batch = 8, .heads_q = 2, .heads_k = 1, .len_q = 70, .len_k = 93};
  const Sizes even{.batch = 8, .heads_q = 2, .heads_k = 1, .len_q = 70, .len_k = 96};
  const Sizes seven{.batch = 7, .heads_q = 1, .heads_k = 1, .len_q = 70, .len_k = 93};
  const Sizes eight{.batch = 8, .heads_q = 1, .heads_k = 1, .len_q = 70, .len_k = 93};
  const Sizes heads{.batch = 2, .heads_q = 8, .heads_k = 8, .len_q = 70, .len_k = 93};
  const Sizes many{.batch = 65536, .heads_q = 8, .heads_k = 8, .len_q = 3, .len_k = 5};
  const Sizes fewer{.batch = 65535, .heads_q = 8, .heads_k = 8, .len_q = 3, .len_k = 5};
  const Sizes one_key{.batch = 8, .heads_q = 2, .heads_k = 1, .len_q = 70, .len_k = 1};
  const Sizes one_pair{.batch = 8, .heads_q = 2, .heads_k = 1, .len_q = 1, .len_k = 1};
  const Bias table[] = {
      {"eight share it", eight, contiguous(kHalf, {70, 93}), 70},
      {"seven share it", seven, contiguous(kHalf, {70, 93})},
      {"all batches", odd, contiguous(kHalf, {2, 70, 93}), 140},
      {"all heads", heads, contiguous(kHalf, {2, 1, 70, 93}), 140},
      {"two batches", heads, contiguous(kHalf, {8, 70, 93})},
      {"two heads", odd, contiguous(kHalf, {8, 1, 70, 93})},
      {"nobody", odd, contiguous(kHalf, {8, 2, 70, 93})},
      {"fp32", odd, contiguous(DType::kFloat32, {70, 93})},
      {"one row", odd, contiguous(kHalf, {1, 93})},
      {"one column", odd, contiguous(kHalf, {70, 1})},
      {"one dimension", odd, contiguous(kHalf, {93})},
      {"whole chunks", even, contiguous(kHalf, {70, 96})},
      {"whole chunks, apart", even, strided({70, 96}, {104, 1})},
      {"chunks that are cut", even, strided({70, 96}, {100, 1}), 70},
      {"transposed", even, strided({70, 96}, {1, 72}), 70},
      {"heads last", even, strided({2, 70, 96}, {1, 192, 2}), 140},
      {"odd matrices", even, strided({2, 70, 96}, {6724, 96, 1}), 140},
      {"one odd matrix", even, strided({1, 70, 96}, {6724, 96, 1})},
      {"whole rows, cut at an odd key", odd, strided({70, 93}, {96, 1}), 70},
      {"all a grid takes", fewer, contiguous(kHalf, {65535, 1, 3, 5}), 3 * 65535},
      {"more than a grid takes", many, contiguous(kHalf, {65536, 1, 3, 5})},
      {"one key", one_key, contiguous(kHalf, {70, 1}), 70},
      {"one pair", one_pair, contiguous(kHalf, {1, 1})},
  };
  for (const Chip& chip : kChips) {
    for (const auto& [what, s, bias, rows] : table) {
      const Note note("sm_", chip.compute_capability, ", ", what);
      const size_t copied = rows > 0 ? copy_bytes(rows, s.len_k) : 0;
      const auto plan_with = [&](Pass pass, const TensorSpec& spec) {
        AttentionProblem p = cuda_problem(chip.compute_capability, pass, kHalf, 32, 32, s);
        p.bias = spec;
        return plan_of(p);
      };
      if (s.len_q > 1) {  // one query is cut otherwise
        check_plan(plan_with(Pass::kForward, bias), chip, s, {.copied = copied});
      }
      const AttentionPlan backward = plan_with(Pass::kBackward, bias);
      check_plan(backward, chip, s, {.copied = copied});
      if (s.batch > 8) continue;  // its rounds depend on the bytes of the bias
      // Beside what the same call takes with a bias that stays where it is.
      TensorSpec wide = bias;
      wide.dtype = DType::kFloat32;
      const AttentionPlan in_place = plan_with(Pass::kBackward, wide);
      CHECK_EQ(backward.workspace_bytes, in_place.workspace_bytes + copied);
    }
  }
}

// What shares a tile of the gradient is split as little as leaves at most a tenth of the chip idle,
// and never in parts of fewer than four steps.
TEST(cuda_the_sum_of_a_small_gradient_is_split) {
  if (!all_families()) return;
  const auto plan_for = [](int64_t batch, int multiprocessors, int64_t length = 256,
                           bool alone = true) {
    const Sizes s{.batch = batch, .heads_q = 4, .heads_k = 4, .len_q = length, .len_k = length};
    AttentionProblem p = cuda_problem(100, Pass::kBackward, DType::kFloat16, 64, 64, s);
    p.device.multiprocessors = multiprocessors;
    p.bias = p.grad_bias = contiguous(DType::kFloat16, {length, length});
    if (alone) p.grad_query.reset();
    return plan_of(p);
  };
  // 16 tiles of 64 x 64, and two CTAs on each of 132 SMs: 15 x 16 are nine tenths of 264.
  const AttentionPlan plan = plan_for(64, 132);
  const CudaKernel* sum = find(plan.after.back());
  CHECK_EQ(sum->block_q, 64);
  CHECK_EQ(sum->block_k, 64);
  CHECK_EQ(plan.bias_splits, 15);
  CHECK_CONTAINS(flashmoe::explain(plan.problem), "\n  splits     what shares the bias, in 15\n");
  CHECK_EQ(plan_for(64, 132, 256, false).bias_splits, 15);
  CHECK_EQ(plan_for(64, 72).bias_splits, 9);  // 8 x 16 are 0.89 of 144
  // The terms of the rows, the parts in fp32, and a counter.
  const size_t terms = 64 * 4 * 256 * 8, parts = 15 * 256 * 256 * 4;
  CHECK_EQ(plan.workspace_bytes, terms + parts + 256);

  CHECK_EQ(plan_for(64, 1).bias_splits, 1);  // the tiles alone fill it
  CHECK_EQ(plan_for(64, 132, 4096).bias_splits, 1);
  for (const auto& [batch, splits] : {std::pair{1, 1}, {2, 2}, {3, 3}, {14, 14}, {15, 15}}) {
    CHECK_EQ(plan_for(batch, 132).bias_splits, splits);  // four heads are four steps
  }
  const AttentionPlan one = plan_for(1, 132);
  CHECK(flashmoe::explain(one.problem).find("splits") == std::string::npos);
}

TEST(cuda_nothing_to_do_is_planned) {
  if (!all_families()) return;
  for (const Sizes& s : {Sizes{.batch = 0}, Sizes{.len_q = 0}, Sizes{.len_k = 0}}) {
    for (bool ragged : {false, true}) {
      for (Pass pass : {Pass::kForward, Pass::kBackward}) {
        CHECK(find(plan_of(cuda_problem(100, pass, DType::kFloat16, 64, 64, s, ragged)).kernel));
      }
    }
  }
}

TEST(cuda_one_query_over_many_keys_is_split) {
  if (!all_families()) return;
  const auto plan_for_batch = [](int cc, int64_t batch, int64_t keys, int multiprocessors = 0) {
    const Sizes s{.batch = batch, .heads_q = 32, .heads_k = 8, .len_q = 1, .len_k = keys};
    AttentionProblem p = cuda_problem(cc, Pass::kForward, DType::kFloat16, 128, 128, s);
    p.device.multiprocessors = multiprocessors;
    return plan_of(p);
  };
  for (const Chip& chip : kChips) {
    const int cc = chip.compute_capability;
    const Note note("sm_", cc);
    const AttentionPlan one = plan_for_batch(cc, 1, 100000, 100);
    CHECK(one.splits > 10 && one.splits <= 100, one.splits);  // 8 key heads
    CHECK_EQ(int64_t{one.grid[0]}, one.splits);
    CHECK_EQ(one.grid[1], 8u);  // the heads of a group are rows
    CHECK_EQ(one.grid[2], 1u);
    CHECK_EQ(one.after.size(), 1u);
    check_helper(one, one.after[0], "attention_combine");
    // (splits, heads, rows, head dim) of sums and their lse.
    CHECK_EQ(one.workspace_bytes, static_cast<size_t>(one.splits * 8 * 4 * (128 + 1) * 4));
    const std::string words = flashmoe::explain(one.problem);
    CHECK_CONTAINS(words, "\n  splits     the keys, in " + std::to_string(one.splits) + "\n");
    CHECK_CONTAINS(words, "\n  after      " + one.after[0] + "\n");
    CHECK_CONTAINS(words, "\n  bitwise reproducible\n");

    // Enough to do for everyone, or too little for several.
    const AttentionPlan many = plan_for_batch(cc, 512, 100000);
    const AttentionPlan few_keys = plan_for_batch(cc, 1, 100);
    const AttentionPlan small_chip = plan_for_batch(cc, 1, 100000, 1);
    for (const AttentionPlan& plan : {many, few_keys, small_chip}) {
      CHECK_EQ(plan.splits, 1);
      CHECK(plan.after.empty());
      CHECK_EQ(plan.workspace_bytes, 0u);
    }
    CHECK(plan_for_batch(cc, 1, 100000, 20).splits < one.splits);
    // A larger batch is never split more.
    int64_t before = 1 << 20;
    for (int64_t batch = 1; batch <= 1024; batch *= 2) {
      const int64_t splits = plan_for_batch(cc, batch, 100000).splits;
      CHECK(splits <= before && splits >= 1, batch, splits);
      before = splits;
    }
  }
}

TEST(cuda_workspace_is_linear_in_length) {
  if (!all_families()) return;
  for (int cc : {75, 100}) {
    for (bool ragged : {false, true}) {
      const auto bytes = [&](int64_t length) {
        const Sizes s{.batch = 1, .heads_q = 4, .heads_k = 4, .len_q = length, .len_k = length};
        AttentionProblem p = cuda_problem(cc, Pass::kBackward, DType::kFloat16, 64, 64, s, ragged);
        p.deterministic = true;
        return static_cast<double>(plan_of(p).workspace_bytes);
      };
      const double base = bytes(1 << 14);
      CHECK(base > 0);
      CHECK(bytes(1 << 15) <= 2.1 * base, base, bytes(1 << 15));
      CHECK(bytes(1 << 20) <= 65 * base, base, bytes(1 << 20));
    }
  }
}

// With a bias or ragged, the sums of dQ come in as few rounds as make the workspace small beside
// the tensors, and each still fills the chip.
TEST(cuda_backward_needs_little_beside_its_tensors) {
  if (!all_families()) return;
  enum Kind { kDense, kBias, kRagged, kRaggedBias };
  const auto problem_of = [](Kind kind, const Sizes& s, int64_t dim = 64) {
    const bool ragged = kind == kRagged || kind == kRaggedBias;
    AttentionProblem p = cuda_problem(100, Pass::kBackward, DType::kBFloat16, dim, dim, s, ragged);
    p.device.multiprocessors = 132;
    if (kind == kBias) p.bias = contiguous(DType::kBFloat16, {s.len_q, s.len_k});
    if (kind == kRaggedBias) {
      p.bias = contiguous(DType::kBFloat16, {s.batch * s.len_q * s.len_k, 1});
    }
    p.grad_bias = p.bias;
    return p;
  };
  const auto numbers = [](const TensorSpec& spec) {
    double count = 1;
    for (int i = 0; i < spec.rank; ++i) count *= static_cast<double>(spec.shape[i]);
    return count;
  };
  struct Large {
    Kind kind;
    Sizes sizes;
    int64_t rounds, fewer;  // and the next fewer that there could be
  };
  const Sizes long_ones{.batch = 8, .heads_q = 16, .heads_k = 16, .len_q = 4096, .len_k = 4096};
  const Sizes groups{.batch = 8, .heads_q = 64, .heads_k = 16, .len_q = 4096, .len_k = 4096};
  const Sizes triangle{.batch = 512, .heads_q = 4, .heads_k = 4, .len_q = 512, .len_k = 512};
  const Sizes three{.batch = 8, .heads_q = 3, .heads_k = 3, .len_q = 8192, .len_k = 8192};
  const Large table[] = {
      {kRagged, long_ones, 4, 2},     {kRagged, groups, 8, 4}, {kRagged, three, 3, 1},
      {kBias, long_ones, 3, 2},       {kBias, triangle, 3, 2}, {kBias, groups, 8, 7},
      {kRaggedBias, long_ones, 2, 1},
  };
  for (const auto& [kind, s, rounds, fewer] : table) {
    const bool ragged = kind == kRagged || kind == kRaggedBias;
    const Note note(ragged ? "ragged" : "dense", kind == kRagged ? "" : " with a bias", ", heads ",
                    s.heads_q, "/", s.heads_k);
    const AttentionProblem p = problem_of(kind, s);
    const AttentionPlan plan = plan_of(p);
    CHECK_EQ(plan.rounds, rounds);
    check_grid(plan, s);
    double tensors = 4 * 2 * (numbers(p.query) + numbers(p.key));
    if (p.bias) tensors += 2 * 2 * numbers(*p.bias);
    const double used = static_cast<double>(plan.workspace_bytes);
    CHECK(used <= 0.099 * tensors, used, tensors);
    // With fewer, the sums alone would have been too many more.
    const auto sums = [&](int64_t n) {
      const int64_t rows =
          ragged ? s.batch * s.len_q * s.heads_q / n : ceil_div(s.batch, n) * s.len_q * s.heads_q;
      return static_cast<double>(rows) * 64 * sizeof(float);
    };
    CHECK(used - sums(rounds) + sums(fewer) > 0.099 * tensors, used, sums(rounds), sums(fewer));
    CHECK_CONTAINS(flashmoe::explain(p), "\n  rounds     " + std::to_string(rounds) +
                                             ", each for a part of the " +
                                             (ragged ? "heads\n" : "batch\n"));

    AttentionProblem without_query = p;  // where dQ is not wanted there are no sums
    without_query.grad_query.reset();
    CHECK_EQ(plan_of(without_query).rounds, 1);
  }
  const auto check_one_round = [&](Kind kind, const Sizes& s) {
    const AttentionPlan plan = plan_of(problem_of(kind, s));
    CHECK_EQ(plan.rounds, 1);
    CHECK(flashmoe::explain(plan.problem).find("rounds") == std::string::npos);
  };
  // Neither a bias nor ragged; one head or one batch, which cannot be cut; and a small call, a part
  // of which would leave SMs idle.
  for (const Sizes& s : {long_ones, groups, triangle}) check_one_round(kDense, s);
  for (Kind kind : {kRagged, kRaggedBias}) {
    check_one_round(kind, {.batch = 8, .heads_q = 1, .heads_k = 1, .len_q = 4096, .len_k = 4096});
  }
  check_one_round(kBias, {.batch = 1, .heads_q = 64, .heads_k = 64, .len_q = 4096, .len_k = 4096});
  for (Kind kind : {kBias, kRagged, kRaggedBias}) {
    check_one_round(kind, {.batch = 1, .heads_q = 16, .heads_k = 16, .len_q = 512, .len_k = 512});
  }
}

// The bias of a ragged batch is copied by heads, of which a round has as many as the workspace has
// room for; where pairs lie side by side already, it stays where it is.
TEST(cuda_packed_bias_is_copied_by_heads) {
  if (!all_families()) return;
  const Sizes s{.batch = 4096, .heads_q = 8, .heads_k = 8, .len_q = 32, .len_k = 32};
  const int64_t pairs = s.batch * 32 * 32;
  const auto plan_with = [&](Pass pass, const TensorSpec& bias) {
    AttentionProblem p = cuda_problem(100, pass, DType::kBFloat16, 64, 64, s, true);
    p.device.multiprocessors = 132;
    p.bias = bias;
    if (pass == Pass::kBackward) p.grad_bias = bias;
    return plan_of(p);
  };
  const double rows = 2. * 4096 * 32 * 8 * 64, numbers = 2. * static_cast<double>(pairs) * 8;
  const TensorSpec packed = contiguous(DType::kBFloat16, {pairs, 8});
  const AttentionPlan forward = plan_with(Pass::kForward, packed);
  check_plan(forward, kChips[5], s);
  CHECK_EQ(forward.rounds, 2);
  CHECK(static_cast<double>(forward.workspace_bytes) <= 0.099 * (4 * rows + numbers));
  const AttentionPlan backward = plan_with(Pass::kBackward, packed);
  check_plan(backward, kChips[5], s);
  CHECK_EQ(backward.rounds, 1);
  CHECK(static_cast<double>(backward.workspace_bytes) <= 0.099 * (8 * rows + 2 * numbers));

  TensorSpec apart = packed;
  apart.stride[0] = 1;
  apart.stride[1] = pairs;
  for (const TensorSpec& bias :
       {apart, contiguous(DType::kBFloat16, {pairs, 1}), contiguous(DType::kFloat32, {pairs, 8})}) {
    const AttentionPlan plan = plan_with(Pass::kForward, bias);
    CHECK_EQ(plan.before.size(), 1u);
    CHECK_EQ(plan.rounds, 1);
    CHECK_EQ(plan_with(Pass::kBackward, bias).before.size(), 2u);
  }
}

// Two blocks of keys for each SM are work enough for a round. Where the rounds that would be needed
// have less, there is one.
TEST(cuda_a_round_fills_the_chip) {
  if (!all_families()) return;
  // 4 heads of 4096 keys, 128 in a block: 128 blocks a batch, and 12 batches.
  const Sizes s{.batch = 12, .heads_q = 4, .heads_k = 4, .len_q = 4096, .len_k = 4096};
  for (const auto& [multiprocessors, rounds] :
       {std::pair{64, 3}, {192, 3}, {256, 3}, {257, 1}, {384, 1}, {769, 1}}) {
    const Note note(multiprocessors, " SMs");
    AttentionProblem p = cuda_problem(100, Pass::kBackward, DType::kFloat16, 64, 64, s);
    p.bias = contiguous(DType::kFloat16, {4096, 4096});
    p.device.multiprocessors = multiprocessors;
    const AttentionPlan plan = plan_of(p);
    CHECK_EQ(plan.block_k, 128);
    CHECK_EQ(plan.rounds, rounds);
  }
}

TEST(cuda_ragged_batches_of_short_sequences) {
  if (!all_families()) return;
  const auto problem_of = [](int64_t batch, int64_t tokens, int64_t longest, int64_t heads = 4) {
    const Sizes s{.batch = 1, .heads_q = heads, .heads_k = heads, .len_q = tokens, .len_k = tokens};
    AttentionProblem p = cuda_problem(100, Pass::kForward, DType::kFloat16, 64, 64, s, true);
    const TensorSpec cu = contiguous(DType::kInt32, {batch + 1});
    p.ragged = flashmoe::Ragged{cu, cu, longest, longest};
    return p;
  };
  // One long sequence among many short ones: the tile is for the short ones, and there are about
  // as many blocks as they need.
  const AttentionPlan plan = plan_of(problem_of(4096, 4096 * 20, 3000));
  CHECK_EQ(plan.block_q, 32);
  CHECK_EQ(plan.block_k, 32);
  CHECK_EQ(int64_t{plan.grid[0]}, (4096 * 20 / 32 + 4096 + 1) * 4);
  const AttentionPlan longer = plan_of(problem_of(4096, 4096 * 49, 3000));
  CHECK_EQ(longer.block_q, 64);
  CHECK_EQ(int64_t{longer.grid[0]}, (4096 * 49 / 64 + 4096 + 1) * 4);
  CHECK_CONTAINS(flashmoe::explain(longer.problem),
                 "49 rows a sequence would leave half of the tile empty");
  // A stated length costs nothing.
  const AttentionPlan stated = plan_of(problem_of(4096, 4096 * 20, 1 << 29));
  CHECK_EQ(stated.kernel, plan.kernel);
  CHECK_EQ(stated.grid[0], plan.grid[0]);
  CHECK_EQ(stated.workspace_bytes, plan.workspace_bytes);

  check_refused(problem_of(1 << 20, 1 << 20, 64, 4096), {"blocks", "2^31 - 1"});
}

// 32 x 32 up to head dim 64, for at least four (batch, head) of an SM and at most 48 tokens on
// average, or 32 where all are equally long; the tiles for the others are passed over by name.
TEST(cuda_many_short_sequences_have_a_tile_of_their_own) {
  if (!all_families()) return;
  const auto problem_of = [](Pass pass, bool ragged, bool bias, const Sizes& s, int64_t dim = 64,
                             int64_t dim_v = 64) {
    AttentionProblem p = cuda_problem(100, pass, DType::kFloat16, dim, dim_v, s, ragged);
    p.device.multiprocessors = 132;
    if (bias && ragged) {
      p.bias = contiguous(DType::kFloat16, {s.batch * s.len_q * s.len_k, s.heads_q});
    } else if (bias) {
      p.bias = contiguous(DType::kFloat16, {s.len_q, s.len_k});
    }
    return p;
  };
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (bool ragged : {false, true}) {
      for (bool bias : {false, true}) {
        const Note note(pass == Pass::kForward ? "forward" : "backward", ragged ? " ragged" : "",
                        bias ? " with a bias" : "");
        const int64_t most = ragged ? 48 : 32;
        const auto sizes = [](int64_t batch, int64_t len_q, int64_t len_k) {
          return Sizes{.batch = batch, .heads_q = 8, .heads_k = 4, .len_q = len_q, .len_k = len_k};
        };
        const auto is_short = [&](const Sizes& s, int64_t dim = 64, int64_t dim_v = 64) {
          return for_short(*find(plan_of(problem_of(pass, ragged, bias, s, dim, dim_v)).kernel));
        };
        CHECK(is_short(sizes(132, most, most)));
        CHECK(is_short(sizes(132, 2, most)));
        CHECK(is_short(sizes(132, most, most), 8, 64));
        CHECK(!is_short(sizes(131, most, most)));  // 524 (batch, key head), 528 are four of an SM
        CHECK(!is_short(sizes(132, most + 1, most)));
        CHECK(!is_short(sizes(132, most, most + 1)));
        CHECK(!is_short(sizes(132, most, most), 65, 8));
        CHECK(!is_short(sizes(132, most, most), 8, 65));

        const AttentionProblem p = problem_of(pass, ragged, bias, sizes(132, most, most));
        const AttentionPlan plan = plan_of(p);
        std::vector<std::string> passed, tiles;
        for (const flashmoe::Candidate& c : plan.candidates) {
          if (c.verdict == "passed over: made for longer sequences") passed.push_back(c.name);
        }
        for (const CudaKernel& k : flashmoe::cuda_kernels()) {
          const CudaKernel* chosen = find(plan.kernel);
          if (k.role != chosen->role || k.image != chosen->image || k.name == chosen->name)
            continue;
          tiles.push_back(k.name);
          const Environment tile("FLASHMOE_TILE",
                                 std::to_string(k.block_q) + "x" + std::to_string(k.block_k));
          CHECK_EQ(plan_of(p).kernel, k.name);
        }
        CHECK(!tiles.empty());
        CHECK(passed == tiles, passed.size(), tiles.size());
      }
    }
  }
  // Where there is no other, the tile for longer sequences has to do for a few short ones.
  AttentionProblem p = cuda_problem(75, Pass::kForward, DType::kFloat16, 64, 64,
                                    {.batch = 1, .len_q = 20, .len_k = 20});
  CHECK_EQ(plan_of(p).kernel, "sm75_attention_fwd_fp16_d64_128x64");
  CHECK_CONTAINS(flashmoe::explain(p),
                 "sm75_attention_fwd_fp16_d64_32x32: passed over: made for many sequences of at "
                 "most a few dozen tokens\n");
}

// With a bias, 64 rows where 128 would leave more of the last round of SMs idle.
TEST(cuda_a_forward_tile_with_a_bias_fills_the_last_round) {
  if (!all_families()) return;
  const auto plan_for = [](int64_t blocks, bool bias) {
    const Sizes s{.batch = blocks, .heads_q = 1, .heads_k = 1, .len_q = 128, .len_k = 128};
    AttentionProblem p = cuda_problem(100, Pass::kForward, DType::kFloat16, 64, 64, s);
    p.device.multiprocessors = 132;
    if (bias) p.bias = contiguous(DType::kFloat16, {128, 128});
    return plan_of(p);
  };
  // Two CTAs of 128 rows on an SM, three of 64 with 0.82 of the speed.
  for (const auto& [blocks, rows] : {std::pair{132, 64},  // 0.5 full, or 0.82 * 0.67
                                     {198, 64},           // 0.75, or 0.82
                                     {199, 128},          // 0.75, or 0.82 * 0.50
                                     {264, 128},          // 1, or 0.82 * 0.67
                                     {265, 64},           // 0.50, or 0.82 * 0.67
                                     {396, 64},           // 0.75, or 0.82
                                     {397, 128},          // 0.75, or 0.82 * 0.67
                                     {1057, 128}}) {      // 0.80, or 0.82 * 0.89
    const Note note(blocks, " blocks");
    const AttentionPlan plan = plan_for(blocks, true);
    CHECK_EQ(plan.block_q, rows);
    CHECK_EQ(plan.block_k, 64);
    const std::string why = "_128x64: passed over: " + std::to_string(blocks) +
                            " blocks would leave much of the last round of SMs idle\n";
    CHECK_EQ(flashmoe::explain(plan.problem).find(why) != std::string::npos, rows == 64);
    CHECK_EQ(plan_for(blocks, false).block_q, 128);
  }
  CHECK_CONTAINS(flashmoe::explain(plan_for(131, true).problem),
                 "_128x64: passed over: 131 blocks would leave some of 132 SMs idle\n");
}

TEST(cuda_short_sequences_are_reproducible) {
  if (!all_families()) return;
  const Sizes s{.batch = 600, .len_q = 20, .len_k = 20};
  const AttentionProblem p = cuda_problem(100, Pass::kBackward, DType::kFloat16, 64, 64, s);
  CHECK(for_short(*find(plan_of(p).kernel)));
  CHECK_CONTAINS(flashmoe::explain(p), "\n  bitwise reproducible\n");
}

TEST(cuda_explain_tells_what_is_reproducible) {
  if (!all_families()) return;
  for (int cc : {75, 80, 100}) {
    AttentionProblem p = cuda_problem(cc, Pass::kBackward, DType::kFloat16, 64, 64, {});
    const AttentionPlan plan = plan_of(p);
    const std::string words = flashmoe::explain(p);
    CHECK_CONTAINS(words, "\n  not bitwise reproducible: grad_query is summed in any order");
    CHECK_CONTAINS(words, "\n  before     " + plan.before[0] + "\n");
    CHECK_CONTAINS(words, "\n  after      " + plan.after[0] + "\n");
    AttentionProblem in_turns = p;
    in_turns.deterministic = true;
    CHECK_CONTAINS(flashmoe::explain(in_turns), "\n  bitwise reproducible\n");
    AttentionProblem without_query = p;  // what is summed in any order is not there
    without_query.grad_query.reset();
    CHECK_CONTAINS(flashmoe::explain(without_query), "\n  bitwise reproducible\n");
  }
}

TEST(cuda_refusals_say_why) {
  if (!all_families()) return;
  const auto good = [](int cc, Pass pass = Pass::kForward, DType dtype = DType::kFloat16) {
    return cuda_problem(cc, pass, dtype, 64, 64, {});
  };
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    check_refused(good(75, pass, DType::kBFloat16),
                  {"on sm_75", "sm80: needs sm_80 or newer, the device is sm_75",
                   "sm75: has no kernels for bfloat16", ".cpu()"});
    check_refused(good(70, pass), {"on sm_70", "sm75: needs sm_75 or newer", ".cpu()"});
  }
  AttentionProblem p;
  for (TensorSpec AttentionProblem::*tensor :
       {&AttentionProblem::query, &AttentionProblem::key, &AttentionProblem::value}) {
    p = good(80);
    TensorSpec& spec = p.*tensor;
    spec.stride[2] += 1;  // no multiple of 16 bytes
    CHECK(flashmoe::needs_copy(spec, p.device));
    check_refused(p, {"16-byte aligned", ".contiguous()"});
  }
  CHECK(!flashmoe::needs_copy(good(80).query, good(80).device));

  p = problem(Pass::kForward, 1, 2, 100, 64, DType::kFloat32);
  p.device = good(100).device;
  check_refused(p, {"query is float32", "float16 and bfloat16", ".cpu()"});
}

TEST(cuda_environment) {
  if (!all_families()) return;
  const AttentionProblem p = cuda_problem(100, Pass::kForward, DType::kFloat16, 64, 64, {});
  for (const char* family : {"sm75", "sm80"}) {
    const Environment set("FLASHMOE_FAMILY", family);
    CHECK_EQ(plan_of(p).family, family);
    CHECK_CONTAINS(flashmoe::explain(p), "FLASHMOE_FAMILY asks for " + std::string(family));
  }
  {
    const Environment set("FLASHMOE_FAMILY", "sm81");
    check_refused(p, {"FLASHMOE_FAMILY is sm81", "sm75, sm80, sm90 or cpu"});
  }
  {
    const Environment set("FLASHMOE_FAMILY", "cpu");
    check_refused(p, {"FLASHMOE_FAMILY is cpu", ".cpu()"});
  }
  for (const char* tile : {"64", "64x", "x64", "64x64x64", "axb", "64x64 "}) {
    const Environment set("FLASHMOE_TILE", tile);
    check_refused(p, {"FLASHMOE_TILE is ", tile, "QUERIESxKEYS"});
  }
  {
    const Environment set("FLASHMOE_TILE", "1x1");
    check_refused(p, {"FLASHMOE_TILE asks for 1x1; for head dim 64 there are ", "128x128"});
  }
  // On the CPU neither means anything.
  const Environment family("FLASHMOE_FAMILY", "sm80"), tile("FLASHMOE_TILE", "1x1");
  CHECK(plan_for(problem(Pass::kForward, 1, 2, 100, 64), 1).kernel.starts_with("cpu_"));
}

TEST(cuda_every_tile_can_be_forced) {
  for (const CudaKernel& k : flashmoe::cuda_kernels()) {
    const bool bias = k.role.ends_with("_bias");
    const bool backward = k.role == (bias ? "attention_bwd_bias" : "attention_bwd");
    if (!backward && k.role != (bias ? "attention_fwd_bias" : "attention_fwd")) continue;
    const Environment family("FLASHMOE_FAMILY", k.family);
    const Environment tile("FLASHMOE_TILE",
                           std::to_string(k.block_q) + "x" + std::to_string(k.block_k));
    const int cc = k.family == "sm75" ? 75 : 90;
    AttentionProblem p = cuda_problem(cc, backward ? Pass::kBackward : Pass::kForward, k.dtype,
                                      k.head_dim, k.head_dim, {});
    if (bias) p.bias = contiguous(DType::kFloat32, {300, 517});
    if (k.name.find("_any_") != std::string::npos) p.softcap = 3;
    CHECK_EQ(plan_of(p).kernel, k.name);
  }
}

TEST(targets) {
  CHECK(!flashmoe::cpu_targets().empty());
  bool found = false;
  for (const std::string& name : flashmoe::cpu_targets()) found |= name == flashmoe::cpu_target();
  CHECK(found, flashmoe::cpu_target());
  CHECK(std::string(flashmoe::version()).find('.') != std::string::npos);
}
