#include "attention/problem.h"
#include "attention/text.h"

namespace flashmoe {
namespace {

std::string window_text(const Geometry& g) {
  const auto side = [](int64_t n) { return n < 0 ? std::string("any") : text(n); };
  return text("window (", side(g.left), " left, ", side(g.right), " right)");
}

std::string options_text(const AttentionProblem& p, const Geometry& g) {
  std::string line = text("scale ", g.scale);
  if (p.causal && g.left < 0) {
    line += ", causal";
  } else if (g.left >= 0 || g.right >= 0) {
    line += ", " + window_text(g);
  }
  if (g.softcap > 0) line += text(", softcap ", g.softcap);
  if (p.bias) line += ", bias " + spec_text(*p.bias);
  if (p.key_lengths) line += ", key lengths";
  if (p.ragged) line += text(", ragged batch of ", g.batch);
  return line;
}

std::string mebibytes(size_t bytes) {
  std::ostringstream stream;
  stream.precision(3);
  stream << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return stream.str();
}

}  // namespace

std::string explain(const AttentionProblem& problem) {
  const Result<AttentionPlan> result = plan(problem);
  if (!result.ok()) return "cannot run: " + result.status().message();
  const AttentionPlan& plan = result.value();
  const Geometry g = geometry(problem);
  std::ostringstream s;
  s << (problem.pass == Pass::kForward ? "forward" : "backward") << " attention in "
    << dtype_name(problem.query.dtype) << ": batch " << plan.batch << ", heads " << plan.heads_q
    << "/" << plan.heads_k << ", " << plan.len_q << " queries x " << plan.len_k
    << " keys, head dim " << plan.head_dim;
  if (plan.head_dim_v != plan.head_dim) s << "/" << plan.head_dim_v;
  s << "\n  options    " << options_text(problem, g);
  s << "\n  kernel     " << plan.kernel;
  s << "\n  tile       " << plan.block_q << " queries x " << plan.block_k << " keys";
  if (problem.device.type == DeviceType::kCuda) {
    s << "\n  launch     grid " << plan.grid[0] << " x " << plan.grid[1] << " x " << plan.grid[2]
      << ", " << plan.threads << " threads, " << plan.shared_bytes << " bytes of shared memory";
  } else {
    s << "\n  work       " << plan.work_items << " items";
    if (plan.chunks > 1) s << " (" << plan.chunks << " per head)";
    s << " on " << plan.workers << (plan.workers == 1 ? " thread" : " threads");
  }
  s << "\n  workspace  " << mebibytes(plan.workspace_bytes);
  s << "\n  bitwise reproducible";
  s << "\n  candidates";
  for (const Candidate& c : plan.candidates) s << "\n    " << c.name << ": " << c.verdict;
  s << "\n";
  return s.str();
}

}  // namespace flashmoe
