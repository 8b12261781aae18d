// The ops' names and arguments. Each file of an op registers what computes it; CUDA tensors go the
// same way as CPU tensors, and the planner says what can run there, and why not.
#include <torch/csrc/stable/library.h>

// Arguments (arguments.h) in its order; the options are those of AttentionOptions.
#define FLASHMOE_ARGUMENTS                                                      \
  "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? key_lengths, " \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, "           \
  "SymInt max_seqlen_k, bool causal, SymInt window_left, SymInt window_right, " \
  "float? scale, float softcap, bool deterministic"

STABLE_TORCH_LIBRARY(flashmoe, m) {
  m.def("attention_forward(" FLASHMOE_ARGUMENTS ") -> (Tensor out, Tensor lse)");
  m.def("attention(" FLASHMOE_ARGUMENTS ") -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor "
      "lse, " FLASHMOE_ARGUMENTS
      ", bool needs_query, bool needs_key, bool needs_value, bool needs_bias)"
      " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)");
  m.def("explain(" FLASHMOE_ARGUMENTS ", bool backward, str device) -> str");
  m.def("build_info() -> str");
}
