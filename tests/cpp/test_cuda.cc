// Driver, launch and, in test_tensor_map.cc, tensor maps, without a GPU: fake_libcuda.cc is opened
// in the driver's place. The first argument says which one LD_LIBRARY_PATH leads to, and picks the
// tests for it:
//
//   none_     no driver            full_     a driver of CUDA 12.4 and two devices
//   oldest_   CUDA 12.0            broken_   lacks a function it should have
#include "test_cuda.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"

using namespace flashmoe;
using namespace flashmoe::cuda;
using namespace testing;

fake::Cuda fake_cuda;

// To show that launching allocates nothing. Not inlined: the compiler would see malloc and delete,
// and warn that they do not match.
static thread_local int allocations = 0;
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

// The head of a fatbin as nvcc 13.0 writes it for sm_80 and PTX compute_80, then for sm_90a.
struct Entry {
  uint16_t kind, version = 0x101;
  uint32_t header_bytes = 64;
  uint64_t content_bytes = 8;
  uint32_t other[3] = {};
  uint32_t chip;
  uint32_t more[2] = {};
  uint64_t flags;
  uint64_t rest[2] = {};
  uint64_t content = 0;
};
struct Fatbin {
  uint32_t magic = 0xBA55ED50;
  uint16_t version = 1, header_bytes = 16;
  uint64_t content_bytes = 3 * sizeof(Entry);
  Entry entries[3] = {{.kind = 2, .chip = 80, .flags = 0x11},
                      {.kind = 1, .chip = 80, .flags = 0x8011},
                      {.kind = 2, .chip = 90, .flags = 0x100011}};
};
const Fatbin fatbin;
const Fatbin other_fatbin;
const Image image{"sm80_attention_fp16", &fatbin, sizeof fatbin};
const Image other_image{"sm80_attention_bf16", &other_fatbin, sizeof other_fatbin};
const KernelId kernel{"attention_fwd", &image};

char params[fake::kParamsBytes] = "parameters";

Status launch_plainly(const KernelId& id = kernel, int device = 0, uint32_t shared_bytes = 0) {
  return launch(id, {.grid = {1, 1, 1}, .threads = 128, .shared_bytes = shared_bytes}, device,
                nullptr, params, sizeof params);
}

const Driver& the_driver() { return *driver().value(); }

const void* current_context() { return fake::current_context(the_driver()); }

// Every entry to the library refuses, with a message that contains `part`.
void all_refuse(const char* part) {
  CHECK_CONTAINS(driver().status().message(), part);
  CHECK_CONTAINS(devices().status().message(), part);
  CHECK_CONTAINS(device_info(0).status().message(), part);
  CHECK_CONTAINS(find_device(0).status().message(), part);
  CHECK_CONTAINS(primary_context(0).status().message(), part);
  CHECK_CONTAINS(prepare(kernel, 0, 0).message(), part);
  CHECK_CONTAINS(launch_plainly().message(), part);
  CHECK_CONTAINS(kernel_info(kernel, 0).status().message(), part);
  const int box[] = {64};
  CHECK_CONTAINS(
      encode_tensor_map(contiguous(DType::kFloat16, {64}), memory, box).status().message(), part);
  CHECK_EQ(driver().status().code() == StatusCode::kUnsupported, true);
}

}  // namespace

TEST(none_every_call_says_so) {
  in_process_of_its_own([] {
    all_refuse("no CUDA driver on this machine: ");
    all_refuse("libcuda.so.1");
    all_refuse("CPU tensors work");
    CHECK_EQ(describe_error(CUDA_ERROR_NO_DEVICE), "CUDA error (100)");
    CHECK_CONTAINS(device_info(-1).status().message(), "no CUDA driver");
    // A fork changes nothing where there was no driver.
    CHECK_EQ(exit_code_of_child([] { all_refuse("no CUDA driver on this machine: "); }), 0);
  });
}

TEST(none_image_chips) {
  CHECK_EQ(image_chips(image), "sm_80, PTX compute_80, sm_90a");
  CHECK_EQ(image_chips({"cut", &fatbin, sizeof fatbin - sizeof(Entry)}), "sm_80, PTX compute_80");
  CHECK_EQ(image_chips({"head", &fatbin, 16}), "");
  CHECK_EQ(image_chips({"short", &fatbin, 3}), "");
  CHECK_EQ(image_chips({"text", ".version 9.0 .target sm_80", 26}), "");
  Fatbin wild = fatbin;  // sizes that lead nowhere
  wild.entries[0].content_bytes = ~uint64_t{0} - 8;
  CHECK_EQ(image_chips({"wild", &wild, sizeof wild}), "");
}

TEST(none_image_for_a_chip) {
  const Image ptx80{"a", &fatbin, 1, {"sm_80", 80, false, true}};
  const Image plain90{"a", &fatbin, 1, {"sm_90", 90, false, false}, &ptx80};
  const Image only90{"b", &fatbin, 1, {"sm_90a", 90, true, false}};
  const Image ptx75{"c", &fatbin, 1, {"sm_75", 75, false, true}};
  const auto chip = [](const Image& images, int compute_capability) {
    return std::string(image_for(images, compute_capability).target.chip);
  };
  for (int capability : {80, 86, 87, 89}) CHECK_EQ(chip(plain90, capability), "sm_80");
  CHECK_EQ(chip(plain90, 90), "sm_90");   // its own machine code before PTX
  CHECK_EQ(chip(plain90, 100), "sm_80");  // no machine code: the one with PTX
  CHECK_EQ(chip(ptx80, 90), "sm_80");     // where sm_90's was not built
  CHECK_EQ(chip(ptx75, 90), "sm_75");
  CHECK_EQ(chip(only90, 90), "sm_90a");
  // None for it: the driver is asked, and refuses.
  CHECK_EQ(chip(plain90, 75), "sm_90");
  CHECK_EQ(chip(only90, 100), "sm_90a");
}

TEST(full_each_device_loads_its_image) {
  in_process_of_its_own([] {
    const Image for90{"sm80_attention_fp16", &other_fatbin, sizeof other_fatbin, {"sm_90", 90}};
    Image for80{"sm80_attention_fp16", &fatbin, sizeof fatbin, {"sm_80", 80, false, true}, &for90};
    const KernelId both{"attention_fwd", &for80};
    CHECK(launch_plainly(both, 0).ok());
    CHECK_EQ(fake_cuda.loaded, static_cast<const void*>(&fatbin));
    CHECK_EQ(fake_cuda.libraries.load(), 1);
    CHECK(launch_plainly(both, 1).ok());
    CHECK_EQ(fake_cuda.loaded, static_cast<const void*>(&other_fatbin));
    for (int device : {0, 1}) CHECK(launch_plainly(both, device).ok());
    CHECK_EQ(fake_cuda.libraries.load(), 2);
    CHECK(kernel_info(both, 1).ok());
  });
}

TEST(full_the_image_has_a_symbol_for_a_kernel) {
  in_process_of_its_own([] {
    const KernelId named{"sm80_attention_fwd_fp16_d64_128x128", &image, "attention_symbol"};
    CHECK(launch_plainly(named).ok());
    CHECK_EQ(*static_cast<const std::string*>(fake_cuda.launch.kernel), "attention_symbol");
    const std::string message = prepare({"attention_fwd", &image, "softmax"}, 0, 0).message();
    CHECK_CONTAINS(message, "kernel attention_fwd of image");  // people know it by its name
  });
}

TEST(full_too_old) {
  in_process_of_its_own([] {
    fake_cuda.version = 11080;
    all_refuse("is 11.8; at least 12.0 is needed");
    CHECK_EQ(fake_cuda.inits.load(), 0);
  });
}

TEST(full_no_device) {
  in_process_of_its_own([] {
    fake_cuda.init_result = CUDA_ERROR_NO_DEVICE;
    all_refuse("CUDA_ERROR_NO_DEVICE (100): the driver's own words");
    all_refuse("CUDA_VISIBLE_DEVICES");
    CHECK_EQ(fake_cuda.inits.load(), 1);
  });
  in_process_of_its_own([] {
    fake_cuda.devices = 0;
    CHECK_CONTAINS(devices().status().message(), "CUDA_ERROR_NO_DEVICE (100)");
    CHECK_CONTAINS(launch_plainly().message(), "CUDA_ERROR_NO_DEVICE (100)");
  });
}

TEST(full_init_fails) {
  in_process_of_its_own([] {
    fake_cuda.init_result = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    all_refuse("the CUDA driver (12.4) does not start: ");
    all_refuse("a restart after an update");
  });
  in_process_of_its_own([] {  // a child of a process in which someone else had used CUDA
    fake_cuda.init_result = CUDA_ERROR_NOT_INITIALIZED;
    all_refuse("spawn");
  });
}

TEST(full_devices) {
  in_process_of_its_own([] {
    const auto list = devices();
    CHECK(list.ok(), list.status().message());
    CHECK_EQ(list.value().size(), 2u);
    CHECK_EQ(list.value()[0].compute_capability, 80);
    CHECK_EQ(list.value()[1].compute_capability, 90);
    const DeviceInfo info = device_info(1).value();
    CHECK_EQ(info.ordinal, 1);
    CHECK_EQ(info.name, "Fake 1");
    CHECK_EQ(info.max_shared_bytes, fake::max_shared_bytes(90));
    // The fake answers 2000 + the number of the attribute, from the manual.
    CHECK_EQ(info.sm_count, 2016);
    CHECK_EQ(info.max_threads, 2001);
    CHECK_EQ(info.max_threads_per_sm, 2039);
    CHECK_EQ(info.max_blocks_per_sm, 2106);
    CHECK_EQ(info.registers_per_sm, 2082);
    CHECK_EQ(info.max_shared_per_sm_bytes, 2081);
    CHECK_EQ(info.reserved_shared_bytes, 2111);
    CHECK_EQ(info.l2_bytes, 2038);
    CHECK_EQ(describe_device(info), "device 1 (Fake 1, compute capability 9.0)");
    for (int wrong : {-1, 2}) {
      const Status status = launch_plainly(kernel, wrong);
      CHECK(status.code() == StatusCode::kInvalidArgument);
      CHECK_CONTAINS(status.message(), "this process sees 2 CUDA devices");
    }
  });
}

TEST(full_opens_once) {
  in_process_of_its_own([] {
    fake_cuda.init_milliseconds = 20;
    std::vector<std::thread> threads;
    std::atomic<int> good{0};
    for (int i = 0; i < 8; ++i) threads.emplace_back([&] { good += driver().ok(); });
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(good.load(), 8);
    CHECK_EQ(fake_cuda.inits.load(), 1);
  });
}

TEST(full_loads_once_for_many_threads) {
  in_process_of_its_own([] {
    constexpr int kThreads = 8, kRounds = 50;
    std::vector<std::thread> threads;
    std::atomic<int> good{0};
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int round = 0; round < kRounds; ++round) {
          for (const char* name : {"attention_fwd", "attention_bwd"}) {
            const std::string copy = name;  // ids are compared by text
            for (int device : {0, 1}) good += launch_plainly({copy.c_str(), &image}, device).ok();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(good.load(), kThreads * kRounds * 4);
    CHECK_EQ(fake_cuda.launches.load(), kThreads * kRounds * 4);
    CHECK_EQ(fake_cuda.libraries.load(), 1);
    CHECK_EQ(fake_cuda.kernels.load(), 2);
    CHECK_EQ(fake_cuda.functions.load(), 4);       // two kernels on two devices
    CHECK_EQ(fake_cuda.function_loads.load(), 4);  // so that no launch has to
    for (const auto& retained : fake_cuda.retained) CHECK_EQ(retained.load(), 1);
  });
}

TEST(full_same_name_in_two_images) {
  in_process_of_its_own([] {
    CHECK(prepare(kernel, 0, 0).ok());
    CHECK(prepare({kernel.name, &other_image}, 0, 0).ok());
    CHECK_EQ(fake_cuda.libraries.load(), 2);
    CHECK_EQ(fake_cuda.kernels.load(), 2);
  });
}

TEST(full_kernel_not_found) {
  in_process_of_its_own([] {
    const std::string message = prepare({"softmax", &image}, 1, 0).message();
    CHECK_CONTAINS(message, "softmax");
    CHECK_CONTAINS(message, image.name);
    CHECK_CONTAINS(message, "device 1 (Fake 1, compute capability 9.0)");
    CHECK_CONTAINS(message, "CUDA_ERROR_NOT_FOUND (500): the driver's own words");
    CHECK(!launch_plainly({"softmax", &image}).ok());
    CHECK(launch_plainly().ok());  // the others still work
    CHECK_EQ(fake_cuda.libraries.load(), 1);
  });
}

TEST(full_no_code_for_this_chip) {
  in_process_of_its_own([] {
    fake_cuda.function_result = CUDA_ERROR_NO_BINARY_FOR_GPU;
    const std::string message = prepare(kernel, 1, 0).message();
    CHECK_CONTAINS(message, "CUDA_ERROR_NO_BINARY_FOR_GPU (209)");
    CHECK_CONTAINS(message, "code for sm_80, PTX compute_80, sm_90a");
    CHECK_CONTAINS(message, "compute capability 9.0");
    CHECK_CONTAINS(message, "CPU tensors");
    CHECK(current_context() == nullptr);  // restored on failure too
    fake_cuda.function_result = CUDA_SUCCESS;
    CHECK(prepare(kernel, 1, 0).ok());  // a failure is not for ever
  });
  in_process_of_its_own([] {
    fake_cuda.load_result = CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    CHECK_CONTAINS(launch_plainly().message(), "update the driver");
    CHECK_EQ(fake_cuda.launches.load(), 0);
  });
}

TEST(full_shared_memory) {
  in_process_of_its_own([] {
    const uint32_t most = fake::max_shared_bytes(80) - fake::kStaticSharedBytes;
    CHECK(prepare(kernel, 0, 0).ok());
    CHECK_EQ(fake_cuda.opt_ins.load(), 0);
    CHECK(prepare(kernel, 0, most).ok());
    CHECK(prepare(kernel, 0, 1000).ok());  // never lowered: another plan may need it
    CHECK_EQ(fake_cuda.opt_ins.load(), 1);
    CHECK_EQ(fake_cuda.opt_in_bytes[0].load(), static_cast<int>(most));
    CHECK_EQ(fake_cuda.opt_in_bytes[1].load(), 0);

    const std::string message = prepare(kernel, 0, most + 1).message();
    CHECK_CONTAINS(message, std::to_string(most + 1) + " bytes of dynamic and 1024 of static");
    CHECK_CONTAINS(message, "at most " + std::to_string(fake::max_shared_bytes(80)));
    CHECK_EQ(fake_cuda.opt_ins.load(), 1);
    CHECK(launch_plainly(kernel, 1, most + 1).ok());  // device 1 has more; launch opts in by itself
    CHECK_EQ(fake_cuda.opt_in_bytes[1].load(), static_cast<int>(most + 1));
  });
}

TEST(full_launch_passes_everything) {
  in_process_of_its_own([] {
    const LaunchShape shape{.grid = {6, 5, 4}, .threads = 384, .shared_bytes = 70000};
    int stream = 0;
    CHECK(launch(kernel, shape, 1, &stream, params, sizeof params).ok());
    const fake::Launch& seen = fake_cuda.launch;
    CHECK_EQ(seen.config.gridDimX, 6u);
    CHECK_EQ(seen.config.gridDimY, 5u);
    CHECK_EQ(seen.config.gridDimZ, 4u);
    CHECK_EQ(seen.config.blockDimX, 384u);
    CHECK_EQ(seen.config.blockDimY, 1u);
    CHECK_EQ(seen.config.blockDimZ, 1u);
    CHECK_EQ(seen.config.sharedMemBytes, 70000u);
    CHECK_EQ(static_cast<const void*>(seen.config.hStream), static_cast<const void*>(&stream));
    CHECK_EQ(seen.config.numAttrs, 0u);
    CHECK_EQ(std::string(seen.params), "parameters");
    CHECK_EQ(seen.device, 1);
    CHECK_EQ(*static_cast<const std::string*>(seen.kernel), kernel.name);
  });
}

TEST(full_launch_attributes) {
  in_process_of_its_own([] {
    LaunchShape shape{.grid = {6, 1, 1}, .threads = 128, .cluster = 2, .programmatic = true};
    CHECK(launch(kernel, shape, 1, nullptr, params, sizeof params).ok());
    const fake::Launch& seen = fake_cuda.launch;
    CHECK_EQ(seen.config.numAttrs, 2u);
    CHECK_EQ(static_cast<int>(seen.attributes[0].id), 4);
    CHECK_EQ(seen.attributes[0].value.clusterDim.x, 2u);
    CHECK_EQ(seen.attributes[0].value.clusterDim.y, 1u);
    CHECK_EQ(seen.attributes[0].value.clusterDim.z, 1u);
    CHECK_EQ(static_cast<int>(seen.attributes[1].id), 6);
    CHECK_EQ(seen.attributes[1].value.programmaticStreamSerializationAllowed, 1);

    shape.cluster = 1;
    CHECK(launch(kernel, shape, 1, nullptr, params, sizeof params).ok());
    CHECK_EQ(seen.config.numAttrs, 1u);
    CHECK_EQ(static_cast<int>(seen.attributes[0].id), 6);

    fake_cuda.capturing = true;
    CHECK(launch(kernel, shape, 1, nullptr, params, sizeof params).ok());
    CHECK_EQ(seen.config.numAttrs, 1u);
  });
}

TEST(full_graphs_overlap_from_12_3_on) {
  in_process_of_its_own([] {
    fake_cuda.version = 12020;
    const LaunchShape shape{.grid = {6, 1, 1}, .threads = 128, .programmatic = true};
    CHECK(launch(kernel, shape, 1, nullptr, params, sizeof params).ok());
    CHECK_EQ(fake_cuda.launch.config.numAttrs, 1u);
    fake_cuda.capturing = true;
    CHECK(launch(kernel, shape, 1, nullptr, params, sizeof params).ok());
    CHECK_EQ(fake_cuda.launch.config.numAttrs, 0u);
  });
}

TEST(full_launch_fails) {
  in_process_of_its_own([] {
    fake_cuda.launch_result = CUDA_ERROR_INVALID_VALUE;
    const LaunchShape shape{.grid = {7, 1, 1}, .threads = 96, .shared_bytes = 5, .cluster = 2};
    const std::string message = launch(kernel, shape, 0, nullptr, params, 64).message();
    CHECK_CONTAINS(message, "cannot launch kernel attention_fwd of image sm80_attention_fp16");
    CHECK_CONTAINS(message, "device 0 (Fake 0, compute capability 8.0)");
    CHECK_CONTAINS(message, "grid 7 x 1 x 1, 96 threads, 5 bytes of shared memory, clusters of 2");
    CHECK_CONTAINS(message, "CUDA_ERROR_INVALID_VALUE (1): the driver's own words");
    fake_cuda.launch_result = CUDA_ERROR_ILLEGAL_ADDRESS;
    CHECK_CONTAINS(launch_plainly().message(), "Work launched earlier");
  });
}

TEST(full_launch_of_nothing) {
  in_process_of_its_own([] {
    for (int empty = 0; empty < 3; ++empty) {
      LaunchShape shape{.grid = {1, 1, 1}, .threads = 32};
      shape.grid[empty] = 0;
      CHECK(launch(kernel, shape, 0, nullptr, params, sizeof params).ok());
    }
    CHECK_EQ(fake_cuda.launches.load(), 0);
  });
}

TEST(full_parameters_of_another_build) {
  in_process_of_its_own([] {
    const Status status = launch(kernel, {}, 0, nullptr, params, sizeof params - 8);
    CHECK_CONTAINS(status.message(), "takes 64 bytes of parameters and is given 56");
    CHECK_EQ(fake_cuda.launches.load(), 0);
  });
}

TEST(full_capture_hint) {
  in_process_of_its_own([] {
    fake_cuda.capturing = true;
    CHECK(launch_plainly().ok());
    fake_cuda.function_result = CUDA_ERROR_UNKNOWN;
    CHECK_CONTAINS(launch_plainly({"attention_bwd", &image}).message(), "once before capturing");
    fake_cuda.capturing = false;
    const std::string message = launch_plainly({"attention_bwd", &image}).message();
    CHECK(message.find("captur") == std::string::npos, message);
  });
}

TEST(full_contexts) {
  in_process_of_its_own([] {
    // None current: the primary one is borrowed.
    CHECK(launch_plainly(kernel, 0).ok());
    CHECK_EQ(fake_cuda.launch.device, 0);
    CHECK(current_context() == nullptr);
    CHECK_EQ(fake_cuda.retained[0].load(), 1);

    // One of another device current: put back afterwards.
    fake::Context mine{1};
    fake::make_current(the_driver(), mine);
    CHECK(launch_plainly(kernel, 0).ok());
    CHECK_EQ(fake_cuda.launch.device, 0);
    CHECK(current_context() == &mine);

    // One of this device current: used as it is, whoever made it.
    CHECK(launch_plainly(kernel, 1).ok());
    CHECK_EQ(fake_cuda.launch.device, 1);
    CHECK(current_context() == &mine);
    CHECK_EQ(fake_cuda.retained[1].load(), 0);

    fake_cuda.launch_result = CUDA_ERROR_INVALID_VALUE;
    CHECK(!launch_plainly(kernel, 0).ok());
    CHECK(current_context() == &mine);
  });
}

TEST(full_launch_allocates_nothing) {
  in_process_of_its_own([] {
    const LaunchShape shape{.grid = {2, 1, 1}, .threads = 128, .shared_bytes = 99, .cluster = 2};
    CHECK(launch(kernel, shape, 0, nullptr, params, sizeof params).ok());
    const int before = allocations;
    for (int i = 0; i < 100; ++i) {
      CHECK(launch(kernel, shape, 0, nullptr, params, sizeof params).ok());
      CHECK(prepare(kernel, 0, 99).ok() && find_device(0).ok());
    }
    CHECK_EQ(allocations, before);
    const auto list = std::make_unique<int>(0);  // the counter does count
    CHECK_EQ(allocations, before + 1);
  });
}

TEST(full_kernel_info) {
  in_process_of_its_own([] {
    const auto info = kernel_info(kernel, 0);
    CHECK(info.ok(), info.status().message());
    CHECK_EQ(info.value().static_shared_bytes, fake::kStaticSharedBytes);
    // The fake answers 100 + the number of the attribute, from the manual.
    CHECK_EQ(info.value().max_threads, 100);
    CHECK_EQ(info.value().local_bytes, 103);
    CHECK_EQ(info.value().registers, 104);
    CHECK_EQ(info.value().ptx_version, 105);
    CHECK_EQ(info.value().binary_version, 106);
    CHECK_CONTAINS(kernel_info({"softmax", &image}, 0).status().message(), "NOT_FOUND");
  });
}

TEST(full_fork_after_use) {
  in_process_of_its_own([] {
    CHECK(launch_plainly().ok());
    CHECK_EQ(exit_code_of_child([] {
               all_refuse("does not survive a fork");
               all_refuse("spawn");
               CHECK_EQ(exit_code_of_child([] { all_refuse("spawn"); }), 0);
             }),
             0);
    CHECK(launch_plainly().ok());  // the parent goes on
  });
}

TEST(full_fork_during_init) {
  in_process_of_its_own([] {
    fake_cuda.init_milliseconds = 300;
    std::thread first([] { CHECK(driver().ok()); });
    while (fake_cuda.inits == 0) std::this_thread::yield();
    CHECK_EQ(exit_code_of_child([] { all_refuse("spawn"); }), 0);  // and does not wait for ever
    first.join();
  });
}

TEST(full_fork_after_failure) {
  in_process_of_its_own([] {
    fake_cuda.init_result = CUDA_ERROR_NO_DEVICE;
    all_refuse("CUDA_ERROR_NO_DEVICE");
    CHECK_EQ(exit_code_of_child([] { all_refuse("CUDA_ERROR_NO_DEVICE"); }), 0);
  });
}

TEST(oldest_works_without_what_came_later) {
  in_process_of_its_own([] {
    fake_cuda.version = 12000;
    CHECK(launch_plainly().ok());
    CHECK_EQ(fake_cuda.functions.load(), 1);
    const int box[] = {64};
    const auto map = encode_tensor_map(contiguous(DType::kFloat16, {64}), memory, box);
    CHECK_CONTAINS(map.status().message(), "the CUDA driver (12.0) has no tensor maps");
  });
}

TEST(broken_lacks_a_function) {
  in_process_of_its_own([] { all_refuse("12.4) lacks cuLaunchKernelEx"); });
}
