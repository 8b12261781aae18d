// The chip families: for which chips kernels are compiled, and which dtypes these have. Knows no
// operator: each operator says what its kernels of a family can do in a table of its own.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cuda/runtime/chips.h"
#include "flashmoe/device.h"
#include "flashmoe/status.h"
#include "flashmoe/tensor.h"

namespace flashmoe::cuda {

struct ChipFamily {
  const char* name;
  int oldest, newest;  // compute capabilities it runs on; newest 0: every later one, by its PTX
  std::initializer_list<const char*> machine_code;  // chips it is compiled for
  const char* ptx;                                  // for chips to come; "": none
  std::initializer_list<DType> dtypes;
};

// Best first.
std::span<const ChipFamily> chip_families();
const ChipFamily* find_chip_family(std::string_view name);

// What the planner knows of the device.
struct Gpu {
  int compute_capability = 0;
  Chip chip;
  int64_t multiprocessors = 0;
};
Gpu gpu_of(const Device& device);

std::string chip_name(int compute_capability);

// Why the family's chips are others; empty where the device is one of them.
std::string other_chip(const ChipFamily& family, const Gpu& gpu);

// FLASHMOE_FAMILY, or null. `argument` is a tensor of the call, for the message.
Status read_forced_family(const char* argument, const ChipFamily*& forced);

// FLASHMOE_TILE=128x64: queries x keys of attention, rows x columns of a mixture of experts.
struct ForcedTile {
  int rows = 0, columns = 0;
};
Status read_forced_tile(std::optional<ForcedTile>& tile);

}  // namespace flashmoe::cuda
