// Forward mode and second derivatives, of every head dim.
#include "cuda/attention/second/bias_sum.cuh"
#include "cuda/attention/second/keys.cuh"
#include "cuda/attention/second/queries.cuh"
#include "cuda/attention/second/rows.cuh"
#include "cuda/attention/second/tangent.cuh"
#include "cuda/ptx/grid.cuh"

#include FLASHMOE_CHIP

#define FLASHMOE_PASTE(FAMILY, NAME, DTYPE) FAMILY##_##NAME##_##DTYPE
#define FLASHMOE_PASTE_VALUES(FAMILY, NAME, DTYPE) FLASHMOE_PASTE(FAMILY, NAME, DTYPE)
#define FLASHMOE_KERNEL(NAME) FLASHMOE_PASTE_VALUES(FLASHMOE_FAMILY, NAME, FLASHMOE_DTYPE)

using namespace flashmoe::cuda;

// What FLASHMOE_FAMILY and FLASHMOE_DTYPE say.
namespace flashmoe::cuda::sm75 {
inline constexpr bool kTf32 = false;
}
namespace flashmoe::cuda::sm80 {
inline constexpr bool kTf32 = true;
}
namespace elements {
inline constexpr Element fp32 = Element::kFp32, fp16 = Element::kFp16, bf16 = Element::kBf16;
}

namespace family = flashmoe::cuda::FLASHMOE_FAMILY;
using Config = second::Config<family::Chip, family::kTf32, elements::FLASHMOE_DTYPE>;
// Other chips have not the memory for three CTAs of fp32, and may have the registers.
constexpr int ctas(bool by_keys) {
  const int wanted = second_ctas(Config::kElementBytes, by_keys);
  return Config::kElementBytes == 4 && !ptx::kHopper ? 2 : wanted;
}

extern "C" __global__ void __launch_bounds__(kSecondThreads, ctas(false))
    FLASHMOE_KERNEL(attention_tangent)(const __grid_constant__ AttentionSecondParams p) {
  second::attention_tangent<Config>(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_second_rows)(const __grid_constant__ AttentionSecondParams p) {
  second::attention_second_rows<Config>(p);
}

extern "C" __global__ void __launch_bounds__(kSecondThreads, ctas(false))
    FLASHMOE_KERNEL(attention_second_queries)(const __grid_constant__ AttentionSecondParams p) {
  ptx::griddepcontrol_launch_dependents();  // the kernel by keys, which needs nothing of this one
  second::attention_second_queries<Config>(p);
}

extern "C" __global__ void __launch_bounds__(kSecondThreads, ctas(true))
    FLASHMOE_KERNEL(attention_second_keys)(const __grid_constant__ AttentionSecondParams p) {
  second::attention_second_keys<Config>(p);
  // Whoever waits for this kernel waits for the one by queries too, which it may overlap.
  if (blockIdx.x + 1 == gridDim.x) ptx::griddepcontrol_wait();
}

extern "C" __global__ void __launch_bounds__(kSecondThreads, ctas(false))
    FLASHMOE_KERNEL(attention_second_bias_sum)(const __grid_constant__ AttentionSecondParams p) {
  second::attention_second_bias_sum<Config>(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    FLASHMOE_KERNEL(attention_second_sinks)(const __grid_constant__ AttentionSecondParams p) {
  second::attention_second_sinks<Config>(p);
}
