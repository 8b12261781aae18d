// The tasks of Hopper's kernels without a GPU. Calls run with a driver that only looks on
// (fake_libcuda.cc): it is given what kernels would be. Then the kernels' own code for tasks runs
// here, one task after the other in the order in which they are given out, on the workspace of the
// call:
//
// - Every pair of tiles that has anything to do is somebody's, once; nothing is done beside.
// - Whoever waits for another task waits for an earlier one, so that nobody waits for ever.
// - Sums begin with a store or with zeros, and get what all tasks add, in the order they promise.
#include <array>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "fake_libcuda.h"
#include "plans.h"
// Behind all others, and before device code.
#include "emulator/device.h"
//
#include "cuda/attention/kernels/sm90.h"
#include "cuda/attention/ragged.cuh"
#include "cuda/attention/sm90/bwd.cuh"
#include "cuda/attention/sm90/bwd_key_sum.cuh"
#include "cuda/attention/sm90/bwd_preprocess.cuh"
#include "cuda/attention/sm90/fwd.cuh"

fake::Cuda fake_cuda;

namespace {

using namespace flashmoe;
using namespace flashmoe::cuda;
using namespace flashmoe::cuda::sm90;
using namespace testing;

// What the driver was asked to launch.
struct Launched {
  std::string symbol;
  CUlaunchConfig config;
  Sm90BwdParams backward{};
  Sm90FwdParams forward{};
  RaggedParams ragged{};

  bool is(const char* role) const { return symbol.find(role) != std::string::npos; }
  bool lists_blocks() const { return is("ragged_blocks"); }
};
std::vector<Launched> launched;

void record(const char* symbol, const CUlaunchConfig& config, const void* params) {
  Launched one{.symbol = symbol, .config = config};
  if (one.is("13Sm90BwdParams")) std::memcpy(&one.backward, params, sizeof(one.backward));
  if (one.is("13Sm90FwdParams")) std::memcpy(&one.forward, params, sizeof(one.forward));
  if (one.lists_blocks()) std::memcpy(&one.ragged, params, sizeof(one.ragged));
  launched.push_back(one);
}

// A call whose tensors nobody reads or writes, but lengths.
struct Problem {
  AttentionProblem problem;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k;
  std::vector<int64_t> key_lengths;
  AttentionPlan plan;
  std::vector<char> workspace;

  char* memory() {
    const auto at = reinterpret_cast<uintptr_t>(workspace.data());
    return workspace.data() + (256 - at % 256);
  }
  bool contains(const void* data, size_t bytes) {
    const char* const first = static_cast<const char*>(data);
    return memory() <= first && first + bytes <= memory() + plan.workspace_bytes;
  }
  // Plans it and runs it up to the driver.
  void launch() {
    launched.clear();
    plan = plan_of(problem);
    workspace.assign(plan.workspace_bytes + 512, '\xff');  // NaN, and -1
    char* address = reinterpret_cast<char*>(uintptr_t{1} << 50);
    const auto somewhere = [&](bool wanted) -> char* {
      return wanted ? address += 1ll << 40 : nullptr;
    };
    AttentionTensors t;
    t.query = somewhere(true);
    t.key = somewhere(true);
    t.value = somewhere(true);
    t.out = somewhere(true);
    t.lse = somewhere(true);
    t.bias = somewhere(problem.bias.has_value());
    t.grad_out = somewhere(problem.grad_out.has_value());
    t.grad_query = somewhere(problem.grad_query.has_value());
    t.grad_key = somewhere(problem.grad_key.has_value());
    t.grad_value = somewhere(problem.grad_value.has_value());
    t.grad_bias = somewhere(problem.grad_bias.has_value());
    if (problem.key_lengths) t.key_lengths = key_lengths.data();
    if (problem.ragged) {
      t.cu_seqlens_q = cu_seqlens_q.data();
      t.cu_seqlens_k = cu_seqlens_k.data();
    }
    const Status status = flashmoe::run(plan, t, memory());
    CHECK(status.ok(), status.message());
    for (const Launched& one : launched) {
      if (one.lists_blocks()) list_blocks(one.ragged);
    }
  }

 private:
  // As attention_ragged_blocks() does, whose threads share out the sequences.
  static void list_blocks(const RaggedParams& p) {
    for (const RaggedList& list : p.lists) {
      if (!list.blocks) continue;
      std::fill(list.blocks, list.blocks + list.slots, RaggedBlock{});
      RaggedBefore before{};
      for (int i = 0; i <= p.batch; ++i) {
        const RaggedSequence s = find_ragged(before, i, list, p);
        for (int n = 0; n < s.blocks && before.slot + n < list.slots; ++n) {
          list.blocks[before.slot + n] = ragged_block(before, i, s, n, list, p);
        }
        before = after(before, s);
      }
      CHECK(before.slot <= list.slots, before.slot, "blocks,", list.slots, "slots");
    }
  }
};

// f(index) for the tile of a table that the plan's kernel has; false where there is none.
template <const auto& kTiles, class F>
bool for_tile(const AttentionPlan& plan, const F& f) {
  const CudaKernel& kernel = *find(plan.kernel);
  const auto is_it = [&](const auto& tile) {
    return tile.head_dim == kernel.head_dim && tile.block_q == kernel.block_q &&
           tile.block_k == kernel.block_k;
  };
  return [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    return ((is_it(kTiles[kIndices]) && (f(std::integral_constant<size_t, kIndices>()), true)) ||
            ...);
  }
  (std::make_index_sequence<std::size(kTiles)>());
}

bool is_hopper(const AttentionPlan& plan) {
  return plan.family == "sm90" && plan.kernel.find("packed") == std::string::npos;
}

// Whether any of the rows [first, last] of a sequence sees any of the keys [begin, end).
bool sees(const Sequence& seq, int first, int last, int begin, int end, const AttentionParams& p) {
  for (int row = first; row <= std::min(last, seq.len_q - 1); ++row) {
    const int64_t lowest = std::max<int64_t>(int64_t{row} + seq.shift - p.left, begin);
    const int64_t highest =
        std::min<int64_t>(int64_t{row} + seq.shift + p.right, std::min(end, seq.len_k) - 1);
    if (lowest <= highest) return true;
  }
  return false;
}
bool sees_all(const Sequence& seq, int first, int last, int begin, int end,
              const AttentionParams& p) {
  for (int row = first; row <= std::min(last, seq.len_q - 1); ++row) {
    if (int64_t{row} + seq.shift - p.left > begin || end > seq.len_k ||
        int64_t{row} + seq.shift + p.right < end - 1) {
      return false;
    }
  }
  return true;
}

// The backward kernel of a slice, and those around it.
template <class C>
class BackwardSlice {
 public:
  BackwardSlice(Problem& problem, const Launched& main) : problem_(problem), p(main.backward) {
    const int batches = p.key_tiles / (p.key_blocks * p.heads);
    for (int batch = p.first_batch; !p.blocks && batch < p.first_batch + batches; ++batch) {
      sequences_[batch] = find_sequence(p, batch);
    }
    for (const Launched& one : launched) {
      for (const RaggedList& list : one.ragged.lists) {
        for (int slot = 0; p.blocks && list.blocks == p.query_blocks && slot < list.slots; ++slot) {
          const RaggedBlock& block = list.blocks[slot];
          if (block.kind == RaggedKind::kBlock) sequences_[block.sequence] = find_sequence(block);
        }
      }
    }
  }

  void preprocess(const Launched& kernel) {
    p.tile_counter[0] = p.tile_counter[1] = 0;
    CHECK(problem_.contains(p.lse_delta + 2 * p.first_head * p.group * p.rows,
                            p.heads * p.group * p.rows * 8));
    std::set<std::tuple<int, int, int>> seen;
    for_each_cta(kernel.config, [&] {
      const QueryRows rows = find_preprocess_rows(p);
      const int count = p.blocks ? p.block_q : p.preprocess_rows;
      if (rows.kind != RaggedKind::kBlock) return;
      for (int row = rows.first; row < rows.first + count; row += 16) {
        CHECK(seen.insert({rows.batch, rows.head, row}).second);
      }
    });
    for (const auto& [batch, seq] : sequences_) {
      if (!seq.valid) continue;
      const int rows = round_up(seq.len_q);
      for (int head = first_head(); head < last_head(); ++head) {
        for (int row = 0; row < rows; row += 16) {
          CHECK(seen.contains({batch, head, row}), "batch", batch, "head", head, "row", row);
        }
        if (!p.dq_accum) continue;
        const int64_t row = head * p.dq_accum_rows + slice_row(batch);
        CHECK(problem_.contains(p.dq_accum + row * p.dim, int64_t{rows} * p.dim * 4));
        for (int tile = 0; tile < rows; tile += p.block_q) semaphore(row + tile) = 0;
        if (head % p.group == 0) *parts_done(p, batch, head / p.group) = 0;
        if (p.zeroes_dq && head_index(batch, head / p.group, p) < p.zeroed_ahead) {
          zero_dq_rows<1>(batch, head, 0, rows, 0, p);
        }
      }
    }
  }

  void run() {
    bool ended = false;
    for (int number = 0; number < p.num_tasks; ++number) {
      BwdTask task;
      find_task<C>(task, number, p);
      CHECK(task.last || !ended);
      ended = task.last;
      if (ended) continue;
      try {
        run(task);
      } catch (const emulator::WaitsForever&) {
        CHECK(false, "task", number, "waits for a later one; batch", task.batch, "key head",
              task.key_head, "keys", task.first_key);
        return;
      }
    }
    BwdTask task;
    find_task<C>(task, p.num_tasks, p);
    CHECK(task.last);
  }

  // Every tile of queries saw the tiles of keys that it sees, and its sums are theirs.
  void check() {
    size_t expected = 0;
    for (const auto& [batch, seq] : sequences_) {
      for (int head = first_head(); head < last_head(); ++head) {
        const int key_head = head / p.group;
        if (p.dq_accum && seq.valid && seq.len_q > 0) {
          const int blocks = p.blocks ? ceil_div(seq.len_k, C::kBlockK) : p.key_blocks;
          CHECK_EQ(*parts_done(p, batch, key_head), kPartsOfBlock * blocks * p.splits);
          if (p.zeroes_dq && head_index(batch, key_head, p) >= p.zeroed_ahead) {
            CHECK_EQ(*zeroed_parts(p, batch, key_head), p.key_blocks);
          }
        }
        for (int first = 0; seq.valid && first < seq.len_q; first += C::kBlockQ) {
          int count = 0;
          for (int key = 0; key < seq.len_k; key += C::kBlockK) {
            if (!sees(seq, first, first + C::kBlockQ - 1, key, key + C::kBlockK, p)) continue;
            ++count;
            CHECK(pairs_.contains({batch, head, first, key}), "batch", batch, "head", head,
                  "queries", first, "keys", key, "are nobody's");
          }
          expected += count;
          CHECK_EQ(is_seen(seq, first, p), count > 0);
          if (!p.dq_accum || count == 0) continue;
          const int64_t row = head * p.dq_accum_rows + slice_row(batch) + first;
          for (int part = 0; part < kParts; ++part) {
            for (const float* sum : ends_of(row, part)) CHECK_EQ(*sum, static_cast<float>(count));
          }
        }
      }
    }
    CHECK_EQ(pairs_.size(), expected);
  }

  // The kernel that converts dQ, or the warps of this one that do.
  void convert(const Launched* kernel) {
    if (!p.dq_accum) return;
    std::set<std::tuple<int, int, int>> seen;
    if (kernel) {
      for_each_cta(kernel->config, [&] {
        const QueryRows rows = find_query_rows(p);
        if (rows.kind != RaggedKind::kBlock || rows.first >= rows.seq.len_q) return;
        CHECK(seen.insert({rows.batch, rows.head, rows.first}).second);
        wait_until_done(p, rows.seq, rows.batch, rows.head / p.group);
      });
      for (const auto& [batch, seq] : sequences_) {
        for (int head = first_head(); head < last_head(); ++head) {
          for (int first = 0; seq.valid && first < seq.len_q; first += p.block_q) {
            CHECK(seen.contains({batch, head, first}));
          }
        }
      }
    } else if constexpr (C::kTwoCta) {
      CompleteRows rows;
      std::set<const float*> places;
      size_t expected = 0;
      while (find_complete_rows<C>(rows, p)) {
        CHECK(places.insert(rows.sums).second);
        CHECK(problem_.contains(rows.sums, 4));
      }
      for (const auto& [batch, seq] : sequences_) {
        for (int first = 0; first < seq.len_q; first += 16) {
          if (is_seen(seq, first, p)) expected += last_head() - first_head();
        }
      }
      CHECK_EQ(places.size(), expected);
    }
  }

  // The kernel that adds up dK and dV.
  void sum_keys(const Launched& kernel) {
    std::set<std::tuple<bool, int, int, int, int, int>> seen;
    for_each_cta(kernel.config, [&] {
      SummedPart r;
      if (!find_summed_part(r, p)) return;
      const KeyTile tile = find_tile<false>(p.key_tiles - p.split_tiles + r.tile, p);
      const int sequence = p.blocks ? p.blocks[tile.block].sequence : r.batch;
      const int token = static_cast<int>(r.seq.token_k);
      CHECK(seen.insert({r.value, sequence, token, r.key_head, r.first, r.column}).second);
      const int first_key = r.first / kKeysOfBlock * kKeysOfBlock;
      float sum = 0;
      for (int split = 0; split < p.splits; ++split) {
        const QueryRange queries =
            find_query_range(r.seq, first_key, split, p.block_q, kKeysOfBlock, p);
        if (queries.begin >= queries.end) continue;
        const int64_t part =
            (r.value ? p.splits * p.split_tiles : 0) + r.tile + split * p.split_tiles;
        const int64_t row = part * kKeysOfBlock + r.first - first_key;
        const float* const first = p.grad_parts + row * p.dim + r.column * 64;
        const float* const last = first + std::min(p.dim - r.column, 64) * 64 - 1;
        CHECK(problem_.contains(first, (last + 1 - first) * 4));
        CHECK_EQ(*first, *last);
        sum += *first;
      }
      size_t tiles = 0;
      for (const auto& [batch, head, query, key] : pairs_) {
        tiles += batch == sequence && head / p.group == r.key_head && key == first_key;
      }
      CHECK_EQ(sum, static_cast<float>(tiles));
    });
    size_t expected = 0;
    const int columns = ceil_div(p.head_dim, 64) + ceil_div(p.head_dim_v, 64);
    for (int keys : split_keys_) expected += columns * (keys > 64 ? 2 : keys > 0);
    CHECK_EQ(seen.size(), expected);
  }

 private:
  static constexpr int kParts = C::kTwoCta ? 2 : C::kDqParts;  // of a tile's sums

  static int ceil_div(int a, int b) { return (a + b - 1) / b; }
  int round_up(int rows) const { return ceil_div(rows, p.block_q) * p.block_q; }
  int first_head() const { return p.first_head * p.group; }
  int last_head() const { return (p.first_head + p.heads) * p.group; }
  int64_t slice_row(int batch) const {
    return workspace_row(p, sequences_.at(batch), batch) - rows_before_slice(p);
  }
  int& semaphore(int64_t row) {
    int* const at = p.dq_semaphore + row / p.block_q;
    CHECK(problem_.contains(at, 4));
    return *at;
  }
  // The first and the last number of a part of the sums at a row.
  std::array<float*, 2> ends_of(int64_t row, int part) {
    constexpr int64_t kAll = int64_t{C::kBlockQ} * C::kDqAccumDim, kOfPart = kAll / kParts;
    static_assert(C::kTwoCta || kOfPart * 4 == C::kDqBytes);
    float* first = p.dq_accum + row * C::kDqAccumDim + part * kOfPart;
    if constexpr (!C::kTwoCta) first = dq_accum_part<C>(row, part, p);
    CHECK(problem_.contains(first, kOfPart * 4));
    return {first, first + kOfPart - 1};
  }
  template <class F>
  static void for_each_cta(const CUlaunchConfig& config, const F& f) {
    gridDim = {config.gridDimX, config.gridDimY, config.gridDimZ};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
      for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) f();
      }
    }
    blockIdx = {0, 0, 0};
  }

  void run(const BwdTask& task) {
    int part = BwdTask::kWhole;
    if constexpr (C::kSplits) part = task.part;
    if constexpr (C::kZeroesDq) {
      for (int lane = 31; lane >= 0; --lane) {
        threadIdx.x = lane;
        zero_next_wave<C>(task, p);
      }
    }
    if (part != BwdTask::kWhole) {
      CHECK(part >= 0 && part < p.splits * p.split_tiles && parts_.insert(part).second);
      if (part < p.split_tiles) {
        split_keys_.push_back((p.blocks ? task.seq.len_k : p.len_k) - task.first_key);
      }
    }
    if (task.tiles > 0 && part != BwdTask::kWhole) {
      for (int value = 0; value < 2; ++value) {
        const int64_t at = part + value * p.splits * p.split_tiles;
        constexpr int64_t kNumbers = int64_t{C::kBlockK} * C::kDqAccumDim;
        CHECK(problem_.contains(p.grad_parts + at * kNumbers, kNumbers * 4));
        std::fill_n(p.grad_parts + at * kNumbers, kNumbers, static_cast<float>(task.tiles));
      }
    }
    if (p.dq_accum && zeroes_dq<C>(p)) wait_until_zeroed(task, p);
    int tiles = 0;
    for_each_query_tile<C>(task, p, [&](int head, int first) {
      ++tiles;
      CHECK(pairs_.insert({task.sequence, head, first, task.first_key}).second);
      const QueryTileInfo info = find_query_tile<C>(task, head, first, p);
      for (int i = 0; i < C::kBlockK / 64; ++i) {
        const int key = task.first_key + 64 * i;
        CHECK((info.flags & QueryTileInfo::kMasked << i) ||
              sees_all(task.seq, first, first + C::kBlockQ - 1, key, key + 64, p));
      }
      if (p.dq_accum) add(task, head, first);
    });
    CHECK_EQ(tiles, task.tiles);
    if (!p.dq_accum) return;
    for (int i = 0; i < kParts; ++i) add_parts_done<C>(p, task, kPartsOfBlock / kParts);
  }

  // dQ of a tile of queries, of which every number is 1.
  void add(const BwdTask& task, int head, int first) {
    const SumOrder<C> order(task, head, first, p);
    CHECK(problem_.contains(order.semaphore, 4));
    for (int part = 0; part < kParts; ++part) {
      order.wait();
      if (p.deterministic) {
        CHECK_EQ(*order.semaphore, order.parts_before + part * (kPartsOfBlock / kParts));
      }
      for (float* sum : ends_of(order.row, part)) *sum = order.stores ? 1 : *sum + 1;
      order.release(kPartsOfBlock / kParts);
    }
  }

  Problem& problem_;
  const Sm90BwdParams p;
  std::map<int, Sequence> sequences_;
  std::set<std::tuple<int, int, int, int>> pairs_;  // sequence, head, first query, first key
  std::set<int> parts_;
  std::vector<int> split_keys_;  // of each tile of keys that is split: what its rows have room for
};

template <class C>
void check_backward(Problem& problem) {
  const std::string main = find(problem.plan.kernel)->symbol;
  const Launched* preprocess = nullptr;
  const Launched* sum = nullptr;
  for (const Launched& one : launched) {
    if (one.is("bwd_key_sum")) sum = &one;
  }
  for (size_t i = 0; i < launched.size(); ++i) {
    if (launched[i].is("bwd_preprocess")) preprocess = &launched[i];
    if (launched[i].symbol != main) continue;
    const bool converts = i + 1 < launched.size() && launched[i + 1].is("bwd_dq");
    BackwardSlice<C> slice(problem, launched[i]);
    try {
      slice.preprocess(*preprocess);
      slice.run();
      slice.check();
      slice.convert(converts ? &launched[i + 1] : nullptr);
      if (sum) slice.sum_keys(*sum);
    } catch (const emulator::WaitsForever& error) {
      CHECK(false, error.what());
    }
  }
}

// What is left out of a task's tiles of keys, or goes without a mask, is seen by nobody, or by all.
template <class C>
void check_keys(const FwdTask& task, const Sm90FwdParams& p) {
  const Sequence& seq = task.seq;
  const auto row_of = [&](int i) { return (task.first_row + i) >> p.pack; };
  CHECK(task.key_begin >= 0 && task.key_end > task.key_begin);
  const int last = row_of(C::kBlockQ - 1);
  CHECK(!sees(seq, row_of(0), last, 0, task.key_begin * C::kBlockK, p));
  CHECK(!sees(seq, row_of(0), last, task.key_end * C::kBlockK, seq.len_k, p));
  for (int i = 0; i < C::kWarpgroups; ++i) {
    const int first_row = row_of(64 * i), last_row = row_of(64 * i + 63);
    const int end = task.warpgroup_end[i];
    CHECK(end > task.key_begin && end <= task.key_end);
    CHECK(!sees(seq, first_row, last_row, end * C::kBlockK, seq.len_k, p));
    if constexpr (C::kHalfSoftmax) {
      const int half = (end - 1) * C::kBlockK + C::kBlockK / 2;
      CHECK(!task.half_first[i] || !sees(seq, first_row, last_row, half, seq.len_k, p));
    }
    for (int tile = task.unmasked_begin[i]; tile < std::min(task.unmasked_end[i], end); ++tile) {
      CHECK(sees_all(seq, first_row, last_row, tile * C::kBlockK, (tile + 1) * C::kBlockK, p));
    }
  }
}

// The tasks of a forward kernel, CTA by CTA.
template <class C>
void check_forward(Problem& problem) {
  const std::string symbol = find(problem.plan.kernel)->symbol;
  const auto main = std::find_if(launched.begin(), launched.end(),
                                 [&](const Launched& one) { return one.symbol == symbol; });
  const Sm90FwdParams p = main->forward;
  if (p.tile_counter) {
    CHECK(problem.contains(p.tile_counter, 4));
    *p.tile_counter = 0;
  }
  std::set<std::tuple<int64_t, int, int>> rows_seen;  // batch or token, head, row
  const FwdScheduler<C> scheduler{p};
  gridDim.x = main->config.gridDimX;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    int number = blockIdx.x;
    for (uint32_t count = 0;; ++count) {
      FwdTask task;
      scheduler.find_task(number, task);
      if (!task.more) break;
      number = scheduler.next(number, count);
      const Sequence& seq = task.seq;
      for (int row = task.first_row; row < task.first_row + C::kBlockQ; ++row) {
        if (row >> p.pack >= seq.len_q) break;
        const int64_t where = p.blocks ? seq.token_q + row : task.batch;
        CHECK(rows_seen.insert({where, task.head, p.blocks ? 0 : row}).second);
      }
      if (seq.valid) check_keys<C>(task, p);
    }
  }
  blockIdx.x = 0;
  const auto rows =
      p.blocks ? problem.problem.query.shape[0] : int64_t{p.batch} * p.len_q << p.pack;
  CHECK_EQ(rows_seen.size(), static_cast<size_t>(rows * p.heads));
}

int pick(std::mt19937& random, std::initializer_list<int> from) {
  return from.begin()[random() % from.size()];
}
int between(std::mt19937& random, int first, int last) {
  return first + static_cast<int>(random() % (last - first + 1));
}

Problem random_problem(std::mt19937& random, Pass pass) {
  const int dim = pick(random, {32, 64, 64, 80, 96, 128, 128, 128, 192, 256});
  const bool ragged = random() % 4 == 0;
  Sizes s;
  s.batch = between(random, 1, 4);
  s.heads_k = between(random, 1, 4);
  s.heads_q = s.heads_k * pick(random, {1, 1, 2, 3, 4, 5, 8});
  s.len_q = between(random, 1, pick(random, {100, 700, 1500}));
  s.len_k = random() % 2 ? s.len_q : between(random, 1, 1200);
  // Long enough for zeros and, with enough heads that share theirs, for pairs; or with tasks that
  // CTAs have a few of each, and so in splits.
  const bool is_long = random() % 12 == 0, has_few = is_long && random() % 3 == 0;
  if (is_long) s.len_q = s.len_k = between(random, 3000, 6000);
  if (has_few) s.batch = 1;
  if (has_few) s.heads_q = 4 * s.heads_k;
  if (is_long && !has_few && random() % 2) s.heads_q = 6 * s.heads_k;
  Problem made;
  AttentionProblem& p = made.problem;
  p = cuda_problem(90, pass, DType::kBFloat16, dim, dim, s, ragged);
  p.device.ordinal = 1;  // of the fake driver's
  p.device.multiprocessors =
      has_few ? pick(random, {6, 10, 16, 132}) : pick(random, {2, 4, 6, 10, 16, 24, 132});
  switch (has_few ? random() % 2 : is_long ? 0 : random() % 4) {
    case 0:
      p.options.causal = true;
      break;
    case 1:
      p.options.window_left = between(random, 0, 300);
      p.options.window_right = between(random, 0, 300);
      break;
    case 2:
      p.options.causal = true;
      if (random() % 2) p.options.window_left = between(random, 0, 500);
  }
  p.options.deterministic = pass == Pass::kBackward && random() % 3 == 0;
  if (ragged) {
    // One end may lie, and then its neighbours may be wrong as well.
    for (auto* ends : {&made.cu_seqlens_q, &made.cu_seqlens_k}) {
      const int tokens =
          static_cast<int>(ends == &made.cu_seqlens_q ? p.query.shape[0] : p.key.shape[0]);
      const int longest = tokens / static_cast<int>(s.batch);
      ends->push_back(0);
      for (int i = 0; i < s.batch; ++i) {
        ends->push_back(ends->back() + between(random, random() % 4 ? 1 : 0, longest));
      }
      if (random() % 4 == 0) (*ends)[between(random, 0, s.batch)] += between(random, -9, 9);
    }
  } else if (random() % 3 == 0) {
    p.key_lengths = contiguous(DType::kInt64, {s.batch});
    for (int i = 0; i < s.batch; ++i) {
      made.key_lengths.push_back(between(random, 0, s.len_k));
      if (random() % 8 == 0) made.key_lengths.back() = pick(random, {-1, 100000});
    }
  } else if (pass == Pass::kBackward && dim <= 128 && random() % 4 == 0) {
    p.bias = contiguous(DType::kBFloat16, {s.batch, s.heads_q, s.len_q, s.len_k / 8 * 8 + 8});
    p.bias->shape[3] = s.len_k;
  }
  if (pass == Pass::kBackward && random() % 8 == 0) p.grad_query.reset();
  return made;
}

std::string words(const Problem& made) {
  const AttentionProblem& p = made.problem;
  std::ostringstream s;
  s << made.plan.kernel << " batch " << made.plan.batch << " heads " << made.plan.heads_q << "/"
    << made.plan.heads_k << " " << made.plan.len_q << " x " << made.plan.len_k
    << (p.options.causal ? " causal" : "") << " window " << p.options.window_left << " "
    << p.options.window_right << (p.options.deterministic ? " deterministic" : "")
    << (p.grad_query ? "" : " without dQ") << ", " << p.device.multiprocessors << " SMs, splits "
    << made.plan.splits << " of " << made.plan.split_tiles << ", slices " << made.plan.slices;
  for (auto& ends : {made.cu_seqlens_q, made.cu_seqlens_k}) {
    for (int end : ends) s << " " << end;
  }
  for (int64_t length : made.key_lengths) s << " " << length;
  return s.str();
}

void prepare() {
  fake_cuda.static_shared_bytes = 0;
  fake_cuda.on_launch = record;
}

}  // namespace

TEST(tasks_of_a_forward_pass) {
  if (!has_family("sm90")) return;
  prepare();
  std::mt19937 random(26);
  int checked = 0, counted = 0, late = 0, packed = 0, ragged = 0;
  for (int i = 0; i < 3000; ++i) {
    Problem made = random_problem(random, Pass::kForward);
    made.launch();
    if (!is_hopper(made.plan)) continue;
    const Note note("problem ", i, ": ", words(made));
    CHECK(for_tile<kFwd>(made.plan,
                         [&](auto at) { check_forward<FwdConfig<Bf16, kFwd[at]>>(made); }));
    const Sm90FwdParams& p = launched.back().forward;
    ++checked;
    counted += p.tile_counter != nullptr;
    late += p.late_blocks > 0;
    packed += p.pack > 0;
    ragged += p.blocks != nullptr;
  }
  std::printf("%d checked: %d count tasks, %d with late tiles, %d pack heads, %d ragged\n", checked,
              counted, late, packed, ragged);
  for (int of_a_kind : {counted, late, packed, ragged}) CHECK(of_a_kind > 50);
}

TEST(tasks_of_a_backward_pass) {
  if (!has_family("sm90")) return;
  prepare();
  std::mt19937 random(26);
  int checked = 0, split = 0, in_part = 0, paired = 0, zeroed = 0, sliced = 0;
  for (int i = 0; i < 3000; ++i) {
    Problem made = random_problem(random, Pass::kBackward);
    made.launch();
    if (!is_hopper(made.plan)) continue;
    const Note note("problem ", i, ": ", words(made));
    const bool bias = made.problem.bias.has_value();
    const bool found =
        bias ? made.plan.kernel.find("rows") == std::string::npos &&
                   for_tile<kBwdBias>(
                       made.plan,
                       [&](auto at) { check_backward<BwdConfig<Bf16, kBwdBias[at]>>(made); })
             : for_tile<kBwd>(made.plan,
                              [&](auto at) { check_backward<BwdConfig<Bf16, kBwd[at]>>(made); });
    CHECK(found || bias, "no configuration of", made.plan.kernel);
    if (!found) continue;
    const auto main = std::find_if(launched.begin(), launched.end(), [&](const Launched& one) {
      return one.symbol == find(made.plan.kernel)->symbol;
    });
    ++checked;
    split += made.plan.splits > 1;
    in_part += made.plan.splits > 1 && main->backward.key_tiles > made.plan.split_tiles;
    paired += main->backward.paired_heads > 0;
    zeroed += main->backward.zeroes_dq;
    sliced += made.plan.slices > 1;
  }
  std::printf(
      "%d checked: %d split, %d in part, %d in pairs, %d begin with zeros, "
      "%d in slices\n",
      checked, split, in_part, paired, zeroed, sliced);
  for (int of_a_kind : {split / 10, in_part, paired, zeroed, sliced}) {
    CHECK(of_a_kind > 5);
  }
}
