// What the planner knows of a chip that it cannot ask.
#pragma once

#include <cstddef>

namespace flashmoe::cuda {

struct Chip {
  size_t shared_bytes;        // that one block may have, opted in
  size_t shared_bytes_of_sm;  // of which each block costs 1 KB more than it asked for
  int multiprocessors;        // of the largest common card, where the device does not say
};

// The CUDA programming guide's table of compute capabilities.
inline Chip chip(int compute_capability) {
  constexpr size_t kKB = 1024;
  switch (compute_capability) {
    case 75:
      return {64 * kKB, 64 * kKB, 40};  // T4
    case 80:
      return {163 * kKB, 164 * kKB, 108};  // A100
    case 86:
      return {99 * kKB, 100 * kKB, 84};  // A10, A40
    case 87:
      return {163 * kKB, 164 * kKB, 16};  // Orin
    case 89:
      return {99 * kKB, 100 * kKB, 58};  // L4
    case 90:
      return {227 * kKB, 228 * kKB, 132};  // H100, H200
    case 100:
    case 103:
      return {227 * kKB, 228 * kKB, 148};  // B200, B300
    default:
      return {99 * kKB, 100 * kKB, 84};  // 12.0, and the least any later chip has had
  }
}

}  // namespace flashmoe::cuda
