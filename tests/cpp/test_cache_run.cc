// Writing to a cache: the backend against the oracle, bit for bit, on every instruction set this
// machine can run.
#include "flashmoe/cache.h"
#include "runs.h"

using namespace testing;
using flashmoe::AppendProblem;
using flashmoe::AppendTensors;

namespace {

struct AppendCase {
  Tensor key, value, key_cache, value_cache, slots, k_scale, v_scale;

  AppendProblem problem(int threads) const {
    AppendProblem p;
    p.device.num_threads = threads;
    p.key = key.spec();
    p.value = value.spec();
    p.key_cache = key_cache.spec();
    p.value_cache = value_cache.spec();
    p.slots = slots.spec();
    p.k_scale = maybe_spec(k_scale);
    p.v_scale = maybe_spec(v_scale);
    return p;
  }
  AppendTensors tensors() const {
    return {key.data(),   value.data(),   key_cache.data(), value_cache.data(),
            slots.data(), k_scale.data(), v_scale.data()};
  }
};

AppendCase random_append(Random& random) {
  const DType all[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const int64_t sizes[] = {1, 3, 8, 17, 64, 100, 128, 300};
  const DType dtype = all[uniform(random, 0, 3)];
  const bool fp8 = chance(random, 0.6);
  const int64_t tokens = uniform(random, 0, 40), heads = uniform(random, 1, 3);
  const int64_t blocks = uniform(random, 0, 9), page = uniform(random, 1, 9);
  const int64_t dim = sizes[uniform(random, 0, 7)];
  const int64_t dim_v = chance(random, 0.7) ? dim : sizes[uniform(random, 0, 7)];
  const auto empty = [&](DType type, std::vector<int64_t> shape, bool only_read) {
    return Tensor(type, shape, random_layout(random, static_cast<int>(shape.size()), only_read));
  };
  // Numbers of every size that e4m3 has, beyond it, and some that are none.
  const auto fill = [&](Tensor& t) {
    Values values = random_values(random, t.count());
    for (double& x : values) {
      x *= std::ldexp(1., static_cast<int>(uniform(random, -12, 12)));
      if (chance(random, 0.01)) x = std::nan("");
      if (chance(random, 0.01)) x = -std::numeric_limits<double>::infinity();
      if (chance(random, 0.05)) x = std::ldexp(double(uniform(random, -32, 32)), -10);  // ties
    }
    t.set(values);
  };
  AppendCase c;
  c.key = empty(dtype, {tokens, heads, dim}, true);
  c.value = empty(dtype, {tokens, heads, dim_v}, true);
  fill(c.key);
  fill(c.value);
  const DType cache = fp8 ? DType::kFloat8E4M3 : dtype;
  c.key_cache = empty(cache, {blocks, page, heads, dim}, false);
  c.value_cache = empty(cache, {blocks, page, heads, dim_v}, false);
  // Each slot once at most; some tokens have none, or one that is not there.
  std::vector<double> free(blocks * page);
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), random);
  const double nowhere[] = {-1, -7, double(blocks * page), 1 << 30};
  Values slots;
  for (int64_t t = 0; t < tokens; ++t) {
    const bool none = free.empty() || chance(random, 0.2);
    slots.push_back(none ? nowhere[uniform(random, 0, 3)] : free.back());
    if (!none) free.pop_back();
  }
  c.slots = empty(chance(random, 0.5) ? DType::kInt32 : DType::kInt64, {tokens}, false);
  c.slots.set(slots);
  for (Tensor* scale : {&c.k_scale, &c.v_scale}) {
    if (!fp8 || chance(random, 0.3)) continue;
    const bool by_head = chance(random, 0.5);
    *scale = empty(DType::kFloat32, by_head ? std::vector<int64_t>{heads} : std::vector<int64_t>{},
                   true);
    Values values(by_head ? heads : 1);
    for (double& x : values) x = std::uniform_real_distribution<double>(0.1, 3)(random);
    scale->set(values);
  }
  return c;
}

Bits bits_of(const AppendCase& c) {
  Bits bits;
  for (const Tensor* t : {&c.key_cache, &c.value_cache}) {
    bits.emplace_back(t->memory(), t->memory() + t->bytes());
  }
  return bits;
}

// e4m3 numbers and NaN by their bytes; of other dtypes a NaN may change its bits in the oracle.
void check_equal(const Tensor& got, const Values& want) {
  const Values values = got.values();
  for (size_t i = 0; i < want.size(); ++i) {
    const bool same = values[i] == want[i] ? std::signbit(values[i]) == std::signbit(want[i])
                                           : std::isnan(values[i]) && std::isnan(want[i]);
    CHECK(same, "element", i, "is", values[i], "and should be", want[i]);
  }
}

}  // namespace

TEST(agrees_with_the_oracle) {
  int written = 0;
  for (int i = 0; i < case_count(300); ++i) {
    Random random(i);
    AppendCase c = random_append(random);
    const Note note("case ", i, describe("key", c.key), describe("key_cache", c.key_cache),
                    describe_integers("slots", c.slots));
    const flashmoe::Status oracle = flashmoe::run_reference(c.problem(1), c.tensors());
    CHECK(oracle.ok(), oracle.message());
    const Values key = c.key_cache.values(), value = c.value_cache.values();
    for (double x : key) written += std::isfinite(x);
    Bits first;
    for (int threads : {1, 3}) {
      c.key_cache.poison();
      c.value_cache.poison();
      const auto plan = flashmoe::plan(c.problem(threads));
      CHECK(plan.ok(), plan.status().message());
      const flashmoe::Status status =
          flashmoe::run(plan.value(), c.tensors(), {.parallel = on_threads});
      CHECK(status.ok(), status.message());
      CHECK(c.key_cache.gaps_untouched() && c.value_cache.gaps_untouched());
      if (threads == 1) first = bits_of(c);
      CHECK(bits_of(c) == first);
      check_equal(c.key_cache, key);
      check_equal(c.value_cache, value);
    }
  }
  CHECK(written > 10000, written);
}

// Every e4m3 number, the middle between neighbours, and what is beside it.
TEST(rounds_to_nearest_even) {
  using flashmoe::cpu::Float8E4M3;
  Values numbers, want;
  for (int bits = 0; bits < 0x7e; ++bits) {
    const double a = Float8E4M3::to_double(static_cast<uint8_t>(bits));
    const double b = Float8E4M3::to_double(static_cast<uint8_t>(bits + 1));
    const auto middle = static_cast<float>((a + b) / 2);
    for (double sign : {1., -1.}) {
      numbers.insert(numbers.end(), {sign * a, sign * middle, sign * std::nextafter(middle, 0.f),
                                     sign * std::nextafter(middle, 1e30f)});
      want.insert(want.end(), {sign * a, sign * (bits % 2 ? b : a), sign * a, sign * b});
    }
  }
  for (double x : {448., 449., 465., 1e30, std::numeric_limits<double>::infinity()}) {
    numbers.insert(numbers.end(), {x, -x});
    want.insert(want.end(), {448, -448});
  }
  numbers.push_back(std::nan(""));
  want.push_back(std::nan(""));
  const auto n = static_cast<int64_t>(numbers.size());
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    AppendCase c;
    c.key = Tensor(dtype, {1, 1, n});
    c.key.set(numbers);
    c.value = Tensor(dtype, {1, 1, n});
    c.value.set(numbers);
    c.key_cache = Tensor(DType::kFloat8E4M3, {1, 1, 1, n});
    c.value_cache = Tensor(DType::kFloat8E4M3, {1, 1, 1, n});
    c.slots = Tensor(DType::kInt32, {1});
    c.slots.set({0});
    const auto plan = flashmoe::plan(c.problem(1));
    CHECK(flashmoe::run(plan.value(), c.tensors()).ok());
    check_equal(c.key_cache, want);
  }
}

int main(int argc, char** argv) { return run_for_every_target(argc, argv); }
