// A mixture of experts: problem -> plan -> run.
//
//   out[t] = sum over j of weights[t, j] * down[e] @ act(gate_up[e] @ x[t]),   e = ids[t, j]
//
//   flashmoe::MoeProblem problem;             // what is asked: shapes, strides, dtypes, options
//   problem.x = flashmoe::contiguous(flashmoe::DType::kBFloat16, {tokens, width});
//   ...
//   auto plan = flashmoe::plan(problem);      // checked, and who will do it; touches no memory
//   if (!plan.ok()) complain(plan.status().message());
//   std::vector<std::byte> workspace(plan.value().workspace_bytes);
//   flashmoe::run(plan.value(), tensors, workspace.data());
//
// RouteProblem is the router before it: from logits to ids and weights. docs/semantics.md has the
// meaning of every option.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashmoe/device.h"
#include "flashmoe/export.h"
#include "flashmoe/plan.h"
#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

namespace flashmoe {

// The first three have a gate: silu(gate) * up, gelu(gate) * up, relu(gate) * up. gelu is the exact
// one (erf).
enum class Activation { kSwiglu, kGeglu, kReglu, kSilu, kGelu, kRelu };

constexpr bool has_gate(Activation activation) { return activation <= Activation::kReglu; }

constexpr const char* activation_name(Activation activation) {
  switch (activation) {
    case Activation::kSwiglu:
      return "swiglu";
    case Activation::kGeglu:
      return "geglu";
    case Activation::kReglu:
      return "reglu";
    case Activation::kSilu:
      return "silu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kRelu:
      return "relu";
  }
  return "?";
}

struct MoeProblem {
  Pass pass = Pass::kForward;
  Device device;
  Activation activation = Activation::kSwiglu;

  // Inputs. T tokens, width d, E experts of inner width n, k experts a token; G = 2 with a gate,
  // else 1. fp64, fp32, fp16 or bf16, all alike but where said.
  TensorSpec x;                         // (T, d)
  TensorSpec gate_up;                   // (E, G n, d): gate rows first, then up rows
  TensorSpec down;                      // (E, d, n)
  std::optional<TensorSpec> up_bias;    // (E, G n), added before the activation
  std::optional<TensorSpec> down_bias;  // (E, d), weighted with what it is added to
  TensorSpec ids;                       // (T, k), int32 or int64; outside 0 .. E - 1: no expert
  std::optional<TensorSpec> weights;    // (T, k), fp32 (fp64 for fp64); absent: 1

  // Results of the forward pass. The last two are inputs of the backward pass; absent forward,
  // nothing is kept for it.
  TensorSpec out;                     // (T, d)
  std::optional<TensorSpec> pre;      // (T k, G, n): pre-activations, rows in the order of routing
  std::optional<TensorSpec> routing;  // (routing_elems), int32, contiguous

  // Backward only. A gradient that is not asked for costs nothing. That of an expert without
  // tokens is 0, and so is that of the weight of a pair without an expert.
  std::optional<TensorSpec> grad_out;        // like out; absent: all gradients are 0
  std::optional<TensorSpec> grad_x;          // (T, d)
  std::optional<TensorSpec> grad_gate_up;    // (E, G n, d)
  std::optional<TensorSpec> grad_down;       // (E, d, n)
  std::optional<TensorSpec> grad_up_bias;    // (E, G n)
  std::optional<TensorSpec> grad_down_bias;  // (E, d)
  std::optional<TensorSpec> grad_weights;    // (T, k), as weights

  bool operator==(const MoeProblem&) const = default;
};

// The pairs (token, choice) sorted by expert, as the forward pass leaves them for the backward
// pass:
//   offsets (E + 1)   rows offsets[e] .. offsets[e + 1] are those of expert e
//   pairs (T k)       row -> t * k + j, rising within an expert. Rows from offsets[E] on have no
//                     expert, and what is in them is nobody's business
constexpr int64_t routing_elems(int64_t tokens, int64_t top_k, int64_t experts) {
  return experts + 1 + tokens * top_k;
}

// Pointers for one call, in the order of MoeProblem. Null where the problem has no tensor.
struct MoeTensors {
  const void* x = nullptr;
  const void* gate_up = nullptr;
  const void* down = nullptr;
  const void* up_bias = nullptr;
  const void* down_bias = nullptr;
  const void* ids = nullptr;
  const void* weights = nullptr;
  void* out = nullptr;  // written forward; not read backward
  void* pre = nullptr;  // written forward, read backward
  void* routing = nullptr;
  const void* grad_out = nullptr;
  void* grad_x = nullptr;
  void* grad_gate_up = nullptr;
  void* grad_down = nullptr;
  void* grad_up_bias = nullptr;
  void* grad_down_bias = nullptr;
  void* grad_weights = nullptr;
};

// Who does the work and how it is partitioned. Plain data: print it, compare it, test it.
struct MoePlan {
  MoeProblem problem;
  std::string kernel;            // the one that does most of the work: "cpu_neon_moe_fwd"
  const void* handle = nullptr;  // CUDA: that kernel in the library's catalogue
  std::string family;            // "sm80"; "cpu"

  // The problem as numbers.
  int64_t tokens = 0, top_k = 0, experts = 0;
  int64_t width = 0, inner = 0;  // d, n
  int64_t rows = 0;              // T k: pairs of a token and an expert

  int64_t block_m = 0, block_n = 0;  // the tile: rows x columns of a product's result
  int64_t work_items = 0;            // CPU: pieces of work; CUDA: CTAs of the main kernel
  size_t workspace_bytes = 0;        // to pass to run(), 64-byte aligned

  std::vector<LaunchStep> launches;  // CUDA: in their order
  int workers = 1;                   // CPU: items in flight at once, each with scratch of its own
  size_t scratch_bytes = 0;

  std::vector<Candidate> candidates;  // best first; the last is the one chosen
};

// Checks the problem and decides who runs it. Touches no device and no tensor.
FLASHMOE_API Result<MoePlan> plan(const MoeProblem& problem);

// Runs a plan. Allocates nothing; on the CPU returns when done. The same bits in every run.
FLASHMOE_API Status run(const MoePlan& plan, const MoeTensors& tensors, void* workspace,
                        const Launch& launch = {});

// Whether kernels of that device want this tensor of the problem (x, gate_up, down, a bias, a
// gradient) copied to one with 16-byte aligned rows first. The CPU never does.
FLASHMOE_API bool needs_moe_copy(const TensorSpec& spec, const Device& device);

FLASHMOE_API std::string explain(const MoeProblem& problem);

// The plain float64 oracle behind the tests. Slow. Only host memory; takes the same problem and
// tensors as run().
FLASHMOE_API Status run_reference(const MoeProblem& problem, const MoeTensors& tensors);

// The router: scores of all experts, of which the k largest (of score + bias) are chosen, in
// falling order, ties to the lower id; a NaN counts as the largest. Without a bias the logits are
// compared, whose order is that of the scores. The weights are the scores.
enum class Scoring { kSoftmax, kSigmoid };

constexpr const char* scoring_name(Scoring scoring) {
  return scoring == Scoring::kSoftmax ? "softmax" : "sigmoid";
}

struct RouteProblem {
  Pass pass = Pass::kForward;
  Device device;
  Scoring scoring = Scoring::kSoftmax;
  bool normalize = true;  // weights are divided by their sum

  TensorSpec logits;               // (T, E), fp64, fp32, fp16 or bf16
  std::optional<TensorSpec> bias;  // (E), fp32 (fp64 for fp64): shifts the choice, not the weights
  TensorSpec ids;                  // (T, k), int32; written forward, read backward
  TensorSpec weights;              // (T, k), fp32 (fp64 for fp64); written forward

  // Backward only.
  std::optional<TensorSpec> grad_weights;  // like weights
  std::optional<TensorSpec> grad_logits;   // like logits, in their dtype

  bool operator==(const RouteProblem&) const = default;
};

struct RouteTensors {
  const void* logits = nullptr;
  const void* bias = nullptr;
  void* ids = nullptr;
  void* weights = nullptr;
  const void* grad_weights = nullptr;
  void* grad_logits = nullptr;
};

struct RoutePlan {
  RouteProblem problem;
  std::string kernel;
  std::string family;
  int64_t tokens = 0, top_k = 0, experts = 0;
  int64_t work_items = 0;
  size_t workspace_bytes = 0;
  std::vector<LaunchStep> launches;
  int workers = 1;
  std::vector<Candidate> candidates;
};

FLASHMOE_API Result<RoutePlan> plan(const RouteProblem& problem);
FLASHMOE_API Status run(const RoutePlan& plan, const RouteTensors& tensors, void* workspace,
                        const Launch& launch = {});
FLASHMOE_API Status run_reference(const RouteProblem& problem, const RouteTensors& tensors);

}  // namespace flashmoe
