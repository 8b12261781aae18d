// One instruction set's kernels: compiled once per target, see cpu/target.h.
#include "cpu/attention/kernels.h"

#include "cpu/attention/bwd.h"
#include "cpu/attention/fwd.h"
#include "cpu/attention/paged.h"

namespace flashmoe::cpu {
namespace {

template <class M>
constexpr Kernels kKernels = {
    M::kBlock,        M::kKeyStep, forward_scratch<M>, forward<M>,   backward_scratch<M>,
    partial_bytes<M>, backward<M>, reduce<M>,          bias_grad<M>, sink_grad<M>,
    paged_scratch<M>, paged<M>,    combine<M>,
};

}  // namespace

extern const Arithmetics<Kernels> FLASHMOE_OF_TARGET(attention);
const Arithmetics<Kernels> FLASHMOE_OF_TARGET(attention) = {
    kKernels<ExactProducts<float>>, kKernels<ExactProducts<double>>, kKernels<Bf16Products>};

}  // namespace flashmoe::cpu
