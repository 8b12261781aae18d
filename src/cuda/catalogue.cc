#include "cuda/catalogue.h"

#include <cstring>
#include <unordered_map>

#include "cuda/sm75/variants.h"
#include "cuda/sm80/variants.h"
#include "cuda/tiles.h"

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

constexpr int kRowThreads = 128;  // any/attention_rows.cuh

class Lister {
 public:
  std::vector<Kernel> take() { return std::move(list_); }

  void add(const char* family, DType dtype, const char* image, const char* name, FwdTile tile) {
    add(image, {{name, nullptr},
                family,
                Role::kForward,
                dtype,
                tile.head_dim,
                tile.block_q,
                tile.block_k,
                tile.threads(),
                tile.shared_bytes(),
                tile.ctas});
  }
  void add(const char* family, DType dtype, const char* image, const char* name, const char* finish,
           BwdTile tile) {
    Kernel kernel{{name, nullptr},     family,       Role::kBackward, dtype,
                  tile.head_dim,       tile.block_q, tile.block_k,    tile.threads(),
                  tile.shared_bytes(), tile.ctas};
    add(image, kernel);
    kernel.id.name = finish;
    kernel.role = Role::kFinish;
    kernel.shared_bytes = tile.block_q * tile.head_dim * 2;
    add(image, kernel);
  }
  void add(const char* family, DType dtype, const char* image, const char* name, Role role) {
    add(image, {{name, nullptr}, family, role, dtype, 0, 0, 0, kRowThreads, 0, 0});
  }

 private:
  void add(const char* image, Kernel kernel) {
    kernel.id.image = find_image(image);
    if (kernel.id.image) list_.push_back(kernel);
  }
  std::vector<Kernel> list_;
};

std::vector<Kernel> list_kernels() {
  Lister list;
// Names as the .cu files of the families make them.
#define FWD(FAMILY, TYPE, DTYPE, D, BQ, BK, ...)                  \
  list.add(FAMILY, DTYPE, FAMILY "_attention_fwd_" TYPE "_d" #D,  \
           FAMILY "_attention_fwd_" TYPE "_d" #D "_" #BQ "x" #BK, \
           FwdTile{D, BQ, BK, __VA_ARGS__});
#define BWD(FAMILY, TYPE, DTYPE, D, BQ, BK, ...)                         \
  list.add(FAMILY, DTYPE, FAMILY "_attention_bwd_" TYPE "_d" #D,         \
           FAMILY "_attention_bwd_" TYPE "_d" #D "_" #BQ "x" #BK,        \
           FAMILY "_attention_bwd_finish_" TYPE "_d" #D "_" #BQ "x" #BK, \
           BwdTile{D, BQ, BK, __VA_ARGS__});
#define ROWS(FAMILY, TYPE, DTYPE)                                                                \
  list.add(FAMILY, DTYPE, FAMILY "_attention_rows_" TYPE, FAMILY "_attention_combine_" TYPE,     \
           Role::kCombine);                                                                      \
  list.add(FAMILY, DTYPE, FAMILY "_attention_rows_" TYPE, FAMILY "_attention_bwd_prepare_" TYPE, \
           Role::kPrepare);
#define SM80_FP16_FWD(...) FWD("sm80", "fp16", DType::kFloat16, __VA_ARGS__)
#define SM80_BF16_FWD(...) FWD("sm80", "bf16", DType::kBFloat16, __VA_ARGS__)
#define SM80_FP16_BWD(...) BWD("sm80", "fp16", DType::kFloat16, __VA_ARGS__)
#define SM80_BF16_BWD(...) BWD("sm80", "bf16", DType::kBFloat16, __VA_ARGS__)
#define SM75_FP16_FWD(...) FWD("sm75", "fp16", DType::kFloat16, __VA_ARGS__)
#define SM75_FP16_BWD(...) BWD("sm75", "fp16", DType::kFloat16, __VA_ARGS__)
  FLASHMOE_SM80_ATTENTION_FWD(SM80_FP16_FWD)
  FLASHMOE_SM80_ATTENTION_FWD(SM80_BF16_FWD)
  FLASHMOE_SM80_ATTENTION_BWD(SM80_FP16_BWD)
  FLASHMOE_SM80_ATTENTION_BWD(SM80_BF16_BWD)
  ROWS("sm80", "fp16", DType::kFloat16)
  ROWS("sm80", "bf16", DType::kBFloat16)
  FLASHMOE_SM75_ATTENTION_FWD(SM75_FP16_FWD)
  FLASHMOE_SM75_ATTENTION_BWD(SM75_FP16_BWD)
  ROWS("sm75", "fp16", DType::kFloat16)
  return list.take();
}

}  // namespace

const char* role_name(Role role) {
  switch (role) {
    case Role::kForward:
      return "attention_fwd";
    case Role::kCombine:
      return "attention_combine";
    case Role::kPrepare:
      return "attention_bwd_prepare";
    case Role::kBackward:
      return "attention_bwd";
    case Role::kFinish:
      return "attention_bwd_finish";
  }
  return "";
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = list_kernels();
  return all;
}

const Kernel* find_kernel(std::string_view name) {
  static const std::unordered_map<std::string_view, const Kernel*> by_name = [] {
    std::unordered_map<std::string_view, const Kernel*> map;
    for (const Kernel& kernel : kernels()) map[kernel.id.name] = &kernel;
    return map;
  }();
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : found->second;
}

const Kernel* find_kernel(Role role, std::string_view family, DType dtype) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.role == role && kernel.dtype == dtype && kernel.family == family) return &kernel;
  }
  return nullptr;
}

}  // namespace flashmoe::cuda
