#include "core/explain.h"

#include "attention/problem.h"

namespace flashmoe {
namespace {

std::string window_text(const Geometry& g) {
  const auto side = [](int64_t n) { return n < 0 ? std::string("any") : text(n); };
  return text("window (", side(g.left), " left, ", side(g.right), " right)");
}

std::string options_text(const AttentionProblem& p, const Geometry& g) {
  std::string line = text("scale ", g.scale);
  if (p.options.causal && g.left < 0) {
    line += ", causal";
  } else if (g.left >= 0 || g.right >= 0) {
    line += ", " + window_text(g);
  }
  if (g.softcap > 0) line += text(", softcap ", g.softcap);
  if (p.options.allow_tf32) line += ", TF32 allowed";
  if (p.options.dropout_p > 0) line += text(", dropout ", p.options.dropout_p);
  if (p.bias) line += (p.bias->dtype == DType::kBool ? ", mask " : ", bias ") + spec_text(*p.bias);
  if (p.sinks) line += text(", sinks in ", dtype_name(p.sinks->dtype));
  if (p.key_lengths) line += ", key lengths";
  if (p.ragged) line += text(", ragged batch of ", g.batch);
  if (p.paged) {
    line += text(", pages of ", g.page);
    if (p.key.dtype != p.query.dtype) line += text(" in ", dtype_name(p.key.dtype));
    if (p.paged->k_scale || p.paged->v_scale) line += ", scaled";
  }
  return line;
}

const char* pass_name(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return "forward";
    case Pass::kBackward:
      return "backward";
    case Pass::kTangent:
      return "tangent of";
    case Pass::kSecond:
      return "second derivative of";
  }
  return "";
}

std::string work_text(const AttentionPlan& plan) {
  if (plan.problem.device.type == DeviceType::kCuda) {
    std::string lines;
    if (plan.splits > 1) {
      const bool backward = plan.problem.pass == Pass::kBackward;
      lines += text("splits     the ", backward ? "queries" : "keys", ", in ",
                    plan.problem.paged ? "up to " : "", plan.splits);
      if (backward) lines += text(", of ", plan.split_tiles, " tiles of keys");
      lines += "\n  ";
    }
    if (plan.slices > 1) {
      lines += text("slices     ", plan.slices, ", each a part of the ",
                    plan.problem.ragged ? "heads" : "batch", "\n  ");
    }
    if (plan.bias_splits > 1) {
      lines += text("splits     what shares the bias, in ", plan.bias_splits, "\n  ");
    }
    lines += text("launches   ", plan.launches.size());
    for (const AttentionLaunch& step : plan.launches) {
      lines += launch_text(step);
      if (step.per_slice && plan.slices > 1) lines += ", for each slice";
    }
    return lines;
  }
  const std::string per_head = plan.chunks > 1 ? text(" (", plan.chunks, " per head)") : "";
  return text("work       ", plan.work_items, " items", per_head, workers_text(plan.workers));
}

std::string reproducible_text(const AttentionPlan& plan) {
  return plan.dq_order_varies
             ? "not bitwise reproducible: grad_query is summed in any order, unless "
               "deterministic is asked for"
             : "bitwise reproducible";
}

}  // namespace

std::string explain(const AttentionProblem& problem) {
  const Result<AttentionPlan> result = plan(problem);
  if (!result.ok()) return "cannot run: " + result.status().message();
  const AttentionPlan& plan = result.value();
  const Geometry g = geometry(problem);
  const std::string value_dim = plan.head_dim_v != plan.head_dim ? text("/", plan.head_dim_v) : "";
  return text(pass_name(problem.pass), " attention in ", dtype_name(problem.query.dtype),
              ": batch ", plan.batch, ", heads ", plan.heads_q, "/", plan.heads_k, ", ", plan.len_q,
              " queries x ", plan.len_k, " keys, head dim ", plan.head_dim, value_dim,
              "\n  options    ", options_text(problem, g), "\n  kernel     ", plan.kernel,
              "\n  tile       ", plan.block_q, " queries x ", plan.block_k, " keys\n  ",
              work_text(plan), "\n  workspace  ", mebibytes(plan.workspace_bytes), "\n  ",
              reproducible_text(plan), "\n  ", candidates_text(plan.candidates));
}

}  // namespace flashmoe
