// MMA of a warpgroup (sm_90a): 64 rows x kN columns, 16 of the depth at a time, accumulated in
// registers in mma.sync's layout. Asynchronous: see wgmma_wait_group().
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "wgmma.fence": needed before the first MMA, and after registers it uses were written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// PTX ISA, "wgmma.commit_group": the MMAs issued since the last commit become a group.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// PTX ISA, "wgmma.wait_group": waits until at most kPending groups are still at work. Accumulators
// must not be touched before: the empty asm makes whatever reads `sums` later come after the wait.
template <int kPending, int kCount>
__device__ __forceinline__ void wgmma_wait_group(float (&sums)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// The same, where the accumulators stay with the MMAs that are still at work.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps A operands in their registers until here, for MMAs that are still reading them.
template <int kSteps>
__device__ __forceinline__ void wgmma_keep_alive(const uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
  }
}

// wgmma_wait_group<0>() that ptxas does not move above the computation of `rare`.
// NOTE: the predicated nanosleep is a scheduling barrier. Without it ptxas hoists the wait above
// the exponentials that `rare` is computed from.
template <int kCount>
__device__ __forceinline__ void wgmma_wait_all_after(bool rare, float (&sums)[kCount]) {
  asm volatile(
      "{ .reg .pred rare; setp.ne.u32 rare, %0, 0; @rare nanosleep.u32 1; }"
      "wgmma.wait_group.sync.aligned 0;" ::"r"(int{rare})
      : "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// PTX ISA, "setmaxnreg": changes the registers of each thread of the warpgroup. Warpgroups that
// give registers away (dec) let others ask for more (inc, which waits until there are enough).
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// PTX ISA, "wgmma.mma_async": sums += A B. Operands are bf16 or fp16; those in shared memory are
// given by descriptors (tma/operand.cuh). Names say where A and B lie (s: shared memory, r:
// registers) and which is transposed, that is, has a row for each step of the depth (ta: A, tb: B).
// Those that end in _first compute sums = A B, and what `sums` held before needs no registers.
template <bool kBf16, int kN>
struct Wgmma;

// The accumulators of N columns are %0 to %(N/2 - 1) of the asm.
#define FLASHMOE_SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASHMOE_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHMOE_SUMS_32 \
  FLASHMOE_SUMS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHMOE_SUMS_40 \
  FLASHMOE_SUMS_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHMOE_SUMS_48 FLASHMOE_SUMS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHMOE_SUMS_64 \
  FLASHMOE_SUMS_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHMOE_SUMS_96                                                                    \
  FLASHMOE_SUMS_64                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHMOE_SUMS_128                                                                \
  FLASHMOE_SUMS_96                                                                       \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"
// The accumulators as asm operands: HOW is "+f" where MMAs add to them, "=f" where they begin.
#define FLASHMOE_FLOATS_8_AT(HOW, i)                                                    \
  HOW(sums[i]), HOW(sums[i + 1]), HOW(sums[i + 2]), HOW(sums[i + 3]), HOW(sums[i + 4]), \
      HOW(sums[i + 5]), HOW(sums[i + 6]), HOW(sums[i + 7])
#define FLASHMOE_FLOATS_8(HOW) FLASHMOE_FLOATS_8_AT(HOW, 0)
#define FLASHMOE_FLOATS_16_AT(HOW, i) FLASHMOE_FLOATS_8_AT(HOW, i), FLASHMOE_FLOATS_8_AT(HOW, i + 8)
#define FLASHMOE_FLOATS_16(HOW) FLASHMOE_FLOATS_16_AT(HOW, 0)
#define FLASHMOE_FLOATS_32(HOW) FLASHMOE_FLOATS_16(HOW), FLASHMOE_FLOATS_16_AT(HOW, 16)
#define FLASHMOE_FLOATS_40(HOW) FLASHMOE_FLOATS_32(HOW), FLASHMOE_FLOATS_8_AT(HOW, 32)
#define FLASHMOE_FLOATS_48(HOW) FLASHMOE_FLOATS_32(HOW), FLASHMOE_FLOATS_16_AT(HOW, 32)
#define FLASHMOE_FLOATS_64(HOW) FLASHMOE_FLOATS_48(HOW), FLASHMOE_FLOATS_16_AT(HOW, 48)
#define FLASHMOE_FLOATS_96(HOW) \
  FLASHMOE_FLOATS_64(HOW), FLASHMOE_FLOATS_16_AT(HOW, 64), FLASHMOE_FLOATS_16_AT(HOW, 80)
#define FLASHMOE_FLOATS_128(HOW) \
  FLASHMOE_FLOATS_96(HOW), FLASHMOE_FLOATS_16_AT(HOW, 96), FLASHMOE_FLOATS_16_AT(HOW, 112)

// An MMA with both operands in shared memory. ADD is `eq` where it adds to the sums, `ne` where it
// begins them; TA and TB are 1 where A or B is transposed.
#define FLASHMOE_WGMMA_SS(NAME, HOW, ADD, TA, TB, TYPE, N, COUNT, P0, P1)                     \
  static __device__ __forceinline__ void NAME(float(&sums)[COUNT], uint64_t a, uint64_t b) {  \
    asm volatile("{ .reg .pred add; setp." ADD                                                \
                 ".u32 add, 0, 0;"                                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE              \
                 " {" FLASHMOE_SUMS_##COUNT "}, " P0 ", " P1 ", add, 1, 1, " TA ", " TB "; }" \
                 : FLASHMOE_FLOATS_##COUNT(HOW)                                               \
                 : "l"(a), "l"(b));                                                           \
  }

// An MMA with A in registers, which adds to the sums.
#define FLASHMOE_WGMMA_RS(NAME, TB, TYPE, N, COUNT, P0, P1, P2, P3, P4)                            \
  static __device__ __forceinline__ void NAME(float(&sums)[COUNT], const uint32_t(&a)[4],          \
                                              uint64_t b) {                                        \
    asm volatile(                                                                                  \
        "{ .reg .pred add; setp.eq.u32 add, 0, 0;"                                                 \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FLASHMOE_SUMS_##COUNT \
        "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", add, 1, 1, " TB "; }"                        \
        : FLASHMOE_FLOATS_##COUNT("+f")                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
  }

// COUNT is N / 2, the accumulators of a thread; P0 to P4 are the asm's operands from COUNT on.
#define FLASHMOE_WGMMA(BF16, TYPE, N, COUNT, P0, P1, P2, P3, P4)                            \
  template <>                                                                               \
  struct Wgmma<BF16, N> {                                                                   \
    static __device__ __forceinline__ void ss(float (&sums)[COUNT], uint64_t a, uint64_t b, \
                                              bool add) {                                   \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " P2                                 \
                   ", 0;"                                                                   \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE          \
                   " {" FLASHMOE_SUMS_##COUNT "}, " P0 ", " P1 ", add, 1, 1, 0, 0; }"       \
                   : FLASHMOE_FLOATS_##COUNT("+f")                                          \
                   : "l"(a), "l"(b), "r"(int{add}));                                        \
    }                                                                                       \
    FLASHMOE_WGMMA_SS(ss_first, "=f", "ne", "0", "0", TYPE, N, COUNT, P0, P1)               \
    FLASHMOE_WGMMA_SS(ss_tb, "+f", "eq", "0", "1", TYPE, N, COUNT, P0, P1)                  \
    FLASHMOE_WGMMA_SS(ss_tb_first, "=f", "ne", "0", "1", TYPE, N, COUNT, P0, P1)            \
    FLASHMOE_WGMMA_SS(ss_ta, "+f", "eq", "1", "0", TYPE, N, COUNT, P0, P1)                  \
    FLASHMOE_WGMMA_SS(ss_ta_first, "=f", "ne", "1", "0", TYPE, N, COUNT, P0, P1)            \
    FLASHMOE_WGMMA_SS(ss_tatb, "+f", "eq", "1", "1", TYPE, N, COUNT, P0, P1)                \
    FLASHMOE_WGMMA_RS(rs, "0", TYPE, N, COUNT, P0, P1, P2, P3, P4)                          \
    FLASHMOE_WGMMA_RS(rs_tb, "1", TYPE, N, COUNT, P0, P1, P2, P3, P4)                       \
  };
#define FLASHMOE_WGMMA_TYPES(...)           \
  FLASHMOE_WGMMA(false, "f16", __VA_ARGS__) \
  FLASHMOE_WGMMA(true, "bf16", __VA_ARGS__)

FLASHMOE_WGMMA_TYPES(16, 8, "%8", "%9", "%10", "%11", "%12")
FLASHMOE_WGMMA_TYPES(32, 16, "%16", "%17", "%18", "%19", "%20")
FLASHMOE_WGMMA_TYPES(64, 32, "%32", "%33", "%34", "%35", "%36")
FLASHMOE_WGMMA_TYPES(80, 40, "%40", "%41", "%42", "%43", "%44")
FLASHMOE_WGMMA_TYPES(96, 48, "%48", "%49", "%50", "%51", "%52")
FLASHMOE_WGMMA_TYPES(128, 64, "%64", "%65", "%66", "%67", "%68")
FLASHMOE_WGMMA_TYPES(192, 96, "%96", "%97", "%98", "%99", "%100")
FLASHMOE_WGMMA_TYPES(256, 128, "%128", "%129", "%130", "%131", "%132")

}  // namespace flashmoe::cuda::ptx
