#include "cuda/moe/catalogue.h"

#include <algorithm>
#include <string>

#include "core/text.h"
#include "cuda/moe/kernels/sm75.h"
#include "cuda/moe/kernels/sm80.h"
#include "cuda/moe/kernels/sm90.h"
#include "cuda/moe/tiles.h"
#include "cuda/runtime/families.h"
#include "cuda/runtime/images.h"

namespace flashmoe::cuda::moe {
namespace {

// Lists kernels of one family and dtype, as far as this build has an image of theirs.
struct Lister {
  std::vector<Kernel>& list;
  const char* family;
  DType dtype;

  void add(const Kernel& kernel) const {
    if (kernel.id.image) list.push_back(kernel);
  }

  // Threads and shared memory of a product.
  static void shape(Kernel& kernel, const GemmTile& tile) {
    kernel.tile = tile;
    kernel.threads = tile.threads();
    kernel.shared_bytes =
        tile.shared_bytes() +
        (kernel.role == Role::kBwdWeights ? depth_table_bytes(tile) : row_table_bytes(tile));
  }
  static void shape(Kernel& kernel, const TmaGemmTile& tile) {
    kernel.tile = {tile.block_m, tile.block_n, tile.kDepth, tile.stages, 0, 0, 1};
    kernel.threads = tile.kThreads;
    kernel.shared_bytes = tile.shared_bytes();
  }
  static void shape(Kernel& kernel, const FewTile& tile) {
    kernel.tile = {tile.block_m, tile.block_n, 0, 0, 0, 0, 0};
    const bool up = kernel.role == Role::kFewUp;
    kernel.threads = 32 * (up ? kFewUpWarps : kFewDownWarps);
    kernel.shared_bytes = up ? few_up_shared_bytes(tile.block_m) : few_down_shared_bytes(kFewPairs);
  }

  // sm80_moe_NAME_bf16_128x128 and so on, in the images sm80_moe_IMAGE_bf16. The symbol is that of
  // NAME<block_m, block_n>(flashmoe::cuda::moe::PARAMS) by the Itanium C++ ABI.
  template <class Tile, size_t kRows>
  void add(Role role, const char* name, const char* image, const std::string& params, bool along,
           const Tile (&table)[kRows]) const {
    for (const Tile& tile : table) {
      const std::string stem = text(family, "_", name, "_", dtype_suffix(dtype));
      const std::string symbol =
          text("_Z", stem.size(), stem, "ILi", tile.block_m, "ELi", tile.block_n,
               "EEvN8flashmoe4cuda3moe", params.size(), params, "E");
      const KernelId id = embedded_kernel(text(family, "_moe_", image, "_", dtype_suffix(dtype)),
                                          text(stem, "_", tile.block_m, "x", tile.block_n), symbol);
      Kernel kernel{id, family, role, dtype, {}, along};
      shape(kernel, tile);
      if (role == Role::kBwdWeightsSum) {
        kernel.threads = kRowThreads;
        kernel.shared_bytes = 0;
      }
      add(kernel);
    }
  }

  // Those with a tile of rows come for either order of the weights.
  template <class Tile, size_t kRows>
  void add_orders(Role role, const char* image, const std::string& params,
                  const Tile (&table)[kRows]) const {
    const std::string name = role_name(role);
    add(role, name.c_str(), image, params, true, table);
    add(role, (name + "_t").c_str(), image, params, false, table);
  }

  void add_small(Role role, int threads, int shared_bytes) const {
    const std::string name = text(family, "_", role_name(role), "_", dtype_suffix(dtype));
    const std::string image = text(family, "_moe_small_", dtype_suffix(dtype));
    add({embedded_kernel(image, name, name), family, role, dtype, {}, true, threads, shared_bytes});
  }

  template <size_t kRows>
  void add_few(const FewTile (&few)[kRows]) const {
    add(Role::kFewUp, role_name(Role::kFewUp), "few", "UpParams", true, few);
    add(Role::kFewDown, role_name(Role::kFewDown), "few", "FewDownParams", true, few);
  }

  template <class Tile, size_t kRows, size_t kTokens>
  void add_all(const Tile (&rows)[kRows], const Tile (&tokens)[kTokens]) const {
    const std::string prefix = std::is_same_v<Tile, TmaGemmTile> ? "Sm90" : "";
    add_orders(Role::kUp, "up", prefix + "UpParams", rows);
    add_orders(Role::kDown, "down", prefix + "DownParams", rows);
    add_orders(Role::kBwdAct, "bwd_act", prefix + "BwdActParams", rows);
    add(Role::kBwdWeights, role_name(Role::kBwdWeights), "bwd_weights", prefix + "BwdWeightsParams",
        true, tokens);
    add(Role::kBwdWeightsSum, role_name(Role::kBwdWeightsSum), "bwd_weights", "BwdWeightsParams",
        true, tokens);
    const int of_warp = kMaxExperts * 4;
    add_small(Role::kSort, kScanThreads, kSortSharedBytes);
    add_small(Role::kCount, kCountThreads, of_warp);
    add_small(Role::kScan, kScanThreads, scan_shared_bytes(kMaxExperts));
    add_small(Role::kPlace, 32, of_warp);
    add_small(Role::kCombine, kRowThreads, 0);
    add_small(Role::kPrepare, kScanThreads, scan_shared_bytes(kMaxExperts));
    add_small(Role::kBwdBias, kBiasThreads, 0);
    add_small(Role::kBwdBiasSum, kBiasThreads, 0);
    add_small(Role::kBwdScale, kRowThreads, 0);
    add_small(Role::kRoute, 32 * kRouteWarps, kRouteSharedBytes);
    add_small(Role::kRouteBwd, 32 * kRouteWarps, kRouteSharedBytes);
  }
};

std::vector<Kernel> list_kernels() {
  std::vector<Kernel> list;
  const auto add = [&](const char* family, const auto& rows, const auto& tokens) {
    for (const DType dtype : find_chip_family(family)->dtypes) {
      Lister{list, family, dtype}.add_all(rows, tokens);
    }
  };
  add("sm90", sm90::kRows, sm90::kTokens);
  for (const DType dtype : find_chip_family("sm90")->dtypes) {
    Lister{list, "sm90", dtype}.add_few(sm90::kFew);
  }
  add("sm80", sm80::kRows, sm80::kTokens);
  add("sm75", sm75::kRows, sm75::kTokens);
  return list;
}

}  // namespace

const char* role_name(Role role) {
  switch (role) {
    case Role::kSort:
      return "moe_sort";
    case Role::kCount:
      return "moe_count";
    case Role::kScan:
      return "moe_scan";
    case Role::kPlace:
      return "moe_place";
    case Role::kUp:
      return "moe_up";
    case Role::kDown:
      return "moe_down";
    case Role::kCombine:
      return "moe_combine";
    case Role::kFewUp:
      return "moe_few_up";
    case Role::kFewDown:
      return "moe_few_down";
    case Role::kPrepare:
      return "moe_bwd_prepare";
    case Role::kBwdAct:
      return "moe_bwd_act";
    case Role::kBwdWeights:
      return "moe_bwd_weights";
    case Role::kBwdWeightsSum:
      return "moe_bwd_weights_sum";
    case Role::kBwdBias:
      return "moe_bwd_bias";
    case Role::kBwdBiasSum:
      return "moe_bwd_bias_sum";
    case Role::kBwdScale:
      return "moe_bwd_scale";
    case Role::kRoute:
      return "moe_route";
    case Role::kRouteBwd:
      return "moe_route_bwd";
  }
  return "";
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = list_kernels();
  return all;
}

bool has_kernels(std::string_view family) {
  return std::any_of(kernels().begin(), kernels().end(),
                     [&](const Kernel& kernel) { return kernel.family == family; });
}

const Kernel* find_kernel(Role role, std::string_view family, DType dtype) {
  return find_kernel(role, family, dtype, GemmTile{});
}

const Kernel* find_kernel(Role role, std::string_view family, DType dtype, const GemmTile& tile,
                          bool along) {
  for (const Kernel& k : kernels()) {
    if (k.role == role && k.dtype == dtype && k.family == family && k.along == along &&
        k.tile.block_m == tile.block_m && k.tile.block_n == tile.block_n) {
      return &k;
    }
  }
  return nullptr;
}

}  // namespace flashmoe::cuda::moe
