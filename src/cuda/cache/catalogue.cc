#include "cuda/cache/catalogue.h"

#include <string>

#include "core/text.h"
#include "cuda/runtime/families.h"
#include "cuda/runtime/images.h"

namespace flashmoe::cuda::cache {

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = [] {
    std::vector<Kernel> list;
    for (const ChipFamily& family : chip_families()) {
      const std::string name = text(family.name, "_", kAppendRole);
      const Kernel kernel{embedded_kernel(name, name, name), family.name};
      if (kernel.id.image) list.push_back(kernel);
    }
    return list;
  }();
  return all;
}

const Kernel* find_kernel(std::string_view family) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.family == family) return &kernel;
  }
  return nullptr;
}

}  // namespace flashmoe::cuda::cache
