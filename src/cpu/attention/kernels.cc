// One instruction set's kernels. CMake compiles this file once per target, with FLASHMOE_CPU_TARGET
// naming it and the compiler flags choosing its instructions; all else it includes is local to this
// file.
#include "cpu/attention/kernels.h"

#include "cpu/attention/bwd.h"
#include "cpu/attention/fwd.h"

#define FLASHMOE_CONCAT_(a, b) a##b
#define FLASHMOE_CONCAT(a, b) FLASHMOE_CONCAT_(a, b)
#define FLASHMOE_STRING_(a) #a
#define FLASHMOE_STRING(a) FLASHMOE_STRING_(a)

namespace flashmoe::cpu {
namespace {

template <class M>
constexpr Kernels kKernels = {
    M::kBlock,        M::kKeyStep, forward_scratch<M>, forward<M>,   backward_scratch<M>,
    partial_bytes<M>, backward<M>, reduce<M>,          bias_grad<M>,
};

}  // namespace

extern const Target FLASHMOE_CONCAT(target_, FLASHMOE_CPU_TARGET);
const Target FLASHMOE_CONCAT(target_, FLASHMOE_CPU_TARGET) = {
    FLASHMOE_STRING(FLASHMOE_CPU_TARGET), kKernels<ExactProducts<float>>,
    kKernels<ExactProducts<double>>, kKernels<Bf16Products>};

}  // namespace flashmoe::cpu
