// Threads of a warpgroup, by the names that attention's kernels have for them.
#pragma once

#include "cuda/tma/warpgroup.cuh"

namespace flashmoe::cuda::sm90 {

using tma::fragment_column;
using tma::fragment_row;
using tma::kWarpgroupRows;
using tma::kWarpgroupThreads;
using tma::kWarpgroupWarps;
using tma::lane;
using tma::warp_arrive;
using tma::warpgroup_thread;
using tma::warpgroup_warp;

}  // namespace flashmoe::cuda::sm90
