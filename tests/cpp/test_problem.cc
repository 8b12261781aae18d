// What a problem may be, and what is said about one that it may not be: always which argument, its
// value and the limit, from plan(), explain(), run_reference() and run() alike.
#include <cmath>
#include <functional>
#include <limits>

#include "attention/problem.h"
#include "cases.h"
#include "refusals.h"
#include "second_cases.h"
#include "testing.h"

using namespace testing;
using flashmoe::contiguous;
using flashmoe::StatusCode;

namespace {

constexpr int64_t kHuge = int64_t{1} << 40;

AttentionProblem dense_problem(Pass pass = Pass::kForward) {
  const DType dtype = DType::kFloat32;
  AttentionProblem p;
  p.pass = pass;
  p.query = contiguous(dtype, {2, 4, 5, 8});
  p.key = contiguous(dtype, {2, 2, 7, 8});
  p.value = contiguous(dtype, {2, 2, 7, 6});
  p.out = contiguous(dtype, {2, 4, 5, 6});
  p.lse = contiguous(dtype, {2, 4, 5});
  if (pass == Pass::kForward) return p;
  p.bias = p.grad_bias = contiguous(dtype, {4, 5, 7});
  p.sinks = p.grad_sinks = contiguous(dtype, {4});
  p.grad_out = p.out;
  p.grad_lse = p.lse;
  p.grad_query = p.query;
  p.grad_key = p.key;
  p.grad_value = p.value;
  if (pass == Pass::kBackward) return p;
  p.tangent_query = p.query;
  p.tangent_key = p.key;
  p.tangent_value = p.value;
  p.tangent_bias = p.bias;
  p.tangent_out = p.out;
  p.tangent_lse = p.lse;
  return p;
}

AttentionProblem ragged_problem() {
  AttentionProblem p;
  p.query = contiguous(DType::kFloat16, {9, 4, 8});
  p.key = contiguous(DType::kFloat16, {12, 2, 8});
  p.value = contiguous(DType::kFloat16, {12, 2, 6});
  p.out = contiguous(DType::kFloat16, {9, 4, 6});
  p.lse = contiguous(DType::kFloat32, {9, 4});
  p.bias = contiguous(DType::kFloat32, {40, 4});
  p.ragged.emplace();
  p.ragged->cu_seqlens_q = p.ragged->cu_seqlens_k = contiguous(DType::kInt32, {4});
  p.ragged->max_seqlen_q = p.ragged->max_seqlen_k = 8;
  return p;
}

using Bad = BadProblem<AttentionProblem>;

}  // namespace

TEST(bad_dense_problems) {
  using P = AttentionProblem&;
  const std::vector<Bad> bad = {
      {"integers", [](P p) { p.query.dtype = DType::kInt32; }, {"query", "int32", "float16"}},
      {"key dtype", [](P p) { p.key.dtype = DType::kFloat16; }, {"key", "float16", "float32"}},
      {"value dtype",
       [](P p) { p.value.dtype = DType::kFloat64; },
       {"value", "float64", "float32"}},
      {"out dtype", [](P p) { p.out.dtype = DType::kBFloat16; }, {"out", "bfloat16", "float32"}},
      {"lse dtype", [](P p) { p.lse->dtype = DType::kFloat16; }, {"lse", "float16", "float32"}},
      {"no batch", [](P p) { p.query.rank = 3; }, {"query", "(2, 4, 5)", "4"}},
      {"key rank",
       [](P p) {
         p.key = contiguous(DType::kFloat32, {1, 2, 2, 7, 8});
       },
       {"key", "5", "4"}},
      {"value rank", [](P p) { p.value.rank = 2; }, {"value", "2", "4"}},
      {"rank beyond all", [](P p) { p.query.rank = 9; }, {"query", "9", "8"}},
      {"negative rank", [](P p) { p.key.rank = -1; }, {"key", "-1"}},
      {"negative size", [](P p) { p.query.shape[2] = -5; }, {"query", "-5"}},
      {"batch", [](P p) { p.key.shape[0] = 3; }, {"key", "3", "2"}},
      {"value batch", [](P p) { p.value.shape[0] = 1; }, {"value", "1", "2"}},
      {"head ratio", [](P p) { p.query.shape[1] = 5; }, {"query", "5", "2", "multiple"}},
      {"fewer query heads", [](P p) { p.query.shape[1] = 1; }, {"query", "1", "2"}},
      {"no query heads", [](P p) { p.query.shape[1] = 0; }, {"query", "0"}},
      {"no key heads", [](P p) { p.key.shape[1] = p.value.shape[1] = 0; }, {"key", "0"}},
      {"value heads", [](P p) { p.value.shape[1] = 4; }, {"value", "4", "2"}},
      {"lengths", [](P p) { p.value.shape[2] = 8; }, {"value", "8", "7"}},
      {"head dims", [](P p) { p.key.shape[3] = 16; }, {"key", "16", "8"}},
      {"head dim 0", [](P p) { p.query.shape[3] = p.key.shape[3] = 0; }, {"query", "0", "256"}},
      {"head dim 257",
       [](P p) { p.query.shape[3] = p.key.shape[3] = 257; },
       {"query", "257", "256"}},
      {"value dim 300", [](P p) { p.value.shape[3] = 300; }, {"value", "300", "256"}},
      {"out shape", [](P p) { p.out.shape[3] = 8; }, {"out", "(2, 4, 5, 8)", "(2, 4, 5, 6)"}},
      {"out rank", [](P p) { p.out.rank = 3; }, {"out", "(2, 4, 5)"}},
      {"lse shape", [](P p) { p.lse->shape[2] = 7; }, {"lse", "(2, 4, 7)", "(2, 4, 5)"}},
      {"out overlaps", [](P p) { p.out.stride[1] = 0; }, {"out", "stride 0"}},
      {"lse overlaps", [](P p) { p.lse->stride[0] = 0; }, {"lse", "stride 0"}},
      {"bias dtype",
       [](P p) {
         p.bias = contiguous(DType::kFloat16, {5, 7});
       },
       {"bias", "float16"}},
      {"bias of integers",
       [](P p) {
         p.bias = contiguous(DType::kInt32, {5, 7});
       },
       {"bias", "int32", "bool for a mask"}},
      {"mask shape",
       [](P p) {
         p.bias = contiguous(DType::kBool, {7, 5});
       },
       {"bias", "(7, 5)", "(2, 4, 5, 7)"}},
      {"bias shape",
       [](P p) {
         p.bias = contiguous(DType::kFloat32, {7, 5});
       },
       {"bias", "(7, 5)", "(2, 4, 5, 7)"}},
      {"bias rank",
       [](P p) {
         p.bias = contiguous(DType::kFloat32, {1, 2, 4, 5, 7});
       },
       {"bias", "(1, 2, 4, 5, 7)"}},
      {"bias per key head",
       [](P p) {
         p.bias = contiguous(DType::kFloat32, {2, 2, 5, 7});
       },
       {"bias", "(2, 2, 5, 7)"}},
      {"sinks dtype",
       [](P p) { p.sinks = contiguous(DType::kFloat16, {4}); },
       {"sinks", "float16", "float32"}},
      {"sinks as integers",
       [](P p) { p.sinks = contiguous(DType::kInt64, {4}); },
       {"sinks", "int64", "float32"}},
      {"sinks of key heads",
       [](P p) { p.sinks = contiguous(DType::kFloat32, {2}); },
       {"sinks", "(2,)", "(4,)"}},
      {"sinks with a batch",
       [](P p) {
         p.sinks = contiguous(DType::kFloat32, {2, 4});
       },
       {"sinks", "(2, 4)", "(4,)"}},
      {"one sink", [](P p) { p.sinks = contiguous(DType::kFloat32, {}); }, {"sinks", "()", "(4,)"}},
      {"key_lengths dtype",
       [](P p) { p.key_lengths = contiguous(DType::kFloat32, {2}); },
       {"key_lengths", "float32"}},
      {"key_lengths shape",
       [](P p) { p.key_lengths = contiguous(DType::kInt32, {3}); },
       {"key_lengths", "(3,)", "(2,)"}},
      {"window left", [](P p) { p.options.window_left = -2; }, {"window", "-2"}},
      {"window right",
       [](P p) { p.options.window_right = std::numeric_limits<int64_t>::min(); },
       {"window", "-9223372036854775808"}},
      {"scale", [](P p) { p.options.scale = std::nan(""); }, {"scale", "nan"}},
      {"infinite scale", [](P p) { p.options.scale = kInf; }, {"scale", "inf"}},
      {"softcap", [](P p) { p.options.softcap = -1; }, {"softcap", "-1"}},
      {"dropout", [](P p) { p.options.dropout_p = 1.5; }, {"dropout_p", "1.5"}},
      {"negative dropout", [](P p) { p.options.dropout_p = -0.1; }, {"dropout_p", "-0.1"}},
      {"dropout NaN", [](P p) { p.options.dropout_p = std::nan(""); }, {"dropout_p", "nan"}},
      {"no seed", [](P p) { p.options.dropout_p = 0.1; }, {"seed", "0.1"}},
      {"seed dtype", [](P p) { p.seed = contiguous(DType::kInt32, {}); }, {"seed", "int32"}},
      {"two seeds", [](P p) { p.seed = contiguous(DType::kInt64, {2}); }, {"seed", "(2,)"}},
      {"infinite softcap", [](P p) { p.options.softcap = kInf; }, {"softcap", "inf"}},
      {"more than 2^63 elements",
       [](P p) {
         p.query = huge_spec(DType::kFloat32, {kHuge, kHuge, 5, 8});
       },
       {"query", "2^63"}},
      {"more than 2^63 bytes",
       [](P p) {
         p.key = huge_spec(DType::kFloat32, {2, 2, int64_t{1} << 58, 8});
       },
       {"key", "2^63"}},
      {"stride overflows",
       [](P p) { p.value.stride[2] = std::numeric_limits<int64_t>::max() / 2; },
       {"value", "2^63"}},
      {"stride has no negative",
       [](P p) { p.value.stride[2] = std::numeric_limits<int64_t>::min(); },
       {"value", "2^63"}},
  };
  for (const Bad& b : bad) check_refused(dense_problem(), b);
}

TEST(bad_backward_problems) {
  using P = AttentionProblem&;
  const std::vector<Bad> bad = {
      {"no lse", [](P p) { p.lse.reset(); }, {"lse"}},
      {"grad_out shape",
       [](P p) { p.grad_out->shape[2] = 6; },
       {"grad_out", "(2, 4, 6, 6)", "(2, 4, 5, 6)"}},
      {"grad_out dtype",
       [](P p) { p.grad_out->dtype = DType::kFloat64; },
       {"grad_out", "float64", "float32"}},
      {"grad_lse shape", [](P p) { p.grad_lse->rank = 2; }, {"grad_lse", "(2, 4)"}},
      {"grad_query shape", [](P p) { p.grad_query->shape[3] = 6; }, {"grad_query", "(2, 4, 5, 6)"}},
      {"grad_key dtype", [](P p) { p.grad_key->dtype = DType::kFloat16; }, {"grad_key", "float16"}},
      {"grad_value overlaps", [](P p) { p.grad_value->stride[2] = 0; }, {"grad_value", "stride 0"}},
      {"gradient of a mask",
       [](P p) { p.bias->dtype = p.grad_bias->dtype = DType::kBool; },
       {"grad_bias", "bool", "no gradient"}},
      {"grad_bias without bias", [](P p) { p.bias.reset(); }, {"grad_bias", "bias"}},
      {"grad_bias shape",
       [](P p) { p.grad_bias->shape[0] = 1; },
       {"grad_bias", "(1, 5, 7)", "(4, 5, 7)"}},
      {"grad_sinks without sinks", [](P p) { p.sinks.reset(); }, {"grad_sinks", "has no sinks"}},
      {"grad_sinks shape", [](P p) { p.grad_sinks->shape[0] = 2; }, {"grad_sinks", "(2,)", "(4,)"}},
      {"grad_sinks dtype",
       [](P p) { p.grad_sinks->dtype = DType::kFloat64; },
       {"grad_sinks", "float64", "float32"}},
      {"grad_sinks overlap", [](P p) { p.grad_sinks->stride[0] = 0; }, {"grad_sinks", "stride 0"}},
      {"grad_bias too large",
       [](P p) { p.grad_bias->stride[0] = std::numeric_limits<int64_t>::max(); },
       {"grad_bias", "2^63"}},
  };
  for (const Bad& b : bad) check_refused(dense_problem(Pass::kBackward), b);
}

TEST(bad_tangents) {
  using P = AttentionProblem&;
  std::vector<Bad> bad = {
      {"no lse", [](P p) { p.lse.reset(); }, {"lse"}},
      {"tangent_query shape",
       [](P p) { p.tangent_query->shape[3] = 6; },
       {"tangent_query", "(2, 4, 5, 6)", "(2, 4, 5, 8)"}},
      {"tangent_key dtype",
       [](P p) { p.tangent_key->dtype = DType::kFloat16; },
       {"tangent_key", "float16", "float32"}},
      {"tangent_value shape",
       [](P p) { p.tangent_value->rank = 3; },
       {"tangent_value", "(2, 2, 7)"}},
      {"tangent_bias without bias",
       [](P p) {
         p.bias.reset();
         p.grad_bias.reset();
       },
       {"tangent_bias is given", "no bias"}},
      {"tangent_out shape",
       [](P p) { p.tangent_out->shape[2] = 6; },
       {"tangent_out", "(2, 4, 6, 6)"}},
      {"tangent_lse dtype",
       [](P p) { p.tangent_lse->dtype = DType::kFloat64; },
       {"tangent_lse", "float64", "float32"}},
  };
  const Bad overlaps = {"tangent_out overlaps",
                        [](P p) { p.tangent_out->stride[2] = 0; },
                        {"tangent_out", "stride 0"}};
  for (const Bad& b : bad) check_refused(dense_problem(Pass::kTangent), b);
  check_refused(dense_problem(Pass::kTangent), overlaps);
  bad.insert(bad.end(),
             {{"no tangent_out", [](P p) { p.tangent_out.reset(); }, {"tangent_out is missing"}},
              {"no tangent_lse", [](P p) { p.tangent_lse.reset(); }, {"tangent_lse is missing"}},
              {"grad_key dtype",
               [](P p) { p.grad_key->dtype = DType::kFloat16; },
               {"grad_key", "float16"}}});
  for (const Bad& b : bad) check_refused(dense_problem(Pass::kSecond), b);
  AttentionProblem p = dense_problem(Pass::kSecond);
  overlaps.spoil(p);  // only read here
  CHECK(flashmoe::plan(p).ok());
}

TEST(bad_ragged_problems) {
  using P = AttentionProblem&;
  const std::vector<Bad> bad = {
      {"dense shape",
       [](P p) {
         p.query = contiguous(DType::kFloat16, {1, 9, 4, 8});
       },
       {"query", "(1, 9, 4, 8)"}},
      {"cu_seqlens_q dtype",
       [](P p) { p.ragged->cu_seqlens_q.dtype = DType::kFloat32; },
       {"cu_seqlens_q", "float32"}},
      {"cu_seqlens dtypes",
       [](P p) { p.ragged->cu_seqlens_k.dtype = DType::kInt64; },
       {"cu_seqlens_k", "int64"}},
      {"cu_seqlens_k rank",
       [](P p) {
         p.ragged->cu_seqlens_k = contiguous(DType::kInt32, {2, 2});
       },
       {"cu_seqlens_k", "(2, 2)"}},
      {"empty cu_seqlens_q",
       [](P p) { p.ragged->cu_seqlens_q.shape[0] = 0; },
       {"cu_seqlens_q", "(0,)"}},
      {"entries", [](P p) { p.ragged->cu_seqlens_k.shape[0] = 5; }, {"cu_seqlens_k", "5", "4"}},
      {"max_seqlen_q", [](P p) { p.ragged->max_seqlen_q = -1; }, {"max_seqlen_q", "-1"}},
      {"max_seqlen_k", [](P p) { p.ragged->max_seqlen_k = -7; }, {"max_seqlen_k", "-7"}},
      {"key_lengths too",
       [](P p) { p.key_lengths = contiguous(DType::kInt32, {3}); },
       {"key_lengths", "cu_seqlens"}},
      {"unpacked bias",
       [](P p) {
         p.bias = contiguous(DType::kFloat32, {4, 9, 12});
       },
       {"bias", "(4, 9, 12)"}},
      {"bias heads",
       [](P p) {
         p.bias = contiguous(DType::kFloat32, {40, 2});
       },
       {"bias", "(40, 2)", "4"}},
      {"sinks of tokens",
       [](P p) { p.sinks = contiguous(DType::kFloat16, {9}); },
       {"sinks", "(9,)", "(4,)"}},
      {"sinks dtype",
       [](P p) { p.sinks = contiguous(DType::kBFloat16, {4}); },
       {"sinks", "bfloat16", "float16", "float32"}},
      {"out", [](P p) { p.out.shape[0] = 12; }, {"out", "(12, 4, 6)", "(9, 4, 6)"}},
  };
  for (const Bad& b : bad) check_refused(ragged_problem(), b);
}

// Sizes that only just do not matter: nothing is there, so nothing overflows.
TEST(empty_problems_are_legal) {
  for (int zero : {0, 2}) {
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      AttentionProblem p = dense_problem(pass);
      for (TensorSpec* spec : {&p.query, &p.out})
        *spec = contiguous(spec->dtype, {2, 4, 5, spec->size(-1)});
      for (TensorSpec* spec : {&p.query, &p.key, &p.value, &p.out, &*p.lse}) spec->shape[zero] = 0;
      for (auto* given : {&p.bias, &p.grad_bias, &p.sinks, &p.grad_sinks}) given->reset();
      if (pass == Pass::kBackward) {
        p.grad_out = p.out;
        p.grad_lse = p.lse;
        p.grad_query = p.query;
        p.grad_key = p.key;
        p.grad_value = p.value;
      }
      const auto plan = flashmoe::plan(p);
      CHECK(plan.ok(), plan.status().message());
      CHECK(flashmoe::run_reference(p, {}).ok());
    }
  }
}

// The specs that contiguous() makes of empty tensors can be written.
TEST(empty_contiguous_results_are_legal) {
  AttentionProblem p;
  p.query = contiguous(DType::kFloat32, {3, 2, 0, 8});
  p.key = p.value = contiguous(DType::kFloat32, {3, 2, 4, 8});
  p.out = p.query;
  CHECK(flashmoe::plan(p).ok(), flashmoe::plan(p).status().message());
}

// Huge sizes beside a 0: nothing to do, or refused, but nothing overflows on the way.
TEST(empty_and_huge) {
  const auto harmless = [](const AttentionProblem& p) {
    const auto plan = flashmoe::plan(p);
    if (plan.ok()) CHECK_EQ(plan.value().work_items, 0);
    if (!plan.ok()) CHECK_CONTAINS(plan.status().message(), "2^63");
  };
  AttentionProblem p;
  p.query = p.key = p.value = p.out = huge_spec(DType::kFloat32, {kHuge, kHuge, 0, 1, 4, 8});
  harmless(p);
  p.query = p.key = p.value = p.out = huge_spec(DType::kFloat32, {0, kHuge, kHuge, 8});
  harmless(p);
}

// Lengths that only the data tells.
namespace {

struct Lengths {
  std::vector<int> q, k;
  std::vector<const char*> said;  // empty: legal
};

void check_lengths(const AttentionProblem& p, const Case& c, const std::vector<const char*>& said) {
  const auto plan = flashmoe::plan(p);
  CHECK(plan.ok(), plan.status().message());
  std::vector<std::byte> workspace(plan.value().workspace_bytes);
  for (const flashmoe::Status& status : {flashmoe::run(plan.value(), c.tensors(), workspace.data()),
                                         flashmoe::run_reference(p, c.tensors())}) {
    CHECK_EQ(status.ok(), said.empty());
    for (const char* part : said) CHECK_CONTAINS(status.message(), part);
  }
  if (!said.empty()) CHECK(std::isnan(c.out.values()[0]), "something was computed");
}

Case case_for(const AttentionProblem& p) {
  const auto tensor = [](const TensorSpec& s) {
    Tensor t(s.dtype, {s.shape.begin(), s.shape.begin() + s.rank});
    t.set(Values(t.count(), 0.5));
    return t;
  };
  Case c;
  c.options = p.options;
  if (p.ragged) {
    c.max_seqlen_q = p.ragged->max_seqlen_q;
    c.max_seqlen_k = p.ragged->max_seqlen_k;
  }
  c.query = tensor(p.query);
  c.key = tensor(p.key);
  c.value = tensor(p.value);
  if (p.bias) c.bias = tensor(*p.bias);
  c.out = tensor(p.out);
  c.out.poison();
  c.lse = tensor(*p.lse);
  return c;
}

}  // namespace

TEST(cu_seqlens_are_checked) {
  const std::vector<Lengths> all = {
      {{0, 2, 5, 9}, {0, 4, 4, 12}, {}},  // 2 * 4 + 3 * 0 + 4 * 8 = 40 rows of bias
      {{1, 2, 5, 9}, {0, 4, 4, 12}, {"cu_seqlens_q[0] is 1"}},
      {{0, 2, 5, 9}, {-1, 4, 4, 12}, {"cu_seqlens_k[0] is -1"}},
      {{0, 5, 2, 9}, {0, 4, 4, 12}, {"cu_seqlens_q[2] is 2", "cu_seqlens_q[1] is 5"}},
      {{0, 2, 5, 9}, {0, 4, -3, 12}, {"cu_seqlens_k[2] is -3"}},
      {{0, 2, 5, 10}, {0, 4, 4, 12}, {"cu_seqlens_q[3] is 10", "9 tokens"}},
      {{0, 2, 5, 9}, {0, 4, 4, 13}, {"cu_seqlens_k[3] is 13", "12 tokens"}},
      {{0, 9, 9, 9}, {0, 4, 4, 12}, {"max_seqlen_q is 8", "sequence 0", "9"}},
      {{0, 2, 5, 9}, {0, 1, 1, 12}, {"max_seqlen_k is 8", "sequence 2", "11"}},
      {{0, 3, 5, 9}, {0, 4, 4, 12}, {"bias", "40", "44"}},
      {{0, 0, 0, 0}, {0, 0, 0, 0}, {"bias", "40", "0"}},
  };
  for (DType dtype : {DType::kInt32, DType::kInt64}) {
    for (const Lengths& l : all) {
      AttentionProblem p = ragged_problem();
      Case c = case_for(p);
      c.cu_seqlens_q = Tensor(dtype, {4});
      c.cu_seqlens_k = Tensor(dtype, {4});
      c.cu_seqlens_q.set({l.q.begin(), l.q.end()});
      c.cu_seqlens_k.set({l.k.begin(), l.k.end()});
      check_lengths(c.problem(Pass::kForward), c, l.said);
    }
  }
}

TEST(key_lengths_are_checked) {
  struct {
    Values lengths;
    std::vector<const char*> said;
  } const all[] = {
      {{0, 7}, {}},
      {{7, 8}, {"key_lengths[1] is 8", "7"}},
      {{-1, 3}, {"key_lengths[0] is -1", "7"}},
  };
  for (const auto& [lengths, said] : all) {
    Case c = case_for(dense_problem());
    c.key_lengths = Tensor(DType::kInt64, {2});
    c.key_lengths.set(lengths);
    check_lengths(c.problem(Pass::kForward), c, said);
  }
}

// Numbers that do not fit 32 bits are not cut short.
TEST(int64_lengths_are_not_cut) {
  Case c = case_for(dense_problem());
  c.key_lengths = Tensor(DType::kInt64, {2});
  c.key_lengths.set({3, static_cast<double>(int64_t{1} << 32)});
  check_lengths(c.problem(Pass::kForward), c, {"key_lengths[1] is 4294967296"});
}

TEST(null_pointers_are_refused) {
  Case c = case_for(dense_problem());
  c.sinks = Tensor(DType::kFloat32, {4});
  const AttentionProblem p = c.problem(Pass::kForward);
  const auto plan = flashmoe::plan(p);
  std::vector<std::byte> workspace(plan.value().workspace_bytes);
  for (auto [name, member] :
       {std::pair{"query", &AttentionTensors::query}, std::pair{"key", &AttentionTensors::key},
        std::pair{"value", &AttentionTensors::value},
        std::pair{"sinks", &AttentionTensors::sinks}}) {
    AttentionTensors tensors = c.tensors();
    tensors.*member = nullptr;
    const flashmoe::Status status = flashmoe::run(plan.value(), tensors, workspace.data());
    CHECK(!status.ok());
    CHECK_CONTAINS(status.message(), name);
  }
  CHECK_CONTAINS(flashmoe::run(plan.value(), c.tensors(), nullptr).message(), "workspace");
}

TEST(null_tangents_are_refused) {
  Random random(11);
  SecondCase c = random_second_case(random);
  for (Pass pass : {Pass::kTangent, Pass::kSecond}) {
    const auto plan = flashmoe::plan(c.problem(pass));
    CHECK(plan.ok(), plan.status().message());
    std::vector<std::byte> workspace(plan.value().workspace_bytes);
    AttentionTensors tensors = c.tensors();
    tensors.tangent_lse = nullptr;
    const flashmoe::Status status = flashmoe::run(plan.value(), tensors, workspace.data());
    CHECK_CONTAINS(status.message(), "tangent_lse is null");
  }
}

// allowed_keys() against the rule it stands for, near every edge and near the ends of int64.
TEST(allowed_keys_follow_the_rule) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  const std::vector<int64_t> sides = {-1, 0, 1, 2, 3, 5, 8, most - 1, most};
  for (int64_t rows = 1; rows <= 6; ++rows) {
    for (int64_t keys = 0; keys <= 6; ++keys) {
      for (int64_t left : sides) {
        for (int64_t right : sides) {
          for (int64_t i = 0; i < rows; ++i) {
            const flashmoe::KeyRange range = flashmoe::allowed_keys(i, rows, keys, left, right);
            CHECK(0 <= range.begin && range.begin <= range.end && range.end <= keys);
            const int64_t p = i + keys - rows;
            for (int64_t j = 0; j < keys; ++j) {
              const bool allowed = (left < 0 || j >= p - std::min<int64_t>(left, 100)) &&
                                   (right < 0 || j <= p + std::min<int64_t>(right, 100));
              CHECK((j >= range.begin && j < range.end) == allowed, rows, keys, left, right, i, j);
            }
          }
        }
      }
    }
  }
}
