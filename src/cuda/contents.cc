// What this build has for GPUs: the families, and the kernels of every operator.
#include <algorithm>

#include "cuda/attention/catalogue.h"
#include "cuda/cache/catalogue.h"
#include "cuda/cache/params.h"
#include "cuda/moe/catalogue.h"
#include "cuda/runtime/families.h"
#include "cuda/runtime/images.h"
#include "flashmoe/device.h"

namespace flashmoe {

std::vector<CudaKernel> cuda_kernels() {
  std::vector<CudaKernel> list;
  for (const cuda::Kernel& k : cuda::kernels()) {
    list.push_back({k.id.name, k.family, k.id.image->name, k.id.symbol, cuda::chips_of(k.id),
                    cuda::role_name(k.role), k.dtype, k.head_dim, k.block_q, k.block_k, k.threads,
                    k.shared_bytes});
  }
  for (const cuda::moe::Kernel& k : cuda::moe::kernels()) {
    list.push_back({k.id.name, k.family, k.id.image->name, k.id.symbol, cuda::chips_of(k.id),
                    cuda::moe::role_name(k.role), k.dtype, 0, k.tile.block_m, k.tile.block_n,
                    k.threads, k.shared_bytes});
  }
  for (const cuda::cache::Kernel& k : cuda::cache::kernels()) {
    list.push_back({k.id.name, k.family, k.id.image->name, k.id.symbol, cuda::chips_of(k.id),
                    cuda::cache::kAppendRole, DType::kFloat16, 0, 0, 0, cuda::cache::kAppendThreads,
                    0});
  }
  return list;
}

std::vector<CudaFamily> cuda_families() {
  const std::vector<CudaKernel> kernels = cuda_kernels();
  std::vector<CudaFamily> list;
  for (const cuda::ChipFamily& family : cuda::chip_families()) {
    CudaFamily& row = list.emplace_back();
    row.name = family.name;
    row.oldest = family.oldest;
    row.newest = family.newest;
    row.machine_code.assign(family.machine_code.begin(), family.machine_code.end());
    row.ptx = family.ptx;
    row.dtypes = family.dtypes;
    for (const CudaKernel& kernel : kernels) {
      if (kernel.family != row.name) continue;
      row.in_build = true;
      if (kernel.head_dim > 0) row.head_dims.push_back(kernel.head_dim);
    }
    std::sort(row.head_dims.begin(), row.head_dims.end());
    row.head_dims.erase(std::unique(row.head_dims.begin(), row.head_dims.end()),
                        row.head_dims.end());
  }
  return list;
}

}  // namespace flashmoe
