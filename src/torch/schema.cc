// The ops' names and arguments. Each file of an op registers what computes it; CUDA tensors go the
// same way as CPU tensors, and the planner says what can run there, and why not.
#include <torch/csrc/stable/library.h>

// The arguments of Arguments, in its order.
#define FLASHMOE_TENSORS                                                        \
  "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? key_lengths, " \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
#define FLASHMOE_OPTIONS                                                        \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, SymInt window_left, " \
  "SymInt window_right, float? scale, float softcap"

STABLE_TORCH_LIBRARY(flashmoe, m) {
  m.def("attention_forward(" FLASHMOE_TENSORS FLASHMOE_OPTIONS ") -> (Tensor out, Tensor lse)");
  m.def("attention(" FLASHMOE_TENSORS FLASHMOE_OPTIONS
        ", bool deterministic) -> (Tensor out, Tensor lse)");
  m.def("attention_backward(Tensor? grad_out, Tensor? grad_lse, " FLASHMOE_TENSORS
        "Tensor out, Tensor lse, " FLASHMOE_OPTIONS
        ", bool deterministic, bool needs_query, bool needs_key, bool needs_value, bool needs_bias)"
        " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)");
  m.def("explain(" FLASHMOE_TENSORS FLASHMOE_OPTIONS
        ", bool backward, bool deterministic, str device) -> str");
  m.def("build_info() -> str");
}
