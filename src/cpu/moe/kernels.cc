// One instruction set's kernels: compiled once per target, see cpu/target.h.
#include "cpu/moe/kernels.h"

#include "cpu/moe/bwd.h"
#include "cpu/moe/fwd.h"
#include "cpu/moe/route.h"

namespace flashmoe::cpu {
namespace {

template <class M>
constexpr moe::Kernels kKernels = {
    .element_bytes = sizeof(typename M::Element),
    .accumulator_bytes = sizeof(typename M::A),
    // Flat from 96 to 256 rows and from 64 to 128 columns on a Neoverse V1. Where a product is so
    // fast that packing shows, attention's tiles are larger, and so are these.
    .block_rows = larger(128, M::kBlock),
    .block_inner = 128,
    .row_step = kProductPanel<typename M::A>,
    .grad_rows = moe::kGradRows,
    .grad_cols = moe::kGradCols,
    .forward_scratch = moe::forward_scratch<M>,
    .forward = moe::forward<M>,
    .backward_scratch = moe::backward_scratch<M>,
    .backward = moe::backward<M>,
    .grad_gate_up = moe::grad_gate_up<M>,
    .grad_down = moe::grad_down<M>,
    .combine = moe::combine<M>,
    .route_scratch = moe::route_scratch<typename M::A>,
    .route_forward = moe::route_forward<typename M::A>,
    .route_backward = moe::route_backward<typename M::A>,
};

}  // namespace

extern const Arithmetics<moe::Kernels> FLASHMOE_OF_TARGET(moe);
const Arithmetics<moe::Kernels> FLASHMOE_OF_TARGET(moe) = {
    kKernels<ExactProducts<float>>, kKernels<ExactProducts<double>>, kKernels<Bf16Products>};

}  // namespace flashmoe::cpu
