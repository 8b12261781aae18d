// The sm90 family on the host: which problems its kernels take, which tile a product gets, and the
// tensor maps that kernels are given.
#pragma once

#include <optional>
#include <string>

#include "cuda/moe/catalogue.h"
#include "cuda/moe/sm90/params.h"
#include "cuda/runtime/families.h"
#include "flashmoe/moe.h"

namespace flashmoe::cuda::moe::sm90 {

// Why the kernels cannot do the problem; empty: they can.
std::string missing(const MoePlan& plan);

// Why the sm80 family is faster; empty: it is not.
std::string slower(const MoePlan& plan);

// The first kernel of a forward pass with few rows an expert, or null where there are many, or
// where another tile is forced.
const Kernel* choose_few(const MoePlan& plan, const std::optional<ForcedTile>& forced);

// The kernel of a product over rows, `depth` deep and with so many columns; null and why where a
// tile is forced that there is not.
const Kernel* choose_product(const MoePlan& plan, Role role, bool along, int64_t depth,
                             int64_t columns, const std::optional<ForcedTile>& forced,
                             std::string& why);

// Fill in the maps of a launch of `kernel`, after everything else. `weights` is the tensor of
// p.weights.
Status add_maps(Sm90UpParams& p, const Kernel& kernel, const TensorSpec& weights);
Status add_maps(Sm90DownParams& p, const Kernel& kernel, const TensorSpec& weights, int64_t rows);
Status add_maps(Sm90BwdActParams& p, const Kernel& kernel, const TensorSpec& weights);
Status add_maps(Sm90BwdWeightsParams& p, DType dtype, int64_t rows);

}  // namespace flashmoe::cuda::moe::sm90
