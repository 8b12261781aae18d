// Attention: problem -> plan -> run.
//
//   out = softmax(softcap(scale * q k^T) + bias, over the allowed keys) v
//   lse = natural log of the softmax denominator, which sinks add to
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
#include <optional>
#include <string>
#include <vector>

#include "flashmoe/device.h"
#include "flashmoe/export.h"
#include "flashmoe/plan.h"
#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

namespace flashmoe {

// Ragged batches: N sequences packed along the token dimension, sequence i being the tokens
// cu_seqlens[i] .. cu_seqlens[i + 1].
struct Ragged {
  TensorSpec cu_seqlens_q;   // (N + 1), int32 or int64
  TensorSpec cu_seqlens_k;   // (N + 1), same dtype
  int64_t max_seqlen_q = 0;  // at least the longest query sequence
  int64_t max_seqlen_k = 0;

  bool operator==(const Ragged&) const = default;
};

// Keys and values in the pages of a cache, as serving engines keep them. Of N sequences, sequence i
// has seq_lens[i] keys, and key j is row j % page of block block_table[i, j / page]; its queries
// sit at its last positions. Forward only. Entries of the table past a sequence's last key are not
// read.
struct Paged {
  TensorSpec block_table;                  // (N, blocks of a sequence at most), int32 or int64
  TensorSpec seq_lens;                     // (N), int32 or int64
  std::optional<TensorSpec> cu_seqlens_q;  // (N + 1), int32 or int64; absent: one query each
  int64_t max_seqlen_q = 0;                // at least the longest; a bound, so that one plan serves
  int64_t max_seqlen_k = 0;                // every call below it
  std::optional<TensorSpec> k_scale;  // fp32, () or (Hk): what numbers of an fp8 cache are times of
  std::optional<TensorSpec> v_scale;

  bool operator==(const Paged&) const = default;
};

// Row i of Sq queries sits at key position p = i + L - Sq, L being the number of keys.
struct AttentionOptions {
  bool causal = false;          // key j is allowed when j <= p
  int64_t window_left = -1;     // and p - left <= j; -1 = no limit
  int64_t window_right = -1;    // and j <= p + right; -1 = no limit
  std::optional<double> scale;  // 1 / sqrt(D) unless given
  double softcap = 0;           // c * tanh(x / c) for c > 0; 0 = off
  bool deterministic = false;   // ask for a bitwise reproducible backward pass
  bool allow_tf32 = false;      // fp32 on CUDA: one TF32 product where fp32's accuracy takes three
  double dropout_p = 0;         // share of the pairs (query, key) to drop after the softmax, 0 to 1

  bool operator==(const AttentionOptions&) const = default;
};

// "..." stands for any leading (batch) dimensions, the same for every tensor.
struct AttentionProblem {
  Pass pass = Pass::kForward;
  Device device;

  // Inputs. fp64, fp32, fp16 or bf16, all alike.     dense                   ragged
  TensorSpec query;                       // (..., Hq, Sq, D)        (Tq, Hq, D)
  TensorSpec key;                         // (..., Hk, Sk, D)        (Tk, Hk, D)
  TensorSpec value;                       // (..., Hk, Sk, Dv)       (Tk, Hk, Dv)
                                          // paged: query as ragged; key and value are
                                          // (blocks, page, Hk, D), under 16-bit queries also e4m3
  std::optional<TensorSpec> bias;         // broadcasts to           (sum n_i * m_i, Hq or 1)
                                          // (..., Hq, Sq, Sk)
                                          // in the inputs' dtype or fp32; bool: a mask,
                                          // true = may look, without a gradient
  std::optional<TensorSpec> key_lengths;  // broadcasts to (...)     -
  std::optional<TensorSpec> sinks;        // (Hq), fp32 or query's dtype: exp(sink) joins the
                                          // denominator of every row of a head, and lse counts it
  std::optional<Ragged> ragged;
  std::optional<Paged> paged;      // at most one of the two
  std::optional<TensorSpec> seed;  // one int64: which pairs are dropped; needed with dropout. In
                                   // memory of the device, so that graphs can be given another

  // Results of the forward pass, inputs of all others.
  TensorSpec out;                 // (..., Hq, Sq, Dv)       (Tq, Hq, Dv)
  std::optional<TensorSpec> lse;  // (..., Hq, Sq)           (Tq, Hq)
                                  // fp32; fp64 for fp64 inputs. Optional forward alone.

  // Backward and second pass. A gradient that is not asked for costs nothing.
  std::optional<TensorSpec> grad_out;    // like out; absent = zero
  std::optional<TensorSpec> grad_lse;    // like lse; absent = zero
  std::optional<TensorSpec> grad_query;  // like query, in its dtype
  std::optional<TensorSpec> grad_key;
  std::optional<TensorSpec> grad_value;
  std::optional<TensorSpec> grad_bias;  // the bias's own shape and dtype
  std::optional<TensorSpec> grad_sinks;

  // Tangent and second pass: the inputs move along their tangents.
  std::optional<TensorSpec> tangent_query;  // like query, in its dtype; absent = zero
  std::optional<TensorSpec> tangent_key;
  std::optional<TensorSpec> tangent_value;
  std::optional<TensorSpec> tangent_bias;
  std::optional<TensorSpec> tangent_sinks;
  std::optional<TensorSpec> tangent_out;  // like out; a result of the tangent pass, which the
  std::optional<TensorSpec> tangent_lse;  // second pass needs; like lse

  AttentionOptions options;

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
  const void* sinks = nullptr;
  const void* block_table = nullptr;
  const void* seq_lens = nullptr;
  const void* k_scale = nullptr;
  const void* v_scale = nullptr;
  const void* seed = nullptr;
  void* out = nullptr;  // written forward, else read
  void* lse = nullptr;
  const void* grad_out = nullptr;
  const void* grad_lse = nullptr;
  void* grad_query = nullptr;
  void* grad_key = nullptr;
  void* grad_value = nullptr;
  void* grad_bias = nullptr;
  void* grad_sinks = nullptr;
  const void* tangent_query = nullptr;
  const void* tangent_key = nullptr;
  const void* tangent_value = nullptr;
  const void* tangent_bias = nullptr;
  const void* tangent_sinks = nullptr;
  void* tangent_out = nullptr;  // written by the tangent pass, read by the second
  void* tangent_lse = nullptr;
};

// What a launch of a call is given: the structs of src/cuda/attention/params.h.
enum class Given {
  kCall,           // the problem, its tensors and the workspace
  kRagged,         // cumulative lengths, and the lists of blocks to make
  kBiasAlign,      // a bias, and room for its copy in aligned rows
  kBiasToHeads,    // a packed bias, and room for its copy head by head
  kBiasFromHeads,  // the gradient of such a copy, and where it belongs
  kBiasSum,        // as kCall, for the gradient of a shared bias
  kBiasSumLast,    // the same, for what adds up the parts of that sum
  kSinkSum,        // as kCall, for the gradient of the sinks
  kSinkSumLast,    // the same, for what adds up the parts of that sum
};

struct AttentionLaunch : LaunchStep {
  Given given = Given::kCall;
  int64_t first_batch = 0;  // kBiasSum, kBiasSumLast: of the bias's own batch

  bool operator==(const AttentionLaunch&) const = default;
};

// Who does the work and how it is partitioned. Plain data: print it, compare it, test it.
struct AttentionPlan {
  AttentionProblem problem;      // as asked, with options.scale filled in
  std::string kernel;            // the one that does most of the work: "cpu_neon_attention_fwd"
  const void* handle = nullptr;  // CUDA: that kernel in the library's catalogue
  std::string family;            // "sm80"; "cpu"

  // The problem as numbers. Ragged: batch counts sequences, lengths are the stated maxima.
  int64_t batch = 0;
  int64_t heads_q = 0;
  int64_t heads_k = 0;
  int64_t len_q = 0;
  int64_t len_k = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;

  int64_t block_q = 0;  // the tile: queries x keys
  int64_t block_k = 0;
  int64_t work_items = 0;  // tiles of queries (forward) or keys (backward), each of their splits
                           // counted; CPU: see below
  size_t workspace_bytes = 0;  // to pass to run(), 64-byte aligned

  // CUDA.
  std::vector<AttentionLaunch> launches;  // in their order
  int64_t slices = 1;  // parts of the batch (ragged: of the heads) that launches repeat for
  // Parts that the keys of one tile of queries come in; backward, the queries of one of split_tiles
  // tiles of keys, the last ones.
  int64_t splits = 1, split_tiles = 0;
  int64_t bias_splits = 1;       // parts that the sum of a shared bias's gradient comes in
  bool dq_order_varies = false;  // grad_query is summed in an order that differs from run to run

  // CPU. A work item is one chunk of query blocks of one (batch, head), and always the same piece
  // of arithmetic whoever runs it: that is why results do not depend on the number of threads.
  int64_t chunks = 1;  // of one (batch, head)
  int workers = 1;     // how many items are in flight at once, each with scratch of its own
  size_t scratch_bytes = 0;

  std::vector<Candidate> candidates;  // best first; the last is the one chosen
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

}  // namespace flashmoe
