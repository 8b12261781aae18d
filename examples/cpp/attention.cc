// Self-attention over a batch of two small molecules of 5 and 3 atoms, padded to 5, with a learned
// bias for every pair of atoms and its gradient: problem -> plan -> run, in plain C++.
#include <flashmoe/attention.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

using flashmoe::contiguous;
using flashmoe::DType;

namespace {

constexpr int64_t kMolecules = 2, kHeads = 2, kAtoms = 5, kDim = 8;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "attention example failed: %s\n", why.c_str());
  std::exit(1);
}

std::vector<float> random_numbers(int64_t count) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& x : numbers) x = normal(generator);
  return numbers;
}

// Plans, says what will run, and runs.
void plan_and_run(const flashmoe::AttentionProblem& problem,
                  const flashmoe::AttentionTensors& tensors) {
  const flashmoe::Result<flashmoe::AttentionPlan> plan = flashmoe::plan(problem);
  if (!plan.ok()) fail(plan.status().message());
  std::vector<std::byte> workspace(plan.value().workspace_bytes);
  const flashmoe::Status status = flashmoe::run(plan.value(), tensors, workspace.data());
  if (!status.ok()) fail(status.message());
  std::printf("ran %s\n", plan.value().kernel.c_str());
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::fmax(most, std::fabs(a[i] - b[i]));
  return most;
}

}  // namespace

int main() {
  const int64_t elements = kMolecules * kHeads * kAtoms * kDim;
  const std::vector<float> query = random_numbers(elements), key = random_numbers(elements),
                           value = random_numbers(elements), grad_out = random_numbers(elements);
  const std::vector<float> pair_bias = random_numbers(kHeads * kAtoms * kAtoms);
  const std::vector<int32_t> atoms = {5, 3};
  std::vector<float> out(elements), lse(kMolecules * kHeads * kAtoms), grad_bias(pair_bias.size());

  flashmoe::AttentionProblem problem;
  problem.query = problem.key = problem.value = problem.out =
      contiguous(DType::kFloat32, {kMolecules, kHeads, kAtoms, kDim});
  problem.bias =
      contiguous(DType::kFloat32, {kHeads, kAtoms, kAtoms});  // the same for every molecule
  problem.key_lengths = contiguous(DType::kInt32, {kMolecules});
  problem.lse = contiguous(DType::kFloat32, {kMolecules, kHeads, kAtoms});

  flashmoe::AttentionTensors tensors;
  tensors.query = query.data();
  tensors.key = key.data();
  tensors.value = value.data();
  tensors.bias = pair_bias.data();
  tensors.key_lengths = atoms.data();
  tensors.out = out.data();
  tensors.lse = lse.data();

  std::printf("flashmoe %s\n%s\n", flashmoe::version(), flashmoe::explain(problem).c_str());
  plan_and_run(problem, tensors);
  std::printf("out[0, 0, 0, :] =");
  for (int64_t d = 0; d < kDim; ++d) std::printf(" %7.4f", out[d]);
  std::printf("\n");

  // The gradient of the bias, summed over the molecules inside the kernel.
  problem.pass = flashmoe::Pass::kBackward;
  problem.grad_out = problem.out;
  problem.grad_bias = problem.bias;
  tensors.grad_out = grad_out.data();
  tensors.grad_bias = grad_bias.data();
  plan_and_run(problem, tensors);
  std::printf("grad_bias[0, 0, :] =");
  for (int64_t j = 0; j < kAtoms; ++j) std::printf(" %7.4f", grad_bias[j]);
  std::printf("\n");

  std::vector<float> exact(grad_bias.size());
  tensors.grad_bias = exact.data();
  const flashmoe::Status status = flashmoe::run_reference(problem, tensors);
  if (!status.ok()) fail(status.message());
  const double difference = largest_difference(grad_bias, exact);
  std::printf("largest difference to the float64 reference: %.1e\n", difference);
  if (!(difference < 1e-5)) fail("the gradient is not what the reference says");
  return 0;
}
