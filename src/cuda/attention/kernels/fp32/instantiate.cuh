// What the .cu files of fp32 share: see kernels/instantiate.cuh. FLASHMOE_DTYPE is fp32 or tf32,
// FLASHMOE_TABLE "cuda/attention/kernels/fp32.h".
#pragma once

#include "cuda/tile/float_product.cuh"

namespace flashmoe::cuda {

namespace FLASHMOE_FAMILY::dtypes {
using fp32 = Fp32;
using tf32 = Fp32;
}  // namespace FLASHMOE_FAMILY::dtypes

// How products are made.
namespace sm80::products {
using fp32 = ThreeTf32;
using tf32 = OneTf32;
}  // namespace sm80::products
namespace sm75::products {
using fp32 = Fma;
}  // namespace sm75::products
using KernelProduct = FLASHMOE_FAMILY::products::FLASHMOE_DTYPE;

}  // namespace flashmoe::cuda

#include "cuda/attention/kernels/instantiate.cuh"

namespace table = flashmoe::cuda::FLASHMOE_FAMILY::FLASHMOE_DTYPE;
