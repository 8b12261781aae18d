#include "cuda/attention/paged_plan.h"

#include <algorithm>
#include <numeric>

#include "core/numbers.h"
#include "core/text.h"
#include "cuda/attention/lay_out.h"
#include "cuda/attention/paged.h"
#include "cuda/attention/planner.h"
#include "cuda/attention/sm90.h"
#include "cuda/attention/tile_choice.h"
#include "cuda/runtime/driver.h"

namespace flashmoe::cuda {
namespace {

constexpr int64_t kMostSplits = 128;
// Queries of a sequence that are combined at once: most have one, and CTAs without work cost too.
constexpr int64_t kCombinedQueries = 4;
// CTAs of the kernel for few rows have an item each if they are so many times what the chip holds
// at most: those of splits that a sequence turns out not to have end at once, which costs little.
constexpr int64_t kMostOwnItems = 8;
// From so many queries on, tiles of one head's queries are full enough to have a kernel of their
// own.
constexpr int64_t kChunkQueries = 64;

// Keys of a sequence at most: what the caller says, and what its row of the table can name.
int64_t most_keys(const AttentionPlan& plan) {
  const Paged& paged = *plan.problem.paged;
  const int64_t page = plan.problem.key.size(1), entries = paged.block_table.size(1);
  return entries > plan.len_k / page ? plan.len_k : entries * page;
}

// How keys are split. The device does the same for the lengths it finds: see paged_work.cuh.
struct PagedSplits {
  int64_t most = 1;     // of a sequence with up to 16 rows
  int64_t longest = 0;  // queries of a sequence whose keys may be split
  int64_t rows = 0;     // queries x splits of a sequence at most
  int64_t here = 1;     // splits that the longest sequence of few rows gets
};
PagedSplits splits_of(const AttentionPlan& plan, int64_t multiprocessors) {
  const int64_t group = plan.heads_q / plan.heads_k;
  PagedSplits s;
  s.most = std::clamp<int64_t>(multiprocessors / plan.heads_k, 1, kMostSplits);
  const int64_t by_keys = ceil_div(most_keys(plan), kLeastSplitKeys);
  for (int64_t queries = 1; queries <= plan.len_q; ++queries) {
    const int64_t of_rows = s.most / ceil_div(queries * group, kDecodeRows);
    if (of_rows < 2) break;
    const int64_t splits = std::min(of_rows, by_keys);
    if (splits < 2) break;
    s.longest = queries;
    s.rows = std::max(s.rows, queries * splits);
    s.here = std::max(s.here, splits);
  }
  return s;
}

struct PagedWorkspace {
  size_t sequences = 0;    // PagedSequence (batch + 1)
  size_t tickets = 0;      // int32_t
  size_t partial_out = 0;  // float (batch, rows, heads_q, dim)
  size_t partial_lse = 0;  // float (batch, rows, heads_q)
  size_t bytes = 0;
};
PagedWorkspace workspace_of(const AttentionPlan& plan, const PagedSplits& splits) {
  constexpr int64_t kAlignment = 256;
  PagedWorkspace w;
  const auto place = [&](int64_t bytes) {
    const size_t at = w.bytes;
    w.bytes += static_cast<size_t>(round_up(bytes, kAlignment));
    return at;
  };
  const int64_t rows = plan.batch * splits.rows * plan.heads_q;
  w.sequences = place((plan.batch + 1) * static_cast<int64_t>(sizeof(PagedSequence)));
  w.tickets = place(static_cast<int64_t>(sizeof(int32_t)));
  w.partial_out = place(rows * main_kernel(plan).head_dim * static_cast<int64_t>(sizeof(float)));
  w.partial_lse = place(rows * static_cast<int64_t>(sizeof(float)));
  return w;
}

// Tiles of rows at most, of one key head.
int64_t most_tiles(const AttentionPlan& plan) {
  const int64_t group = plan.heads_q / plan.heads_k;
  return ceil_div(plan.problem.query.size(0) * group, kDecodeRows) + plan.batch;
}

// 2^this many keys count as one where work is shared out: as few as keep the sum in 32 bits, with
// room for what CTAs count behind the end when there is nothing left.
int32_t cost_keys_log2(const AttentionPlan& plan) {
  const double items = static_cast<double>(most_tiles(plan)) * static_cast<double>(plan.heads_k);
  int32_t log2 = 6;
  const auto sum = [&] {
    return items * static_cast<double>((most_keys(plan) >> log2) + 2 * kMostSplits + 2);
  };
  while (log2 < 30 && sum() > INT32_MAX / 2) ++log2;
  return log2;
}

bool is(Role role, const AttentionLaunch& step) { return kernel_of(step).role == role; }

// Whether each CTA of the kernel for few rows has an item of its own.
bool item_each(const AttentionPlan& plan, const AttentionLaunch& step) {
  return is(Role::kPagedDecode, step) &&
         step.grid == grid_of(plan.heads_k, plan.splits, plan.batch);
}

// As many as divide the key heads and the CTAs of each kernel alike.
int32_t head_lanes(const AttentionPlan& plan) {
  int64_t lanes = plan.heads_k;
  for (const AttentionLaunch& step : plan.launches) {
    if (is(Role::kPaged, step) || (is(Role::kPagedDecode, step) && !item_each(plan, step))) {
      lanes = std::gcd(lanes, int64_t{step.grid[0]});
    }
  }
  return static_cast<int32_t>(lanes);
}

Strides token_strides(const TensorSpec& spec) {  // (tokens, heads, ...)
  Strides s{};
  s.row = spec.stride[0];
  s.head = spec.stride[1];
  return s;
}
Strides cache_strides(const TensorSpec& spec) {  // (blocks, page, heads, D)
  Strides s{};
  s.row = spec.stride[1];
  s.head = spec.stride[2];
  return s;
}

// Whether rows are aligned chunks of 16 bytes and nothing but these.
bool whole_chunks(const TensorSpec& cache) {
  return in_place(cache) && cache.size(-1) * dtype_bytes(cache.dtype) % 16 == 0;
}
bool whole_chunks(const TensorSpec& cache, const void* data) {
  return whole_chunks(cache) && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Bytes from each row of the cache to the next, if it has only one such step; else 0.
uint32_t row_step(const TensorSpec& cache) {
  const int64_t blocks = cache.size(0), page = cache.size(1);
  if (blocks * page > INT32_MAX) return 0;
  if (blocks > 1 && page > 1 && cache.stride[0] != page * cache.stride[1]) return 0;
  const int64_t bytes = cache.stride[page > 1 ? 1 : 0] * dtype_bytes(cache.dtype);
  return bytes > 0 && bytes <= INT32_MAX ? static_cast<uint32_t>(bytes) : 0;
}

void fill_lengths(PagedParams& p, const Paged& paged, const AttentionTensors& t) {
  const auto is_int64 = [](const TensorSpec& spec) { return spec.dtype == DType::kInt64; };
  p.block_table = t.block_table;
  p.table_row = paged.block_table.stride[0];
  p.table_column = paged.block_table.stride[1];
  p.table_is_int64 = is_int64(paged.block_table);
  p.table_step = static_cast<uint32_t>(p.table_column * dtype_bytes(paged.block_table.dtype));
  p.seq_lens = t.seq_lens;
  p.seq_lens_stride = paged.seq_lens.stride[0];
  p.seq_lens_are_int64 = is_int64(paged.seq_lens);
  if (!paged.cu_seqlens_q) return;
  p.cu_seqlens_q = t.cu_seqlens_q;
  p.cu_stride = paged.cu_seqlens_q->stride[0];
  p.cu_is_int64 = is_int64(*paged.cu_seqlens_q);
}

void fill_scales(PagedParams& p, const Paged& paged, const AttentionTensors& t) {
  const auto stride = [](const std::optional<TensorSpec>& spec) {
    return spec && spec->rank == 1 && spec->shape[0] > 1 ? spec->stride[0] : 0;
  };
  p.k_scale = static_cast<const float*>(t.k_scale);
  p.v_scale = static_cast<const float*>(t.v_scale);
  p.k_scale_stride = stride(paged.k_scale);
  p.v_scale_stride = stride(paged.v_scale);
}

}  // namespace

std::string missing_over_pages(const AttentionPlan& plan) {
  const AttentionProblem& p = plan.problem;
  if (p.key.size(0) > INT32_MAX || p.key.size(1) > INT32_MAX) {
    return "a cache has more than 2^31 - 1 blocks, or rows in a block";
  }
  const TensorSpec& table = p.paged->block_table;
  if (table.size(1) > 1 && table.stride[1] * dtype_bytes(table.dtype) > UINT32_MAX) {
    return "columns of block_table are more than 2^32 - 1 bytes apart";
  }
  if (plan.batch > (1 << 24)) return text("there are more than ", 1 << 24, " sequences");
  if (most_keys(plan) >= kNoLimit) return text("sequences are longer than ", kNoLimit - 1);
  if (p.query.size(0) * plan.heads_q > INT32_MAX) {
    return text("query has ", p.query.size(0), " tokens of ", plan.heads_q,
                " heads; CUDA kernels over pages count at most 2^31 - 1 of both");
  }
  return {};
}

const Kernel* choose_paged_tile(AttentionPlan& plan, const Family& family, const Gpu& gpu,
                                const std::optional<ForcedTile>& forced, std::string& why) {
  const AttentionProblem& p = plan.problem;
  const int64_t dim = std::max(plan.head_dim, plan.head_dim_v);
  // Of a sequence that the kernel for few rows may have.
  const int64_t rows = std::min<int64_t>(plan.len_q * (plan.heads_q / plan.heads_k), kDecodeRows);
  std::string tiles;
  for (const Kernel& k : kernels()) {
    if (k.role != Role::kPagedDecode || k.family != std::string_view(family.name) ||
        k.dtype != p.query.dtype || k.cache_bytes != dtype_bytes(p.key.dtype) || k.head_dim < dim) {
      continue;
    }
    if (k.block_q >= rows) tiles += text(tiles.empty() ? "" : ", ", k.block_q, "x", k.block_k);
    if (forced && (k.block_q != forced->rows || k.block_k != forced->columns)) continue;
    if (k.block_q < rows) {
      plan.candidates.push_back(
          {k.id.name, text("passed over: has ", k.block_q, " rows, sequences may have ", rows)});
      continue;
    }
    if (static_cast<size_t>(k.shared_bytes) > gpu.chip.shared_bytes) {
      plan.candidates.push_back(
          {k.id.name, text("passed over: needs ", k.shared_bytes, " bytes of shared memory, ",
                           chip_name(gpu.compute_capability), " has ", gpu.chip.shared_bytes)});
      continue;
    }
    return &k;
  }
  why = tiles.empty() ? text("has no kernels over pages for ", dtype_name(p.query.dtype), " over ",
                             dtype_name(p.key.dtype), " with head dim ", dim)
        : forced      ? text("FLASHMOE_TILE asks for ", forced->rows, "x", forced->columns,
                             "; over pages, for ", rows, " rows, there are ", tiles)
                      : text("no tile over pages for head dim ", dim, " fits ",
                             chip_name(gpu.compute_capability));
  return nullptr;
}

void lay_out_paged(AttentionPlan& plan, const Kernel& kernel, const Gpu& gpu) {
  const PagedSplits splits = splits_of(plan, gpu.multiprocessors);
  const int64_t items = (most_tiles(plan) + plan.batch * (splits.here - 1)) * plan.heads_k;
  plan.splits = splits.here;
  plan.work_items = items;
  // On Hopper a kernel begins where the one before it has left SMs, or left them to it.
  const bool hopper = plan.family == "sm90";
  const auto launch = [&](const Kernel& next, const Grid& grid) {
    plan.launches.push_back(once(next, grid, Given::kCall));
    plan.launches.back().overlaps = hopper && plan.launches.size() > 1;
  };
  const auto ctas = [&](const Kernel& next) {
    return gpu.multiprocessors * resident_ctas(next, gpu.chip);
  };
  // With few rows some CTAs are left out if up to 8 heads are read side by side then: see
  // head_lanes. 3 on each of 132 SMs are 8 x 49 and 4 more.
  const auto shared_out = [&](const Kernel& next) {
    int64_t here = std::min(ctas(next), items);
    const int64_t rest = here % std::gcd(plan.heads_k, int64_t{8});
    if (next.role == Role::kPagedDecode && rest <= here / 64) here -= rest;
    return grid_of(std::max<int64_t>(here, 1));
  };
  const bool chunks = hopper && plan.len_q >= kChunkQueries && whole_chunks(plan.problem.key) &&
                      whole_chunks(plan.problem.value);
  if (const Kernel* chunk = chunks ? sm90::find_chunk_kernel(plan) : nullptr) {
    launch(*chunk, grid_of(gpu.multiprocessors));
  }
  if (plan.len_q * plan.heads_q > kDecodeRows * plan.heads_k) {
    const Kernel& many = *find_kernel(Role::kPaged, kernel);
    launch(many, shared_out(many));
  }
  const int64_t own_items = plan.heads_k * splits.here * plan.batch;
  const bool each = own_items > 0 && own_items <= kMostOwnItems * ctas(kernel);
  if (!each) launch(*find_kernel(Role::kPagedTickets, kernel), grid_of(1));
  launch(kernel, each ? grid_of(plan.heads_k, splits.here, plan.batch) : shared_out(kernel));
  if (splits.rows > 0) {
    const Kernel& combine = *find_kernel(Role::kPagedCombine, kernel);
    const int64_t heads = ceil_div(plan.heads_q, kPagedCombineThreads / 32);
    const int64_t queries = std::min(splits.longest, kCombinedQueries);
    launch(combine, grid_of(plan.batch, heads, queries));
  }
  plan.workspace_bytes = workspace_of(plan, splits).bytes;
}

Status run_paged(const Call& call) {
  const AttentionPlan& plan = call.plan;
  const AttentionProblem& problem = plan.problem;
  const AttentionTensors& t = call.tensors;
  const int64_t multiprocessors = gpu_of(problem.device).multiprocessors;
  const PagedSplits splits = splits_of(plan, multiprocessors);
  const PagedWorkspace w = workspace_of(plan, splits);
  PagedParams p{};
  p.query = t.query;
  p.key = t.key;
  p.value = t.value;
  p.out = t.out;
  p.lse = static_cast<float*>(t.lse);
  p.query_strides = token_strides(problem.query);
  p.key_strides = cache_strides(problem.key);
  p.value_strides = cache_strides(problem.value);
  p.out_strides = token_strides(problem.out);
  if (problem.lse) p.lse_strides = token_strides(*problem.lse);
  p.key_block = problem.key.stride[0];
  p.value_block = problem.value.stride[0];
  p.key_column = problem.key.stride[3];
  p.value_column = problem.value.stride[3];
  p.whole_chunks = whole_chunks(problem.key, t.key) && whole_chunks(problem.value, t.value);
  const int64_t dim = main_kernel(plan).head_dim;
  const uint32_t steps[2] = {row_step(problem.key), row_step(problem.value)};
  if (p.whole_chunks && plan.head_dim == dim && plan.head_dim_v == dim && steps[0] && steps[1]) {
    p.key_step = steps[0];
    p.value_step = steps[1];
    p.even_blocks = static_cast<int32_t>(problem.key.size(0));
  }
  p.tokens_q = problem.query.size(0);
  p.batch = static_cast<int32_t>(plan.batch);
  p.heads_q = static_cast<int32_t>(plan.heads_q);
  p.heads_k = static_cast<int32_t>(plan.heads_k);
  p.group = p.heads_q / p.heads_k;
  p.blocks = static_cast<int32_t>(problem.key.size(0));
  p.page = static_cast<int32_t>(problem.key.size(1));
  p.page_log2 = exact_log2(p.page);
  p.len_q = static_cast<int32_t>(std::min(plan.len_q, problem.query.size(0)));
  p.len_k = static_cast<int32_t>(most_keys(plan));
  p.head_dim = static_cast<int32_t>(plan.head_dim);
  p.head_dim_v = static_cast<int32_t>(plan.head_dim_v);
  fill_scores(p, call.geometry);
  fill_sign(p, call.geometry);
  fill_lengths(p, *problem.paged, t);
  fill_scales(p, *problem.paged, t);
  fill_sinks(p, call);
  p.most_splits = static_cast<int32_t>(splits.most);
  p.cost_keys_log2 = cost_keys_log2(plan);
  p.head_lanes = head_lanes(plan);
  p.partial_rows = static_cast<int32_t>(splits.rows);
  p.sequences = reinterpret_cast<PagedSequence*>(call.workspace + w.sequences);
  p.partial_out = reinterpret_cast<float*>(call.workspace + w.partial_out);
  p.partial_lse = reinterpret_cast<float*>(call.workspace + w.partial_lse);
  // TMA wants whole chunks too; what it cannot load the kernel for many rows can.
  if (is(Role::kPagedChunk, plan.launches.front()) && p.whole_chunks) {
    p.chunk_queries = kChunkQueries;
  }
  for (const AttentionLaunch& step : plan.launches) {
    if (is(Role::kPagedTickets, step)) {
      p.tickets = reinterpret_cast<int32_t*>(call.workspace + w.tickets);
    }
  }
  bool first = true;
  for (AttentionLaunch step : plan.launches) {
    const bool chunk = is(Role::kPagedChunk, step);
    if (chunk && !p.chunk_queries) continue;
    step.overlaps = step.overlaps && !first;  // never a launch of somebody else
    first = false;
    p.item_each = item_each(plan, step);
    Status status =
        chunk ? sm90::run_chunk(call, step, p) : launch_step(call, step, plan.batch, &p, sizeof(p));
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace flashmoe::cuda
