#include "cuda/catalogue.h"

#include <cstring>

// The images CMake embedded, by name.
#if defined(FLASHMOE_HAS_IMAGES)
#define X(name) extern "C" const char flashmoe_image_##name[], flashmoe_image_##name##_end[];
#include "images.inc"
#undef X
#endif

namespace flashmoe::cuda {
namespace {

const std::vector<Image>& images() {
  static const std::vector<Image> all = {
#if defined(FLASHMOE_HAS_IMAGES)
#define X(name)                  \
  {#name, flashmoe_image_##name, \
   static_cast<size_t>(flashmoe_image_##name##_end - flashmoe_image_##name)},
#include "images.inc"
#undef X
#endif
  };
  return all;
}

const Image* find_image(const char* name) {
  for (const Image& image : images()) {
    if (!std::strcmp(image.name, name)) return &image;
  }
  return nullptr;
}

std::vector<FwdKernel> list_fwd_kernels() {
  std::vector<FwdKernel> list;
  const auto add = [&](const char* name, const char* image, DType dtype, sm80::FwdTile tile) {
    if (const Image* found = find_image(image))
      list.push_back({{name, found}, "sm80", dtype, tile});
  };
#define KERNEL(D, MASK, BLOCK_Q, BLOCK_K, WARPS, Q_STEPS)                                    \
  add("sm80_attention_fwd_fp16_d" #D "_" #MASK, "sm80_attention_fwd_fp16", DType::kFloat16,  \
      {D, sm80::MASK == sm80::causal, BLOCK_Q, BLOCK_K, WARPS, Q_STEPS});                    \
  add("sm80_attention_fwd_bf16_d" #D "_" #MASK, "sm80_attention_fwd_bf16", DType::kBFloat16, \
      {D, sm80::MASK == sm80::causal, BLOCK_Q, BLOCK_K, WARPS, Q_STEPS});
  FLASHMOE_SM80_ATTENTION_FWD(KERNEL)
#undef KERNEL
  return list;
}

}  // namespace

const std::vector<FwdKernel>& fwd_kernels() {
  static const std::vector<FwdKernel> all = list_fwd_kernels();
  return all;
}

std::vector<std::string> families() {
  std::vector<std::string> names;
  if (!fwd_kernels().empty()) names.push_back("sm80");
  return names;
}

}  // namespace flashmoe::cuda
