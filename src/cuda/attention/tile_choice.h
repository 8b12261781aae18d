// Which tile of a family a problem gets.
#pragma once

#include <optional>
#include <string>

#include "cuda/attention/families.h"

namespace flashmoe::cuda {

// FLASHMOE_TILE=128x64: queries x keys; 128x64,64x128: of a forward and of a backward pass.
struct ForcedTile {
  int block_q = 0, block_k = 0;
};
Status read_forced_tile(Pass pass, std::optional<ForcedTile>& tile);

// The best tile of the family for the problem, or null and why there is none. Better tiles that are
// passed over leave their reasons in the plan.
const Kernel* choose_tile(AttentionPlan& plan, const Family& family, const Gpu& gpu,
                          const std::optional<ForcedTile>& forced, std::string& why);

// How many CTAs an SM of the chip holds at once.
int64_t resident_ctas(const Kernel& kernel, const Chip& chip);

// Whether there are so many sequences, and on average so short, that a tile should not be larger.
bool many_short_sequences(const AttentionPlan& plan, const Gpu& gpu);

// Tokens of a sequence: its queries or its keys, whichever are more; ragged, on average.
int64_t mean_length(const AttentionPlan& plan);

std::string chip_name(int compute_capability);

}  // namespace flashmoe::cuda
