// A backend against the oracle: runs in any order and on any threads, how far results may be apart,
// and a main program that starts itself once for each instruction set this machine can run.
#pragma once

#define TESTING_OWN_MAIN
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <new>
#include <span>
#include <thread>

#include "flashmoe/device.h"
#include "flashmoe/plan.h"
#include "tensors.h"
#include "testing.h"

namespace testing {

using flashmoe::ParallelFor;
using flashmoe::Pass;

// How far a result may be from the oracle's: as far as the oracle's own moves when each number that
// is rounded on the way is changed by one rounding error, that is the inputs and, backward, the out
// that comes from the forward pass. No computation in that dtype can be expected to do better.
// kSlack covers that one change of the inputs is a sample, and the largest of many rounding errors
// is not. A sum of n numbers gathers about sqrt(n) errors of the accumulator on top.
constexpr double kSlack = 10;

inline double accumulator_roundoff(DType dtype) {
  return unit_roundoff(dtype == DType::kFloat64 ? dtype : DType::kFloat32);
}

// FLASHMOE_TEST_CASES=10000 for a long look.
inline int case_count(int usual) {
  const char* text = std::getenv("FLASHMOE_TEST_CASES");
  if (text) return std::atoi(text);
#ifdef __SANITIZE_ADDRESS__
  usual /= 3;  // ten times slower, and what it looks for shows early
#endif
  return usual;
}

inline double largest(const Values& values) {
  double most = 0;
  for (double x : values) {
    if (std::isfinite(x)) most = std::max(most, std::fabs(x));
  }
  return most;
}

inline Values changed(Random& random, Values values, double by) {
  for (double& x : values) x *= 1 + (chance(random, 0.5) ? by : -by);
  return values;
}

// Tasks one after the other, the last first: order must not matter.
inline void backwards(int tasks, const std::function<void(int)>& task) {
  for (int i = tasks - 1; i >= 0; --i) task(i);
}

inline void on_threads(int tasks, const std::function<void(int)>& task) {
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
template <class Case>
Bits run_pass(Case& c, Pass pass, int threads, const ParallelFor& parallel) {
  const auto planned = plan(c.problem(pass, threads));
  CHECK(planned.ok(), planned.status().message());
  if (!planned.ok()) return {};
  const size_t bytes = planned.value().workspace_bytes;
  const std::unique_ptr<std::byte, FreeAligned> workspace(
      static_cast<std::byte*>(::operator new(bytes, std::align_val_t(64))));
  std::memset(workspace.get(), 0xFF, bytes);
  for (auto& [name, tensor] : c.results(pass)) tensor->poison();
  const flashmoe::Status status =
      run(planned.value(), c.tensors(), workspace.get(), {.parallel = parallel});
  CHECK(status.ok(), status.message());
  Bits bits;
  for (auto& [name, tensor] : c.results(pass)) {
    if (*tensor) CHECK(tensor->gaps_untouched(), name, "was written between its elements");
    bits.emplace_back(tensor->memory(), tensor->memory() + tensor->bytes());
  }
  return bits;
}

// Same bits twice, with any number of threads, in any order; on a GPU where it is deterministic.
// Leaves the results in `c`.
template <class Case>
void run_repeatedly(Case& c, Pass pass) {
  if (device_under_test.type == flashmoe::DeviceType::kCuda) {
    const Bits one = run_pass(c, pass, 0, {});
    const auto planned = plan(c.problem(pass));
    bool varies = !planned.ok();
    if constexpr (requires { planned.value().dq_order_varies; }) {
      varies = varies || planned.value().dq_order_varies;
    }
    CHECK(varies || run_pass(c, pass, 0, {}) == one, "not the same bits twice");
    return;
  }
  const Bits one = run_pass(c, pass, 1, backwards);
  CHECK(run_pass(c, pass, 3, backwards) == one, "not the same bits for 3 workers, last first");
  CHECK(run_pass(c, pass, 0, {}) == one, "not the same bits on the library's own threads");
  CHECK(run_pass(c, pass, 3, on_threads) == one, "not the same bits on 3 threads");
}

// `movement` is how far the oracle moved, `factor_error` the relative error of all there is to add
// up for an element, `terms` how many numbers that are.
inline void compare(const char* name, const Tensor& got, const Values& oracle, DType inputs,
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

// In their order: each takes what those before it leave in the case.
inline constexpr Pass kPasses[] = {Pass::kForward, Pass::kBackward};
template <class Case>
constexpr std::span<const Pass> passes_of = [] {
  if constexpr (requires { Case::kPasses; }) return std::span<const Pass>(Case::kPasses);
  return std::span<const Pass>(kPasses);
}();

template <class Case>
void run_oracle(const Case& c) {
  for (Pass pass : passes_of<Case>) {
    auto problem = c.problem(pass);
    problem.device = {};
    const flashmoe::Status status = run_reference(problem, c.tensors());
    CHECK(status.ok(), status.message());
  }
}

// By how much each result of `twin` moves when its inputs change by one rounding error, as change()
// gives them: the largest of some samples.
template <class Case, class Change>
std::map<std::string, double> movements(Case& twin, int samples, const Change& change) {
  std::map<std::string, double> result;
  for (int sample = 0; sample < samples; ++sample) {
    Case moved = change();
    run_oracle(moved);
    for (Pass pass : passes_of<Case>) {
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

// A fresh process, because the library reads FLASHMOE_CPU_TARGET once.
inline int run_for_target(const std::string& target, char** argv) {
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

inline int run_for_every_target(int argc, char** argv) {
  if (const char* target = std::getenv("FLASHMOE_CPU_TARGET")) {
    context = "target " + flashmoe::cpu_target();
    CHECK_EQ(flashmoe::cpu_target(), std::string(target));
    return run_all(argc, argv);
  }
  int failed = 0;
  for (const std::string& target : flashmoe::cpu_targets()) failed |= run_for_target(target, argv);
  return failed;
}

}  // namespace testing
