// What a kernel is given, by value. Read by nvcc and by the host compiler, so: plain numbers and
// pointers. T tokens, k experts of each, E experts, width d, inner width n; G = 2 with a gate, else
// 1. A pair is t * k + j, a row its place when pairs are sorted by expert. Strides are in elements,
// *_bytes in bytes, both 64-bit: T k d may be past 2^31.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::moe {

// In the order of flashmoe::Activation, the gate left out.
enum class Kind : int32_t { kSilu, kGelu, kRelu };

// Rows of one expert that a CTA works on. Lists of these are made on the device, where the counts
// are, and have as many slots as there may be tiles.
struct alignas(16) ExpertTile {
  int32_t expert;  // -1: an empty slot
  int32_t first;   // row
  int32_t rows;    // at most those of a tile; 0 where an expert without rows needs a result
  int32_t sum;     // of a slice: where its sums go in `slice_sums`; -1: it is its expert's only one
};
// An expert whose rows were cut into several slices.
struct alignas(16) SlicedExpert {
  int32_t expert;  // -1: an empty slot
  int32_t first;   // of its sums in `slice_sums`
  int32_t slices;
  int32_t unused;
};

struct Ids {
  const void* data;  // (T, k), int32 or int64
  int64_t row, col;  // strides
  int32_t are_int64;
  int32_t experts;  // E: an id outside 0 .. E - 1 is none
};

// What pairs are sorted to.
struct Routing {
  int32_t* offsets;  // (E + 1)
  int32_t* pairs;    // (T k): row -> pair
  int32_t* row_of;   // (T k): pair -> row, or -1
};

// Which tiles there are. Lists that are null are not made.
struct Lists {
  ExpertTile* tiles;  // (slots) of `block` rows at most
  int32_t slots, block;
  int32_t* first_tile;  // (E + 1): tiles of the experts before
  ExpertTile* slices;   // (slice_slots) of `slice` rows at most; one also for an empty expert
  int32_t slice_slots, slice;
  SlicedExpert* sliced;  // (sliced_slots)
  int32_t sliced_slots;
  int32_t* first_sum;  // (E): sums of the experts before; and how many slices there are
};

// The counting sort. Each chunk of neighbouring pairs is a CTA's.
struct SortParams {
  Ids ids;
  int32_t pairs, top_k;   // T k, k
  int32_t chunk, chunks;  // pairs of a chunk
  int32_t chunk_pitch;    // `chunks`, rounded up to 16 bytes
  int32_t* counts;        // (E, chunk_pitch)
  int32_t* bases;         // (E, chunk_pitch): of the chunks before, the expert's pairs
  Routing routing;
  Lists lists;
};

// Before a backward pass: what the forward pass did not keep of the routing.
struct PrepareParams {
  Ids ids;
  int32_t pairs, top_k;
  Routing routing;
  Lists lists;
  void* zero_row;           // (d) elements to set to 0 where there is no grad_out; null: none
  int32_t zero_row_chunks;  // of 16 bytes
};

// The weights of all experts, whatever dimension of a matrix has unit stride.
struct ExpertMatrix {
  const void* data;
  int64_t expert_bytes;  // from one expert to the next
  int32_t row_bytes;     // from one row in memory to the next
};

struct RoutingWeights {
  const float* data;  // (T, k); null: 1
  int64_t row, col;   // strides
};

// The tiles of a product, and its grid: slots x columns.
struct ProductTiles {
  const ExpertTile* tiles;
  int32_t slots;
  int32_t columns;  // tiles of columns
};

// h = x W^T + bias, a = act(h): rows of x gathered by token.
struct UpParams {
  ProductTiles tiles;
  const int32_t* pairs;
  int32_t top_k;
  const void* x;  // (T, d)
  int64_t x_row_bytes;
  ExpertMatrix weights;  // (E, G n, d)
  const void* bias;      // (E, G n), or null
  int64_t bias_expert, bias_col;
  int32_t width, inner;  // d, n
  int32_t partial;       // whether rows of any operand end within a chunk of 16 bytes
  int32_t gated;         // G == 2
  Kind kind;
  void* pre;  // (T k, G, n), or null
  int64_t pre_row_bytes, pre_half_bytes;
  void* act;  // (T k, n)
  int64_t act_row_bytes;
};

// y = a W^T + bias: rows as they are sorted. Forward `down`, backward dX = dh W.
struct DownParams {
  ProductTiles tiles;
  const void* rows;  // (T k, halves, depth)
  int64_t row_bytes, half_bytes;
  int32_t halves, depth;
  ExpertMatrix weights;  // (E, columns, halves * depth), or the other way round
  const void* bias;      // (E, columns), or null
  int64_t bias_expert, bias_col;
  int32_t columns;
  int32_t partial;  // as in UpParams
  // k = 1: rows of the result are tokens, weighted. Otherwise rows stay sorted and as they are.
  const int32_t* pairs;  // row -> token; null: sorted
  RoutingWeights scale;
  void* out;
  int64_t out_row_bytes;
};

// Few rows an expert: y = a W^T + bias, and out[t] = sum over j of weight * y[row] in the order of
// j, in one launch. A CTA has 16 columns of all tokens.
struct FewDownParams {
  const ExpertTile* tiles;
  const int32_t* tile_count;
  const void* rows;  // (T k, depth)
  int64_t row_bytes;
  int32_t depth, columns;  // n, d
  ExpertMatrix weights;    // (E, columns, depth)
  const void* bias;        // (E, columns), or null
  int64_t bias_expert, bias_col;
  const int32_t* row_of;
  RoutingWeights scale;
  int32_t tokens, top_k;
  void* out;  // (T, columns)
  int64_t out_row_bytes;
};

// out[t] = sum over j of weight * y[row], in the order of j. `only_absent`: zeros for tokens (k =
// 1) whose pair has no expert, and nothing else.
struct CombineParams {
  const void* rows;  // (T k, width)
  int64_t row_bytes;
  const int32_t* row_of;
  RoutingWeights weights;
  int32_t tokens, top_k, width;
  int32_t lanes;  // threads that share a token: combine_lanes(width)
  int32_t only_absent;
  void* out;  // (T, width)
  int64_t out_row_bytes;
};

// dA = dOut W (rows gathered by token), and from it and h: dh, the weighted activation, and a part
// of each routing weight's gradient for each tile of columns.
struct BwdActParams {
  ProductTiles tiles;
  const int32_t* pairs;
  int32_t top_k;
  const void* grad_out;  // (T, d)
  int64_t grad_out_row_bytes;
  ExpertMatrix weights;  // down (E, d, n)
  int32_t width, inner;  // d, n
  int32_t partial;       // as in UpParams
  int32_t gated;
  Kind kind;
  RoutingWeights scale;
  const void* pre;  // (T k, G, n)
  int64_t pre_row_bytes, pre_half_bytes;
  void* grad_pre;  // dh (T k, G, n), or null
  int64_t grad_pre_row_bytes, grad_pre_half_bytes;
  void* weighted_act;  // (T k, n), or null
  int64_t weighted_act_row_bytes;
  float* row_sums;  // (tiles of columns, T k), or null
  int64_t row_sums_stride;
};

// One operand of a product over rows: (rows, halves, columns).
struct RowOperand {
  const void* data;
  int64_t row_bytes, half_bytes;
  int32_t halves, columns;
  int32_t gathered;  // rows are tokens
};
// out[e] = left^T right over the rows of e.
struct WeightProduct {
  RowOperand left, right;
  int32_t tiles_m, tiles_n;  // of all halves; 0: not asked for
  int32_t tile_m, tile_n;    // rows and columns of a tile
  void* out;                 // (E, left's columns, right's columns) in this order, unit last
  int64_t out_expert_bytes, out_row_bytes;
};
// The gradients of gate_up and down, in one launch. Its grid is slices x tiles of both.
struct BwdWeightsParams {
  WeightProduct products[2];
  const ExpertTile* slices;
  const SlicedExpert* sliced;
  const int32_t* pairs;
  int32_t top_k;
  int32_t partial;    // as in UpParams
  float* slice_sums;  // (sums of slices, tiles of both, block_m x block_n)
};

// Column sums of rows: the gradients of both biases. Parts of them for each tile of rows first, and
// these in the order of the tiles then.
struct BiasSum {
  const void* rows;  // (T k, halves, columns), or (T, columns) where gathered
  int64_t row_bytes, half_bytes;
  int32_t halves, columns;  // 0 columns: not asked for
  int32_t gathered;
  RoutingWeights scale;
  float* parts;  // (slots, halves * columns)
  void* out;     // (E, halves * columns)
  int64_t out_expert, out_col;
};
struct BwdBiasParams {
  BiasSum sums[2];  // grid.z
  const ExpertTile* tiles;
  const int32_t* first_tile;
  const int32_t* pairs;
  int32_t top_k;
};

// The gradient of the routing weights: a warp for each pair.
struct BwdScaleParams {
  Ids ids;
  int32_t pairs, top_k;
  const int32_t* row_of;
  const float* row_sums;  // (parts, T k)
  int64_t row_sums_stride;
  int32_t parts;
  // The share of down's bias: dOut . bias. Null where there is none.
  const void* bias;  // (E, d)
  int64_t bias_expert, bias_col;
  const void* grad_out;  // (T, d)
  int64_t grad_out_row_bytes;
  int32_t width;
  float* grad_weights;  // (T, k)
  int64_t grad_row, grad_col;
};

struct RouteParams {
  const void* logits;  // (T, E), fp32 or the kernel's dtype
  int64_t logits_row, logits_col;
  int32_t logits_are_fp32;
  int32_t tokens, experts, top_k;
  int32_t sigmoid, normalize;
  const float* bias;  // (E), or null
  int64_t bias_col;
  int32_t* ids;  // (T, k)
  int64_t ids_row, ids_col;
  float* weights;  // (T, k)
  int64_t weights_row, weights_col;
  const float* grad_weights;  // (T, k), backward
  int64_t grad_weights_row, grad_weights_col;
  void* grad_logits;  // (T, E), as logits
  int64_t grad_logits_row, grad_logits_col;
};

}  // namespace flashmoe::cuda::moe
