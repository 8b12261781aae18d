#include "cuda/attention/catalogue.h"

#include <cstring>
#include <unordered_map>

#include "cuda/attention/kernels/sm75.h"
#include "cuda/attention/kernels/sm80.h"
#include "cuda/attention/kernels/sm90.h"
#include "cuda/attention/tiles.h"
#include "flashmoe/device.h"

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

class Lister {
 public:
  std::vector<Kernel> take() { return std::move(list_); }

  template <class Tile>
  void add(Role role, const char* family, DType dtype, const char* image, const char* name,
           const Tile& tile) {
    Kernel kernel{{name, nullptr}, family,         role,
                  dtype,           tile.head_dim,  tile.block_q,
                  tile.block_k,    tile.threads(), shared_bytes(role, tile),
                  tile.ctas};
    if constexpr (requires { tile.for_short(); }) kernel.for_short = tile.for_short();
    if constexpr (requires { tile.general_score; }) kernel.general_score = tile.general_score;
    if constexpr (requires { tile.cluster(); }) kernel.cluster = tile.cluster();
    kernel.dq_accum_dim = tile.head_dim;
    if constexpr (requires { tile.dq_accum_dim(); }) kernel.dq_accum_dim = tile.dq_accum_dim();
    if constexpr (requires { tile.converts_dq(); }) kernel.converts_dq = tile.converts_dq();
    if constexpr (requires { Tile::kCountsTasks; }) kernel.counts_tasks = Tile::kCountsTasks;
    add(image, kernel);
  }
  void add(const char* family, DType dtype, const char* image, const char* name, Role role) {
    const bool lists = role == Role::kRaggedBlocks;
    const int threads = lists ? kRaggedThreads : kRowThreads;
    const int shared_bytes = lists                          ? kRaggedSharedBytes
                             : role == Role::kBiasTranspose ? kBiasTransposeSharedBytes
                             : role == Role::kBackwardDq    ? kConvertDqSharedBytes
                                                            : 0;
    add(image, {{name, nullptr}, family, role, dtype, 0, 0, 0, threads, shared_bytes, 0});
  }

 private:
  static int shared_bytes(Role role, const FwdTile& tile) {
    return tile.shared_bytes(role == Role::kForwardBias);
  }
  static int shared_bytes(Role role, const BwdTile& tile) {
    if (role == Role::kBackwardDq || role == Role::kBackwardBiasDq) {
      return tile.dq_shared_bytes(role == Role::kBackwardBiasDq);
    }
    return tile.shared_bytes(role == Role::kBackwardBias);
  }
  static int shared_bytes(Role, const BiasSumTile& tile) { return tile.shared_bytes(); }
  static int shared_bytes(Role, const Sm90FwdTile& tile) { return tile.shared_bytes(); }
  static int shared_bytes(Role, const Sm90BwdTile& tile) { return tile.shared_bytes(); }

  void add(const char* image, Kernel kernel) {
    kernel.id.image = find_image(image);
    if (kernel.id.image) list_.push_back(kernel);
  }
  std::vector<Kernel> list_;
};

std::vector<Kernel> list_kernels() {
  Lister list;
// Names as the .cu files of the families make them.
#define TILED(ROLE, PREFIX, IMAGE, TILE, FAMILY, TYPE, DTYPE, D, BQ, BK, ...)      \
  list.add(Role::ROLE, FAMILY, DTYPE, FAMILY "_attention_" IMAGE "_" TYPE "_d" #D, \
           FAMILY "_attention_" PREFIX "_" TYPE "_d" #D "_" #BQ "x" #BK,           \
           TILE{D, BQ, BK, __VA_ARGS__});
#define FWD(...) TILED(kForward, "fwd", "fwd", FwdTile, __VA_ARGS__)
#define FWD_BIAS(...) TILED(kForwardBias, "fwd_bias", "fwd_bias", FwdTile, __VA_ARGS__)
#define BWD(...)                                       \
  TILED(kBackward, "bwd", "bwd", BwdTile, __VA_ARGS__) \
  TILED(kBackwardDq, "bwd_dq", "bwd", BwdTile, __VA_ARGS__)
#define BWD_BIAS(...)                                                \
  TILED(kBackwardBias, "bwd_bias", "bwd_bias", BwdTile, __VA_ARGS__) \
  TILED(kBackwardBiasDq, "bwd_bias_dq", "bwd_bias", BwdTile, __VA_ARGS__)
#define BIAS_SUM(...) TILED(kBiasSum, "bwd_bias_sum", "bwd_bias", BiasSumTile, __VA_ARGS__)
#define ROWS(FAMILY, TYPE, DTYPE)                                                                \
  list.add(FAMILY, DTYPE, FAMILY "_attention_small_" TYPE, FAMILY "_attention_combine_" TYPE,    \
           Role::kCombine);                                                                      \
  list.add(FAMILY, DTYPE, FAMILY "_attention_small_" TYPE,                                       \
           FAMILY "_attention_bwd_preprocess_" TYPE, Role::kPreprocess);                         \
  list.add(FAMILY, DTYPE, FAMILY "_attention_small_" TYPE,                                       \
           FAMILY "_attention_ragged_blocks_" TYPE, Role::kRaggedBlocks);                        \
  list.add(FAMILY, DTYPE, FAMILY "_attention_small_" TYPE, FAMILY "_attention_bias_align_" TYPE, \
           Role::kBiasAlign);                                                                    \
  list.add(FAMILY, DTYPE, FAMILY "_attention_small_" TYPE,                                       \
           FAMILY "_attention_bias_transpose_" TYPE, Role::kBiasTranspose);
#define SM90_FWD(...) TILED(kForward, "fwd", "fwd", Sm90FwdTile, "sm90", __VA_ARGS__, false)
#define SM90_FWD_GENERAL(...) \
  TILED(kForward, "fwd_general", "fwd", Sm90FwdTile, "sm90", __VA_ARGS__, true)
#define SM90_BWD(...) TILED(kBackward, "bwd", "bwd", Sm90BwdTile, "sm90", __VA_ARGS__, false)
#define SM90_BWD_GENERAL(...) \
  TILED(kBackward, "bwd_general", "bwd", Sm90BwdTile, "sm90", __VA_ARGS__, true)
#define SM90_ROWS(TYPE, DTYPE)                                                                 \
  list.add("sm90", DTYPE, "sm90_attention_small_" TYPE, "sm90_attention_ragged_blocks_" TYPE,  \
           Role::kRaggedBlocks);                                                               \
  list.add("sm90", DTYPE, "sm90_attention_small_" TYPE, "sm90_attention_bwd_preprocess_" TYPE, \
           Role::kPreprocess);                                                                 \
  list.add("sm90", DTYPE, "sm90_attention_small_" TYPE, "sm90_attention_bwd_dq_" TYPE,         \
           Role::kBackwardDq);
#define SM90_FP16_BWD(...) SM90_BWD("fp16", DType::kFloat16, __VA_ARGS__)
#define SM90_BF16_BWD(...) SM90_BWD("bf16", DType::kBFloat16, __VA_ARGS__)
#define SM90_FP16_BWD_GENERAL(...) SM90_BWD_GENERAL("fp16", DType::kFloat16, __VA_ARGS__)
#define SM90_BF16_BWD_GENERAL(...) SM90_BWD_GENERAL("bf16", DType::kBFloat16, __VA_ARGS__)
#define SM90_FP16_FWD(...) SM90_FWD("fp16", DType::kFloat16, __VA_ARGS__)
#define SM90_BF16_FWD(...) SM90_FWD("bf16", DType::kBFloat16, __VA_ARGS__)
#define SM90_FP16_FWD_GENERAL(...) SM90_FWD_GENERAL("fp16", DType::kFloat16, __VA_ARGS__)
#define SM90_BF16_FWD_GENERAL(...) SM90_FWD_GENERAL("bf16", DType::kBFloat16, __VA_ARGS__)
#define SM80_FP16(PASS, ...) PASS("sm80", "fp16", DType::kFloat16, __VA_ARGS__)
#define SM80_BF16(PASS, ...) PASS("sm80", "bf16", DType::kBFloat16, __VA_ARGS__)
#define SM75_FP16(PASS, ...) PASS("sm75", "fp16", DType::kFloat16, __VA_ARGS__)
#define SM80_FP16_FWD(...) SM80_FP16(FWD, __VA_ARGS__)
#define SM80_FP16_FWD_BIAS(...) SM80_FP16(FWD_BIAS, __VA_ARGS__)
#define SM80_FP16_BWD(...) SM80_FP16(BWD, __VA_ARGS__)
#define SM80_FP16_BWD_BIAS(...) SM80_FP16(BWD_BIAS, __VA_ARGS__)
#define SM80_FP16_BIAS_SUM(...) SM80_FP16(BIAS_SUM, __VA_ARGS__)
#define SM80_BF16_FWD(...) SM80_BF16(FWD, __VA_ARGS__)
#define SM80_BF16_FWD_BIAS(...) SM80_BF16(FWD_BIAS, __VA_ARGS__)
#define SM80_BF16_BWD(...) SM80_BF16(BWD, __VA_ARGS__)
#define SM80_BF16_BWD_BIAS(...) SM80_BF16(BWD_BIAS, __VA_ARGS__)
#define SM80_BF16_BIAS_SUM(...) SM80_BF16(BIAS_SUM, __VA_ARGS__)
#define SM75_FP16_FWD(...) SM75_FP16(FWD, __VA_ARGS__)
#define SM75_FP16_FWD_BIAS(...) SM75_FP16(FWD_BIAS, __VA_ARGS__)
#define SM75_FP16_BWD(...) SM75_FP16(BWD, __VA_ARGS__)
#define SM75_FP16_BWD_BIAS(...) SM75_FP16(BWD_BIAS, __VA_ARGS__)
#define SM75_FP16_BIAS_SUM(...) SM75_FP16(BIAS_SUM, __VA_ARGS__)
  FLASHMOE_SM90_ATTENTION_FWD(SM90_FP16_FWD)
  FLASHMOE_SM90_ATTENTION_FWD(SM90_BF16_FWD)
  FLASHMOE_SM90_ATTENTION_FWD_GENERAL(SM90_FP16_FWD_GENERAL)
  FLASHMOE_SM90_ATTENTION_FWD_GENERAL(SM90_BF16_FWD_GENERAL)
  FLASHMOE_SM90_ATTENTION_BWD(SM90_FP16_BWD)
  FLASHMOE_SM90_ATTENTION_BWD(SM90_BF16_BWD)
  FLASHMOE_SM90_ATTENTION_BWD_GENERAL(SM90_FP16_BWD_GENERAL)
  FLASHMOE_SM90_ATTENTION_BWD_GENERAL(SM90_BF16_BWD_GENERAL)
  SM90_ROWS("fp16", DType::kFloat16)
  SM90_ROWS("bf16", DType::kBFloat16)
  FLASHMOE_SM80_ATTENTION_FWD(SM80_FP16_FWD)
  FLASHMOE_SM80_ATTENTION_FWD(SM80_BF16_FWD)
  FLASHMOE_SM80_ATTENTION_FWD_BIAS(SM80_FP16_FWD_BIAS)
  FLASHMOE_SM80_ATTENTION_FWD_BIAS(SM80_BF16_FWD_BIAS)
  FLASHMOE_SM80_ATTENTION_BWD(SM80_FP16_BWD)
  FLASHMOE_SM80_ATTENTION_BWD(SM80_BF16_BWD)
  FLASHMOE_SM80_ATTENTION_BWD_BIAS(SM80_FP16_BWD_BIAS)
  FLASHMOE_SM80_ATTENTION_BIAS_SUM(SM80_FP16_BIAS_SUM)
  FLASHMOE_SM80_ATTENTION_BWD_BIAS(SM80_BF16_BWD_BIAS)
  FLASHMOE_SM80_ATTENTION_BIAS_SUM(SM80_BF16_BIAS_SUM)
  ROWS("sm80", "fp16", DType::kFloat16)
  ROWS("sm80", "bf16", DType::kBFloat16)
  FLASHMOE_SM75_ATTENTION_FWD(SM75_FP16_FWD)
  FLASHMOE_SM75_ATTENTION_FWD_BIAS(SM75_FP16_FWD_BIAS)
  FLASHMOE_SM75_ATTENTION_BWD(SM75_FP16_BWD)
  FLASHMOE_SM75_ATTENTION_BWD_BIAS(SM75_FP16_BWD_BIAS)
  FLASHMOE_SM75_ATTENTION_BIAS_SUM(SM75_FP16_BIAS_SUM)
  ROWS("sm75", "fp16", DType::kFloat16)
  return list.take();
}

}  // namespace

const char* role_name(Role role) {
  switch (role) {
    case Role::kRaggedBlocks:
      return "attention_ragged_blocks";
    case Role::kBiasAlign:
      return "attention_bias_align";
    case Role::kBiasTranspose:
      return "attention_bias_transpose";
    case Role::kForward:
      return "attention_fwd";
    case Role::kForwardBias:
      return "attention_fwd_bias";
    case Role::kCombine:
      return "attention_combine";
    case Role::kPreprocess:
      return "attention_bwd_preprocess";
    case Role::kBackward:
      return "attention_bwd";
    case Role::kBackwardBias:
      return "attention_bwd_bias";
    case Role::kBiasSum:
      return "attention_bwd_bias_sum";
    case Role::kBackwardDq:
      return "attention_bwd_dq";
    case Role::kBackwardBiasDq:
      return "attention_bwd_bias_dq";
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

const Kernel* find_kernel(Role role, const Kernel& beside) {
  for (const Kernel& kernel : kernels()) {
    const bool same_tile = kernel.block_q == beside.block_q && kernel.block_k == beside.block_k;
    if (kernel.role == role && kernel.id.image == beside.id.image &&
        (same_tile || role == Role::kBiasSum)) {
      return &kernel;
    }
  }
  return nullptr;
}

const Kernel* find_kernel(Role role, std::string_view family, DType dtype) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.role == role && kernel.dtype == dtype && kernel.family == family) return &kernel;
  }
  return nullptr;
}

}  // namespace flashmoe::cuda

namespace flashmoe {

std::vector<CudaKernel> cuda_kernels() {
  std::vector<CudaKernel> list;
  for (const cuda::Kernel& k : cuda::kernels()) {
    list.push_back({k.id.name, k.family, k.id.image->name, cuda::role_name(k.role), k.dtype,
                    k.head_dim, k.block_q, k.block_k, k.threads, k.shared_bytes});
  }
  return list;
}

}  // namespace flashmoe
