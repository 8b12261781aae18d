// Which kernels exist: the rows of the families' tables (kernels/sm80.h and so on), as far as an
// image of theirs is in this build.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/attention/tiles.h"
#include "cuda/runtime/launch.h"
#include "flashmoe/tensor.h"

namespace flashmoe::cuda {

enum class Role {
  kRaggedBlocks,   // before either pass of a ragged batch
  kRowBounds,      // before a forward pass over packed tokens
  kTaskCounter,    // before a dense forward pass that counts its tasks
  kBiasAlign,      // before either pass with a bias that many share
  kBiasTranspose,  // before either pass with the bias of a ragged batch, and for its gradient after
  kForward,
  kForwardBias,
  kForwardDropout,    // with a bias or none, as the next one
  kCombine,           // after a forward pass that was split over keys
  kPreprocess,        // before the backward pass
  kPackedPreprocess,  // before that over packed tokens
  kBackward,
  kBackwardBias,
  kBackwardDropout,
  kBackwardDq,  // after it: dQ
  kBackwardBiasDq,
  kBackwardDropoutDq,
  kKeySum,         // dK and dV, where tiles of keys came in several tasks
  kBiasSum,        // the gradient of a bias that was broadcast
  kSinkSum,        // the gradient of the sinks
  kPagedDecode,    // a forward pass over the pages of a cache: sequences with few rows,
  kPaged,          // with more,
  kPagedChunk,     // and with many queries, where they have a kernel of their own
  kPagedTickets,   // before the first of these, where its CTAs take tickets
  kPagedCombine,   // after it, where keys were split
  kTangent,        // forward mode
  kSecondRows,     // second derivatives: before all others, row by row
  kSecondQueries,  // by queries
  kSecondKeys,     // by keys
  kSecondBiasSum,  // the gradient of a bias that was broadcast
  kSecondSinks,    // the gradient of the sinks
};
const char* role_name(Role role);

struct Kernel {
  KernelId id;
  const char* family;
  Role role;
  DType dtype;
  // The tile; 0 for kernels that go row by row.
  int head_dim = 0, block_q = 0, block_k = 0;
  int threads = 0;
  int shared_bytes = 0;
  int ctas = 0;                    // that the registers of an SM hold
  bool for_short = false;          // for thousands of short sequences
  bool general_score = true;       // takes a softcap, and a scale that is not positive
  int cluster = 1;                 // CTAs that share a block of keys
  int dq_accum_dim = 0;            // backward: columns of the accumulator of dQ
  int key_box = 0;                 // backward, by TMA: rows of K and V that are loaded at once
  bool converts_dq = false;        // backward: converts dQ from its accumulator itself
  bool stores_dq = false;          // backward: stores dQ where one tile has all keys
  BiasInput bias_input = kNoBias;  // sm90: how it reads a bias; by TMA it is one matrix
  int bias_keys = 0;               // forward: whose bias stays in shared memory; it takes no more
  int teams = 1;                   // forward: tasks at once, which share out block_q
  bool packed = false;             // tiles are tokens, whatever sequences these are of
  int heads_of_box = 1;            // packed: heads that must lie side by side
  bool whole = false;              // backward: a cluster has all of a head, and dQ is complete
  bool counts_tasks = false;       // gives out its tasks by a counter, not by the grid
  bool tf32 = false;               // fp32: one TF32 product where others make three
  bool makes_dq = false;           // backward: dQ has a kernel that adds nothing up in memory
  int key_parts = 1;               // backward: CTAs that share a tile of keys
  int cache_bytes = 0;             // over pages: of a number of the cache
  bool whole_rows = false;         // and whether a box has all columns of its rows
};

// Grouped by family and role, and there best tile first.
const std::vector<Kernel>& kernels();

const Kernel* find_kernel(std::string_view name);
const Kernel* find_kernel(Role role, std::string_view family, DType dtype);
// The one of that role that was made for the same tile; the sum of a bias's gradient has its own,
// and what combines splits needs none.
const Kernel* find_kernel(Role role, const Kernel& beside);

}  // namespace flashmoe::cuda
