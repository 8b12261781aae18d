// Problems over pages that are legal, those that are not, and lengths that only the data tells.
#include <limits>

#include "flashmoe/attention.h"
#include "refusals.h"
#include "tensors.h"

using namespace testing;
using flashmoe::AttentionProblem;
using flashmoe::AttentionTensors;
using flashmoe::contiguous;
using flashmoe::DType;

namespace {

using P = AttentionProblem&;
using Bad = BadProblem<AttentionProblem>;

// Three sequences of up to four blocks of 8 keys, 7 tokens.
AttentionProblem paged_problem() {
  AttentionProblem p;
  p.device.num_threads = 1;
  p.query = contiguous(DType::kFloat16, {7, 4, 8});
  p.key = contiguous(DType::kFloat8E4M3, {10, 8, 2, 8});
  p.value = contiguous(DType::kFloat8E4M3, {10, 8, 2, 6});
  p.paged = flashmoe::Paged{.block_table = contiguous(DType::kInt32, {3, 4}),
                            .seq_lens = contiguous(DType::kInt32, {3}),
                            .cu_seqlens_q = contiguous(DType::kInt64, {4}),
                            .max_seqlen_q = 5,
                            .max_seqlen_k = 30,
                            .k_scale = contiguous(DType::kFloat32, {}),
                            .v_scale = contiguous(DType::kFloat32, {2})};
  p.out = contiguous(DType::kFloat16, {7, 4, 6});
  p.lse = contiguous(DType::kFloat32, {7, 4});
  return p;
}

// The same with memory behind it, and a length or an entry to spoil.
struct Call {
  AttentionProblem problem = paged_problem();
  std::vector<std::byte> query = std::vector<std::byte>(7 * 4 * 8 * 2);
  std::vector<std::byte> key = std::vector<std::byte>(10 * 8 * 2 * 8);
  std::vector<std::byte> value = std::vector<std::byte>(10 * 8 * 2 * 6);
  std::vector<int32_t> table = {0, 9, 3, -1, 5, -1, -1, -1, 2, 4, 6, 8};
  std::vector<int32_t> lengths = {24, 3, 30};
  std::vector<int64_t> starts = {0, 1, 1, 6};
  std::vector<float> scales = {1, 2};
  std::vector<uint16_t> out = std::vector<uint16_t>(7 * 4 * 6, 0xffff);
  std::vector<float> lse = std::vector<float>(7 * 4, -7);

  flashmoe::Status run() {
    AttentionTensors t;
    t.query = query.data();
    t.key = key.data();
    t.value = value.data();
    t.block_table = table.data();
    t.seq_lens = lengths.data();
    t.cu_seqlens_q = starts.data();
    t.k_scale = t.v_scale = scales.data();
    t.out = out.data();
    t.lse = lse.data();
    const auto plan = flashmoe::plan(problem);
    CHECK(plan.ok(), plan.status().message());
    std::vector<std::byte> workspace(plan.value().workspace_bytes);
    const flashmoe::Status status = flashmoe::run(plan.value(), t, workspace.data());
    CHECK_EQ(flashmoe::run_reference(problem, t).message(), status.message());
    return status;
  }
};

}  // namespace

TEST(bad_problems) {
  const std::vector<Bad> bad = {
      {"query dtype", [](P p) { p.query.dtype = DType::kInt32; }, {"query", "int32"}},
      {"query rank",
       [](P p) {
         p.query = contiguous(DType::kFloat16, {1, 7, 4, 8});
       },
       {"query", "(1, 7, 4, 8)", "tokens"}},
      {"cache rank",
       [](P p) {
         p.key = contiguous(DType::kFloat8E4M3, {80, 2, 8});
       },
       {"k_cache", "(80, 2, 8)", "page"}},
      {"cache dtype",
       [](P p) { p.key.dtype = p.value.dtype = DType::kBFloat16; },
       {"k_cache", "bfloat16", "float16"}},
      {"cache of integers",
       [](P p) { p.key.dtype = p.value.dtype = DType::kInt32; },
       {"k_cache", "int32"}},
      {"dtypes of caches",
       [](P p) { p.value.dtype = DType::kFloat16; },
       {"v_cache", "float16", "float8_e4m3fn"}},
      {"blocks", [](P p) { p.value.shape[0] = 9; }, {"v_cache", "9", "10", "blocks"}},
      {"page", [](P p) { p.value.shape[1] = 4; }, {"v_cache", "4", "8", "page"}},
      {"heads of value", [](P p) { p.value.shape[2] = 1; }, {"v_cache", "heads"}},
      {"empty page",
       [](P p) { p.key.shape[1] = p.value.shape[1] = 0; },
       {"k_cache", "at least 1 row"}},
      {"heads", [](P p) { p.query.shape[1] = p.out.shape[1] = 5; }, {"query", "5", "2"}},
      {"head dim", [](P p) { p.query.shape[2] = 9; }, {"k_cache", "8", "9"}},
      {"head dim too large",
       [](P p) {
         p.query = contiguous(DType::kFloat16, {7, 4, 513});
         p.key = contiguous(DType::kFloat8E4M3, {10, 8, 2, 513});
       },
       {"query", "513", "512"}},
      {"table dtype",
       [](P p) { p.paged->block_table.dtype = DType::kFloat32; },
       {"block_table", "float32", "int32"}},
      {"table rank", [](P p) { p.paged->block_table.rank = 1; }, {"block_table", "(3,)"}},
      {"seq_lens dtype",
       [](P p) { p.paged->seq_lens.dtype = DType::kFloat32; },
       {"seq_lens", "float32"}},
      {"seq_lens size", [](P p) { p.paged->seq_lens.shape[0] = 4; }, {"seq_lens", "(4,)", "3"}},
      {"cu_seqlens_q size",
       [](P p) { p.paged->cu_seqlens_q->shape[0] = 3; },
       {"cu_seqlens_q", "(3,)", "3"}},
      {"tokens without cu_seqlens_q",
       [](P p) { p.paged->cu_seqlens_q.reset(); },
       {"query", "7 tokens", "3 sequences", "cu_seqlens_q"}},
      {"max_seqlen_q", [](P p) { p.paged->max_seqlen_q = -1; }, {"max_seqlen_q", "-1"}},
      {"max_seqlen_k", [](P p) { p.paged->max_seqlen_k = -2; }, {"max_seqlen_k", "-2"}},
      {"scale of a float16 cache",
       [](P p) { p.key.dtype = p.value.dtype = DType::kFloat16; },
       {"k_scale", "float16", "float8_e4m3fn"}},
      {"scale dtype",
       [](P p) { p.paged->k_scale->dtype = DType::kFloat64; },
       {"k_scale", "float64", "float32"}},
      {"scale shape", [](P p) { p.paged->v_scale->shape[0] = 4; }, {"v_scale", "(4,)", "2"}},
      {"ragged too",
       [](P p) {
         p.ragged = {*p.paged->cu_seqlens_q, *p.paged->cu_seqlens_q, 5, 30};
       },
       {"cu_seqlens_k", "block_table"}},
      {"key_lengths too",
       [](P p) { p.key_lengths = contiguous(DType::kInt32, {3}); },
       {"key_lengths", "block_table"}},
      {"bias",
       [](P p) {
         p.bias = contiguous(DType::kFloat16, {7, 4});
       },
       {"bias", "block_table"}},
      {"backward", [](P p) { p.pass = flashmoe::Pass::kBackward; }, {"backward"}},
      {"sinks", [](P p) { p.sinks = contiguous(DType::kFloat32, {3}); }, {"sinks", "(3,)", "(4,)"}},
      {"out shape", [](P p) { p.out.shape[2] = 8; }, {"out", "(7, 4, 8)", "(7, 4, 6)"}},
      {"lse shape", [](P p) { p.lse->shape[0] = 6; }, {"lse", "(6, 4)", "(7, 4)"}},
      {"softcap", [](P p) { p.options.softcap = -1; }, {"softcap", "-1"}},
      {"table too large",
       [](P p) { p.paged->block_table.stride[1] = std::numeric_limits<int64_t>::max(); },
       {"block_table", "2^63"}},
      {"cache too large",
       [](P p) { p.key.stride[0] = std::numeric_limits<int64_t>::max(); },
       {"k_cache", "2^63"}},
  };
  for (const Bad& b : bad) check_refused(paged_problem(), b);
}

TEST(legal_problems) {
  AttentionProblem p = paged_problem();
  for (DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    p.query.dtype = p.out.dtype = dtype;
    p.lse->dtype = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
    CHECK(flashmoe::plan(p).ok(), flashmoe::plan(p).status().message());
  }
  p = paged_problem();
  p.query = p.out = contiguous(DType::kFloat16, {7, 4, 512});
  p.key = p.value = contiguous(DType::kFloat8E4M3, {10, 8, 2, 512});
  CHECK(flashmoe::plan(p).ok(), flashmoe::plan(p).status().message());
  // Nothing at all: no sequences, no blocks, no entries.
  p = paged_problem();
  p.query.shape[0] = p.out.shape[0] = p.lse->shape[0] = 0;
  p.key.shape[0] = p.value.shape[0] = 0;
  p.paged->block_table = contiguous(DType::kInt64, {0, 0});
  p.paged->seq_lens.shape[0] = 0;
  p.paged->cu_seqlens_q->shape[0] = 1;
  CHECK(flashmoe::plan(p).ok(), flashmoe::plan(p).status().message());
  // Maxima are bounds, and bounds may be anything.
  p = paged_problem();
  p.paged->max_seqlen_q = p.paged->max_seqlen_k = std::numeric_limits<int64_t>::max();
  CHECK(flashmoe::plan(p).ok(), flashmoe::plan(p).status().message());
}

TEST(explanations) {
  const std::string words = flashmoe::explain(paged_problem());
  CHECK_CONTAINS(words, "pages of 8 in float8_e4m3fn, scaled");
  CHECK_CONTAINS(words, "attention_fwd_paged");
}

TEST(cuda_says_what_it_lacks) {
  AttentionProblem p = paged_problem();
  p.device = {.type = flashmoe::DeviceType::kCuda, .compute_capability = 90};
  const auto plan = flashmoe::plan(p);
  if (plan.ok()) return;  // a build with such kernels
  CHECK(plan.status().code() == flashmoe::StatusCode::kUnsupported);
}

TEST(good_lengths) {
  Call call;
  const flashmoe::Status status = call.run();
  CHECK(status.ok(), status.message());
  CHECK_EQ(call.out[6 * 4 * 6], 0);  // a token of no sequence
  CHECK(call.lse[6 * 4] == -std::numeric_limits<float>::infinity());
}

// Fewer keys than queries: rows before the first key see none of them, and give 0.
TEST(fewer_keys_than_queries) {
  Call call;
  call.lengths = {24, 3, 2};
  call.problem.options.causal = true;
  CHECK(call.run().ok());
  CHECK_EQ(call.out[1 * 4 * 6], 0);
  CHECK(call.lse[1 * 4] == -std::numeric_limits<float>::infinity());
  CHECK(call.lse[5 * 4] > -1);
}

TEST(bad_lengths) {
  const auto refused = [](const std::function<void(Call&)>& spoil,
                          std::initializer_list<const char*> said) {
    Call call;
    spoil(call);
    const flashmoe::Status status = call.run();
    CHECK(!status.ok());
    for (const char* part : said) CHECK_CONTAINS(status.message(), part);
    CHECK_EQ(call.out[0], 0xffff);  // nothing was computed
  };
  refused([](Call& c) { c.lengths[1] = -1; }, {"seq_lens[1] is -1"});
  refused([](Call& c) { c.lengths[2] = 31; }, {"seq_lens[2] is 31", "max_seqlen_k, 30"});
  refused(
      [](Call& c) {
        c.problem.paged->max_seqlen_k = 100;
        c.lengths[2] = 33;
      },
      {"seq_lens[2] is 33", "4 entries", "8 keys"});
  refused([](Call& c) { c.table[2] = 10; }, {"block_table[0, 2] is 10", "10 blocks"});
  refused([](Call& c) { c.table[8] = -1; }, {"block_table[2, 0] is -1", "sequence 2"});
  refused([](Call& c) { c.starts[0] = 1; }, {"cu_seqlens_q[0] is 1"});
  refused([](Call& c) { c.starts[2] = 0; }, {"cu_seqlens_q[2] is 0", "must not fall"});
  refused([](Call& c) { c.starts[3] = 8; }, {"cu_seqlens_q[3] is 8", "7 tokens"});
  refused([](Call& c) { c.problem.paged->max_seqlen_q = 4; }, {"max_seqlen_q is 4", "sequence 2"});
}

// A block that no query sees is not looked up: before a window, or of a sequence without queries.
TEST(blocks_that_nobody_needs) {
  Call call;
  call.table[4] = 99;  // the second sequence has no query
  CHECK(call.run().ok());
  call.table[0] = 99;
  CHECK(!call.run().ok());
  call.problem.options.window_left = 3;
  CHECK(call.run().ok());
}
