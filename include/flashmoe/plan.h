// What the plans of all operators are made of. A plan is plain data: print it, compare it, test it.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace flashmoe {

enum class Pass {
  kForward,
  kBackward,
  // Attention alone has these two.
  kTangent,  // forward mode: how the results move when the inputs move along their tangents
  kSecond,   // the gradient of <grad_out, tangent_out> + <grad_lse, tangent_lse> by the inputs
};

// One way to run a problem that the planner looked at.
struct Candidate {
  std::string name;
  std::string verdict;  // why it was passed over, or why it was chosen
};

// One launch of a CUDA kernel. A plan is a list of these, in their order on the stream.
struct LaunchStep {
  std::string kernel;                        // "sm80_attention_fwd_bf16_d64_128x128"
  std::string role;                          // what it does: "attention_fwd"
  std::array<uint32_t, 3> grid = {1, 1, 1};  // CTAs; per slice, those of a full one
  uint32_t threads = 0;                      // of a CTA
  uint32_t shared_bytes = 0;                 // dynamic shared memory of a CTA
  uint32_t cluster = 1;                      // CTAs that make a cluster
  bool overlaps = false;   // begins before the launch ahead of it ends, and waits for it itself
  bool per_slice = false;  // repeated for every slice of the call, together with its neighbours
  const void* handle = nullptr;  // the kernel in the library's own catalogue

  bool operator==(const LaunchStep&) const = default;
};

}  // namespace flashmoe
