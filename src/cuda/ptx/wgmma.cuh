// Products of a warpgroup (sm_90a): 64 rows by kN columns, 16 of the depth at a time, accumulated
// in registers as mma.sync lays them out. Asynchronous: see wgmma_wait.
#pragma once

#include <cstdint>

namespace flashmoe::cuda::ptx {

// PTX ISA, "wgmma.fence": before the first product, and after registers it uses were written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending of the groups are still at work. Their registers must not be touched
// before: what is computed from `sums` afterwards must go through this.
template <int kPending, int kCount>
__device__ __forceinline__ void wgmma_wait_group(float (&sums)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Registers that products still at work read: not to be used for anything else before this.
template <int kSteps>
__device__ __forceinline__ void wgmma_done_with(const uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
  }
}

// wgmma_wait_group<0>, no earlier than it is known whether something is `rare`: left to itself the
// compiler waits first and computes later. What sleeps a nanosecond then is there to be waited for.
template <int kCount>
__device__ __forceinline__ void wgmma_wait_all_after(bool rare, float (&sums)[kCount]) {
  asm volatile(
      "{ .reg .pred rare; setp.ne.u32 rare, %0, 0; @rare nanosleep.u32 1; }"
      "wgmma.wait_group.sync.aligned 0;" ::"r"(int{rare})
      : "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// PTX ISA, "setmaxnreg": registers of each thread of the warpgroup, from or to the others.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// PTX ISA, "stmatrix": four 8 x 8 matrices, each lane the address of a row.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// The same, each transposed: lane i gives where column i % 8 of matrix i / 8 goes.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, const uint32_t (&x)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

// PTX ISA, "wgmma.mma_async": sums = A B, or sums += A B where `add`. Matrices in shared memory are
// given by descriptors (see sm90/operand.cuh). Operands are bf16, or fp16.
template <bool kBf16, int kN>
struct Wgmma;

// Registers %0 to %(n - 1), and what comes after them.
#define FLASHMOE_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHMOE_SUMS_32                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHMOE_SUMS_40 \
  FLASHMOE_SUMS_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHMOE_SUMS_48 \
  FLASHMOE_SUMS_40       \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHMOE_SUMS_56 \
  FLASHMOE_SUMS_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHMOE_SUMS_64 \
  FLASHMOE_SUMS_56       \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHMOE_SUMS_80 \
  FLASHMOE_SUMS_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHMOE_SUMS_88 \
  FLASHMOE_SUMS_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLASHMOE_SUMS_96 \
  FLASHMOE_SUMS_88       \
  ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHMOE_SUMS_128                                                                \
  FLASHMOE_SUMS_96                                                                       \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"
// And what they are: "+f" where sums are added to, "=f" where they begin.
#define FLASHMOE_FLOATS_8(HOW, i)                                                       \
  HOW(sums[i]), HOW(sums[i + 1]), HOW(sums[i + 2]), HOW(sums[i + 3]), HOW(sums[i + 4]), \
      HOW(sums[i + 5]), HOW(sums[i + 6]), HOW(sums[i + 7])
#define FLASHMOE_FLOATS_16(HOW) FLASHMOE_FLOATS_8(HOW, 0), FLASHMOE_FLOATS_8(HOW, 8)
#define FLASHMOE_FLOATS_32(HOW)                                                     \
  FLASHMOE_FLOATS_8(HOW, 0), FLASHMOE_FLOATS_8(HOW, 8), FLASHMOE_FLOATS_8(HOW, 16), \
      FLASHMOE_FLOATS_8(HOW, 24)
#define FLASHMOE_FLOATS_40(HOW) FLASHMOE_FLOATS_32(HOW), FLASHMOE_FLOATS_8(HOW, 32)
#define FLASHMOE_FLOATS_48(HOW) FLASHMOE_FLOATS_40(HOW), FLASHMOE_FLOATS_8(HOW, 40)
#define FLASHMOE_FLOATS_56(HOW) FLASHMOE_FLOATS_48(HOW), FLASHMOE_FLOATS_8(HOW, 48)
#define FLASHMOE_FLOATS_64(HOW) FLASHMOE_FLOATS_56(HOW), FLASHMOE_FLOATS_8(HOW, 56)
#define FLASHMOE_FLOATS_80(HOW) \
  FLASHMOE_FLOATS_64(HOW), FLASHMOE_FLOATS_8(HOW, 64), FLASHMOE_FLOATS_8(HOW, 72)
#define FLASHMOE_FLOATS_88(HOW) FLASHMOE_FLOATS_80(HOW), FLASHMOE_FLOATS_8(HOW, 80)
#define FLASHMOE_FLOATS_96(HOW) FLASHMOE_FLOATS_88(HOW), FLASHMOE_FLOATS_8(HOW, 88)
#define FLASHMOE_FLOATS_128(HOW)                                                    \
  FLASHMOE_FLOATS_96(HOW), FLASHMOE_FLOATS_8(HOW, 96), FLASHMOE_FLOATS_8(HOW, 104), \
      FLASHMOE_FLOATS_8(HOW, 112), FLASHMOE_FLOATS_8(HOW, 120)

// COUNT is N / 2, the registers of a thread; P0 to P5 are the numbers from COUNT on.
#define FLASHMOE_WGMMA(BF16, TYPE, N, COUNT, P0, P1, P2, P3, P4, P5)                               \
  template <>                                                                                      \
  struct Wgmma<BF16, N> {                                                                          \
    /* Both in shared memory, rows along the depth. */                                             \
    static __device__ __forceinline__ void shared(float (&sums)[COUNT], uint64_t a, uint64_t b,    \
                                                  bool add) {                                      \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " P2                                        \
                   ", 0;"                                                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                 \
                   " {" FLASHMOE_SUMS_##COUNT "}, " P0 ", " P1 ", add, 1, 1, 0, 0; }"              \
                   : FLASHMOE_FLOATS_##COUNT("+f")                                                 \
                   : "l"(a), "l"(b), "r"(int{add}));                                               \
    }                                                                                              \
    /* Both in shared memory, A with rows along the depth, B with a row for each of it. */         \
    static __device__ __forceinline__ void across(float (&sums)[COUNT], uint64_t a, uint64_t b) {  \
      asm volatile(                                                                                \
          "{ .reg .pred add; setp.eq.u32 add, 0, 0;"                                               \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                          \
          " {" FLASHMOE_SUMS_##COUNT "}, " P0 ", " P1 ", add, 1, 1, 0, 1; }"                       \
          : FLASHMOE_FLOATS_##COUNT("+f")                                                          \
          : "l"(a), "l"(b));                                                                       \
    }                                                                                              \
    /* Both with a row for each of the depth. */                                                   \
    static __device__ __forceinline__ void both_across(float (&sums)[COUNT], uint64_t a,           \
                                                       uint64_t b) {                               \
      asm volatile(                                                                                \
          "{ .reg .pred add; setp.eq.u32 add, 0, 0;"                                               \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                          \
          " {" FLASHMOE_SUMS_##COUNT "}, " P0 ", " P1 ", add, 1, 1, 1, 1; }"                       \
          : FLASHMOE_FLOATS_##COUNT("+f")                                                          \
          : "l"(a), "l"(b));                                                                       \
    }                                                                                              \
    /* The first of either: sums = A B. What sums held before needs no registers. */               \
    static __device__ __forceinline__ void shared_first(float (&sums)[COUNT], uint64_t a,          \
                                                        uint64_t b) {                              \
      asm volatile(                                                                                \
          "{ .reg .pred add; setp.ne.u32 add, 0, 0;"                                               \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                          \
          " {" FLASHMOE_SUMS_##COUNT "}, " P0 ", " P1 ", add, 1, 1, 0, 0; }"                       \
          : FLASHMOE_FLOATS_##COUNT("=f")                                                          \
          : "l"(a), "l"(b));                                                                       \
    }                                                                                              \
    static __device__ __forceinline__ void across_first(float (&sums)[COUNT], uint64_t a,          \
                                                        uint64_t b) {                              \
      asm volatile(                                                                                \
          "{ .reg .pred add; setp.ne.u32 add, 0, 0;"                                               \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                          \
          " {" FLASHMOE_SUMS_##COUNT "}, " P0 ", " P1 ", add, 1, 1, 0, 1; }"                       \
          : FLASHMOE_FLOATS_##COUNT("=f")                                                          \
          : "l"(a), "l"(b));                                                                       \
    }                                                                                              \
    /* A in registers, B in shared memory with a row for each of the depth. */                     \
    static __device__ __forceinline__ void registers(float (&sums)[COUNT], const uint32_t (&a)[4], \
                                                     uint64_t b) {                                 \
      asm volatile(                                                                                \
          "{ .reg .pred add; setp.eq.u32 add, 0, 0;"                                               \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                          \
          " {" FLASHMOE_SUMS_##COUNT "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4                    \
                                     ", add, 1, 1, 1; }"                                           \
          : FLASHMOE_FLOATS_##COUNT("+f")                                                          \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                   \
    }                                                                                              \
  };
#define FLASHMOE_WGMMA_TYPES(...)           \
  FLASHMOE_WGMMA(false, "f16", __VA_ARGS__) \
  FLASHMOE_WGMMA(true, "bf16", __VA_ARGS__)

FLASHMOE_WGMMA_TYPES(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
FLASHMOE_WGMMA_TYPES(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
FLASHMOE_WGMMA_TYPES(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
FLASHMOE_WGMMA_TYPES(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
FLASHMOE_WGMMA_TYPES(112, 56, "%56", "%57", "%58", "%59", "%60", "%61")
FLASHMOE_WGMMA_TYPES(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
FLASHMOE_WGMMA_TYPES(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
FLASHMOE_WGMMA_TYPES(176, 88, "%88", "%89", "%90", "%91", "%92", "%93")
FLASHMOE_WGMMA_TYPES(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
FLASHMOE_WGMMA_TYPES(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

}  // namespace flashmoe::cuda::ptx
