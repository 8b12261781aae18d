// The ops' names and arguments. Each file of an op registers what computes it; CUDA tensors go the
// same way as CPU tensors, and the planner says what can run there, and why not.
#include <torch/csrc/stable/library.h>

// Arguments (arguments.h) in its order; the options are those of AttentionOptions.
#define FLASHMOE_ARGUMENTS                                                      \
  "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? key_lengths, " \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, "           \
  "SymInt max_seqlen_k, bool causal, SymInt window_left, SymInt window_right, " \
  "float? scale, float softcap, bool deterministic"

// Tangents (arguments.h) in its order.
#define FLASHMOE_TANGENTS                                               \
  "Tensor? tangent_query, Tensor? tangent_key, Tensor? tangent_value, " \
  "Tensor? tangent_bias"

// BackwardArguments (arguments.h) in its order.
#define FLASHMOE_BACKWARD_ARGUMENTS                                                 \
  "Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, " FLASHMOE_ARGUMENTS \
  ", bool needs_query, bool needs_key, bool needs_value, bool needs_bias"

// MoeArguments (moe_arguments.h) in its order.
#define FLASHMOE_MOE_ARGUMENTS                                                  \
  "Tensor x, Tensor gate_up, Tensor down, Tensor? up_bias, Tensor? down_bias, " \
  "Tensor ids, Tensor? weights, str activation"

STABLE_TORCH_LIBRARY(flashmoe, m) {
  m.def("attention_forward(" FLASHMOE_ARGUMENTS ") -> (Tensor out, Tensor lse)");
  m.def("attention(" FLASHMOE_ARGUMENTS ") -> (Tensor out, Tensor lse)");
  m.def("attention_backward(" FLASHMOE_BACKWARD_ARGUMENTS
        ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)");
  m.def("attention_gradients(" FLASHMOE_BACKWARD_ARGUMENTS
        ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)");
  m.def("attention_tangent(" FLASHMOE_TANGENTS ", Tensor out, Tensor lse, " FLASHMOE_ARGUMENTS
        ") -> (Tensor tangent_out, Tensor tangent_lse)");
  m.def("attention_second(" FLASHMOE_TANGENTS
        ", Tensor tangent_out, Tensor tangent_lse, " FLASHMOE_BACKWARD_ARGUMENTS
        ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)");
  m.def("explain(" FLASHMOE_ARGUMENTS ", str of, str device) -> str");

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
