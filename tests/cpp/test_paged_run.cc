// Attention over pages: the backend against the oracle and the oracle against a ragged batch, over
// random problems, on every instruction set this machine can run.
#include "paged_cases.h"
#include "runs.h"

using namespace testing;

namespace {

constexpr Pass kForward = Pass::kForward;

void run_oracle(const PagedCase& c) {
  const flashmoe::Status status = flashmoe::run_reference(c.problem(kForward), c.tensors());
  CHECK(status.ok(), status.message());
}

PagedCase changed_twin(Random& random, const PagedCase& twin, DType dtype) {
  PagedCase result = float64_twin(twin);
  for (Tensor* tensor : {&result.query, &result.key, &result.value}) {
    tensor->set(changed(random, tensor->values(), unit_roundoff(dtype)));
  }
  const double dim = static_cast<double>(twin.query.spec().size(-1));
  const double scale = twin.options.scale ? *twin.options.scale : 1 / std::sqrt(dim);
  result.options.scale = scale * (1 + std::sqrt(dim) * accumulator_roundoff(dtype));
  return result;
}

void check_case(Random& random, PagedCase& c) {
  const Note note(describe(c));
  PagedCase twin = float64_twin(c);
  run_oracle(twin);
  PagedCase moved = changed_twin(random, twin, c.dtype());
  run_oracle(moved);
  run_repeatedly(c, kForward);
  const auto got = c.results(kForward), want = twin.results(kForward),
             other = moved.results(kForward);
  const double terms = std::max<double>(256, static_cast<double>(c.max_seqlen_k));
  for (size_t n = 0; n < got.size(); ++n) {
    const Values values = want[n].second->values();
    Values difference = values;
    const Values after = other[n].second->values();
    for (size_t i = 0; i < difference.size(); ++i) difference[i] -= after[i];
    compare(got[n].first, *got[n].second, values, c.dtype(), largest(difference), 0, terms);
  }
}

// What a sequence has when nobody shares its batch, with bounds of its own. `c` keeps the memory of
// all its tensors.
Values alone(const PagedCase& c, int64_t sequence, Tensor* lse) {
  const Values lengths = c.seq_lens.values();
  Values ends = c.cu_seqlens_q ? c.cu_seqlens_q.values() : Values();
  for (int64_t b = 0; !c.cu_seqlens_q && b <= c.sequences(); ++b) ends.push_back(double(b));
  const int64_t first = static_cast<int64_t>(ends[sequence]);
  const int64_t rows = static_cast<int64_t>(ends[sequence + 1]) - first;
  AttentionProblem p = c.problem(kForward, 2);
  AttentionTensors t = c.tensors();
  const auto moved = [](const void* data, const TensorSpec& spec, int64_t by) {
    return static_cast<const char*>(data) + by * spec.stride[0] * dtype_bytes(spec.dtype);
  };
  t.query = moved(t.query, p.query, first);
  t.block_table = moved(t.block_table, p.paged->block_table, sequence);
  t.seq_lens = moved(t.seq_lens, p.paged->seq_lens, sequence);
  p.query.shape[0] = rows;
  p.paged->block_table.shape[0] = p.paged->seq_lens.shape[0] = 1;
  Tensor cu(DType::kInt32, {2});
  cu.set({0, static_cast<double>(rows)});
  if (c.cu_seqlens_q) {
    p.paged->cu_seqlens_q = cu.spec();
    t.cu_seqlens_q = cu.data();
  }
  p.paged->max_seqlen_q = rows;
  p.paged->max_seqlen_k = static_cast<int64_t>(lengths[sequence]);
  Tensor out(c.dtype(), {rows, p.query.shape[1], p.value.shape[3]});
  *lse = Tensor(c.lse.spec().dtype, {rows, p.query.shape[1]});
  p.out = out.spec();
  p.lse = lse->spec();
  t.out = out.data();
  t.lse = lse->data();
  const auto plan = flashmoe::plan(p);
  CHECK(plan.ok(), plan.status().message());
  std::vector<std::byte> workspace(plan.value().workspace_bytes);
  CHECK(flashmoe::run(plan.value(), t, workspace.data(), {.parallel = on_threads}).ok());
  return out.values();
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

TEST(agrees_with_the_oracle) {
  for (int i = 0; i < case_count(160); ++i) {
    Random random(1000 + i);
    const Note note("case ", i);
    PagedCase c = random_paged_case(random);
    check_case(random, c);
  }
}

// More queries than a tile has columns, in more parts than one.
TEST(agrees_with_the_oracle_in_many_tiles) {
  PagedRules rules;
  rules.queries = {1, 40, 79, 80, 81, 100, 161, 300};
  rules.keys = {79, 81, 300, 512, 700, 1024};
  rules.head_dims = {8, 16, 33};
  rules.most_products = 2e7;
  for (int i = 0; i < case_count(30); ++i) {
    Random random(20000 + i);
    const Note note("case ", i);
    PagedCase c = random_paged_case(random, rules);
    check_case(random, c);
  }
}

// A NaN in a key or value reaches the rows that see it.
TEST(nan_goes_where_it_must_and_no_further) {
  for (int i = 0; i < case_count(60); ++i) {
    Random random(500000 + i);
    const Note note("case ", i);
    PagedCase c = random_paged_case(random);
    Tensor* tensors[] = {&c.query, &c.key, &c.value};
    Values values = tensors[i % 3]->values();
    if (values.empty()) continue;
    for (int n = 0; n < 2; ++n) values[uniform(random, 0, values.size() - 1)] = std::nan("");
    tensors[i % 3]->set(values);
    check_case(random, c);
  }
}

// The bits of a sequence do not depend on what shares its batch, nor on the bounds of the call.
TEST(a_sequence_alone_has_the_same_bits) {
  int compared = 0;
  for (int i = 0; i < case_count(120); ++i) {
    Random random(700000 + i);
    PagedRules rules;
    if (i % 4 == 0) rules.queries = {1, 30, 90, 170};
    PagedCase c = random_paged_case(random, rules);
    const Note note("case ", i, " ", describe(c));
    run_pass(c, kForward, 3, on_threads);
    const Values out = c.out.values(), lse = c.lse.values();
    size_t at_out = 0, at_lse = 0;
    for (int64_t b = 0; b < c.sequences(); ++b) {
      Tensor lse_alone;
      for (double x : alone(c, b, &lse_alone)) {
        CHECK(same(out[at_out], x), "out", at_out, out[at_out], x);
        ++at_out;
      }
      for (double x : lse_alone.values()) {
        CHECK(same(lse[at_lse], x), "lse", at_lse, lse[at_lse], x);
        ++at_lse;
        ++compared;
      }
    }
  }
  CHECK(compared > 500, compared);
}

// One long sequence of one key head is cut into parts, and many of them do not fit the workspace
// together: the bits are those of one alone.
TEST(more_parts_than_fit_at_once) {
  Random random(3);
  constexpr int64_t kSequences = 120, kKeys = 2100, kPage = 16, kGroup = 3, kDim = 16;
  constexpr int64_t kEntries = (kKeys + kPage - 1) / kPage;
  PagedCase c;
  const auto normal = [&](std::vector<int64_t> shape) {
    Tensor t(DType::kFloat32, shape);
    t.set(random_values(random, t.count()));
    return t;
  };
  c.query = normal({kSequences, kGroup, kDim});
  c.key = normal({kEntries, kPage, 1, kDim});
  c.value = normal({kEntries, kPage, 1, kDim});
  c.block_table = Tensor(DType::kInt32, {kSequences, kEntries});
  Values table;
  for (int64_t i = 0; i < kSequences * kEntries; ++i) table.push_back(double(i % kEntries));
  c.block_table.set(table);
  c.seq_lens = Tensor(DType::kInt32, {kSequences});
  c.seq_lens.set(Values(kSequences, kKeys));
  c.max_seqlen_k = kKeys;
  c.out = Tensor(DType::kFloat32, {kSequences, kGroup, kDim});
  c.lse = Tensor(DType::kFloat32, {kSequences, kGroup});
  check_case(random, c);
  const Values out = c.out.values();
  for (int64_t b : {int64_t{0}, kSequences / 2, kSequences - 1}) {
    Tensor lse;
    const Values one = alone(c, b, &lse);
    CHECK(std::equal(one.begin(), one.end(), out.begin() + b * kGroup * kDim));
  }
}

TEST(lse_is_optional) {
  for (int i = 0; i < 10; ++i) {
    Random random(900000 + i);
    PagedCase c = random_paged_case(random);
    const Note note(describe(c));
    const Bits with = run_pass(c, kForward, 1, backwards);
    c.lse = Tensor();
    const Bits without = run_pass(c, kForward, 1, backwards);
    CHECK(with.at(0) == without.at(0));
  }
}

// The oracle over pages is the oracle over the same keys, packed.
TEST(the_oracle_agrees_with_a_ragged_batch) {
  for (int i = 0; i < case_count(60); ++i) {
    Random random(40000 + i);
    PagedCase c = float64_twin(random_paged_case(random));
    const Note note("case ", i, " ", describe(c));
    run_oracle(c);
    const int64_t page = c.key.spec().size(1), entries = c.block_table.spec().size(1);
    const Values table = c.block_table.values(), lengths = c.seq_lens.values();
    Values ends_q = c.cu_seqlens_q ? c.cu_seqlens_q.values() : Values();
    for (int64_t b = 0; !c.cu_seqlens_q && b <= c.sequences(); ++b) ends_q.push_back(double(b));
    Values ends_k = {0};
    for (double n : lengths) ends_k.push_back(ends_k.back() + n);
    const auto packed = [&](const Tensor& cache) {
      const int64_t row = cache.spec().size(2) * cache.spec().size(3);
      const Values from = cache.values();
      Values to;
      for (int64_t b = 0; b < c.sequences(); ++b) {
        for (int64_t j = 0; j < static_cast<int64_t>(lengths[b]); ++j) {
          // A block that is not there belongs to keys that no query sees.
          auto block = static_cast<int64_t>(table[b * entries + j / page]);
          if (block < 0 || block >= cache.spec().size(0)) block = 0;
          const auto first = from.begin() + (block * page + j % page) * row;
          to.insert(to.end(), first, first + row);
        }
      }
      Tensor result(DType::kFloat64, {static_cast<int64_t>(ends_k.back()), cache.spec().size(2),
                                      cache.spec().size(3)});
      result.set(to);
      return result;
    };
    const Tensor key = packed(c.key), value = packed(c.value);
    Tensor cu_q(DType::kInt64, {c.sequences() + 1}), cu_k(DType::kInt64, {c.sequences() + 1});
    cu_q.set(ends_q);
    cu_k.set(ends_k);
    const Values out = c.out.values(), lse = c.lse.values();
    AttentionProblem p = c.problem(kForward);
    AttentionTensors t = c.tensors();
    if (p.query.size(-1) > 256 || p.value.size(-1) > 256) continue;
    p.paged.reset();
    p.key = key.spec();
    p.value = value.spec();
    p.ragged = {cu_q.spec(), cu_k.spec(), c.max_seqlen_q, c.max_seqlen_k};
    t.key = key.data();
    t.value = value.data();
    t.cu_seqlens_q = cu_q.data();
    t.cu_seqlens_k = cu_k.data();
    const flashmoe::Status status = flashmoe::run_reference(p, t);
    CHECK(status.ok(), status.message());
    CHECK(c.out.values() == out);
    CHECK(c.lse.values() == lse);
  }
}

int main(int argc, char** argv) { return run_for_every_target(argc, argv); }
