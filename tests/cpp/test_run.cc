// The backend against the oracle, over random problems, on every instruction set this machine can
// run: the program starts itself once for each.
#define TESTING_OWN_MAIN
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <new>
#include <thread>

#include "cases.h"
#include "testing.h"

using namespace testing;
using flashmoe::ParallelFor;

namespace {

// How far a result may be from the oracle's: as far as the oracle's own moves when each number that
// is rounded on the way is changed by one rounding error, that is the inputs and, backward, the out
// that comes from the forward pass. No computation in that dtype can be expected to do better.
// kSlack covers that one change of the inputs is a sample, and the largest of many rounding errors
// is not. A sum of n numbers gathers about sqrt(n) errors of the accumulator on top.
constexpr double kSlack = 10;

double accumulator_roundoff(DType dtype) {
  return unit_roundoff(dtype == DType::kFloat64 ? dtype : DType::kFloat32);
}

// FLASHMOE_TEST_CASES=10000 for a long look.
int case_count(int usual) {
  const char* text = std::getenv("FLASHMOE_TEST_CASES");
  if (text) return std::atoi(text);
#ifdef __SANITIZE_ADDRESS__
  usual /= 3;  // ten times slower, and what it looks for shows early
#endif
  return usual;
}

double largest(const Values& values) {
  double most = 0;
  for (double x : values) {
    if (std::isfinite(x)) most = std::max(most, std::fabs(x));
  }
  return most;
}

Values changed(Random& random, Values values, double by) {
  for (double& x : values) x *= 1 + (chance(random, 0.5) ? by : -by);
  return values;
}

// `twin` with every input changed by one rounding error of dtype.
Case changed_twin(Random& random, const Case& twin, DType dtype) {
  const double u = unit_roundoff(dtype);
  Case result = float64_twin(twin);
  for (auto& [name, tensor] : result.inputs()) {
    if (*tensor) tensor->set(changed(random, tensor->values(), u));
  }
  // Rounding errors of one score after the other may all point the same way, as when all products
  // in a sum are alike: the scores grow together.
  const double dim_in = static_cast<double>(twin.query.spec().size(-1));
  const double scale = twin.options.scale ? *twin.options.scale : 1 / std::sqrt(dim_in);
  result.options.scale = scale * (1 + std::sqrt(dim_in) * accumulator_roundoff(dtype));
  if (!twin.grad_out) return result;
  // The backward pass needs sum(grad_out * out) of each row, and has out rounded; and it adds up
  // products of grad_out and value. That sum is subtracted where the gradient of lse is added, so
  // its error is put there.
  const Values grad_out = twin.grad_out.values(), out = twin.out.values();
  const double most = largest(twin.value.values());
  const int64_t dim = twin.out.spec().size(-1);
  Values grad_lse(out.size() / dim);
  if (result.grad_lse) grad_lse = result.grad_lse.values();
  for (size_t row = 0; row < grad_lse.size(); ++row) {
    double squares = 0, products = 0;
    for (int64_t d = 0; d < dim; ++d) {
      squares += std::pow(grad_out[row * dim + d] * out[row * dim + d], 2);
      products += std::fabs(grad_out[row * dim + d]) * most;
    }
    const double error = u * std::sqrt(squares) + accumulator_roundoff(dtype) * products;
    grad_lse[row] += chance(random, 0.5) ? error : -error;
  }
  result.grad_lse = Tensor(DType::kFloat64, result.lse.shape());
  result.grad_lse.set(grad_lse);
  return result;
}

void run_oracle(const Case& c) {
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    const flashmoe::Status status = flashmoe::run_reference(c.problem(pass), c.tensors());
    CHECK(status.ok(), status.message());
  }
}

// Tasks one after the other, the last first: order must not matter.
void backwards(int tasks, const std::function<void(int)>& task) {
  for (int i = tasks - 1; i >= 0; --i) task(i);
}

void on_threads(int tasks, const std::function<void(int)>& task) {
  std::vector<std::thread> threads;
  for (int i = 0; i < tasks; ++i) threads.emplace_back(task, i);
  for (std::thread& thread : threads) thread.join();
}

struct FreeAligned {
  void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t(64)); }
};

using Bits = std::vector<std::vector<std::byte>>;

// Runs one pass with results and workspace full of NaN, the workspace not a byte larger than
// planned, and returns the results bit for bit.
Bits run_pass(Case& c, Pass pass, int threads, const ParallelFor& parallel) {
  const auto plan = flashmoe::plan(c.problem(pass, threads));
  CHECK(plan.ok(), plan.status().message());
  if (!plan.ok()) return {};
  const size_t bytes = plan.value().workspace_bytes;
  const std::unique_ptr<std::byte, FreeAligned> workspace(
      static_cast<std::byte*>(::operator new(bytes, std::align_val_t(64))));
  std::memset(workspace.get(), 0xFF, bytes);
  for (auto& [name, tensor] : c.results(pass)) tensor->poison();
  const flashmoe::Status status =
      flashmoe::run(plan.value(), c.tensors(), workspace.get(), {.parallel = parallel});
  CHECK(status.ok(), status.message());
  Bits bits;
  for (auto& [name, tensor] : c.results(pass)) {
    if (*tensor) CHECK(tensor->gaps_untouched(), name, "was written between its elements");
    bits.emplace_back(tensor->memory(), tensor->memory() + tensor->bytes());
  }
  return bits;
}

// Same bits twice, with any number of threads, in any order. Leaves the results in `c`.
void run_repeatedly(Case& c, Pass pass) {
  const Bits one = run_pass(c, pass, 1, backwards);
  CHECK(run_pass(c, pass, 3, backwards) == one, "not the same bits for 3 workers, last first");
  CHECK(run_pass(c, pass, 0, {}) == one, "not the same bits on the library's own threads");
  CHECK(run_pass(c, pass, 3, on_threads) == one, "not the same bits on 3 threads");
}

// `movement` is how far the oracle moved, `factor_error` the relative error of all there is to add
// up for an element, `terms` how many numbers that are.
void compare(const char* name, const Tensor& got, const Values& oracle, DType inputs,
             double movement, double factor_error, double terms) {
  const DType dtype = got.spec().dtype;
  const double sum_error = std::sqrt(terms) * accumulator_roundoff(inputs);
  const double smallest = dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-126;  // what rounds to nothing
  const double limit = (kSlack + sum_error / unit_roundoff(inputs)) * movement +
                       (2 * unit_roundoff(dtype) + factor_error + sum_error) * largest(oracle) +
                       smallest;
  const Values values = got.values();
  for (size_t i = 0; i < values.size(); ++i) {
    const double x = values[i], want = oracle[i];
    const bool good = std::isfinite(want) ? std::fabs(x - want) <= limit
                                          : x == want || (std::isnan(x) && std::isnan(want));
    if (good) continue;
    CHECK(good, name, "element", i, "is", x, "and should be", want, "within", limit,
          "but is off by", std::fabs(x - want));
    return;  // one line per tensor
  }
}

// At most how many numbers are added up for one element of a result.
double sum_terms(const Case& c, const Tensor& result) {
  const bool ragged = c.ragged();
  const double rows = c.query.spec().size(ragged ? 0 : -2),
               keys = c.key.spec().size(ragged ? 0 : -2);
  const double heads = c.query.spec().size(ragged ? 1 : -3);
  if (&result == &c.grad_bias) {
    return static_cast<double>(c.lse.count()) * keys / std::max<double>(1, c.bias.count());
  }
  return std::max({rows * heads, keys, 256.});
}

// By how much each result of `twin` moves when its inputs change by one rounding error of dtype.
std::map<std::string, double> movements(Random& random, Case& twin, DType dtype) {
  // The largest of many movements is much the same every time; of a few it may be small by luck.
  const bool few = twin.grad_bias && twin.grad_bias.count() < 64;
  std::map<std::string, double> result;
  for (int sample = 0; sample < (few ? 6 : 1); ++sample) {
    Case moved = changed_twin(random, twin, dtype);
    run_oracle(moved);
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      const auto before = twin.results(pass), after = moved.results(pass);
      for (size_t n = 0; n < before.size(); ++n) {
        Values difference = before[n].second->values();
        const Values other = after[n].second->values();
        for (size_t i = 0; i < other.size(); ++i) difference[i] -= other[i];
        double& most = result[before[n].first];
        most = std::max(most, largest(difference));
      }
    }
  }
  return result;
}

void check_case(Random& random, Case& c) {
  const Note note(describe(c));
  Case twin = float64_twin(c);
  run_oracle(twin);
  std::map<std::string, double> movement = movements(random, twin, c.dtype());
  // The backward pass computes exp(score - lse) from an lse as large as the scores, and rounded
  // like them.
  const double lse_error = 4 * accumulator_roundoff(c.dtype()) * largest(twin.lse.values());
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    run_repeatedly(c, pass);
    const auto got = c.results(pass), want = twin.results(pass);
    for (size_t i = 0; i < got.size(); ++i) {
      const auto& [name, tensor] = got[i];
      if (!*tensor) continue;
      compare(name, *tensor, want[i].second->values(), c.dtype(), movement[name],
              pass == Pass::kBackward ? lse_error : 0, sum_terms(c, *tensor));
    }
  }
}

// Lengths around the size of the planner's blocks, whatever that is.
CaseRules rules_around_blocks() {
  AttentionProblem p;
  p.query = p.key = p.value = p.out = flashmoe::contiguous(DType::kFloat32, {1, 1, 100000, 32});
  const auto plan = flashmoe::plan(p);
  CaseRules rules;
  for (int64_t block : {plan.value().block_q, plan.value().block_k}) {
    rules.lengths.insert(rules.lengths.end(), {block - 1, block, block + 1, 2 * block + 1});
  }
  return rules;
}

}  // namespace

TEST(agrees_with_the_oracle) {
  const CaseRules rules = rules_around_blocks();
  for (int i = 0; i < case_count(300); ++i) {
    Random random(1000 + i);
    const Note note("case ", i);
    Case c = random_case(random, rules);
    check_case(random, c);
  }
}

// What NaN reaches is exactly what the oracle says it does: results that depend on it, and nothing
// behind a mask, a length or another sequence.
TEST(nan_goes_where_it_must_and_no_further) {
  const CaseRules rules = rules_around_blocks();
  for (int i = 0; i < case_count(100); ++i) {
    Random random(500000 + i);
    const Note note("case ", i);
    Case c = random_case(random, rules);
    auto inputs = c.inputs();
    auto& [name, tensor] = inputs[i % inputs.size()];
    Values values = *tensor ? tensor->values() : Values();
    if (values.empty()) continue;
    for (int n = 0; n < 2; ++n) values[uniform(random, 0, values.size() - 1)] = std::nan("");
    tensor->set(values);
    const Note where("NaN in ", name);
    check_case(random, c);
  }
}

// A caller that does not want lse gets the same out.
TEST(lse_is_optional) {
  for (int i = 0; i < 10; ++i) {
    Random random(900000 + i);
    Case c = random_case(random);
    const Note note(describe(c));
    const Bits with = run_pass(c, Pass::kForward, 1, backwards);
    c.lse = Tensor();
    const Bits without = run_pass(c, Pass::kForward, 1, backwards);
    CHECK(with.at(0) == without.at(0));
  }
}

namespace {

// A fresh process, because the library reads FLASHMOE_CPU_TARGET once.
int run_for_target(const std::string& target, char** argv) {
  std::cout << "target " << target << std::endl;
  const pid_t child = fork();
  if (child == 0) {
    setenv("FLASHMOE_CPU_TARGET", target.c_str(), 1);
    execv("/proc/self/exe", argv);
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

int main(int argc, char** argv) {
  if (const char* target = std::getenv("FLASHMOE_CPU_TARGET")) {
    context = "target " + flashmoe::cpu_target();
    CHECK_EQ(flashmoe::cpu_target(), std::string(target));
    return run_all(argc, argv);
  }
  int failed = 0;
  for (const std::string& target : flashmoe::cpu_targets()) failed |= run_for_target(target, argv);
  return failed;
}
