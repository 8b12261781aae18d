# The torch ops: torch's stable ABI only, so that one binary serves every torch from 2.10 on, whatever
# the Python. Found through the Python at hand; CMake's Torch package would bring CUDA along.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c "import torch; print(torch.__path__[0])"
  OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing)
if(torch_missing)
  message(FATAL_ERROR "FLASHMOE_TORCH=ON, but ${Python3_EXECUTABLE} cannot import torch. Install torch >= 2.10 "
    "there, or set Python3_EXECUTABLE to a Python that has it.")
endif()

add_library(flashmoe_torch MODULE
  src/torch/schema.cc
  src/torch/attention_forward.cc
  src/torch/attention_backward.cc
  src/torch/attention_tangent.cc
  src/torch/attention_node.cc
  src/torch/explain.cc
  src/torch/paged_forward.cc
  src/torch/paged_explain.cc
  src/torch/cache_append.cc
  src/torch/moe_forward.cc
  src/torch/moe_backward.cc
  src/torch/moe_explain.cc
  src/torch/route.cc
  src/torch/build_info.cc
  src/torch/arguments.cc
  src/torch/call.cc
  src/torch/paged_arguments.cc
  src/torch/paged_call.cc
  src/torch/moe_arguments.cc
  src/torch/moe_call.cc
  src/torch/convert.cc
  src/torch/execute.cc
  src/torch/layout.cc
  src/torch/placement.cc)
target_include_directories(flashmoe_torch SYSTEM PRIVATE ${torch_dir}/include)
target_compile_definitions(flashmoe_torch PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
# libtorch.so pulls in libtorch_cuda.so where there is one. No RPATH to it: torch is loaded before us.
target_link_libraries(flashmoe_torch PRIVATE flashmoe
  -Wl,--no-as-needed ${torch_dir}/lib/libtorch.so ${torch_dir}/lib/libtorch_cpu.so)
set_target_properties(flashmoe_torch PROPERTIES
  BUILD_RPATH_USE_ORIGIN ON BUILD_RPATH "$ORIGIN" INSTALL_RPATH "$ORIGIN" SKIP_BUILD_RPATH OFF)

if(FLASHMOE_INPLACE)
  set(inplace ${PROJECT_SOURCE_DIR}/python/flashmoe_science/lib)
  set_target_properties(flashmoe flashmoe_torch PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${inplace})
endif()
if(SKBUILD)
  install(TARGETS flashmoe flashmoe_torch LIBRARY DESTINATION flashmoe_science/lib)
endif()
