// CUDA plans: which kernel another machine would run, and how its work is partitioned. Needs
// kernels in the build, but no GPU.
#include "plans.h"

using namespace testing;

TEST(plans_name_kernels_that_exist_and_fit) {
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

TEST(every_option_has_a_plan) {
  if (!all_families()) return;
  for (const Chip& chip : kChips) {
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      AttentionProblem p = cuda_problem(chip.compute_capability, pass, DType::kFloat16, 64, 64, {});
      p.options.causal = true;
      p.options.window_left = 100;
      p.options.softcap = 20;
      p.options.scale = -0.5;
      p.key_lengths = contiguous(DType::kInt64, {2});
      if (pass == Pass::kBackward) p.grad_lse = p.lse;
      for (bool deterministic : {false, true}) {
        p.options.deterministic = deterministic;
        check_plan(plan_of(p), chip, {});
      }
      // A gradient that is not asked for needs no kernel.
      if (pass == Pass::kBackward) {
        const size_t with = plan_of(p).workspace_bytes;
        p.grad_query.reset();
        CHECK(kernels_after(plan_of(p)).empty());
        CHECK(plan_of(p).workspace_bytes < with);
      }
    }
  }
}

// A call with sinks runs the kernels of one without; their gradient has launches of its own, last.
TEST(sinks_have_plans) {
  if (!all_families()) return;
  const Sizes sizes[] = {{},
                         {.batch = 1, .len_q = 1, .len_k = 5000},   // split
                         {.batch = 300, .len_q = 31, .len_k = 32},  // short
                         {.batch = 0},
                         {.len_q = 0},
                         {.len_k = 0},
                         {.batch = 9, .len_q = 2048, .len_k = 512}};
  for (int chip : {75, 80, 90, 100}) {
    for (const Sizes& s : sizes) {
      for (bool ragged : {false, true}) {
        for (Pass pass : {Pass::kForward, Pass::kBackward}) {
          const Note note("sm_", chip, " batch ", s.batch, ", ", s.len_q, " x ", s.len_k,
                          ragged ? " ragged" : "");
          AttentionProblem p = cuda_problem(chip, pass, DType::kFloat16, 64, 64, s, ragged);
          const AttentionPlan without = plan_of(p);
          for (DType dtype : {DType::kFloat16, DType::kFloat32}) {
            p.sinks = contiguous(dtype, {s.heads_q});
            p.grad_sinks.reset();
            const AttentionPlan with = plan_of(p);
            CHECK(with.launches == without.launches, with.kernel, "and not", without.kernel);
            CHECK_EQ(with.workspace_bytes, without.workspace_bytes);
            CHECK_CONTAINS(flashmoe::explain(p), ", sinks in ");
            if (pass == Pass::kForward) continue;
            p.grad_sinks = p.sinks;
            const AttentionPlan sums = plan_of(p);
            const int64_t parts = std::clamp<int64_t>(ceil_div(s.batch * s.len_q, 512), 1, 170);
            CHECK_EQ(sums.launches.size(), without.launches.size() + (parts > 1 ? 2 : 1));
            for (size_t i = 0; i < sums.launches.size(); ++i) {
              const flashmoe::AttentionLaunch& step = sums.launches[i];
              if (i < without.launches.size()) {
                CHECK(step == without.launches[i]);
                continue;
              }
              CHECK_EQ(step.role, "attention_bwd_sinks");
              check_helper(sums, step.kernel, "attention_bwd_sinks");
              const bool last = i > without.launches.size();
              CHECK_EQ(int64_t{step.grid[0]}, last ? 1 : parts);
              CHECK_EQ(int64_t{step.grid[1]}, s.heads_q);
              CHECK(!step.per_slice && !step.overlaps);
            }
            const size_t room = parts > 1 ? ceil_div(s.heads_q * parts * 4, 256) * 256 : 0;
            CHECK_EQ(sums.workspace_bytes, without.workspace_bytes + room);
          }
        }
      }
    }
  }
}

TEST(nothing_to_do_is_planned) {
  if (!all_families()) return;
  for (const Sizes& s : {Sizes{.batch = 0}, Sizes{.len_q = 0}, Sizes{.len_k = 0}}) {
    for (bool ragged : {false, true}) {
      for (Pass pass : {Pass::kForward, Pass::kBackward}) {
        CHECK(find(plan_of(cuda_problem(100, pass, DType::kFloat16, 64, 64, s, ragged)).kernel));
      }
    }
  }
}

TEST(one_query_over_many_keys_is_split) {
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
    CHECK_EQ(int64_t{main_launch(one).grid[0]}, one.splits);
    CHECK_EQ(main_launch(one).grid[1], 8u);  // the heads of a group are rows
    CHECK_EQ(main_launch(one).grid[2], 1u);
    CHECK_EQ(kernels_after(one).size(), 1u);
    check_helper(one, kernels_after(one)[0], "attention_combine");
    // (splits, heads, rows, head dim) of sums and their lse.
    CHECK_EQ(one.workspace_bytes, static_cast<size_t>(one.splits * 8 * 4 * (128 + 1) * 4));
    const std::string words = flashmoe::explain(one.problem);
    CHECK_CONTAINS(words, "\n  splits     the keys, in " + std::to_string(one.splits) + "\n");
    CHECK_CONTAINS(words, launch_line(kernels_after(one)[0]));
    CHECK_CONTAINS(words, "\n  bitwise reproducible\n");

    // Enough to do for everyone, or too little for several.
    const AttentionPlan many = plan_for_batch(cc, 512, 100000);
    const AttentionPlan few_keys = plan_for_batch(cc, 1, 100);
    const AttentionPlan small_chip = plan_for_batch(cc, 1, 100000, 1);
    for (const AttentionPlan& plan : {many, few_keys, small_chip}) {
      CHECK_EQ(plan.splits, 1);
      CHECK(kernels_after(plan).empty());
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

TEST(ragged_batches_of_short_sequences) {
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
  CHECK_EQ(int64_t{main_launch(plan).grid[0]}, (4096 * 20 / 32 + 4096 + 1) * 4);
  const AttentionPlan longer = plan_of(problem_of(4096, 4096 * 49, 3000));
  CHECK_EQ(longer.block_q, 64);
  CHECK_EQ(int64_t{main_launch(longer).grid[0]}, (4096 * 49 / 64 + 4096 + 1) * 4);
  CHECK_CONTAINS(flashmoe::explain(longer.problem),
                 "49 rows a sequence would leave half of the tile empty");
  // A stated length costs nothing.
  const AttentionPlan stated = plan_of(problem_of(4096, 4096 * 20, 1 << 29));
  CHECK_EQ(stated.kernel, plan.kernel);
  CHECK_EQ(main_launch(stated).grid[0], main_launch(plan).grid[0]);
  CHECK_EQ(stated.workspace_bytes, plan.workspace_bytes);

  check_refused(problem_of(1 << 20, 1 << 20, 64, 4096), {"blocks", "2^31 - 1"});
}

// 32 x 32 up to head dim 64, for at least four (batch, head) of an SM and at most 48 tokens on
// average, or 32 where all are equally long; the tiles for the others are passed over by name.
TEST(many_short_sequences_have_a_tile_of_their_own) {
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

TEST(short_sequences_are_reproducible) {
  if (!all_families()) return;
  const Sizes s{.batch = 600, .len_q = 20, .len_k = 20};
  const AttentionProblem p = cuda_problem(100, Pass::kBackward, DType::kFloat16, 64, 64, s);
  CHECK(for_short(*find(plan_of(p).kernel)));
  CHECK_CONTAINS(flashmoe::explain(p), "\n  bitwise reproducible\n");
}

TEST(explain_tells_what_is_reproducible) {
  if (!all_families()) return;
  for (int cc : {75, 80, 100}) {
    AttentionProblem p = cuda_problem(cc, Pass::kBackward, DType::kFloat16, 64, 64, {});
    const AttentionPlan plan = plan_of(p);
    const std::string words = flashmoe::explain(p);
    CHECK_CONTAINS(words, "\n  not bitwise reproducible: grad_query is summed in any order");
    CHECK_CONTAINS(words, launch_line(kernels_before(plan)[0]));
    CHECK_CONTAINS(words, launch_line(kernels_after(plan)[0]));
    AttentionProblem in_turns = p;
    in_turns.options.deterministic = true;
    CHECK_CONTAINS(flashmoe::explain(in_turns), "\n  bitwise reproducible\n");
    AttentionProblem without_query = p;  // what is summed in any order is not there
    without_query.grad_query.reset();
    CHECK_CONTAINS(flashmoe::explain(without_query), "\n  bitwise reproducible\n");
  }
}

TEST(refusals_say_why) {
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

  p = problem(Pass::kForward, 1, 2, 100, 64, DType::kFloat64);
  p.device = good(100).device;
  check_refused(p, {"query is float64", "float32, float16 and bfloat16", ".cpu()"});
}

// The tile for a head dim, the kernels around it, and one TF32 product where it may be.
TEST(fp32_has_kernels_of_its_own) {
  if (!all_families()) return;
  for (int cc : {75, 80, 86, 90, 100}) {
    const std::string family = cc < 80 ? "sm75" : "sm80";
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (int64_t dim : {1, 32, 33, 64, 65, 128, 129, 256}) {
        for (bool ragged : {false, true}) {
          for (bool allowed : {false, true}) {
            AttentionProblem p = cuda_problem(cc, pass, DType::kFloat32, dim, dim, {}, ragged);
            p.options.allow_tf32 = allowed;
            const AttentionPlan plan = plan_of(p);
            const CudaKernel* kernel = find(plan.kernel);
            CHECK(kernel, plan.kernel);
            if (!kernel) continue;
            const std::string product = allowed && cc >= 80 ? "_tf32_d" : "_fp32_d";
            CHECK_EQ(plan.family, family);
            CHECK_CONTAINS(plan.kernel, product);
            CHECK_EQ(kernel->head_dim, dim <= 32 ? 32 : dim <= 64 ? 64 : dim <= 128 ? 128 : 256);
            CHECK(!plan.dq_order_varies);
            std::vector<std::string> before, after;
            if (ragged) before.push_back("attention_ragged_blocks");
            if (pass == Pass::kBackward) {
              before.push_back("attention_bwd_preprocess");
              after.push_back("attention_bwd_dq");
            }
            check_names(plan, kernels_before(plan), before);
            check_names(plan, kernels_after(plan), after);
            for (const std::string& name : kernels_after(plan)) CHECK_CONTAINS(name, product);
            // Above head dim 128 two CTAs share a tile of keys.
            const int64_t tiles = ceil_div(517, plan.block_k);
            if (pass == Pass::kBackward && !ragged) {
              CHECK_EQ(int64_t{main_launch(plan).grid[0]}, tiles * (dim > 128 ? 2 : 1));
            }
          }
        }
      }
    }
  }
}

// The gradient of a bias: with dQ where it is not shared, even if nobody wants dQ, or summed.
TEST(fp32_bias) {
  if (!all_families()) return;
  const Sizes s;
  AttentionProblem p = cuda_problem(90, Pass::kBackward, DType::kFloat32, 64, 64, s);
  p.grad_query.reset();
  p.bias = p.grad_bias = contiguous(DType::kFloat32, {s.batch, s.heads_q, s.len_q, s.len_k});
  check_names(plan_of(p), kernels_after(plan_of(p)), {"attention_bwd_bias_dq"});
  p.bias = p.grad_bias = contiguous(DType::kFloat32, {s.len_q, s.len_k});
  check_names(plan_of(p), kernels_after(plan_of(p)), {"attention_bwd_bias_sum"});
  p.grad_query = p.query;
  p.options.allow_tf32 = true;
  const AttentionPlan plan = plan_of(p);
  check_names(plan, kernels_after(plan), {"attention_bwd_bias_dq", "attention_bwd_bias_sum"});
  for (const std::string& name : kernels_after(plan)) CHECK_CONTAINS(name, "_tf32_d64_");
  CHECK_CONTAINS(flashmoe::explain(p), "TF32 allowed");
}

// No launch beside those of a call without: a bias of 32 bits and a mask are read where they lie,
// whoever shares them and whatever their length, and pairs are drawn where they are.
TEST(fp32_copies_no_bias_and_has_dropout) {
  if (!all_families()) return;
  const Sizes s;
  for (bool ragged : {false, true}) {
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (DType dtype : {DType::kFloat32, DType::kBool}) {
        AttentionProblem p = cuda_problem(90, pass, DType::kFloat32, 64, 64, s, ragged);
        p.bias =
            ragged ? contiguous(dtype, {1001, s.heads_q}) : contiguous(dtype, {s.len_q, s.len_k});
        const AttentionPlan plain = plan_of(p);
        CHECK_CONTAINS(plain.kernel,
                       pass == Pass::kForward ? "_fwd_bias_fp32_" : "_bwd_bias_fp32_");
        for (const std::string& name : kernels_before(plain)) {
          CHECK(name.find("bias") == std::string::npos, name);
        }
        p.options.dropout_p = 0.1;
        p.seed = contiguous(DType::kInt64, {});
        const AttentionPlan drops = plan_of(p);
        CHECK_EQ(drops.kernel, plain.kernel);
        CHECK_EQ(drops.workspace_bytes, plain.workspace_bytes);
        CHECK_EQ(drops.launches.size(), plain.launches.size());
      }
    }
  }
}

TEST(environment) {
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
  for (const char* tile : {"64", "64x", "x64", "64x64x64", "axb", "64x64 ", "64x64,", ",64x64",
                           "64x64,64x64,64x64", "64x64, x64"}) {
    const Environment set("FLASHMOE_TILE", tile);
    check_refused(p, {"FLASHMOE_TILE is ", tile, "ROWSxCOLUMNS"});
  }
  {
    const Environment set("FLASHMOE_TILE", "1x1");
    check_refused(p, {"FLASHMOE_TILE asks for 1x1; for head dim 64 there are ", "128x128"});
  }
  {
    const Environment set("FLASHMOE_TILE", "1x1,2x3");
    check_refused(p, {"FLASHMOE_TILE asks for 1x1"});
    check_refused(cuda_problem(100, Pass::kBackward, DType::kFloat16, 64, 64, {}),
                  {"FLASHMOE_TILE asks for 2x3"});
  }
  // On the CPU neither means anything.
  const Environment family("FLASHMOE_FAMILY", "sm80"), tile("FLASHMOE_TILE", "1x1");
  CHECK(plan_for(problem(Pass::kForward, 1, 2, 100, 64), 1).kernel.starts_with("cpu_"));
}

TEST(every_tile_can_be_forced) {
  for (const CudaKernel& k : flashmoe::cuda_kernels()) {
    const bool bias = k.role.ends_with("_bias"), dropout = k.role.ends_with("_dropout");
    const std::string more = bias ? "_bias" : dropout ? "_dropout" : "";
    const bool backward = k.role == "attention_bwd" + more;
    if (!backward && k.role != "attention_fwd" + more) continue;
    const Environment family("FLASHMOE_FAMILY", k.family);
    const Environment tile("FLASHMOE_TILE",
                           std::to_string(k.block_q) + "x" + std::to_string(k.block_k));
    const int cc = k.family == "sm75" ? 75 : 90;
    const bool packed = k.name.find("_packed_") != std::string::npos;
    Sizes sizes;
    const bool whole = k.name.find("_bwd_whole_") != std::string::npos;
    if (packed || whole) sizes.heads_q = sizes.heads_k;
    if (whole) sizes.len_q = 200, sizes.len_k = 256;
    if (bias && k.block_q == 256) sizes.len_k = 500;  // more keys have a bias that does not stay
    AttentionProblem p = cuda_problem(cc, backward ? Pass::kBackward : Pass::kForward, k.dtype,
                                      k.head_dim, k.head_dim, sizes, packed);
    const bool rows = k.name.find("_bias_rows_") != std::string::npos;
    const bool floats = k.name.find("_bias_float_") != std::string::npos;
    const DType wide = k.family == "sm90" && !floats ? k.dtype : DType::kFloat32;
    if (bias) p.bias = contiguous(wide, {sizes.len_q, sizes.len_k});
    if (bias && packed) p.bias = contiguous(wide, {1000, sizes.heads_q});
    if (rows) p.bias = contiguous(wide, {sizes.batch, sizes.heads_q, sizes.len_q, sizes.len_k});
    if (k.name.find("_mask_") != std::string::npos) p.bias->dtype = DType::kBool;
    if (k.name.find("_general_") != std::string::npos) p.options.softcap = 3;
    if (dropout) {
      p.options.dropout_p = 0.1;
      p.seed = contiguous(DType::kInt64, {1});
    }
    p.options.allow_tf32 = k.name.find("_tf32_") != std::string::npos;
    CHECK_EQ(plan_of(p).kernel, k.name);
  }
}
