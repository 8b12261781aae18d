// Attention forward for Hopper: copies by the copy engine, products by warpgroups.
//
// One CTA on each SM, which goes through blocks of queries. Its first warpgroup gives its registers
// away and keeps one thread busy: that one finds out what is next to be worked on, and has Q, K and
// V copied to shared memory as soon as there is room. Each of the others has 64 rows of queries:
//
//   shared memory   sQ   block_q x D
//                   sK   stages x block_k x D
//                   sV   stages x block_k x D
//                   sO   1 or 2 x block_q x 64    on its way out, 64 columns at a time
//                   barriers: full and empty, for each of these but sO, and for
//                   two tasks: which block of queries it is
//
//   warpgroup 1   S(n) O(n+1) |softmax(n)      | S(n-1) O(n)   | ...
//   warpgroup 2               | S(n) O(n+1)    |softmax(n)     | S(n-1) ...
//
// S = Q K^T of a block is on its way together with O += P V of the one before, and the exponentials
// of a warpgroup run under the products of another: they take turns in issuing products. (Both are
// FlashAttention-3's.) P stays in registers. Blocks go from the last to the first, so that those
// that need a mask come first.
#pragma once

#include "cuda/attention/sm90/fwd_consumer.cuh"

namespace flashmoe::cuda::sm90 {

// The thread that fills shared memory. It also finds out what the others are to work on: that
// takes divisions, for which they would have to wait.
template <class C>
class FwdLoader {
 public:
  __device__ __forceinline__ FwdLoader(char* shared, const Sm90FwdParams& p)
      : shared_(shared),
        smem_(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        slots_{smem_ + C::kSmemBarriers},
        p_(p) {}

  __device__ __forceinline__ void run() {
    for (const TensorMap* map : {&p_.query_map, &p_.key_map, &p_.value_map, &p_.out_map}) {
      ptx::prefetch_tensormap(map);
    }
    Ring<2> tasks;
    int number = p_.tile_counter ? atomicAdd(p_.tile_counter, 1) : blockIdx.x;
#pragma unroll 1
    for (;; tasks.advance()) {
      FwdTask& w = *C::task(shared_, tasks.at());
      tasks.wait_empty(slots_.task(tasks.at()));
      find_task(number, w);
      ptx::mbarrier_arrive(slots_.task(tasks.at()).full);
      if (!w.more) return;
      number = after(number, tasks.count());  // asked for early: it may take a while to come
      load(w);
    }
  }

 private:
  // The block of this CTA after that of `round`. Ragged: the next that nobody has. Else forth and
  // back through the list, so that who had the longest of one round has the shortest of the next.
  __device__ __forceinline__ int after(int number, uint32_t round) const {
    if (p_.tile_counter) return atomicAdd(p_.tile_counter, 1);
    return number + 1 + 2 * (round % 2 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }

  // Number `number` of all blocks.
  __device__ __forceinline__ void find_task(int number, FwdTask& w) const {
    w.more = number < p_.num_tasks;
    if (!w.more) return;
    Sequence seq;
    int first_row;
    if (p_.blocks) {
      const RaggedBlock block = p_.blocks[number / p_.heads];
      w.more = block.kind != RaggedKind::kEmpty;  // and so are all that follow
      w.batch = 0;
      w.head = number % p_.heads;
      first_row = block.block * C::kBlockQ;
      seq = find_sequence(block);
      if (block.kind == RaggedKind::kRest) {  // rows that see nothing
        seq.valid = true;
        seq.len_k = 0;
      }
    } else {
      // Heads go together as far as the second-level cache holds their keys, and of these the
      // blocks that see most go first.
      const int heads = p_.heads * p_.batch, together = p_.heads_per_wave;
      const int first = number / (p_.query_blocks * together) * together;
      const int count = min(together, heads - first);
      const int rest = number - first * p_.query_blocks;
      int block = rest / count;
      if (p_.right < kNoLimit) block = p_.query_blocks - 1 - block;
      const int index = first + rest % count, batch = index / p_.heads;
      w.head = index % p_.heads;
      w.batch = batch;
      first_row = block * C::kBlockQ;
      seq = find_sequence(p_, batch);
    }
    w.first_row = first_row;
    w.seq = seq;
    w.lse = offset(p_, p_.lse_strides, w.batch, w.head << p_.pack, seq.token_q);
    const int last_row = min((first_row + C::kBlockQ - 1) >> p_.pack, seq.len_q - 1);
    const int key_begin = seq.begin(first_row >> p_.pack, p_) / C::kBlockK;
    const int key_end = (max(seq.end(last_row, p_), 0) + C::kBlockK - 1) / C::kBlockK;
    w.key_begin = key_begin;
    // One at least, be it masked altogether.
    w.key_end = seq.valid ? max(key_end, key_begin + 1) : key_begin + 1;
#pragma unroll
    for (int group = 0; group < C::kGroups; ++group) {
      const int first = (first_row + group * 64) >> p_.pack;
      const int last = (first_row + group * 64 + 63) >> p_.pack;
      const int end = first < seq.len_q ? seq.end(min(last, seq.len_q - 1), p_) : 0;
      w.end[group] = min(max((end + C::kBlockK - 1) / C::kBlockK, key_begin + 1), w.key_end);
      const int begin = (seq.begin(last, p_) + C::kBlockK - 1) / C::kBlockK;
      w.full_begin[group] = max(begin, key_begin);
      w.full_end[group] = max(max(seq.end(first, p_), 0) / C::kBlockK, key_begin);
    }
  }

  __device__ __forceinline__ void load(const FwdTask& w) {
    const int key_head = w.head / p_.group, token_k = static_cast<int>(w.seq.token_k);
#pragma unroll 1
    for (int n = w.key_end - 1; n >= w.key_begin; --n, keys_.advance()) {
      const uint32_t at = keys_.at() * C::Keys::kBytes;
      const Slot k = slots_.k(keys_.at()), v = slots_.v(keys_.at());
      const int row = token_k + n * C::kBlockK;
      keys_.wait_empty(k);
      fill<typename C::Keys>(k, smem_ + C::kSmemK + at, p_.key_map, row, key_head, w.batch);
      if (n == w.key_end - 1) {  // after the keys, for which there is room earlier
        queries_.wait_empty(slots_.q());
        fill<typename C::Rows>(slots_.q(), smem_ + C::kSmemQ, p_.query_map, 0, w.first_token(p_),
                               w.head, w.batch);
        queries_.advance();
      }
      keys_.wait_empty(v);
      fill<typename C::Keys>(v, smem_ + C::kSmemV + at, p_.value_map, row, key_head, w.batch);
    }
  }

  char* const shared_;
  const uint32_t smem_;
  const FwdSlots<C> slots_;
  const Sm90FwdParams& p_;
  Ring<1> queries_;
  Ring<C::kStages> keys_;
};

template <class C>
__device__ __forceinline__ void attention_fwd(const Sm90FwdParams& p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) FwdSlots<C>{smem + C::kSmemBarriers}.init();
  __syncthreads();  // the barriers are there
  if (group == 0) {
    ptx::setmaxnreg_dec<C::kLoaderRegisters>();
    if (threadIdx.x == 0) FwdLoader<C>(shared, p).run();
  } else {
    ptx::setmaxnreg_inc<C::kRegisters>();
    FwdRows<C>(shared, group - 1, p).run();
  }
}

}  // namespace flashmoe::cuda::sm90
