#include "cuda/backend.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "attention/problem.h"
#include "attention/text.h"
#include "cuda/catalogue.h"
#include "cuda/driver.h"
#include "cuda/params.h"

namespace flashmoe::cuda {
namespace {

constexpr int64_t kMaxGridYZ = 65535;

// Shared memory one block may have, opted in: the CUDA programming guide's table of compute
// capabilities.
int max_shared_bytes(int compute_capability) {
  switch (compute_capability) {
    case 75:
      return 64 << 10;
    case 80:
    case 87:
      return 163 << 10;
    case 90:
    case 100:
    case 103:
      return 227 << 10;
    default:
      return 99 << 10;  // 8.6, 8.9, 12.0, and the least any later chip has had
  }
}

const char* forced_family() {
  const char* name = std::getenv("FLASHMOE_FAMILY");
  return name && *name ? name : nullptr;
}

// What this build's kernels cannot do of the problem; empty when there is nothing.
std::string missing_option(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (p.pass == Pass::kBackward) return "the backward pass has no CUDA kernel yet";
  if (p.query.dtype != DType::kFloat16 && p.query.dtype != DType::kBFloat16) {
    return text("query is ", dtype_name(p.query.dtype), "; CUDA kernels take float16 and bfloat16");
  }
  if (p.ragged) return "ragged batches (cu_seqlens) have no CUDA kernel yet";
  if (p.bias) return "bias has no CUDA kernel yet";
  if (p.key_lengths) return "key_lengths has no CUDA kernel yet";
  if (p.softcap > 0) return "softcap has no CUDA kernel yet";
  if (p.window_left >= 0 || (p.window_right >= 0 && !p.causal))
    return "window has no CUDA kernel yet";
  if (plan.head_dim != plan.head_dim_v) {
    return text("value has head dim ", plan.head_dim_v, " and query ", plan.head_dim,
                "; CUDA kernels need them equal for now");
  }
  if (plan.len_q > INT32_MAX || plan.len_k > INT32_MAX - 1024)
    return "sequences are longer than 2^31";
  for (const auto& [name, spec] : {std::pair{"query", &p.query}, std::pair{"key", &p.key},
                                   std::pair{"value", &p.value}, std::pair{"out", &p.out}}) {
    if (!in_place(*spec)) {
      return text(name,
                  " cannot be addressed where it lies (its last dimension must have stride 1, its "
                  "rows must be "
                  "16-byte aligned); call .contiguous() on it");
    }
  }
  return {};
}

// What keeps kernel k from running the plan's problem on its chip; empty when nothing does.
std::string kernel_misfit(const FwdKernel& k, const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (k.dtype != p.query.dtype) return "is for another dtype";
  if (k.tile.head_dim != plan.head_dim) return text("is for head dim ", k.tile.head_dim);
  if (k.tile.causal != p.causal) return k.tile.causal ? "is causal" : "has no mask";
  const int limit = max_shared_bytes(p.device.compute_capability);
  if (k.tile.shared_bytes() > limit) {
    return text("needs ", k.tile.shared_bytes(), " bytes of shared memory, the chip has ", limit);
  }
  return {};
}

std::string chip_name(int compute_capability) { return text("sm_", compute_capability); }

// Strides of (batch, head, row); leading dimensions are one batch, which in_place() has made sure
// of.
Strides strides(const TensorSpec& spec, bool has_col) {
  const int row = spec.rank - (has_col ? 2 : 1);
  Strides s{0, spec.stride[row - 1], spec.stride[row]};
  for (int i = row - 2; i >= 0; --i) {
    if (spec.shape[i] > 1) {
      s.batch = spec.stride[i];
      break;
    }
  }
  return s;
}

Status check_aligned(const char* name, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % 16 == 0) return {};
  return invalid(name,
                 " begins at an address that is not a multiple of 16 bytes; call .clone() on it");
}

const FwdKernel* find_kernel(const std::string& name) {
  for (const FwdKernel& k : fwd_kernels()) {
    if (name == k.id.name) return &k;
  }
  return nullptr;
}

}  // namespace

bool in_place(const TensorSpec& spec) {
  if (spec.rank < 2) return false;
  if (spec.size(-1) > 1 && spec.step(-1) != 1) return false;
  const int64_t per_chunk = 16 / dtype_bytes(spec.dtype);
  for (int i = 0; i < spec.rank - 1; ++i) {
    if (spec.shape[i] > 1 && spec.stride[i] % per_chunk != 0) return false;
  }
  // (..., H, S, D): each leading dimension must continue the one after it.
  int64_t inner = -1, reach = 0;
  for (int i = spec.rank - 4; i >= 0; --i) {
    if (spec.shape[i] <= 1) continue;
    if (inner >= 0 && spec.stride[i] != reach) return false;
    inner = i;
    reach = spec.stride[i] * spec.shape[i];
  }
  return true;
}

Status choose(AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  const char* forced = forced_family();
  if (forced && std::strcmp(forced, "sm75") && std::strcmp(forced, "sm80") &&
      std::strcmp(forced, "sm90") && std::strcmp(forced, "cpu")) {
    return invalid("FLASHMOE_FAMILY is ", forced, "; it must be sm75, sm80, sm90 or cpu");
  }
  const std::string missing = missing_option(plan);
  std::string reasons;
  const auto pass_over = [&](const char* family, const std::string& why) {
    plan.candidates.push_back({family, "passed over: " + why});
    reasons += text(reasons.empty() ? "" : "; ", family, ": ", why);
  };
  if (forced && !std::strcmp(forced, "cpu")) {
    return unsupported(
        "FLASHMOE_FAMILY is cpu, and query is on a CUDA device; move the tensors with .cpu()");
  }
  const FwdKernel* chosen = nullptr;
  for (const char* family : {"sm90", "sm80", "sm75"}) {
    if (forced && std::strcmp(forced, family)) {
      pass_over(family, text("FLASHMOE_FAMILY asks for ", forced));
      continue;
    }
    if (std::strcmp(family, "sm80") || fwd_kernels().empty()) {
      pass_over(family, "this build has no kernels of it");
      continue;
    }
    if (p.device.compute_capability < 80) {
      pass_over(family, text("needs sm_80 or newer, the device is ",
                             chip_name(p.device.compute_capability)));
      continue;
    }
    if (!missing.empty()) {
      pass_over(family, missing);
      continue;
    }
    std::string misfit =
        text("head dim ", plan.head_dim, " has no CUDA kernel yet; 64 and 128 have");
    for (const FwdKernel& k : fwd_kernels()) {
      const std::string why = kernel_misfit(k, plan);
      if (why.empty()) chosen = &k;
      if (!why.empty() && k.tile.head_dim == plan.head_dim && k.dtype == p.query.dtype &&
          k.tile.causal == p.causal) {
        misfit = text(k.id.name, " ", why);
      }
    }
    if (chosen) break;
    pass_over(family, misfit);
  }
  if (!chosen) {
    return unsupported("no CUDA kernel of this build can run this call on ",
                       chip_name(p.device.compute_capability), " (", reasons,
                       "). The CPU backend runs it: move the tensors with .cpu()");
  }
  plan.candidates.push_back(
      {chosen->id.name, text("chosen: the ", chosen->family, " family's tile for head dim ",
                             plan.head_dim, p.causal ? ", causal" : "")});
  plan.kernel = chosen->id.name;
  plan.family = chosen->family;
  plan.block_q = chosen->tile.block_q;
  plan.block_k = chosen->tile.block_k;
  plan.threads = chosen->tile.threads();
  plan.shared_bytes = chosen->tile.shared_bytes();
  plan.grid[0] = static_cast<uint32_t>((plan.len_q + plan.block_q - 1) / plan.block_q);
  plan.grid[1] = static_cast<uint32_t>(plan.heads_q);
  plan.grid[2] = static_cast<uint32_t>(std::min(plan.batch, kMaxGridYZ));
  plan.work_items = plan.grid[0] * plan.heads_q * plan.batch;
  if (plan.heads_q > kMaxGridYZ)
    return unsupported("query has ", plan.heads_q, " heads; CUDA kernels take at most ", kMaxGridYZ,
                       "; move some heads into the batch, or the tensors to the CPU");
  return {};
}

Status run(const AttentionPlan& plan, const AttentionTensors& t, const Launch& launch) {
  if (plan.work_items == 0) return {};
  for (const auto& [name, data] :
       {std::pair{"query", t.query}, std::pair{"key", t.key}, std::pair{"value", t.value},
        std::pair{"out", static_cast<const void*>(t.out)}}) {
    if (Status status = check_aligned(name, data); !status.ok()) return status;
  }
  const FwdKernel* kernel = find_kernel(plan.kernel);
  if (!kernel)
    return invalid("the plan names kernel ", plan.kernel, ", which is not in this build");

  const AttentionProblem& problem = plan.problem;
  const double scale = *problem.scale;
  AttentionFwdParams p{};
  p.query_strides = strides(problem.query, true);
  p.key_strides = strides(problem.key, true);
  p.value_strides = strides(problem.value, true);
  p.out_strides = strides(problem.out, true);
  if (problem.lse) p.lse_strides = strides(*problem.lse, false);
  p.group = static_cast<int32_t>(plan.heads_q / plan.heads_k);
  p.len_q = static_cast<int32_t>(plan.len_q);
  p.len_k = static_cast<int32_t>(plan.len_k);
  p.scale_log2 = scale == 0 ? 1.f : static_cast<float>(std::fabs(scale) * M_LOG2E);
  p.sign = scale > 0 ? 1.f : scale < 0 ? -1.f : 0.f;

  LaunchShape shape;
  shape.threads = plan.threads;
  shape.shared_bytes = static_cast<uint32_t>(plan.shared_bytes);
  // A grid's third dimension is 16-bit; a larger batch takes several launches.
  for (int64_t first = 0; first < plan.batch; first += kMaxGridYZ) {
    const auto at = [&](const void* data, const Strides& s) {
      return static_cast<const char*>(data) + first * s.batch * 2;
    };
    p.query = at(t.query, p.query_strides);
    p.key = at(t.key, p.key_strides);
    p.value = at(t.value, p.value_strides);
    p.out = const_cast<char*>(at(t.out, p.out_strides));
    p.lse = t.lse ? static_cast<float*>(t.lse) + first * p.lse_strides.batch : nullptr;
    shape.grid[0] = plan.grid[0];
    shape.grid[1] = plan.grid[1];
    shape.grid[2] = static_cast<uint32_t>(std::min(plan.batch - first, kMaxGridYZ));
    Status status =
        cuda::launch(kernel->id, shape, problem.device.ordinal, launch.stream, &p, sizeof(p));
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace flashmoe::cuda

namespace flashmoe {

bool needs_copy(const TensorSpec& spec, const Device& device) {
  return device.type == DeviceType::kCuda && !cuda::in_place(spec);
}

Result<std::vector<Device>> cuda_devices() {
  const Result<std::vector<cuda::DeviceInfo>> found = cuda::devices();
  if (!found.ok()) return found.status();
  std::vector<Device> list;
  for (const cuda::DeviceInfo& info : found.value()) {
    Device device;
    device.type = DeviceType::kCuda;
    device.ordinal = info.ordinal;
    device.compute_capability = info.compute_capability;
    list.push_back(device);
  }
  return list;
}

std::vector<CudaKernel> cuda_kernels() {
  std::vector<CudaKernel> list;
  for (const cuda::FwdKernel& k : cuda::fwd_kernels()) {
    list.push_back({k.id.name, k.family, k.id.image->name, k.dtype, k.tile.head_dim, k.tile.causal,
                    k.tile.block_q, k.tile.block_k, k.tile.threads(), k.tile.shared_bytes()});
  }
  return list;
}

}  // namespace flashmoe
