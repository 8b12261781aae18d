// One instruction set's kernels: compiled once per target, see cpu/target.h.
#include "cpu/attention/kernels.h"

#include "cpu/attention/bwd.h"
#include "cpu/attention/fwd.h"
#include "cpu/attention/paged.h"
#include "cpu/attention/second.h"
#include "cpu/attention/tangent.h"

namespace flashmoe::cpu {
namespace {

template <class Scratch>
constexpr GradientKernels kGradients = {gradient_scratch<Scratch>, gradients<Scratch>,
                                        bias_gradient<Scratch>};

template <class M>
constexpr Kernels kKernels = {
    M::kBlock,
    M::kKeyStep,
    forward_scratch<M>,
    forward<M>,
    tangent_scratch<M>,
    tangent<M>,
    kGradients<BackwardScratch<M>>,
    kGradients<SecondScratch<M>>,
    partial_bytes<M>,
    reduce<M>,
    sink_grad<M>,
    paged_scratch<M>,
    paged<M>,
    combine<M>,
};

}  // namespace

extern const Arithmetics<Kernels> FLASHMOE_OF_TARGET(attention);
const Arithmetics<Kernels> FLASHMOE_OF_TARGET(attention) = {
    kKernels<ExactProducts<float>>, kKernels<ExactProducts<double>>, kKernels<Bf16Products>};

}  // namespace flashmoe::cpu
