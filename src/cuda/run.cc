// From a plan and its tensors to launches.
#include <cmath>

#include "attention/problem.h"
#include "attention/text.h"
#include "cuda/backend.h"
#include "cuda/catalogue.h"
#include "cuda/driver.h"
#include "cuda/params.h"

namespace flashmoe::cuda {
namespace {

// A tensor's batch strides as the problem's leading dimensions have them; 0 where it is broadcast.
void lead_strides(const TensorSpec& spec, int trailing, const Geometry& g, int64_t* strides) {
  const int own = spec.rank - trailing;
  for (int i = 0; i < g.num_lead; ++i) {
    const int at = i - (g.num_lead - own);
    strides[i] = at >= 0 && spec.shape[at] > 1 ? spec.stride[at] : 0;
  }
}

Strides strides_of(const TensorSpec& spec, bool has_col, const Geometry& g) {
  Strides s{};
  const int row = spec.rank - (has_col ? 2 : 1);
  if (g.ragged) {  // (tokens, heads, D)
    s.row = spec.stride[row - 1];
    s.head = spec.stride[row];
    return s;
  }
  s.row = spec.stride[row];
  s.head = spec.stride[row - 1];
  lead_strides(spec, has_col ? 3 : 2, g, s.batch);
  return s;
}

// Leading dimensions that every tensor walks with one stride become one: dividing is dear on a GPU.
void merge_batch(AttentionParams& p, std::initializer_list<int64_t*> tensors) {
  int kept = 0;
  for (int i = 0; i < p.batch_dims; ++i) {
    bool joins = kept > 0;
    for (int64_t* strides : tensors) {
      joins = joins && strides[kept - 1] == strides[i] * p.batch_sizes[i];
    }
    if (p.batch_sizes[i] == 1) continue;
    kept += joins ? 0 : 1;
    p.batch_sizes[kept - 1] = (joins ? p.batch_sizes[kept - 1] : 1) * p.batch_sizes[i];
    for (int64_t* strides : tensors) strides[kept - 1] = strides[i];
  }
  p.batch_dims = std::max(kept, 1);
}

void fill_problem(AttentionParams& p, const AttentionPlan& plan, const AttentionTensors& t,
                  const Geometry& g) {
  const AttentionProblem& problem = plan.problem;
  p.query = t.query;
  p.key = t.key;
  p.value = t.value;
  p.out = t.out;
  p.lse = static_cast<float*>(t.lse);
  p.query_strides = strides_of(problem.query, true, g);
  p.key_strides = strides_of(problem.key, true, g);
  p.value_strides = strides_of(problem.value, true, g);
  p.out_strides = strides_of(problem.out, true, g);
  if (problem.lse) p.lse_strides = strides_of(*problem.lse, false, g);
  p.batch = static_cast<int32_t>(plan.batch);
  p.batch_dims = g.num_lead;
  for (int i = 0; i < g.num_lead; ++i) p.batch_sizes[i] = static_cast<int32_t>(g.lead[i]);
  if (problem.key_lengths) {
    p.key_lengths = t.key_lengths;
    lead_strides(*problem.key_lengths, 0, g, p.key_lengths_strides);
    p.wide_lengths = problem.key_lengths->dtype == DType::kInt64;
  }
  if (problem.ragged) {
    p.cu_seqlens_q = t.cu_seqlens_q;
    p.cu_seqlens_k = t.cu_seqlens_k;
    p.cu_seqlens_q_stride = problem.ragged->cu_seqlens_q.stride[0];
    p.cu_seqlens_k_stride = problem.ragged->cu_seqlens_k.stride[0];
    p.wide_lengths = problem.ragged->cu_seqlens_q.dtype == DType::kInt64;
    p.tokens_q = problem.query.shape[0];
    p.tokens_k = problem.key.shape[0];
  }
  p.group = static_cast<int32_t>(plan.heads_q / plan.heads_k);
  p.len_q = static_cast<int32_t>(plan.len_q);
  p.len_k = static_cast<int32_t>(plan.len_k);
  p.head_dim = static_cast<int32_t>(plan.head_dim);
  p.head_dim_v = static_cast<int32_t>(plan.head_dim_v);
  const auto limit = [](int64_t side) {
    return side < 0 || side > kNoLimit ? kNoLimit : static_cast<int32_t>(side);
  };
  p.left = limit(g.left);
  p.right = limit(g.right);
  p.scale = static_cast<float>(g.scale);
  // With a scale of 0 all scores are 0, capped or not; a softcap_scale of 0 says that there is
  // none.
  const bool capped = g.softcap > 0 && g.scale != 0;
  p.softcap_scale = capped ? static_cast<float>(g.scale / g.softcap) : 0.f;
  p.scale_log2 = static_cast<float>((capped ? g.softcap : g.scale) * M_LOG2E);
}

Status check_aligned(const char* name, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % 16 == 0) return {};
  return invalid(name,
                 " begins at an address that is not a multiple of 16 bytes; call .clone() on it");
}

// One kernel, for the part of the batch that begins at p.first_batch.
template <class Params>
Status launch_part(const std::string& name, const uint32_t (&grid)[3], const AttentionPlan& plan,
                   const Launch& launch, const Params& p) {
  const Kernel* kernel = find_kernel(name);
  if (!kernel) return invalid("the plan names kernel ", name, ", which is not in this build");
  LaunchShape shape;
  for (int i = 0; i < 3; ++i) shape.grid[i] = grid[i];
  shape.threads = static_cast<uint32_t>(kernel->threads);
  shape.shared_bytes = static_cast<uint32_t>(kernel->shared_bytes);
  return cuda::launch(kernel->id, shape, plan.problem.device.ordinal, launch.stream, &p, sizeof(p));
}

// A grid's third dimension is 16-bit; a larger batch takes several rounds. `round` launches the
// kernels of one.
template <class Params, class Round>
Status in_rounds(const AttentionPlan& plan, Params& p, const Round& round) {
  const int64_t batch = plan.batch + (plan.problem.ragged ? 1 : 0);
  for (int64_t first = 0; first < batch; first += kMaxGridYZ) {
    p.first_batch = static_cast<int32_t>(first);
    Status status = round(static_cast<uint32_t>(std::min(batch - first, kMaxGridYZ)));
    if (!status.ok()) return status;
  }
  return {};
}

Status run_forward(const AttentionPlan& plan, const AttentionTensors& t, void* workspace,
                   const Launch& launch) {
  const Geometry g = geometry(plan.problem);
  AttentionFwdParams p{};
  fill_problem(p, plan, t, g);
  // The kernel wants a positive scale: see AttentionFwdParams::sign.
  p.sign = 1;
  if (p.softcap_scale == 0 && g.scale <= 0) {
    p.sign = g.scale < 0 ? -1.f : 0.f;
    p.scale_log2 = g.scale < 0 ? -p.scale_log2 : 1.f;
  }
  if (plan.grid[1] != plan.heads_q) {  // one query: a group's heads are its rows
    p.one_query = 1;
    p.len_q = p.group;
    for (Strides* s : {&p.query_strides, &p.out_strides, &p.lse_strides}) {
      s->row = s->head;
      s->head *= p.group;
    }
    p.group = 1;
  }
  merge_batch(p, {p.query_strides.batch, p.key_strides.batch, p.value_strides.batch,
                  p.out_strides.batch, p.lse_strides.batch, p.key_lengths_strides});
  p.splits = static_cast<int32_t>(plan.splits);
  if (plan.splits > 1) {
    p.dim = find_kernel(plan.kernel)->head_dim;
    p.partial_out = static_cast<float*>(workspace);
    p.partial_lse = p.partial_out + plan.splits * plan.batch * plan.grid[1] * p.len_q * p.dim;
  }
  return in_rounds(plan, p, [&](uint32_t count) {
    Status status = launch_part(plan.kernel, {plan.grid[0], plan.grid[1], count}, plan, launch, p);
    if (!status.ok() || plan.splits == 1) return status;
    return launch_part(plan.after[0], {static_cast<uint32_t>(p.len_q), plan.grid[1], count}, plan,
                       launch, p);
  });
}

Status run_backward(const AttentionPlan& plan, const AttentionTensors& t, void* workspace,
                    const Launch& launch) {
  const AttentionProblem& problem = plan.problem;
  const Geometry g = geometry(problem);
  AttentionBwdParams p{};
  fill_problem(p, plan, t, g);
  const auto fill = [&](Strides& strides, const std::optional<TensorSpec>& spec, bool has_col) {
    if (spec) strides = strides_of(*spec, has_col, g);
  };
  p.grad_out = t.grad_out;
  p.grad_lse = static_cast<const float*>(t.grad_lse);
  p.grad_query = t.grad_query;
  p.grad_key = t.grad_key;
  p.grad_value = t.grad_value;
  fill(p.grad_out_strides, problem.grad_out, true);
  fill(p.grad_lse_strides, problem.grad_lse, false);
  fill(p.grad_query_strides, problem.grad_query, true);
  fill(p.grad_key_strides, problem.grad_key, true);
  fill(p.grad_value_strides, problem.grad_value, true);
  merge_batch(p, {p.query_strides.batch, p.key_strides.batch, p.value_strides.batch,
                  p.out_strides.batch, p.lse_strides.batch, p.key_lengths_strides,
                  p.grad_out_strides.batch, p.grad_lse_strides.batch, p.grad_query_strides.batch,
                  p.grad_key_strides.batch, p.grad_value_strides.batch});

  const BackwardWorkspace w = backward_workspace(plan);
  const auto at = [&](size_t offset) { return static_cast<char*>(workspace) + offset; };
  p.heads_q = static_cast<int32_t>(plan.heads_q);
  p.rows = w.rows;
  p.block_q = static_cast<int32_t>(plan.block_q);
  p.dim = find_kernel(plan.kernel)->head_dim;
  p.row_terms = reinterpret_cast<float*>(at(w.row_terms));
  p.grad_query_sums = reinterpret_cast<float*>(at(w.grad_query_sums));
  p.turns = reinterpret_cast<int32_t*>(at(w.turns));
  p.tickets = reinterpret_cast<int32_t*>(at(w.tickets));
  // Without queries the preparing kernel does not run, and nobody adds.
  p.deterministic = problem.deterministic && p.grad_query && plan.len_q > 0;

  const uint32_t query_blocks = static_cast<uint32_t>(
      std::max<int64_t>((plan.len_q + plan.block_q - 1) / plan.block_q, problem.ragged ? 1 : 0));
  const uint32_t heads_q = static_cast<uint32_t>(plan.heads_q);
  return in_rounds(plan, p, [&](uint32_t count) {
    Status status = launch_part(plan.before[0], {query_blocks, heads_q, count}, plan, launch, p);
    if (status.ok()) {
      status = launch_part(plan.kernel, {plan.grid[0], plan.grid[1], count}, plan, launch, p);
    }
    if (status.ok() && p.grad_query) {
      status = launch_part(plan.after[0], {query_blocks, heads_q, count}, plan, launch, p);
    }
    return status;
  });
}

}  // namespace

Status run(const AttentionPlan& plan, const AttentionTensors& t, void* workspace,
           const Launch& launch) {
  const std::pair<const char*, const void*> aligned[] = {
      {"query", t.query},       {"key", t.key},
      {"value", t.value},       {"out", t.out},
      {"grad_out", t.grad_out}, {"grad_query", t.grad_query},
      {"grad_key", t.grad_key}, {"grad_value", t.grad_value},
      {"workspace", workspace},
  };
  for (const auto& [name, data] : aligned) {
    if (Status status = check_aligned(name, data); !status.ok()) return status;
  }
  return plan.problem.pass == Pass::kForward ? run_forward(plan, t, workspace, launch)
                                             : run_backward(plan, t, workspace, launch);
}

}  // namespace flashmoe::cuda

namespace flashmoe {

Result<std::vector<Device>> cuda_devices() {
  const Result<std::vector<cuda::DeviceInfo>> found = cuda::devices();
  if (!found.ok()) return found.status();
  std::vector<Device> list;
  for (const cuda::DeviceInfo& info : found.value()) {
    Device device;
    device.type = DeviceType::kCuda;
    device.ordinal = info.ordinal;
    device.compute_capability = info.compute_capability;
    device.multiprocessors = info.sm_count;
    list.push_back(device);
  }
  return list;
}

}  // namespace flashmoe
