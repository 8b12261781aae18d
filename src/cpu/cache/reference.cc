// The oracle of writing to a cache: one number at a time.
#include "attention/lengths.h"
#include "cache/problem.h"
#include "cpu/oracle.h"

namespace flashmoe {
namespace {

using cpu::oracle::read;
using cpu::oracle::write;

struct Side {
  const TensorSpec& from;  // (T, Hk, D)
  const void* data;
  const TensorSpec& cache;  // (blocks, page, Hk, D)
  void* target;
  const std::optional<TensorSpec>& scale;
  const void* scale_data;
};

// What a number of head h is divided by.
double scale_of(const Side& s, int64_t h) {
  if (!s.scale) return 1;
  return read(DType::kFloat32, s.scale_data, s.scale->rank ? h * s.scale->stride[0] : 0);
}

// In fp32, as PyTorch would divide; fp64 stays fp64.
double quotient(DType dtype, double x, double scale) {
  if (dtype == DType::kFloat64) return x / scale;
  return static_cast<float>(x) / static_cast<float>(scale);
}

void append(const AppendProblem& p, const void* slots, const Side& s) {
  const int64_t page = s.cache.size(1), rows = s.cache.size(0) * page;
  for (int64_t t = 0; t < s.from.size(0); ++t) {
    const int64_t slot = read_int(p.slots, slots, t);
    if (slot < 0 || slot >= rows) continue;
    for (int64_t h = 0; h < s.from.size(1); ++h) {
      for (int64_t d = 0; d < s.from.size(2); ++d) {
        const double x = read(s.from.dtype, s.data,
                              t * s.from.stride[0] + h * s.from.stride[1] + d * s.from.stride[2]);
        const int64_t at = slot / page * s.cache.stride[0] + slot % page * s.cache.stride[1] +
                           h * s.cache.stride[2] + d * s.cache.stride[3];
        write(s.cache.dtype, s.target, at, s.scale ? quotient(s.from.dtype, x, scale_of(s, h)) : x);
      }
    }
  }
}

}  // namespace

Status run_reference(const AppendProblem& problem, const AppendTensors& tensors) {
  if (Status status = check(problem); !status.ok()) return status;
  if (problem.device.type != DeviceType::kCpu) {
    return unsupported("the reference runs on host memory only");
  }
  append(problem, tensors.slots,
         {problem.key, tensors.key, problem.key_cache, tensors.key_cache, problem.k_scale,
          tensors.k_scale});
  append(problem, tensors.slots,
         {problem.value, tensors.value, problem.value_cache, tensors.value_cache, problem.v_scale,
          tensors.v_scale});
  return {};
}

}  // namespace flashmoe
