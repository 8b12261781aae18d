// The tasks of Hopper's backward kernels without a GPU (hopper_tasks.h):
//
// - Every pair of tiles that has anything to do is somebody's, once; nothing is done beside.
// - Whoever waits for another task waits for an earlier one, so that nobody waits for ever.
// - Sums begin with a store or with zeros, and get what all tasks add, in the order they promise.
#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <set>
#include <tuple>

#include "hopper_tasks.h"
//
#include "cuda/attention/kernels/sm90.h"
#include "cuda/attention/sm90/bwd.cuh"
#include "cuda/attention/sm90/bwd_key_sum.cuh"
#include "cuda/attention/sm90/bwd_preprocess.cuh"
#include "cuda/attention/sm90/bwd_whole.cuh"

fake::Cuda fake_cuda;

namespace {

using namespace flashmoe;
using namespace flashmoe::cuda;
using namespace flashmoe::cuda::sm90;
using namespace testing;

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

// Heads that a cluster has all of: each CTA has its keys and what sees them, first the tile of
// queries whose dQ is the other CTA's, if it has one, and then its own.
template <class C>
void check_whole(const Problem& problem) {
  CHECK_EQ(launched.size(), 1u);
  const Sm90BwdParams p = launched.back().backward;
  const int batches = static_cast<int>(problem.plan.batch);
  CHECK_EQ(int(launched.back().config.gridDimX), p.key_blocks * p.heads * batches);
  std::set<std::tuple<int, int, int, int>> pairs;  // batch, head, first query, first key
  for (blockIdx.x = 0; blockIdx.x < launched.back().config.gridDimX; ++blockIdx.x) {
    const int rank = static_cast<int>(blockIdx.x) % p.key_blocks;
    BwdTask task;
    find_whole_task<C>(task, rank, p);
    CHECK(task.tiles >= 0 && task.tiles <= C::kStages, task.tiles);
    for (int tile = 0; tile < task.tiles; ++tile) {
      const int first = whole_tile<C>(task, tile);
      CHECK(tile == 0 || owner_of<C>(first, p) == rank, "queries", first, "are CTA", rank, "'s");
      CHECK(pairs.insert({task.batch, task.key_head, first, task.first_key}).second);
      const QueryTileInfo info = find_query_tile<C>(task, task.key_head, first, p);
      for (int i = 0; i < C::kBlockK / 64; ++i) {
        const int key = task.first_key + 64 * i;
        CHECK((info.flags & QueryTileInfo::kMasked << i) ||
              sees_all(task.seq, first, first + C::kBlockQ - 1, key, key + 64, p));
      }
    }
  }
  blockIdx.x = 0;
  size_t expected = 0;
  for (int batch = 0; batch < batches; ++batch) {
    const Sequence seq = find_sequence(p, batch);
    for (int first = 0; seq.valid && first < seq.len_q; first += C::kBlockQ) {
      int count = 0;
      for (int key = 0; key < p.key_blocks * C::kBlockK; key += C::kBlockK) {
        if (!sees(seq, first, first + C::kBlockQ - 1, key, key + C::kBlockK, p)) continue;
        ++count;
        for (int head = 0; head < p.heads; ++head) {
          CHECK(pairs.contains({batch, head, first, key}), "batch", batch, "head", head, "queries",
                first, "keys", key, "are nobody's");
        }
      }
      expected += count * p.heads;
      CHECK_EQ(is_seen(seq, first, p), count > 0);
    }
  }
  CHECK_EQ(pairs.size(), expected);
}

Problem random_whole_problem(std::mt19937& random) {
  const int dim = between(random, 1, 8) * 8;
  Sizes s;
  s.batch = between(random, 1, 4);
  s.heads_q = s.heads_k = between(random, 1, 4);
  s.len_q = between(random, 1, 256);
  s.len_k = random() % 3 ? between(random, 1, 256) : s.len_q;
  Problem made;
  made.problem = cuda_problem(90, Pass::kBackward, DType::kBFloat16, dim, dim, s);
  made.problem.device.ordinal = 1;  // of the fake driver's
  made.problem.device.multiprocessors = 132;
  choose_mask(random, random() % 4, made.problem.options);
  if (random() % 3 == 0) choose_key_lengths(random, made, s);
  return made;
}

}  // namespace

TEST(tasks_of_a_backward_pass) {
  if (!has_family("sm90")) return;
  prepare();
  std::mt19937 random(26);
  int checked = 0, split = 0, in_part = 0, paired = 0, zeroed = 0, sliced = 0;
  for (int i = 0; i < 3000; ++i) {
    Problem made = random_problem(random, Pass::kBackward);
    made.launch();
    if (is_whole(made.plan)) {  // the kernels for longer ones take it as well
      const Environment tile("FLASHMOE_TILE", "128x128");
      made.launch();
    }
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

TEST(tasks_of_whole_heads) {
  if (!has_family("sm90")) return;
  prepare();
  std::mt19937 random(27);
  int two_ctas = 0, two_tiles = 0;
  for (int i = 0; i < 1000; ++i) {
    Problem made = random_whole_problem(random);
    made.launch();
    const Note note("problem ", i, ": ", words(made));
    CHECK(for_tile<kBwdWhole>(
        made.plan, [&](auto at) { check_whole<BwdWholeConfig<Bf16, kBwdWhole[at]>>(made); }));
    two_ctas += made.plan.len_k > 128;
    two_tiles += made.plan.len_k > 128 && made.plan.len_q > 128;
  }
  std::printf("%d of two CTAs, %d of two tiles of queries for each\n", two_ctas, two_tiles);
  CHECK(two_ctas > 100 && two_ctas < 900 && two_tiles > 100);
}
