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
};
constexpr size_t kKB = 1024;
constexpr Chip kChips[] = {{75, 64 * kKB}, {80, 163 * kKB}, {86, 99 * kKB},   {87, 163 * kKB},
                           {89, 99 * kKB}, {90, 227 * kKB}, {100, 227 * kKB}, {120, 99 * kKB}};
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

void check_plan(const AttentionPlan& plan, const Chip& chip, const Sizes& s) {
  const AttentionProblem& p = plan.problem;
  const bool backward = p.pass == Pass::kBackward;
  const CudaKernel* kernel = find(plan.kernel);
  CHECK(kernel, plan.kernel, "is not in the build");
  if (!kernel) return;
  check_helper(plan, plan.kernel, backward ? "attention_bwd" : "attention_fwd");
  CHECK_EQ(plan.family, chip.compute_capability < 80 ? "sm75" : "sm80");
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  CHECK_EQ(int64_t{kernel->head_dim}, int64_t{*std::lower_bound(kBuckets, kBuckets + 8, dim)});
  CHECK_EQ(plan.threads, kernel->threads);
  CHECK_EQ(plan.block_q, int64_t{kernel->block_q});
  CHECK_EQ(plan.block_k, int64_t{kernel->block_k});
  CHECK_EQ(plan.shared_bytes, static_cast<size_t>(kernel->shared_bytes));
  CHECK(plan.shared_bytes <= chip.shared_bytes, plan.shared_bytes);

  const auto blocks = [](int64_t n, int64_t block) { return (n + block - 1) / block; };
  const int64_t in_x =
      backward ? blocks(s.len_k, plan.block_k) : blocks(s.len_q, plan.block_q) * plan.splits;
  CHECK_EQ(int64_t{plan.grid[0]}, in_x);
  CHECK_EQ(int64_t{plan.grid[1]}, backward ? s.heads_k : s.heads_q);
  CHECK_EQ(int64_t{plan.grid[2]}, s.batch + (p.ragged ? 1 : 0));
  CHECK(plan.splits == 1 || (!backward && !p.ragged));
  CHECK_EQ(plan.before.size(), backward ? 1u : 0u);
  CHECK_EQ(plan.after.size(), backward || plan.splits > 1 ? 1u : 0u);
  if (backward) check_helper(plan, plan.before[0], "attention_bwd_prepare");
  if (!plan.after.empty()) {
    check_helper(plan, plan.after[0], backward ? "attention_bwd_finish" : "attention_combine");
  }
  if (backward) {  // of the same tile: it knows how the sums lie
    const CudaKernel* finish = find(plan.after[0]);
    CHECK_EQ(finish->image, kernel->image);
    CHECK_EQ(finish->block_q, kernel->block_q);
    CHECK_EQ(finish->block_k, kernel->block_k);
    CHECK_EQ(finish->threads, kernel->threads);
    CHECK(finish->shared_bytes <= kernel->shared_bytes);
  }
  const flashmoe::Candidate& last = plan.candidates.back();
  CHECK_EQ(last.name, plan.kernel);
  CHECK_CONTAINS(last.verdict, "chosen");
  for (const flashmoe::Candidate& c : plan.candidates) {
    if (&c != &last) CHECK_CONTAINS(c.verdict, "passed over: ");
  }
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

TEST(cuda_nothing_to_do_is_planned) {
  if (!all_families()) return;
  for (const Sizes& s : {Sizes{.batch = 0}, Sizes{.len_q = 0}, Sizes{.len_k = 0}}) {
    for (bool ragged : {false, true}) {
      for (Pass pass : {Pass::kForward, Pass::kBackward}) {
        CHECK(find(plan_of(cuda_problem(90, pass, DType::kFloat16, 64, 64, s, ragged)).kernel));
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
  for (int cc : {75, 90}) {
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

TEST(cuda_explain_tells_what_is_reproducible) {
  if (!all_families()) return;
  for (int cc : {75, 80, 90}) {
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
  AttentionProblem p = good(90);
  p.bias = contiguous(DType::kFloat16, {300, 517});
  check_refused(p, {"bias has no CUDA kernel yet", ".cpu()"});

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
  p.device = good(90).device;
  check_refused(p, {"query is float32", "float16 and bfloat16", ".cpu()"});
}

TEST(cuda_environment) {
  if (!all_families()) return;
  const AttentionProblem p = cuda_problem(90, Pass::kForward, DType::kFloat16, 64, 64, {});
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
    const bool backward = k.role == "attention_bwd";
    if (!backward && k.role != "attention_fwd") continue;
    const Environment family("FLASHMOE_FAMILY", k.family);
    const Environment tile("FLASHMOE_TILE",
                           std::to_string(k.block_q) + "x" + std::to_string(k.block_k));
    const int cc = k.family == "sm75" ? 75 : 90;
    CHECK_EQ(plan_of(cuda_problem(cc, backward ? Pass::kBackward : Pass::kForward, k.dtype,
                                  k.head_dim, k.head_dim, {}))
                 .kernel,
             k.name);
  }
}

TEST(targets) {
  CHECK(!flashmoe::cpu_targets().empty());
  bool found = false;
  for (const std::string& name : flashmoe::cpu_targets()) found |= name == flashmoe::cpu_target();
  CHECK(found, flashmoe::cpu_target());
  CHECK(std::string(flashmoe::version()).find('.') != std::string::npos);
}
