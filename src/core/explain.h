// The words that explanations of all operators' plans share.
#pragma once

#include <string>
#include <vector>

#include "core/text.h"
#include "flashmoe/plan.h"

namespace flashmoe {

// Three digits: "0.736 MiB".
inline std::string mebibytes(size_t bytes) {
  char number[32];
  std::snprintf(number, sizeof(number), "%.3g", static_cast<double>(bytes) / (1 << 20));
  return text(number, " MiB");
}

// "sm80_attention_fwd_bf16_d64_128x128: grid 64 x 8 x 2, 256 threads, 65792 bytes of shared memory"
inline std::string launch_text(const LaunchStep& step) {
  std::string line =
      text("\n    ", step.kernel, ": grid ", step.grid[0], " x ", step.grid[1], " x ", step.grid[2],
           ", ", step.threads, " threads, ", step.shared_bytes, " bytes of shared memory");
  if (step.cluster > 1) line += text(", clusters of ", step.cluster);
  if (step.overlaps) line += ", overlaps the launch before";
  return line;
}

// A line for each.
inline std::string launches_text(const std::vector<LaunchStep>& launches) {
  std::string lines = text("launches   ", launches.size());
  for (const LaunchStep& step : launches) lines += launch_text(step);
  return lines;
}

inline std::string workers_text(int workers) {
  return text(" on ", workers, workers == 1 ? " thread" : " threads");
}

inline std::string candidates_text(const std::vector<Candidate>& candidates) {
  std::string lines = "candidates\n";
  for (const Candidate& c : candidates) lines += text("    ", c.name, ": ", c.verdict, "\n");
  return lines;
}

}  // namespace flashmoe
