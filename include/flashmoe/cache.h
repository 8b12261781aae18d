// The cache of keys and values that flash_attention reads in pages (Paged in attention.h):
// problem -> plan -> run for writing to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashmoe/device.h"
#include "flashmoe/export.h"
#include "flashmoe/plan.h"
#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

namespace flashmoe {

// Token t is written to row slots[t] % page of block slots[t] / page. A negative slot is padding,
// one past the cache is skipped: nothing is written for either. No two tokens have the same slot.
struct AppendProblem {
  Device device;
  TensorSpec key;                     // (T, Hk, D), fp64, fp32, fp16 or bf16
  TensorSpec value;                   // (T, Hk, Dv)
  TensorSpec key_cache;               // (blocks, page, Hk, D), like key or e4m3
  TensorSpec value_cache;             // (blocks, page, Hk, Dv)
  TensorSpec slots;                   // (T), int32 or int64
  std::optional<TensorSpec> k_scale;  // fp32, () or (Hk), for e4m3: key / k_scale is stored,
  std::optional<TensorSpec> v_scale;  // rounded to nearest even and held within +-448; NaN stays

  bool operator==(const AppendProblem&) const = default;
};

struct AppendTensors {
  const void* key = nullptr;
  const void* value = nullptr;
  void* key_cache = nullptr;
  void* value_cache = nullptr;
  const void* slots = nullptr;
  const void* k_scale = nullptr;
  const void* v_scale = nullptr;
};

struct AppendPlan {
  AppendProblem problem;
  std::string kernel;
  std::string family;
  int64_t tokens = 0, heads = 0, page = 0;
  int64_t work_items = 0;
  std::vector<LaunchStep> launches;
  int workers = 1;
  std::vector<Candidate> candidates;
};

FLASHMOE_API Result<AppendPlan> plan(const AppendProblem& problem);
FLASHMOE_API Status run(const AppendPlan& plan, const AppendTensors& tensors,
                        const Launch& launch = {});
FLASHMOE_API Status run_reference(const AppendProblem& problem, const AppendTensors& tensors);

// What would run and why, for humans.
FLASHMOE_API std::string explain(const AppendProblem& problem);

}  // namespace flashmoe
