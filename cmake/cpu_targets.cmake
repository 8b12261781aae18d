# The kernels of each operator, compiled once per CPU target. The library picks the best one that the machine can run
# when it loads (src/cpu/targets.cc).
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(flashmoe_cpu_targets neon neon_bf16)
  set(flashmoe_flags_neon -march=armv8-a)
  set(flashmoe_flags_neon_bf16 -march=armv8.2-a+fp16+bf16)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(flashmoe_cpu_targets sse2 avx2 avx512)
  set(flashmoe_flags_sse2 -march=x86-64)
  set(flashmoe_flags_avx2 -march=haswell)
  # GCC 12 warns of what its own headers leave uninitialised.
  set(flashmoe_flags_avx512 -march=skylake-avx512 -mprefer-vector-width=512
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  set(flashmoe_flags_amx ${flashmoe_flags_avx512} -mavx512bf16 -mamx-tile -mamx-bf16)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag("-mavx512bf16 -mamx-tile -mamx-bf16" FLASHMOE_COMPILES_AMX)
  if(FLASHMOE_COMPILES_AMX AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    list(APPEND flashmoe_cpu_targets amx)
  endif()
else()
  set(flashmoe_cpu_targets generic)
  set(flashmoe_flags_generic "")
endif()

set(flashmoe_optimise -O3)
if(FLASHMOE_SANITIZE)
  set(flashmoe_optimise -O1)
endif()
foreach(target IN LISTS flashmoe_cpu_targets)
  add_library(flashmoe_cpu_${target} OBJECT
    src/cpu/target.cc src/cpu/attention/kernels.cc src/cpu/cache/kernels.cc src/cpu/moe/kernels.cc)
  target_include_directories(flashmoe_cpu_${target} PRIVATE include src)
  target_compile_definitions(flashmoe_cpu_${target} PRIVATE FLASHMOE_CPU_TARGET=${target})
  # Contracting a*b+c to one FMA is wanted; reordering or assuming away NaN is not.
  target_compile_options(flashmoe_cpu_${target} PRIVATE ${flashmoe_flags_${target}}
    ${flashmoe_optimise} -ffp-contract=fast -fno-math-errno -fno-trapping-math -fno-exceptions)
  target_sources(flashmoe PRIVATE $<TARGET_OBJECTS:flashmoe_cpu_${target}>)
  string(TOUPPER ${target} macro)
  list(APPEND flashmoe_target_macros FLASHMOE_HAS_${macro})
endforeach()
set_source_files_properties(src/cpu/targets.cc PROPERTIES COMPILE_DEFINITIONS "${flashmoe_target_macros}")
