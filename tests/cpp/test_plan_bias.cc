// CUDA plans of calls with a bias, and of backward passes whose workspace is kept small.
#include "plans.h"

using namespace testing;

// The gradient of a bias of its own for each score is written by the pass itself, that of a shared
// one is summed by a kernel after it, and one that nobody wants takes neither. One in 16 bits that
// eight share is copied first, where its rows are odd: all are here.
TEST(a_bias_has_its_kernels) {
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

TEST(a_bias_adds_no_square_buffer) {
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
TEST(odd_rows_that_many_share_are_copied) {
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
TEST(the_sum_of_a_small_gradient_is_split) {
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
  const CudaKernel* sum = find(kernels_after(plan).back());
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

// The bias of a ragged batch is copied by heads, of which a round has as many as the workspace has
// room for; where pairs lie side by side already, it stays where it is.
TEST(packed_bias_is_copied_by_heads) {
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
  CHECK_EQ(slices(forward), 2);
  CHECK(static_cast<double>(forward.workspace_bytes) <= 0.099 * (4 * rows + numbers));
  const AttentionPlan backward = plan_with(Pass::kBackward, packed);
  check_plan(backward, kChips[5], s);
  CHECK_EQ(slices(backward), 1);
  CHECK(static_cast<double>(backward.workspace_bytes) <= 0.099 * (8 * rows + 2 * numbers));

  TensorSpec apart = packed;
  apart.stride[0] = 1;
  apart.stride[1] = pairs;
  for (const TensorSpec& bias :
       {apart, contiguous(DType::kBFloat16, {pairs, 1}), contiguous(DType::kFloat32, {pairs, 8})}) {
    const AttentionPlan plan = plan_with(Pass::kForward, bias);
    CHECK_EQ(kernels_before(plan).size(), 1u);
    CHECK_EQ(slices(plan), 1);
    CHECK_EQ(kernels_before(plan_with(Pass::kBackward, bias)).size(), 2u);
  }
}

// With a bias, 64 rows where 128 would leave more of the last round of SMs idle.
TEST(a_forward_tile_with_a_bias_fills_the_last_round) {
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

TEST(workspace_is_linear_in_length) {
  if (!all_families()) return;
  for (int cc : {75, 100}) {
    for (bool ragged : {false, true}) {
      const auto bytes = [&](int64_t length) {
        const Sizes s{.batch = 1, .heads_q = 4, .heads_k = 4, .len_q = length, .len_k = length};
        AttentionProblem p = cuda_problem(cc, Pass::kBackward, DType::kFloat16, 64, 64, s, ragged);
        p.options.deterministic = true;
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
TEST(backward_needs_little_beside_its_tensors) {
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
    CHECK_EQ(slices(plan), rounds);
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
    CHECK_CONTAINS(flashmoe::explain(p), "\n  slices     " + std::to_string(rounds) +
                                             ", each a part of the " +
                                             (ragged ? "heads\n" : "batch\n"));

    AttentionProblem without_query = p;  // where dQ is not wanted there are no sums
    without_query.grad_query.reset();
    CHECK_EQ(slices(plan_of(without_query)), 1);
  }
  const auto check_one_round = [&](Kind kind, const Sizes& s) {
    const AttentionPlan plan = plan_of(problem_of(kind, s));
    CHECK_EQ(slices(plan), 1);
    CHECK(flashmoe::explain(plan.problem).find("slices") == std::string::npos);
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

// Two blocks of keys for each SM are work enough for a round. Where the rounds that would be needed
// have less, there is one.
TEST(a_round_fills_the_chip) {
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
    CHECK_EQ(slices(plan), rounds);
  }
}
