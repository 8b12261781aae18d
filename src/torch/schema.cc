// The ops' names and arguments. Each file of an op registers what computes it; CUDA tensors go the
// same way as CPU tensors, and the planner says what can run there, and why not.
#include <torch/csrc/stable/library.h>

// Arguments (arguments.h) in its order; the options are those of AttentionOptions.
#define FLASHMOE_ARGUMENTS                                                 \
  "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, "  \
  "Tensor? key_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "      \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "                \
  "SymInt window_left, SymInt window_right, float? scale, float softcap, " \
  "bool deterministic, bool allow_tf32, float dropout_p, Tensor? seed"

// Tangents (arguments.h) in its order.
#define FLASHMOE_TANGENTS                                               \
  "Tensor? tangent_query, Tensor? tangent_key, Tensor? tangent_value, " \
  "Tensor? tangent_bias, Tensor? tangent_sinks"

// BackwardArguments (arguments.h) in its order.
#define FLASHMOE_BACKWARD_ARGUMENTS                                                 \
  "Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, " FLASHMOE_ARGUMENTS \
  ", bool needs_query, bool needs_key, bool needs_value, bool needs_bias, bool needs_sinks"
#define FLASHMOE_GRADIENTS \
  "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, Tensor grad_sinks)"

// PagedArguments (paged_arguments.h) in its order, under the names that Python's functions have for
// them: refusals name them. An absent maximum is the bound that the shapes give.
#define FLASHMOE_PAGED_ARGUMENTS                                                    \
  "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, " \
  "Tensor? cu_seqlens_q, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "         \
  "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool causal, SymInt window_left, "   \
  "SymInt window_right, float? scale, float softcap"

// AppendArguments (paged_arguments.h) in its order.
#define FLASHMOE_APPEND_ARGUMENTS                                \
  "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, " \
  "Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale"

// MoeArguments (moe_arguments.h) in its order.
#define FLASHMOE_MOE_ARGUMENTS                                                  \
  "Tensor x, Tensor gate_up, Tensor down, Tensor? up_bias, Tensor? down_bias, " \
  "Tensor ids, Tensor? weights, str activation"

STABLE_TORCH_LIBRARY(flashmoe, m) {
  m.def("attention_forward(" FLASHMOE_ARGUMENTS ") -> (Tensor out, Tensor lse)");
  m.def("attention(" FLASHMOE_ARGUMENTS ") -> (Tensor out, Tensor lse)");
  m.def("attention_backward(" FLASHMOE_BACKWARD_ARGUMENTS ") -> " FLASHMOE_GRADIENTS);
  // The same where a node in C++ has recorded the call (attention_node.cc).
  m.def(
      "attention_backward_plain(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
      "Tensor? bias, Tensor out, Tensor lse, bool causal, float? scale, bool needs_query, "
      "bool needs_key, bool needs_value, bool needs_bias) -> (Tensor grad_query, "
      "Tensor grad_key, Tensor grad_value, Tensor grad_bias)");
  m.def("attention_gradients(" FLASHMOE_BACKWARD_ARGUMENTS ") -> " FLASHMOE_GRADIENTS);
  m.def("attention_tangent(" FLASHMOE_TANGENTS ", Tensor out, Tensor lse, " FLASHMOE_ARGUMENTS
        ") -> (Tensor tangent_out, Tensor tangent_lse)");
  m.def("attention_second(" FLASHMOE_TANGENTS
        ", Tensor tangent_out, Tensor tangent_lse, " FLASHMOE_BACKWARD_ARGUMENTS
        ") -> " FLASHMOE_GRADIENTS);
  m.def("explain(" FLASHMOE_ARGUMENTS ", str of, str device) -> str");

  // Nothing here has a gradient: the plain names refuse to be asked for one, their `unchecked`
  // twins are for callers that have done so themselves. Without `return_lse`, lse is empty.
  m.def("attention_paged(" FLASHMOE_PAGED_ARGUMENTS
        ", bool return_lse) -> (Tensor out, Tensor lse)");
  m.def("attention_paged_unchecked(" FLASHMOE_PAGED_ARGUMENTS
        ", bool return_lse) -> (Tensor out, Tensor lse)");
  m.def("attention_paged_out(" FLASHMOE_PAGED_ARGUMENTS ", Tensor(a!) out, Tensor(b!)? lse) -> ()");
  m.def("attention_paged_out_unchecked(" FLASHMOE_PAGED_ARGUMENTS
        ", Tensor(a!) out, Tensor(b!)? lse) -> ()");
  m.def("explain_paged(" FLASHMOE_PAGED_ARGUMENTS ", bool return_lse, str device) -> str");
  m.def("cache_append(" FLASHMOE_APPEND_ARGUMENTS ") -> ()");
  m.def("cache_append_unchecked(" FLASHMOE_APPEND_ARGUMENTS ") -> ()");
  m.def(
      "explain_append(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping, "
      "Tensor? k_scale, Tensor? v_scale, str device) -> str");

  // Without `keep`, pre and routing are empty.
  m.def("moe_forward(" FLASHMOE_MOE_ARGUMENTS
        ", bool keep) -> (Tensor out, Tensor pre, Tensor routing)");
  m.def("moe(" FLASHMOE_MOE_ARGUMENTS ", bool keep) -> (Tensor out, Tensor pre, Tensor routing)");
  m.def("moe_backward(Tensor grad_out, Tensor pre, Tensor routing, " FLASHMOE_MOE_ARGUMENTS
        ", bool needs_x, bool needs_gate_up, bool needs_down, bool needs_up_bias, "
        "bool needs_down_bias, bool needs_weights) -> (Tensor grad_x, Tensor grad_gate_up, "
        "Tensor grad_down, Tensor grad_up_bias, Tensor grad_down_bias, Tensor grad_weights)");
  m.def("explain_moe(" FLASHMOE_MOE_ARGUMENTS ", bool keep, bool backward, str device) -> str");
  // Weights first: torch.library.opcheck adds all results to the first one.
  m.def(
      "route_forward(Tensor logits, Tensor? bias, SymInt k, str scoring, bool normalize)"
      " -> (Tensor weights, Tensor ids)");
  m.def(
      "route(Tensor logits, Tensor? bias, SymInt k, str scoring, bool normalize)"
      " -> (Tensor weights, Tensor ids)");
  m.def(
      "route_backward(Tensor grad_weights, Tensor logits, Tensor ids, str scoring, "
      "bool normalize) -> Tensor");

  m.def("build_info() -> str");
}
