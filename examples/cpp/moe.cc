// A layer of experts over the atoms of two small molecules. First the element of an atom chooses
// its expert, then a router does, with its gradient: problem -> plan -> run, in plain C++.
#include <flashmoe/moe.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

using flashmoe::contiguous;
using flashmoe::DType;

namespace {

constexpr int64_t kAtoms = 8, kWidth = 16, kInner = 24, kExperts = 4, kTopK = 2;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "moe example failed: %s\n", why.c_str());
  std::exit(1);
}

std::vector<float> random_numbers(int64_t count, float spread = 1) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> numbers(count);
  for (float& x : numbers) x = normal(generator);
  return numbers;
}

// Plans, says what will run, and runs.
template <class Problem, class Tensors>
void plan_and_run(const Problem& problem, const Tensors& tensors) {
  const auto plan = flashmoe::plan(problem);
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
  const std::vector<float> x = random_numbers(kAtoms * kWidth);
  const std::vector<float> gate_up = random_numbers(kExperts * 2 * kInner * kWidth, 0.25f);
  const std::vector<float> down = random_numbers(kExperts * kWidth * kInner, 0.2f);
  const std::vector<int64_t> elements = {0, 1, 1, 1, 2, 0, 0, 3};  // of each atom
  std::vector<float> out(x.size());

  flashmoe::MoeProblem problem;
  problem.x = problem.out = contiguous(DType::kFloat32, {kAtoms, kWidth});
  problem.gate_up = contiguous(DType::kFloat32, {kExperts, 2 * kInner, kWidth});
  problem.down = contiguous(DType::kFloat32, {kExperts, kWidth, kInner});
  problem.ids = contiguous(DType::kInt64, {kAtoms, 1});
  flashmoe::MoeTensors tensors;
  tensors.x = x.data();
  tensors.gate_up = gate_up.data();
  tensors.down = down.data();
  tensors.ids = elements.data();
  tensors.out = out.data();
  std::printf("flashmoe %s\n%s\n", flashmoe::version(), flashmoe::explain(problem).c_str());
  plan_and_run(problem, tensors);
  std::printf("out[0, :4] =");
  for (int i = 0; i < 4; ++i) std::printf(" %7.4f", out[i]);
  std::printf("\n");

  // A router chooses two experts for each atom, and how much each of them counts.
  const std::vector<float> logits = random_numbers(kAtoms * kExperts);
  std::vector<int32_t> ids(kAtoms * kTopK);
  std::vector<float> weights(kAtoms * kTopK);
  flashmoe::RouteProblem router;
  router.logits = contiguous(DType::kFloat32, {kAtoms, kExperts});
  router.ids = contiguous(DType::kInt32, {kAtoms, kTopK});
  router.weights = contiguous(DType::kFloat32, {kAtoms, kTopK});
  flashmoe::RouteTensors route;
  route.logits = logits.data();
  route.ids = ids.data();
  route.weights = weights.data();
  plan_and_run(router, route);

  // For the backward pass the forward pass keeps the pre-activations and the routing.
  std::vector<float> pre(kAtoms * kTopK * 2 * kInner);
  std::vector<int32_t> routing(flashmoe::routing_elems(kAtoms, kTopK, kExperts));
  problem.ids = router.ids;
  problem.weights = router.weights;
  problem.pre = contiguous(DType::kFloat32, {kAtoms * kTopK, 2, kInner});
  problem.routing = contiguous(DType::kInt32, {static_cast<int64_t>(routing.size())});
  tensors.ids = ids.data();
  tensors.weights = weights.data();
  tensors.pre = pre.data();
  tensors.routing = routing.data();
  plan_and_run(problem, tensors);

  const std::vector<float> grad_out = random_numbers(kAtoms * kWidth);
  std::vector<float> grad_x(x.size()), grad_weights(weights.size());
  problem.pass = flashmoe::Pass::kBackward;
  problem.grad_out = problem.grad_x = problem.x;
  problem.grad_weights = problem.weights;
  tensors.grad_out = grad_out.data();
  tensors.grad_x = grad_x.data();
  tensors.grad_weights = grad_weights.data();
  plan_and_run(problem, tensors);

  std::vector<float> exact_x(x.size()), exact_weights(weights.size());
  tensors.grad_x = exact_x.data();
  tensors.grad_weights = exact_weights.data();
  const flashmoe::Status status = flashmoe::run_reference(problem, tensors);
  if (!status.ok()) fail(status.message());
  const double difference = std::fmax(largest_difference(grad_x, exact_x),
                                      largest_difference(grad_weights, exact_weights));
  std::printf("largest difference to the float64 reference: %.1e\n", difference);
  if (!(difference < 1e-5)) fail("the gradient is not what the reference says");
  return 0;
}
