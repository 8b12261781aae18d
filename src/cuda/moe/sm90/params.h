// Parameters of the sm90 kernels beside cuda/moe/params.h. The grid of each has as many CTAs as the
// chip holds at once; each goes through some of the tiles.
#pragma once

#include "cuda/moe/params.h"
#include "cuda/tma/tensor_map.h"

namespace flashmoe::cuda::moe {

// Maps of weights are (E, rows, columns) as they lie. What a box has beyond the expert's matrix
// reads as zeros.
struct Sm90UpParams : UpParams {
  const int32_t* tile_count;  // of all experts: the list has as many entries
  TensorMap weights_map;
};

struct Sm90DownParams : DownParams {
  const int32_t* tile_count;
  TensorMap weights_map;
  TensorMap rows_map;  // (T k, depth), in boxes of 64 rows
};

struct Sm90BwdActParams : BwdActParams {
  const int32_t* tile_count;
  TensorMap weights_map;
};

struct Sm90BwdWeightsParams : BwdWeightsParams {
  const int32_t* slice_count;  // of all experts
  // Of each product, the operand that is not gathered: (T k, columns), in boxes of 64 rows.
  TensorMap rows_maps[2];
};

}  // namespace flashmoe::cuda::moe
