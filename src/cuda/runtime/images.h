// The images that this build embeds, and the kernels that operators list of them.
#pragma once

#include <string>
#include <vector>

#include "cuda/runtime/launch.h"
#include "flashmoe/tensor.h"

namespace flashmoe::cuda {

// A kernel of the images `image`, one for each chip, under the name that plans have for it. Its
// .image is null where this build has none of these images. A kernel that does not run on Hopper is
// not in images that have only what Hopper runs. Names and images live as long as the process.
KernelId embedded_kernel(const std::string& image, std::string name, std::string symbol,
                         bool on_hopper = true);

// The chips for which a kernel has machine code: "sm_80", "sm_90".
std::vector<std::string> chips_of(const KernelId& kernel);

// "fp16", "bf16", "fp32": what a kernel's name ends with.
const char* dtype_suffix(DType dtype);

}  // namespace flashmoe::cuda
