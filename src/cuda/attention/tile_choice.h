// Which tile of a family a problem gets.
#pragma once

#include <optional>
#include <string>

#include "cuda/attention/families.h"

namespace flashmoe::cuda {

// The best tile of the family for the problem, or null and why there is none. Better tiles that are
// passed over leave their reasons in the plan.
const Kernel* choose_tile(AttentionPlan& plan, const Family& family, const Gpu& gpu,
                          const std::optional<ForcedTile>& forced, std::string& why);

// How many CTAs an SM of the chip holds at once.
int64_t resident_ctas(const Kernel& kernel, const Chip& chip);

// Whether there are so many sequences, and on average so short, that a tile should not be larger.
bool many_short_sequences(const AttentionPlan& plan, const Gpu& gpu);

// The same for tiles of tokens, which have several sequences.
bool many_packed_sequences(const AttentionPlan& plan, const Gpu& gpu);

// Tokens of a sequence: its queries or its keys, whichever are more; ragged, on average.
int64_t mean_length(const AttentionPlan& plan);

}  // namespace flashmoe::cuda
