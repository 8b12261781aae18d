// Attention: problem -> plan -> run.
//
//   out = softmax(softcap(scale * q k^T) + bias, over the allowed keys) v
//   lse = natural log of the softmax denominator
//
//   flashmoe::AttentionProblem problem;       // what is asked: shapes, strides, dtypes, options
//   problem.query = flashmoe::contiguous(flashmoe::DType::kFloat16, {batch, heads, rows, dim});
//   ...
//   auto plan = flashmoe::plan(problem);      // checked, and who will do it; touches no memory
//   if (!plan.ok()) complain(plan.status().message());
//   std::vector<std::byte> workspace(plan.value().workspace_bytes);
//   flashmoe::run(plan.value(), tensors, workspace.data());
//
// docs/semantics.md has the meaning of every option.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

#if defined(__GNUC__)
#define FLASHMOE_API __attribute__((visibility("default")))
#else
#define FLASHMOE_API
#endif

namespace flashmoe {

enum class Pass { kForward, kBackward };
enum class DeviceType { kCpu, kCuda };

// Where the tensors live and what that device can do. Filled by the caller, never probed by the
// planner, so a laptop can ask what another machine would run.
struct Device {
  DeviceType type = DeviceType::kCpu;
  int num_threads = 0;  // CPU: threads that will work on the call; 0 = the library's own pool
  int ordinal = 0;      // CUDA: which one, as the driver counts
  int compute_capability = 0;  // CUDA: 75, 80, 86, 89, 90, ...
  int multiprocessors = 0;     // CUDA: 0 = as many as the usual card of that capability has

  bool operator==(const Device&) const = default;
};

// Ragged batches: N sequences packed along the token dimension, sequence i being the tokens
// cu_seqlens[i] .. cu_seqlens[i + 1].
struct Ragged {
  TensorSpec cu_seqlens_q;   // (N + 1), int32 or int64
  TensorSpec cu_seqlens_k;   // (N + 1), same dtype
  int64_t max_seqlen_q = 0;  // at least the longest query sequence
  int64_t max_seqlen_k = 0;

  bool operator==(const Ragged&) const = default;
};

// "..." stands for any leading (batch) dimensions, the same for every tensor.
struct AttentionProblem {
  Pass pass = Pass::kForward;
  Device device;

  // Inputs. fp64, fp32, fp16 or bf16, all alike.     dense                   ragged
  TensorSpec query;                       // (..., Hq, Sq, D)        (Tq, Hq, D)
  TensorSpec key;                         // (..., Hk, Sk, D)        (Tk, Hk, D)
  TensorSpec value;                       // (..., Hk, Sk, Dv)       (Tk, Hk, Dv)
  std::optional<TensorSpec> bias;         // broadcasts to           (sum n_i * m_i, Hq or 1)
                                          // (..., Hq, Sq, Sk)
                                          // in the inputs' dtype or fp32
  std::optional<TensorSpec> key_lengths;  // broadcasts to (...)     -
  std::optional<Ragged> ragged;

  // Results of the forward pass, inputs of the backward pass.
  TensorSpec out;                 // (..., Hq, Sq, Dv)       (Tq, Hq, Dv)
  std::optional<TensorSpec> lse;  // (..., Hq, Sq)           (Tq, Hq)
                                  // fp32; fp64 for fp64 inputs. Needed backward.

  // Backward only. A gradient that is not asked for costs nothing.
  std::optional<TensorSpec> grad_out;    // like out; absent = zero
  std::optional<TensorSpec> grad_lse;    // like lse; absent = zero
  std::optional<TensorSpec> grad_query;  // like query, in its dtype
  std::optional<TensorSpec> grad_key;
  std::optional<TensorSpec> grad_value;
  std::optional<TensorSpec> grad_bias;  // the bias's own shape and dtype

  // Options. Row i of Sq queries sits at key position p = i + L - Sq, L being the number of keys.
  bool causal = false;          // key j is allowed when j <= p
  int64_t window_left = -1;     // and p - left <= j; -1 = no limit
  int64_t window_right = -1;    // and j <= p + right; -1 = no limit
  std::optional<double> scale;  // 1 / sqrt(D) unless given
  double softcap = 0;           // c * tanh(x / c) for c > 0; 0 = off
  bool deterministic = false;   // ask for a bitwise reproducible backward pass

  bool operator==(const AttentionProblem&) const = default;
};

// Pointers for one call, in the order of AttentionProblem. Null where the problem has no tensor.
struct AttentionTensors {
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  const void* bias = nullptr;
  const void* key_lengths = nullptr;
  const void* cu_seqlens_q = nullptr;
  const void* cu_seqlens_k = nullptr;
  void* out = nullptr;  // written forward, read backward
  void* lse = nullptr;
  const void* grad_out = nullptr;
  const void* grad_lse = nullptr;
  void* grad_query = nullptr;
  void* grad_key = nullptr;
  void* grad_value = nullptr;
  void* grad_bias = nullptr;
};

// One way to run a problem that the planner looked at.
struct Candidate {
  std::string name;
  std::string verdict;  // why it was passed over, or why it was chosen
};

// Who does the work and how it is cut. Plain data: print it, compare it, test it.
struct AttentionPlan {
  AttentionProblem problem;  // as asked, with scale filled in
  std::string kernel;        // "cpu_neon_attention_fwd"

  // The problem as numbers. Ragged: batch counts sequences, lengths are the stated maxima.
  int64_t batch = 0;
  int64_t heads_q = 0;
  int64_t heads_k = 0;
  int64_t len_q = 0;
  int64_t len_k = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;

  // CUDA: the launch.
  std::string family;  // "sm80"
  int threads = 0;     // of a block
  size_t shared_bytes = 0;
  uint32_t grid[3] = {0, 0, 0};
  int64_t splits = 1;  // parts that the keys of one block of queries come in
  // Of launches, each for a part of the batch of a backward pass; ragged, of the heads of either
  // pass. The grid is that of one round.
  int64_t rounds = 1;
  // Whether grad_query is summed in an order that differs from run to run.
  bool any_order = false;
  int64_t bias_splits = 1;  // parts that the sum of a shared bias's gradient comes in
  // Small kernels around it, in their order. Once a call: the list of a ragged batch's blocks and
  // the copy of a shared bias, before, and the sum of a bias's gradient, after; the others in each
  // round.
  std::vector<std::string> before, after;

  // How it is cut. On the CPU a work item is one chunk of query blocks of one (batch, head), and
  // always the same piece of arithmetic whoever runs it: that is why results do not depend on the
  // number of threads.
  int64_t block_q = 0;
  int64_t block_k = 0;
  int64_t chunks = 1;
  int64_t work_items = 0;
  int workers = 1;  // how many items are in flight at once, each with scratch of its own
  size_t scratch_bytes = 0;
  size_t workspace_bytes = 0;  // to pass to run(), 64-byte aligned

  std::vector<Candidate> candidates;  // best first; the last is the one chosen
};

// Runs task(0) .. task(tasks - 1), several at once, and returns when all are done. Give your own to
// run on your threads; the default is a pool of the library's (FLASHMOE_NUM_THREADS sets its size).
using ParallelFor = std::function<void(int tasks, const std::function<void(int)>& task)>;

struct Launch {
  void* stream = nullptr;     // CUDA: a CUstream; ignored on the CPU
  ParallelFor parallel = {};  // CPU: where the threads come from
};

// Checks the problem and decides who runs it. Touches no device and no tensor.
FLASHMOE_API Result<AttentionPlan> plan(const AttentionProblem& problem);

// Runs a plan. Allocates nothing; on the CPU returns when done. Where lengths that only the data
// tells (key_lengths, cu_seqlens) contradict the problem, the CPU fails with nothing computed; on
// CUDA, where nobody waits for the data, the results of those sequences are NaN.
FLASHMOE_API Status run(const AttentionPlan& plan, const AttentionTensors& tensors, void* workspace,
                        const Launch& launch = {});

// Whether kernels of that device want this tensor copied to a contiguous one first. The CPU never
// does.
FLASHMOE_API bool needs_copy(const TensorSpec& spec, const Device& device);

// What would run and why, in words: the plan, and each better candidate with the reason it was
// passed over.
FLASHMOE_API std::string explain(const AttentionProblem& problem);

// The plain float64 oracle behind the tests: one loop nest, no blocking, every option. Slow. Only
// host memory, and no workspace; takes the same problem and tensors as run().
FLASHMOE_API Status run_reference(const AttentionProblem& problem, const AttentionTensors& tensors);

// CPU instruction sets this build has kernels for, best first, and the one in use.
FLASHMOE_API std::vector<std::string> cpu_targets();
FLASHMOE_API std::string cpu_target();

// CUDA devices of this machine, or why there are none.
FLASHMOE_API Result<std::vector<Device>> cuda_devices();

// A CUDA kernel of this build, as the planner sees it.
struct CudaKernel {
  std::string name, family, image;
  // attention_ragged_blocks, attention_bias_align, attention_fwd, attention_fwd_bias,
  // attention_combine, attention_bwd_preprocess, attention_bwd, attention_bwd_bias,
  // attention_bwd_dq (either's), attention_bwd_bias_sum: docs/kernels.md.
  std::string role;
  DType dtype = DType::kFloat16;
  int head_dim = 0, block_q = 0, block_k = 0;  // 0 for kernels without a tile
  int threads = 0, shared_bytes = 0;
};
FLASHMOE_API std::vector<CudaKernel> cuda_kernels();

FLASHMOE_API const char* version();

}  // namespace flashmoe
