// From a plan and its tensors to launches: what kernels are given, and the loop over the plan.
#include <algorithm>

#include "core/numbers.h"
#include "core/text.h"
#include "cuda/moe/catalogue.h"
#include "cuda/moe/params.h"
#include "cuda/moe/planner.h"
#include "cuda/moe/sm90.h"
#include "cuda/moe/tiles.h"
#include "cuda/moe/workspace.h"
#include "cuda/runtime/driver.h"

namespace flashmoe::cuda::moe {
namespace {

// One call of run().
struct Call {
  const MoePlan& plan;
  const MoeTensors& tensors;
  char* workspace;
  const Launch& stream;

  const MoeProblem& problem() const { return plan.problem; }
  bool forward() const { return plan.problem.pass == Pass::kForward; }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
};

const Kernel& kernel_of(const LaunchStep& step) { return *static_cast<const Kernel*>(step.handle); }

Status launch_step(const LaunchStep& step, const Device& device, const Launch& launch,
                   const void* params, size_t params_bytes) {
  LaunchShape shape;
  std::copy(step.grid.begin(), step.grid.end(), shape.grid);
  shape.threads = step.threads;
  shape.shared_bytes = step.shared_bytes;
  shape.programmatic = step.overlaps;
  return cuda::launch(kernel_of(step).id, shape, device.ordinal, launch.stream, params,
                      params_bytes);
}

// The tile of the products over tokens; zeros where the plan has none.
GemmTile token_tile(const MoePlan& plan) {
  for (const LaunchStep& step : plan.launches) {
    if (kernel_of(step).role == Role::kBwdWeights) return kernel_of(step).tile;
  }
  return {};
}

int64_t bytes_of(const TensorSpec& spec, int dim) {
  return spec.size(dim) > 1 ? spec.step(dim) * dtype_bytes(spec.dtype) : 0;
}

Ids ids_of(const Call& call) {
  const TensorSpec& spec = call.problem().ids;
  return {.data = call.tensors.ids,
          .row = spec.stride[0],
          .col = spec.stride[1],
          .are_int64 = spec.dtype == DType::kInt64,
          .experts = static_cast<int32_t>(call.plan.experts)};
}

RoutingWeights weights_of(const Call& call) {
  const auto& spec = call.problem().weights;
  if (!spec) return {};
  return {static_cast<const float*>(call.tensors.weights), spec->stride[0], spec->stride[1]};
}

ExpertMatrix matrix_of(const void* data, const TensorSpec& spec) {
  const int row = order_of(spec) == Order::kRows ? -2 : -1;
  return {data, bytes_of(spec, -3), static_cast<int32_t>(bytes_of(spec, row))};
}

// Where the offsets and pairs of the routing are.
Routing routing_of(const Call& call, size_t kept, size_t row_of) {
  int32_t* const data =
      call.problem().routing ? static_cast<int32_t*>(call.tensors.routing) : call.at<int32_t>(kept);
  return {data, data + call.plan.experts + 1, call.at<int32_t>(row_of)};
}

Kind kind_of(Activation activation) {
  switch (activation) {
    case Activation::kSwiglu:
    case Activation::kSilu:
      return Kind::kSilu;
    case Activation::kGeglu:
    case Activation::kGelu:
      return Kind::kGelu;
    case Activation::kReglu:
    case Activation::kRelu:
      return Kind::kRelu;
  }
  return Kind::kSilu;
}

struct Bias {
  const void* data;
  int64_t expert, col;
};
Bias bias_of(const void* data, const std::optional<TensorSpec>& spec) {
  if (!spec) return {};
  return {data, spec->stride[0], spec->stride[1]};
}

// The tiles of a product; `columns` are tiles as well.
ProductTiles tiles_of(const Call& call, size_t tiles, int64_t columns) {
  return {call.at<ExpertTile>(tiles),
          static_cast<int32_t>(tile_slots(call.plan, call.plan.block_m)),
          static_cast<int32_t>(columns)};
}

// Whether rows of any operand end within a chunk of 16 bytes.
bool has_partial_chunks(const MoePlan& plan) { return plan.width % 8 || plan.inner % 8; }

// The forward pass.

SortParams sort_params(const Call& call, const ForwardWorkspace& w) {
  const MoePlan& plan = call.plan;
  const SortChunks chunks = sort_chunks(plan);
  SortParams p{};
  p.ids = ids_of(call);
  p.pairs = static_cast<int32_t>(plan.rows);
  p.top_k = static_cast<int32_t>(plan.top_k);
  p.chunk = static_cast<int32_t>(chunks.chunk);
  p.chunks = static_cast<int32_t>(chunks.chunks);
  p.chunk_pitch = static_cast<int32_t>(chunks.pitch());
  p.counts = call.at<int32_t>(w.counts);
  p.bases = call.at<int32_t>(w.bases);
  p.routing = routing_of(call, w.routing, w.row_of);
  p.lists.tiles = call.at<ExpertTile>(w.tiles);
  p.lists.slots = static_cast<int32_t>(tile_slots(plan, plan.block_m));
  p.lists.block = static_cast<int32_t>(plan.block_m);
  if (is_persistent(plan)) p.lists.first_tile = call.at<int32_t>(w.first_tile);
  return p;
}

UpParams up_params(const Call& call, const ForwardWorkspace& w, const Kernel& kernel) {
  const MoePlan& plan = call.plan;
  const MoeProblem& problem = call.problem();
  const Bias bias = bias_of(call.tensors.up_bias, problem.up_bias);
  UpParams p{};
  p.tiles = tiles_of(call, w.tiles, up_columns(plan, kernel.tile));
  p.pairs = routing_of(call, w.routing, w.row_of).pairs;
  p.top_k = static_cast<int32_t>(plan.top_k);
  p.x = call.tensors.x;
  p.x_row_bytes = bytes_of(problem.x, 0);
  p.weights = matrix_of(call.tensors.gate_up, problem.gate_up);
  p.bias = bias.data;
  p.bias_expert = bias.expert;
  p.bias_col = bias.col;
  p.width = static_cast<int32_t>(plan.width);
  p.inner = static_cast<int32_t>(plan.inner);
  p.partial = has_partial_chunks(plan);
  p.gated = has_gate(problem.activation);
  p.kind = kind_of(problem.activation);
  if (problem.pre) {
    p.pre = call.tensors.pre;
    p.pre_row_bytes = bytes_of(*problem.pre, 0);
    p.pre_half_bytes = bytes_of(*problem.pre, 1);
  }
  p.act = call.at<char>(w.act);
  p.act_row_bytes = pitch(plan.inner) * dtype_bytes(problem.x.dtype);
  return p;
}

DownParams down_params(const Call& call, const ForwardWorkspace& w, const Kernel& kernel) {
  const MoePlan& plan = call.plan;
  const MoeProblem& problem = call.problem();
  const int64_t element = dtype_bytes(problem.x.dtype);
  const Bias bias = bias_of(call.tensors.down_bias, problem.down_bias);
  DownParams p{};
  p.tiles = tiles_of(call, w.tiles, ceil_div(plan.width, kernel.tile.block_n));
  p.rows = call.at<char>(w.act);
  p.row_bytes = pitch(plan.inner) * element;
  p.halves = 1;
  p.depth = static_cast<int32_t>(plan.inner);
  p.weights = matrix_of(call.tensors.down, problem.down);
  p.bias = bias.data;
  p.bias_expert = bias.expert;
  p.bias_col = bias.col;
  p.columns = static_cast<int32_t>(plan.width);
  p.partial = has_partial_chunks(plan);
  if (plan.top_k == 1) {
    p.pairs = routing_of(call, w.routing, w.row_of).pairs;
    p.scale = weights_of(call);
    p.out = call.tensors.out;
    p.out_row_bytes = bytes_of(problem.out, 0);
  } else {
    p.out = call.at<char>(w.y);
    p.out_row_bytes = pitch(plan.width) * element;
  }
  return p;
}

FewDownParams few_down_params(const Call& call, const ForwardWorkspace& w) {
  const MoePlan& plan = call.plan;
  const MoeProblem& problem = call.problem();
  const Bias bias = bias_of(call.tensors.down_bias, problem.down_bias);
  FewDownParams p{};
  p.tiles = call.at<ExpertTile>(w.tiles);
  p.tile_count = call.at<int32_t>(w.first_tile) + plan.experts;
  p.rows = call.at<char>(w.act);
  p.row_bytes = pitch(plan.inner) * dtype_bytes(problem.x.dtype);
  p.depth = static_cast<int32_t>(plan.inner);
  p.columns = static_cast<int32_t>(plan.width);
  p.weights = matrix_of(call.tensors.down, problem.down);
  p.bias = bias.data;
  p.bias_expert = bias.expert;
  p.bias_col = bias.col;
  p.row_of = call.at<int32_t>(w.row_of);
  p.scale = weights_of(call);
  p.tokens = static_cast<int32_t>(plan.tokens);
  p.top_k = static_cast<int32_t>(plan.top_k);
  p.out = call.tensors.out;
  p.out_row_bytes = bytes_of(problem.out, 0);
  return p;
}

CombineParams combine_params(const Call& call, size_t rows, size_t row_of, void* out,
                             const TensorSpec& spec) {
  const MoePlan& plan = call.plan;
  CombineParams p{};
  p.rows = call.at<char>(rows);
  p.row_bytes = pitch(plan.width) * dtype_bytes(spec.dtype);
  p.row_of = call.at<int32_t>(row_of);
  p.tokens = static_cast<int32_t>(plan.tokens);
  p.top_k = static_cast<int32_t>(plan.top_k);
  p.width = static_cast<int32_t>(plan.width);
  p.lanes = combine_lanes(p.width);
  p.only_absent = plan.top_k == 1;
  p.out = out;
  p.out_row_bytes = bytes_of(spec, 0);
  return p;
}

// Launches a step with the parameters that all families have, or with sm90's, to which add(p) adds
// the maps.
template <class Sm90Params, class Params, class AddMaps>
Status launch_product(const Call& call, const LaunchStep& step, const Params& common,
                      const int32_t* tile_count, const AddMaps& add) {
  const auto launch = [&](const auto& p) {
    return launch_step(step, call.problem().device, call.stream, &p, sizeof(p));
  };
  if (!is_persistent(call.plan)) return launch(common);
  Sm90Params p{};
  static_cast<Params&>(p) = common;
  p.tile_count = tile_count;
  const Status status = add(p);
  return status.ok() ? launch(p) : status;
}

Status run_forward(const Call& call) {
  const MoeProblem& problem = call.problem();
  const ForwardWorkspace w =
      forward_workspace(call.plan, static_cast<const Kernel*>(call.plan.handle)->tile);
  const int32_t* const tile_count = call.at<int32_t>(w.first_tile) + call.plan.experts;
  for (const LaunchStep& step : call.plan.launches) {
    const Kernel& kernel = kernel_of(step);
    const auto launch = [&](const auto& p) {
      return launch_step(step, problem.device, call.stream, &p, sizeof(p));
    };
    Status status;
    switch (kernel.role) {
      case Role::kSort:
      case Role::kCount:
      case Role::kScan:
      case Role::kPlace:
        status = launch(sort_params(call, w));
        break;
      case Role::kFewUp: {
        UpParams p = up_params(call, w, kernel);
        p.tiles.columns = static_cast<int32_t>(ceil_div(call.plan.inner, kFewColumns));
        status = launch(p);
        break;
      }
      case Role::kFewDown:
        status = launch(few_down_params(call, w));
        break;
      case Role::kUp:
        status = launch_product<Sm90UpParams>(
            call, step, up_params(call, w, kernel), tile_count,
            [&](Sm90UpParams& p) { return sm90::add_maps(p, kernel, problem.gate_up); });
        break;
      case Role::kDown:
        status = launch_product<Sm90DownParams>(
            call, step, down_params(call, w, kernel), tile_count, [&](Sm90DownParams& p) {
              return sm90::add_maps(p, kernel, problem.down, call.plan.rows);
            });
        break;
      default: {  // kCombine
        CombineParams p = combine_params(call, w.y, w.row_of, call.tensors.out, problem.out);
        p.weights = weights_of(call);
        status = launch(p);
      }
    }
    if (!status.ok()) return status;
  }
  return {};
}

// The backward pass.

// dOut, or a row of zeros for every token.
struct GradOut {
  const void* data;
  int64_t row_bytes;
};
GradOut grad_out_of(const Call& call, const BackwardWorkspace& w) {
  const auto& spec = call.problem().grad_out;
  if (!spec) return {call.at<char>(w.zero_row), 0};
  return {call.tensors.grad_out, bytes_of(*spec, 0)};
}

// dh in the workspace. With whole chunks its halves are side by side, one row of G n.
struct GradPre {
  int64_t row_bytes, half_bytes;
  int32_t halves, columns;
};
GradPre grad_pre_of(const MoePlan& plan) {
  const int64_t half_bytes = pitch(plan.inner) * dtype_bytes(plan.problem.x.dtype);
  const auto parts = static_cast<int32_t>(plan.inner % 8 ? halves(plan) : 1);
  return {halves(plan) * half_bytes, half_bytes, parts,
          static_cast<int32_t>(halves(plan) * plan.inner / parts)};
}

PrepareParams prepare_params(const Call& call, const BackwardWorkspace& w) {
  const MoePlan& plan = call.plan;
  PrepareParams p{};
  p.ids = ids_of(call);
  p.pairs = static_cast<int32_t>(plan.rows);
  p.top_k = static_cast<int32_t>(plan.top_k);
  p.routing = routing_of(call, 0, w.row_of);
  p.lists.tiles = call.at<ExpertTile>(w.tiles);
  p.lists.slots = static_cast<int32_t>(tile_slots(plan, plan.block_m));
  p.lists.block = static_cast<int32_t>(plan.block_m);
  p.lists.first_tile = call.at<int32_t>(w.first_tile);
  if (const GemmTile tokens = token_tile(plan); tokens.block_m > 0) {
    const Slices slices = slices_of(plan, tokens);
    p.lists.slices = call.at<ExpertTile>(w.slices);
    p.lists.slice_slots = static_cast<int32_t>(slices.slots);
    p.lists.slice = static_cast<int32_t>(slices.rows);
    p.lists.sliced = call.at<SlicedExpert>(w.sliced);
    p.lists.sliced_slots = static_cast<int32_t>(slices.sliced_slots);
    p.lists.first_sum = call.at<int32_t>(w.first_sum);
  }
  if (!call.problem().grad_out) {
    p.zero_row = call.at<char>(w.zero_row);
    p.zero_row_chunks = static_cast<int32_t>(ceil_div(plan.width, 8));
  }
  return p;
}

BwdActParams act_params(const Call& call, const BackwardWorkspace& w) {
  const MoePlan& plan = call.plan;
  const MoeProblem& problem = call.problem();
  const Wanted want = wanted(plan);
  const GradOut grad_out = grad_out_of(call, w);
  BwdActParams p{};
  p.tiles = tiles_of(call, w.tiles, ceil_div(plan.inner, plan.block_n));
  p.pairs = routing_of(call, 0, w.row_of).pairs;
  p.top_k = static_cast<int32_t>(plan.top_k);
  p.grad_out = grad_out.data;
  p.grad_out_row_bytes = grad_out.row_bytes;
  p.weights = matrix_of(call.tensors.down, problem.down);
  p.width = static_cast<int32_t>(plan.width);
  p.inner = static_cast<int32_t>(plan.inner);
  p.partial = has_partial_chunks(plan);
  p.gated = has_gate(problem.activation);
  p.kind = kind_of(problem.activation);
  p.scale = weights_of(call);
  p.pre = call.tensors.pre;
  p.pre_row_bytes = bytes_of(*problem.pre, 0);
  p.pre_half_bytes = bytes_of(*problem.pre, 1);
  if (want.grad_pre) {
    const GradPre grad = grad_pre_of(plan);
    p.grad_pre = call.at<char>(w.grad_pre);
    p.grad_pre_row_bytes = grad.row_bytes;
    p.grad_pre_half_bytes = grad.half_bytes;
  }
  if (want.weighted_act) {
    p.weighted_act = call.at<char>(w.weighted_act);
    p.weighted_act_row_bytes = pitch(plan.inner) * dtype_bytes(problem.x.dtype);
  }
  if (want.row_sums) {
    p.row_sums = call.at<float>(w.row_sums);
    p.row_sums_stride = plan.rows;
  }
  return p;
}

DownParams dx_params(const Call& call, const BackwardWorkspace& w, const Kernel& kernel) {
  const MoePlan& plan = call.plan;
  const MoeProblem& problem = call.problem();
  const GradPre grad = grad_pre_of(plan);
  DownParams p{};
  p.tiles = tiles_of(call, w.tiles, ceil_div(plan.width, kernel.tile.block_n));
  p.rows = call.at<char>(w.grad_pre);
  p.row_bytes = grad.row_bytes;
  p.half_bytes = grad.half_bytes;
  p.halves = grad.halves;
  p.depth = grad.columns;
  p.weights = matrix_of(call.tensors.gate_up, problem.gate_up);
  p.columns = static_cast<int32_t>(plan.width);
  p.partial = has_partial_chunks(plan);
  if (plan.top_k == 1) {
    p.pairs = routing_of(call, 0, w.row_of).pairs;
    p.out = call.tensors.grad_x;
    p.out_row_bytes = bytes_of(*problem.grad_x, 0);
  } else {
    p.out = call.at<char>(w.dx);
    p.out_row_bytes = pitch(plan.width) * dtype_bytes(problem.x.dtype);
  }
  return p;
}

// dW = left^T right, or its transpose where the gradient lies by columns.
WeightProduct weight_product(RowOperand left, RowOperand right, const WeightTiles::Gradient& tiles,
                             void* out, const TensorSpec& spec) {
  const bool by_rows = order_of(spec) == Order::kRows;
  if (!by_rows) std::swap(left, right);
  return {left,
          right,
          static_cast<int32_t>(tiles.m),
          static_cast<int32_t>(tiles.n),
          tiles.tile_m,
          tiles.tile_n,
          out,
          bytes_of(spec, -3),
          bytes_of(spec, by_rows ? -2 : -1)};
}

BwdWeightsParams weights_params(const Call& call, const BackwardWorkspace& w) {
  const MoePlan& plan = call.plan;
  const MoeProblem& problem = call.problem();
  const WeightTiles tiles = weight_tiles(plan, token_tile(plan));
  const auto d = static_cast<int32_t>(plan.width), n = static_cast<int32_t>(plan.inner);
  BwdWeightsParams p{};
  p.slices = call.at<ExpertTile>(w.slices);
  p.sliced = call.at<SlicedExpert>(w.sliced);
  p.pairs = routing_of(call, 0, w.row_of).pairs;
  p.top_k = static_cast<int32_t>(plan.top_k);
  p.partial = has_partial_chunks(plan);
  p.slice_sums = call.at<float>(w.slice_sums);
  if (problem.grad_gate_up) {
    const GradPre grad = grad_pre_of(plan);
    const RowOperand dh{
        call.at<char>(w.grad_pre), grad.row_bytes, grad.half_bytes, grad.halves, grad.columns, 0};
    const RowOperand x{call.tensors.x, bytes_of(problem.x, 0), 0, 1, d, 1};
    p.products[0] =
        weight_product(dh, x, tiles.gate_up, call.tensors.grad_gate_up, *problem.grad_gate_up);
  }
  if (problem.grad_down) {
    const GradOut grad_out = grad_out_of(call, w);
    const RowOperand out{grad_out.data, grad_out.row_bytes, 0, 1, d, 1};
    const RowOperand act{call.at<char>(w.weighted_act),
                         pitch(plan.inner) * dtype_bytes(problem.x.dtype),
                         0,
                         1,
                         n,
                         0};
    p.products[1] =
        weight_product(out, act, tiles.down, call.tensors.grad_down, *problem.grad_down);
  }
  return p;
}

BwdBiasParams bias_params(const Call& call, const BackwardWorkspace& w) {
  const MoePlan& plan = call.plan;
  const MoeProblem& problem = call.problem();
  BwdBiasParams p{};
  p.tiles = call.at<ExpertTile>(w.tiles);
  p.first_tile = call.at<int32_t>(w.first_tile);
  p.pairs = routing_of(call, 0, w.row_of).pairs;
  p.top_k = static_cast<int32_t>(plan.top_k);
  if (const auto& spec = problem.grad_up_bias) {
    const GradPre grad = grad_pre_of(plan);
    p.sums[0] = {.rows = call.at<char>(w.grad_pre),
                 .row_bytes = grad.row_bytes,
                 .half_bytes = grad.half_bytes,
                 .halves = grad.halves,
                 .columns = grad.columns,
                 .gathered = 0,
                 .scale = {},
                 .parts = call.at<float>(w.bias_parts[0]),
                 .out = call.tensors.grad_up_bias,
                 .out_expert = spec->stride[0],
                 .out_col = spec->stride[1]};
  }
  if (const auto& spec = problem.grad_down_bias) {
    const GradOut grad_out = grad_out_of(call, w);
    p.sums[1] = {.rows = grad_out.data,
                 .row_bytes = grad_out.row_bytes,
                 .half_bytes = 0,
                 .halves = 1,
                 .columns = static_cast<int32_t>(plan.width),
                 .gathered = 1,
                 .scale = weights_of(call),
                 .parts = call.at<float>(w.bias_parts[1]),
                 .out = call.tensors.grad_down_bias,
                 .out_expert = spec->stride[0],
                 .out_col = spec->stride[1]};
  }
  return p;
}

BwdScaleParams scale_params(const Call& call, const BackwardWorkspace& w) {
  const MoePlan& plan = call.plan;
  const MoeProblem& problem = call.problem();
  const GradOut grad_out = grad_out_of(call, w);
  const Bias bias = bias_of(call.tensors.down_bias, problem.down_bias);
  BwdScaleParams p{};
  p.ids = ids_of(call);
  p.pairs = static_cast<int32_t>(plan.rows);
  p.top_k = static_cast<int32_t>(plan.top_k);
  p.row_of = call.at<int32_t>(w.row_of);
  p.row_sums = call.at<float>(w.row_sums);
  p.row_sums_stride = plan.rows;
  p.parts = static_cast<int32_t>(ceil_div(plan.inner, plan.block_n));
  p.bias = bias.data;
  p.bias_expert = bias.expert;
  p.bias_col = bias.col;
  p.grad_out = grad_out.data;
  p.grad_out_row_bytes = grad_out.row_bytes;
  p.width = static_cast<int32_t>(plan.width);
  p.grad_weights = static_cast<float*>(call.tensors.grad_weights);
  p.grad_row = problem.grad_weights->stride[0];
  p.grad_col = problem.grad_weights->stride[1];
  return p;
}

Status launch_weights(const Call& call, const BackwardWorkspace& w, const LaunchStep& step) {
  const BwdWeightsParams common = weights_params(call, w);
  const Device& device = call.problem().device;
  if (!is_persistent(call.plan) || kernel_of(step).role == Role::kBwdWeightsSum) {
    return launch_step(step, device, call.stream, &common, sizeof(common));
  }
  Sm90BwdWeightsParams p{};
  static_cast<BwdWeightsParams&>(p) = common;
  p.slice_count = call.at<int32_t>(w.first_sum) + call.plan.experts;
  const Status status = sm90::add_maps(p, call.problem().x.dtype, call.plan.rows);
  return status.ok() ? launch_step(step, device, call.stream, &p, sizeof(p)) : status;
}

Status run_backward(const Call& call) {
  const MoeProblem& problem = call.problem();
  const BackwardWorkspace w = backward_workspace(
      call.plan, static_cast<const Kernel*>(call.plan.handle)->tile, token_tile(call.plan));
  const int32_t* const tile_count = call.at<int32_t>(w.first_tile) + call.plan.experts;
  for (const LaunchStep& step : call.plan.launches) {
    const Kernel& kernel = kernel_of(step);
    const auto launch = [&](const auto& p) {
      return launch_step(step, problem.device, call.stream, &p, sizeof(p));
    };
    Status status;
    switch (kernel.role) {
      case Role::kPrepare:
        status = launch(prepare_params(call, w));
        break;
      case Role::kBwdAct:
        status = launch_product<Sm90BwdActParams>(
            call, step, act_params(call, w), tile_count,
            [&](Sm90BwdActParams& p) { return sm90::add_maps(p, kernel, problem.down); });
        break;
      case Role::kDown:
        status = launch_product<Sm90DownParams>(
            call, step, dx_params(call, w, kernel), tile_count, [&](Sm90DownParams& p) {
              return sm90::add_maps(p, kernel, problem.gate_up, call.plan.rows);
            });
        break;
      case Role::kCombine:
        status = launch(combine_params(call, w.dx, w.row_of, call.tensors.grad_x, *problem.grad_x));
        break;
      case Role::kBwdWeights:
      case Role::kBwdWeightsSum:
        status = launch_weights(call, w, step);
        break;
      case Role::kBwdBias:
      case Role::kBwdBiasSum:
        status = launch(bias_params(call, w));
        break;
      default:  // kBwdScale
        status = launch(scale_params(call, w));
    }
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

Status run(const MoePlan& plan, const MoeTensors& t, void* workspace, const Launch& launch) {
  const std::pair<const char*, const void*> aligned[] = {
      {"x", t.x},
      {"gate_up", t.gate_up},
      {"down", t.down},
      {"out", t.out},
      {"pre", t.pre},
      {"grad_out", t.grad_out},
      {"grad_x", t.grad_x},
      {"grad_gate_up", t.grad_gate_up},
      {"grad_down", t.grad_down},
      {"workspace", workspace},
  };
  for (const auto& [name, data] : aligned) {
    if (Status status = check_aligned(name, data); !status.ok()) return status;
  }
  if (!plan.handle) return invalid("the plan is not one that plan() made for a GPU");
  const Call call{plan, t, static_cast<char*>(workspace), launch};
  return call.forward() ? run_forward(call) : run_backward(call);
}

Status run(const RoutePlan& plan, const RouteTensors& t, void*, const Launch& launch) {
  const RouteProblem& problem = plan.problem;
  RouteParams p{};
  p.logits = t.logits;
  p.logits_row = problem.logits.stride[0];
  p.logits_col = problem.logits.stride[1];
  p.logits_are_fp32 = problem.logits.dtype == DType::kFloat32;
  p.tokens = static_cast<int32_t>(plan.tokens);
  p.experts = static_cast<int32_t>(plan.experts);
  p.top_k = static_cast<int32_t>(plan.top_k);
  p.sigmoid = problem.scoring == Scoring::kSigmoid;
  p.normalize = problem.normalize;
  p.bias = static_cast<const float*>(t.bias);
  if (problem.bias) p.bias_col = problem.bias->stride[0];
  p.ids = static_cast<int32_t*>(t.ids);
  p.ids_row = problem.ids.stride[0];
  p.ids_col = problem.ids.stride[1];
  p.weights = static_cast<float*>(t.weights);
  p.weights_row = problem.weights.stride[0];
  p.weights_col = problem.weights.stride[1];
  if (problem.grad_weights) {
    p.grad_weights = static_cast<const float*>(t.grad_weights);
    p.grad_weights_row = problem.grad_weights->stride[0];
    p.grad_weights_col = problem.grad_weights->stride[1];
  }
  if (problem.grad_logits) {
    p.grad_logits = t.grad_logits;
    p.grad_logits_row = problem.grad_logits->stride[0];
    p.grad_logits_col = problem.grad_logits->stride[1];
  }
  for (const LaunchStep& step : plan.launches) {
    Status status = launch_step(step, problem.device, launch, &p, sizeof(p));
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace flashmoe::cuda::moe
