// Kernels without a tile: the sort before the products, sums after them, and the router. Each
// family has its own, so that a build with one family has all it needs.
#pragma once

#include "cuda/moe/bwd_bias.cuh"
#include "cuda/moe/combine.cuh"
#include "cuda/moe/kernels/instantiate.cuh"
#include "cuda/moe/route.cuh"
#include "cuda/moe/sort.cuh"

using namespace flashmoe::cuda::moe;

extern "C" __global__ void __launch_bounds__(kScanThreads, 1)
    FLASHMOE_KERNEL(moe_sort)(const __grid_constant__ SortParams p) {
  moe_sort(p);
}

extern "C" __global__ void __launch_bounds__(kCountThreads)
    FLASHMOE_KERNEL(moe_count)(const __grid_constant__ SortParams p) {
  moe_count(p);
}

extern "C" __global__ void __launch_bounds__(kScanThreads, 1)
    FLASHMOE_KERNEL(moe_scan)(const __grid_constant__ SortParams p) {
  moe_scan(p);
}

extern "C" __global__ void __launch_bounds__(32)
    FLASHMOE_KERNEL(moe_place)(const __grid_constant__ SortParams p) {
  moe_place(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(moe_combine)(const __grid_constant__ CombineParams p) {
  moe_combine<KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(kScanThreads)
    FLASHMOE_KERNEL(moe_bwd_prepare)(const __grid_constant__ PrepareParams p) {
  moe_bwd_prepare(p);
}

extern "C" __global__ void __launch_bounds__(kBiasThreads)
    FLASHMOE_KERNEL(moe_bwd_bias)(const __grid_constant__ BwdBiasParams p) {
  moe_bwd_bias<KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(kBiasThreads)
    FLASHMOE_KERNEL(moe_bwd_bias_sum)(const __grid_constant__ BwdBiasParams p) {
  moe_bwd_bias_sum<KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(moe_bwd_scale)(const __grid_constant__ BwdScaleParams p) {
  moe_bwd_scale<KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(32 * kRouteWarps)
    FLASHMOE_KERNEL(moe_route)(const __grid_constant__ RouteParams p) {
  moe_route<KernelType>(p);
}

extern "C" __global__ void __launch_bounds__(32 * kRouteWarps)
    FLASHMOE_KERNEL(moe_route_bwd)(const __grid_constant__ RouteParams p) {
  moe_route_bwd<KernelType>(p);
}
