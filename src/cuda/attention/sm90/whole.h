// What the backward kernel is given in which a cluster has all of a head.
#pragma once

#include "cuda/attention/sm90/params.h"

namespace flashmoe::cuda {

// Its grid has p.key_blocks CTAs for each (batch, head), a cluster. It needs no workspace.
struct Sm90WholeBwdParams : Sm90BwdParams {
  TensorMap out_map;  // as query_map
};

}  // namespace flashmoe::cuda
