// Tensor maps without a GPU: a part of test_cuda.
#define TESTING_OWN_MAIN
#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "cuda/runtime/tensor_map.h"
#include "test_cuda.h"

using namespace flashmoe;
using namespace flashmoe::cuda;
using namespace testing;

TEST(full_tensor_map) {
  in_process_of_its_own([] {
    TensorSpec spec = contiguous(DType::kBFloat16, {3, 1, 1000, 72});
    spec.stride[1] = 7;  // of a dimension of size 1: any
    const int box[] = {1, 1, 128, 64};
    const auto map = encode_tensor_map(spec, memory, box);
    CHECK(map.ok(), map.status().message());
    CHECK_EQ(map.value().opaque[0], 0x7a5u);
    const auto& seen = fake_cuda.tensor_map;
    CHECK_EQ(static_cast<int>(seen.dtype), 9);
    CHECK_EQ(seen.rank, 4u);
    CHECK_EQ(seen.address, static_cast<void*>(memory));
    CHECK(std::ranges::equal(std::span(seen.sizes).first(4), std::array{72, 1000, 1, 3}));
    CHECK_EQ(seen.strides[0], 144u);
    CHECK_EQ(seen.strides[1] % 16, 0u);
    CHECK_EQ(seen.strides[2], 144000u);
    CHECK(std::ranges::equal(std::span(seen.box).first(4), std::array{64, 128, 1, 1}));
    CHECK(std::ranges::equal(std::span(seen.steps).first(4), std::array{1, 1, 1, 1}));
    CHECK_EQ(static_cast<int>(seen.swizzle), 3);
  });
}

// Checked before the driver is needed.
TEST(none_tensor_map_rules) {
  const auto refused = [](const TensorSpec& spec, std::vector<int> box, const char* part,
                          const void* data = memory, Swizzle swizzle = Swizzle::k128) {
    CHECK_CONTAINS(encode_tensor_map(spec, data, box, swizzle).status().message(), part);
  };
  const TensorSpec good = contiguous(DType::kFloat16, {100, 64});
  refused(good, {64, 64}, "no CUDA driver");
  refused(contiguous(DType::kFloat32, {100, 64}), {64, 64}, "float32; only float16 and bfloat16");
  refused(contiguous(DType::kFloat16, {}), {}, "rank 0");
  refused(contiguous(DType::kFloat16, {2, 2, 2, 2, 2, 8}), {1, 1, 1, 1, 1, 8}, "rank 6");
  refused(contiguous(DType::kFloat16, {0, 64}), {64, 64}, "dimension 0 must be 1 to 2^32");
  refused(contiguous(DType::kFloat16, {100, 60}), {64, 64}, "stride 0 of the tensor map is 60");
  TensorSpec spec = good;
  spec.stride[1] = 2;
  refused(spec, {64, 64}, "unit stride in the last dimension; it is 2");
  for (int64_t stride : {int64_t{0}, int64_t{-64}, int64_t{1} << 39}) {
    spec = good;
    spec.stride[0] = stride;
    refused(spec, {64, 64}, "positive multiple of 16 bytes below 2^40");
  }
  refused(good, {64}, "the box has 1 dimensions, the tensor 2");
  refused(good, {257, 64}, "dimension 0 of the box is 257; it must be 1 to 256");
  refused(good, {0, 64}, "dimension 0 of the box is 0");
  refused(good, {64, 60}, "a row of the box has 120 bytes; it must be a multiple of 16");
  refused(good, {64, 128}, "256 bytes, more than the 128 of the swizzle");
  refused(good, {64, 64}, "more than the 64 of the swizzle", memory, Swizzle::k64);
  refused(good, {64, 128}, "no CUDA driver", memory, Swizzle::kNone);
  refused(good, {64, 64}, "must be a multiple of 16 and not null", memory + 8);
  refused(good, {64, 64}, "must be a multiple of 16 and not null", nullptr);
}
