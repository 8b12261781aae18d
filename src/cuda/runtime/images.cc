#include "cuda/runtime/images.h"

#include <atomic>
#include <forward_list>
#include <mutex>
#include <unordered_map>

// The images that CMake embedded: X(name, chip, compute capability, chip only, PTX, Hopper's rows).
#if defined(FLASHMOE_HAS_IMAGES)
#define X(name, chip, ...) \
  extern "C" const char flashmoe_image_##name##_##chip[], flashmoe_image_##name##_##chip##_end[];
#include "images.inc"
#undef X
#endif

namespace flashmoe::cuda {
namespace {

struct EmbeddedImage {
  Image image;
  bool hopper_rows;  // has only the rows of its table that Hopper runs
};

std::vector<EmbeddedImage> embedded_images() {
  return {
#if defined(FLASHMOE_HAS_IMAGES)
#define X(name, chip, compute_capability, chip_only, ptx, hopper_rows)                          \
  {{#name,                                                                                      \
    flashmoe_image_##name##_##chip,                                                             \
    static_cast<size_t>(flashmoe_image_##name##_##chip##_end - flashmoe_image_##name##_##chip), \
    {#chip, compute_capability, chip_only, ptx}},                                               \
   hopper_rows},
#include "images.inc"
#undef X
#endif
  };
}

// Those of one name, one for each chip.
using Chips = std::vector<EmbeddedImage>;

// What kernels refer to. It lives as long as the process: threads may outlive static destructors.
struct Kept {
  std::unordered_map<std::string, Chips> embedded;
  std::unordered_map<std::string, const Image*> chains;
  std::forward_list<Image> images;
  std::forward_list<std::string> names;

  Kept() {
    for (const EmbeddedImage& one : embedded_images()) embedded[one.image.name].push_back(one);
  }
};

Kept& kept() {
  static auto& all = *new Kept;
  return all;
}

// The images of that name, chained; null: this build has none.
const Image* find_images(const std::string& name, bool on_hopper) {
  Kept& all = kept();
  const auto [found, is_new] = all.chains.try_emplace(name + (on_hopper ? "" : "-"), nullptr);
  const auto embedded = all.embedded.find(name);
  if (!is_new || embedded == all.embedded.end()) return found->second;
  for (const EmbeddedImage& one : embedded->second) {
    if (one.hopper_rows && !on_hopper) continue;
    all.images.push_front(one.image);
    all.images.front().next = found->second;
    found->second = &all.images.front();
  }
  return found->second;
}

const char* keep(std::string name) {
  kept().names.push_front(std::move(name));
  return kept().names.front().c_str();
}

}  // namespace

KernelId embedded_kernel(const std::string& image, std::string name, std::string symbol,
                         bool on_hopper) {
  static std::mutex mutex;  // two operators may list theirs at the same time
  std::lock_guard lock(mutex);
  KernelId id{nullptr, find_images(image, on_hopper)};
  if (!id.image) return id;
  id.name = keep(std::move(name));
  id.symbol = keep(std::move(symbol));
  id.found = new std::atomic<void*>(nullptr);  // never freed, as the kernels are not
  return id;
}

std::vector<std::string> chips_of(const KernelId& kernel) {
  std::vector<std::string> chips;
  for (const Image* image = kernel.image; image; image = image->next) {
    chips.push_back(image->target.chip);
  }
  return chips;
}

const char* dtype_suffix(DType dtype) {
  if (dtype == DType::kFloat32) return "fp32";
  return dtype == DType::kFloat16 ? "fp16" : "bf16";
}

}  // namespace flashmoe::cuda
