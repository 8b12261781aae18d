# Device code as data: nvcc compiles each kernel file to a fatbin, and the fatbins are embedded in the library as bytes.
# The host compiler never sees CUDA, and a machine that is given the fatbins (FLASHMOE_FATBINS) needs no nvcc.
# The families, and for each: the chips it is compiled for, an image each; dtypes; the folder of its kernel files in
# src/cuda/<operator>/kernels. Images are small and loaded only when needed.
set(flashmoe_families sm75 sm80 sm90)
set(flashmoe_chips_sm75 sm_75)
set(flashmoe_chips_sm80 sm_80 sm_90)
set(flashmoe_chips_sm90 sm_90a)
set(flashmoe_dtypes_sm75 fp16)
set(flashmoe_dtypes_sm80 fp16 bf16)
set(flashmoe_dtypes_sm90 fp16 bf16)
set(flashmoe_dtypes_sm75_second fp32 fp16)  # passes that have more
set(flashmoe_dtypes_sm80_second fp32 fp16 bf16)
set(flashmoe_folder_sm75 mma_sync)
set(flashmoe_folder_sm80 mma_sync)
set(flashmoe_folder_sm90 sm90)

# Attention's kernels are compiled for each head dim; small.cu has those without a tile, second.cu those of forward mode
# and second derivatives.
set(flashmoe_head_dims_sm75 16 32 48 64 96 128 192 256)
set(flashmoe_head_dims_sm80 ${flashmoe_head_dims_sm75})
set(flashmoe_head_dims_sm90 32 64 96 128 192 256)
set(flashmoe_head_dims_sm90_fwd_bias 32 64 96 128)  # passes that have fewer
set(flashmoe_head_dims_sm90_fwd_bias_rows 32 64 96 128)
set(flashmoe_head_dims_sm90_fwd_mask 32 64 96 128)
set(flashmoe_head_dims_sm90_fwd_packed 16 32 64)
set(flashmoe_head_dims_sm90_bwd_packed 16 32 64)
set(flashmoe_head_dims_sm90_bwd_whole 32 64)
set(flashmoe_head_dims_sm90_fwd_packed_bias 16 32 64)
set(flashmoe_head_dims_sm90_bwd_packed_bias 16 32 64)
set(flashmoe_head_dims_sm90_bwd_bias 32 64 96 128)
set(flashmoe_head_dims_sm90_bwd_bias_rows 32 64 96 128)
set(flashmoe_head_dims_sm90_bwd_mask 32 64 96 128)
set(flashmoe_head_dims_sm90_paged_chunk 64 128 256)
set(flashmoe_head_dims_sm90_paged_chunk_fp8 64 128)
foreach(family IN LISTS flashmoe_families)
  set(flashmoe_head_dims_${family}_paged 64 128 256 512)
  set(flashmoe_head_dims_${family}_paged_fp8 64 128 256 512)
  set(flashmoe_head_dims_${family}_fwd_dropout 32 64 128 256)
  set(flashmoe_head_dims_${family}_bwd_dropout 32 64 128 256)
endforeach()

# Attention in fp32: kernels/fp32, with three TF32 products for each (FMAs on sm75), and with one.
set(flashmoe_fp32_sm75 fp32)
set(flashmoe_fp32_sm80 fp32 tf32)
set(flashmoe_fp32_head_dims 32 64 128 256)

# What is compiled for a chip, and what the library knows of it: compute capability, whether it runs on that chip only,
# whether it has PTX. An sm_80 image runs on 8.6 and 8.9 as it is; PTX is for chips to come. Hopper's own instructions
# (sm_90a) are on no other chip, so there is no PTX of them.
set(flashmoe_code_sm_75 -gencode arch=compute_75,code=sm_75 -gencode arch=compute_75,code=compute_75)
set(flashmoe_code_sm_80 -gencode arch=compute_80,code=sm_80 -gencode arch=compute_80,code=compute_80)
set(flashmoe_code_sm_90 -gencode arch=compute_90,code=sm_90)
set(flashmoe_code_sm_90a -gencode arch=compute_90a,code=sm_90a)
set(flashmoe_target_sm_75 "75, false, true")
set(flashmoe_target_sm_80 "80, false, true")
set(flashmoe_target_sm_90 "90, false, false")
set(flashmoe_target_sm_90a "90, true, false")

set(FLASHMOE_FAMILIES "auto" CACHE STRING
  "Families of CUDA kernels: auto (those that this machine's GPUs can use), all, none, or a list: sm75,sm80:sm_90,sm90")
option(FLASHMOE_EVERY_TILE "Compile for sm_90 also what is never chosen there: tiles of sm80 (kernels/hopper_rows.h), sm75" OFF)
set(FLASHMOE_FATBINS "" CACHE PATH "Folder of fatbins compiled elsewhere from these sources; empty: compile them here")
if(FLASHMOE_EVERY_TILE)
  # From the PTX that a driver would compile there, at each test's first call.
  list(APPEND flashmoe_code_sm_75 -gencode arch=compute_75,code=sm_90)
endif()

target_sources(flashmoe PRIVATE
  src/cuda/contents.cc
  src/cuda/runtime/driver.cc src/cuda/runtime/families.cc src/cuda/runtime/images.cc src/cuda/runtime/launch.cc
  src/cuda/runtime/tensor_map.cc
  src/cuda/attention/bias_plan.cc src/cuda/attention/call.cc src/cuda/attention/catalogue.cc
  src/cuda/attention/families.cc src/cuda/attention/lay_out.cc src/cuda/attention/mma_sync.cc
  src/cuda/attention/paged_plan.cc src/cuda/attention/planner.cc src/cuda/attention/second_plan.cc
  src/cuda/attention/sm90.cc src/cuda/attention/sm90_maps.cc src/cuda/attention/sm90_run.cc
  src/cuda/attention/sm90_tasks.cc src/cuda/attention/tile_choice.cc src/cuda/attention/workspace.cc
  src/cuda/cache/catalogue.cc src/cuda/cache/planner.cc
  src/cuda/moe/call.cc src/cuda/moe/catalogue.cc src/cuda/moe/planner.cc src/cuda/moe/sm90.cc
  src/cuda/moe/workspace.cc)
target_link_libraries(flashmoe PRIVATE ${CMAKE_DL_LIBS})

# Writes what to build to `result`, as family:chip.
function(flashmoe_choose_images result)
  string(REPLACE "," ";" asked "${FLASHMOE_FAMILIES}")
  set(every "")
  foreach(family IN LISTS flashmoe_families)
    foreach(chip IN LISTS flashmoe_chips_${family})
      list(APPEND every ${family}:${chip})
    endforeach()
  endforeach()
  set(chosen "")
  if(asked STREQUAL "all")
    set(chosen ${every})
  elseif(asked STREQUAL "auto" AND FLASHMOE_FATBINS)  # those that were compiled
    get_filename_component(folder ${FLASHMOE_FATBINS} ABSOLUTE BASE_DIR ${PROJECT_SOURCE_DIR})
    foreach(one IN LISTS every)
      string(REPLACE ":" "_*." pattern ${one})
      file(GLOB found ${folder}/${pattern}.fatbin)
      if(found)
        list(APPEND chosen ${one})
      endif()
    endforeach()
  elseif(asked STREQUAL "auto" AND Python3_EXECUTABLE)
    execute_process(COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/gpus.py
      OUTPUT_VARIABLE gpus OUTPUT_STRIP_TRAILING_WHITESPACE)
    string(REPLACE "\n" ";" gpus "${gpus}")
    foreach(gpu IN LISTS gpus)  # "9.0"
      if(gpu VERSION_EQUAL 9.0)
        list(APPEND chosen sm80:sm_90 sm90:sm_90a)
      elseif(gpu VERSION_GREATER_EQUAL 8.0)
        list(APPEND chosen sm80:sm_80)
      elseif(gpu VERSION_EQUAL 7.5)
        list(APPEND chosen sm75:sm_75)
      endif()
    endforeach()
    list(REMOVE_DUPLICATES chosen)
  elseif(NOT asked MATCHES "^(auto|none)$")
    foreach(one IN LISTS asked)
      set(matching ${every})
      list(FILTER matching INCLUDE REGEX "^${one}(:|$)")
      if(NOT matching)
        list(JOIN every ", " every)
        message(FATAL_ERROR "FLASHMOE_FAMILIES has '${one}'; it must be auto, all, none, or a list of sm75, sm80, sm90, "
          "or of a family's chips: ${every}")
      endif()
      list(APPEND chosen ${matching})
    endforeach()
  endif()
  set(${result} "${chosen}" PARENT_SCOPE)
endfunction()

if(NOT FLASHMOE_FAMILIES STREQUAL "none")
  find_package(Python3 QUIET COMPONENTS Interpreter)
endif()
flashmoe_choose_images(chosen)
if(chosen AND NOT FLASHMOE_FATBINS)
  # From the machine, or from NVIDIA's compiler wheels beside the Python that runs the build.
  if(Python3_EXECUTABLE)
    execute_process(COMMAND ${Python3_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
      OUTPUT_VARIABLE site_packages OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  find_program(FLASHMOE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda ${site_packages}/nvidia/cu13
    PATH_SUFFIXES bin DOC "NVIDIA's compiler")
  if(NOT FLASHMOE_NVCC OR NOT Python3_EXECUTABLE)
    if(NOT FLASHMOE_FAMILIES STREQUAL "auto")
      message(FATAL_ERROR "FLASHMOE_FAMILIES=${FLASHMOE_FAMILIES} needs nvcc and a python3. Install the CUDA toolkit "
        "13.0, or `pip install -r requirements-cuda.txt`, or pass FLASHMOE_FATBINS.")
    endif()
    message(WARNING "This machine has a GPU, but no nvcc and python3 to compile kernels for it: install the CUDA "
      "toolkit 13.0, or `pip install -r requirements-cuda.txt`, or pass FLASHMOE_FATBINS.")
    set(chosen "")
  endif()
endif()
if(NOT chosen)
  message(STATUS "flashmoe: no CUDA kernels (FLASHMOE_FAMILIES=${FLASHMOE_FAMILIES}); only the CPU will compute")
  return()
endif()
list(JOIN chosen ", " listed)
message(STATUS "flashmoe: CUDA kernels of ${listed} (FLASHMOE_FAMILIES=${FLASHMOE_FAMILIES})")

# Fatbins and sources must belong together: the hash of all device sources goes with the fatbins.
file(GLOB_RECURSE device_sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS
  src/attention/dropout.h src/cuda/*.cu src/cuda/*.cuh src/cuda/tile/*.h src/cuda/tma/*.h
  src/cuda/attention/paged.h src/cuda/attention/params.h src/cuda/attention/tiles.h src/cuda/attention/sm90/*.h
  src/cuda/attention/fp32/*.h src/cuda/attention/second/*.h src/cuda/attention/kernels/*.h
  src/cuda/cache/params.h src/cuda/moe/params.h src/cuda/moe/tiles.h src/cuda/moe/sm90/*.h src/cuda/moe/kernels/*.h)
list(SORT device_sources)
set(hashes "")
foreach(source IN LISTS device_sources)
  file(SHA256 ${PROJECT_SOURCE_DIR}/${source} hash)
  string(APPEND hashes "${hash} ${source}\n")
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${device_sources})
if(FLASHMOE_FATBINS)
  get_filename_component(fatbin_dir ${FLASHMOE_FATBINS} ABSOLUTE BASE_DIR ${PROJECT_SOURCE_DIR})
  file(READ ${fatbin_dir}/sources.sha256 compiled_from)
  if(NOT compiled_from STREQUAL hashes)
    message(FATAL_ERROR "The fatbins in ${fatbin_dir} were compiled from other sources than these. Compile them again.")
  endif()
  if(EXISTS ${fatbin_dir}/every_tile)
    set(FLASHMOE_EVERY_TILE ON)
  endif()
else()
  set(fatbin_dir ${PROJECT_BINARY_DIR}/fatbins)
  file(WRITE ${fatbin_dir}/sources.sha256 "${hashes}")
  if(FLASHMOE_EVERY_TILE)
    file(TOUCH ${fatbin_dir}/every_tile)
  else()
    file(REMOVE ${fatbin_dir}/every_tile)
  endif()
endif()

enable_language(ASM)
set(images "")

# Compiles src/cuda/<file> to <image>.<chip>.fatbin, unless that was given, and embeds it.
function(flashmoe_add_image family chip file image)
  set(fatbin ${fatbin_dir}/${image}.${chip}.fatbin)
  set(hopper_rows false)
  if("${family}:${chip}" STREQUAL "sm80:sm_90" AND image MATCHES "_attention_bwd_" AND NOT FLASHMOE_EVERY_TILE)
    set(hopper_rows true)
    list(APPEND ARGN -DFLASHMOE_HOPPER_ROWS)
  endif()
  if(NOT FLASHMOE_FATBINS)
    add_custom_command(OUTPUT ${fatbin}
      COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/compile_image.py compile --root ${PROJECT_SOURCE_DIR}/src
        --source ${PROJECT_SOURCE_DIR}/src/cuda/${file} --output ${fatbin} --
        ${FLASHMOE_NVCC} -fatbin -compress-mode=size -std=c++20 -O3 --Wno-deprecated-gpu-targets -Xptxas -v
        ${flashmoe_code_${chip}} ${ARGN}
      DEPENDS src/cuda/${file} cmake/compile_image.py DEPFILE ${fatbin}.d VERBATIM
      COMMENT "nvcc ${image} for ${chip}")
  endif()
  set(symbol flashmoe_image_${image}_${chip})
  set(assembly ${PROJECT_BINARY_DIR}/images/${image}.${chip}.S)
  file(CONFIGURE OUTPUT ${assembly} @ONLY CONTENT
"    .section .rodata
    .balign 64
    .globl @symbol@
    .hidden @symbol@
@symbol@:
    .incbin \"@fatbin@\"
    .globl @symbol@_end
    .hidden @symbol@_end
@symbol@_end:
    .section .note.GNU-stack,\"\",%progbits
")
  set_source_files_properties(${assembly} PROPERTIES OBJECT_DEPENDS ${fatbin})
  target_sources(flashmoe PRIVATE ${assembly})
  set(images "${images}X(${image}, ${chip}, ${flashmoe_target_${chip}}, ${hopper_rows})\n" PARENT_SCOPE)
  # For whoever compiles the same kernels by other means: tests/cpp/emulator.
  list(JOIN ARGN "|" options)
  set_property(GLOBAL APPEND PROPERTY flashmoe_kernels "${image}|${file}|${options}")
endfunction()

# The images of one operator's kernel files, for each dtype of the family; attention's for each head dim as well.
function(flashmoe_add_operator operator family chip)
  set(folder ${operator}/kernels/${flashmoe_folder_${family}})
  file(GLOB passes RELATIVE ${PROJECT_SOURCE_DIR}/src/cuda/${folder} CONFIGURE_DEPENDS src/cuda/${folder}/*.cu)
  foreach(file IN LISTS passes)
    get_filename_component(pass ${file} NAME_WE)
    set(dtypes ${flashmoe_dtypes_${family}})
    if(DEFINED flashmoe_dtypes_${family}_${pass})
      set(dtypes ${flashmoe_dtypes_${family}_${pass}})
    endif()
    foreach(dtype IN LISTS dtypes)
      set(options -DFLASHMOE_FAMILY=${family} -DFLASHMOE_DTYPE=${dtype}
        "-DFLASHMOE_TABLE=\"cuda/${operator}/kernels/${family}.h\"")
      if(flashmoe_folder_${family} STREQUAL "mma_sync")
        list(APPEND options "-DFLASHMOE_CHIP=\"cuda/tile/chip_${family}.cuh\"")
      endif()
      set(image ${family}_${operator}_${pass}_${dtype})
      if(NOT operator STREQUAL "attention" OR pass MATCHES "^(small|second)$")
        flashmoe_add_image(${family} ${chip} ${folder}/${file} ${image} ${options})
      else()
        set(head_dims ${flashmoe_head_dims_${family}})
        if(DEFINED flashmoe_head_dims_${family}_${pass})
          set(head_dims ${flashmoe_head_dims_${family}_${pass}})
        endif()
        foreach(head_dim IN LISTS head_dims)
          flashmoe_add_image(${family} ${chip} ${folder}/${file} ${image}_d${head_dim} ${options}
            -DFLASHMOE_HEAD_DIM=${head_dim})
        endforeach()
      endif()
    endforeach()
  endforeach()
  set(images "${images}" PARENT_SCOPE)
endfunction()

# The images of attention in fp32. Kernels without a tile have one dtype.
function(flashmoe_add_fp32 family chip)
  set(folder attention/kernels/fp32)
  file(GLOB passes RELATIVE ${PROJECT_SOURCE_DIR}/src/cuda/${folder} CONFIGURE_DEPENDS src/cuda/${folder}/*.cu)
  foreach(file IN LISTS passes)
    get_filename_component(pass ${file} NAME_WE)
    foreach(dtype IN LISTS flashmoe_fp32_${family})
      set(options -DFLASHMOE_FAMILY=${family} -DFLASHMOE_DTYPE=${dtype}
        "-DFLASHMOE_TABLE=\"cuda/attention/kernels/fp32.h\"" "-DFLASHMOE_CHIP=\"cuda/tile/chip_${family}.cuh\"")
      set(image ${family}_attention_${pass}_${dtype})
      if(NOT pass STREQUAL "small")
        foreach(head_dim IN LISTS flashmoe_fp32_head_dims)
          flashmoe_add_image(${family} ${chip} ${folder}/${file} ${image}_d${head_dim} ${options}
            -DFLASHMOE_HEAD_DIM=${head_dim})
        endforeach()
      elseif(dtype STREQUAL "fp32")
        flashmoe_add_image(${family} ${chip} ${folder}/${file} ${image} ${options})
      endif()
    endforeach()
  endforeach()
  set(images "${images}" PARENT_SCOPE)
endfunction()

foreach(one IN LISTS chosen)
  string(REPLACE ":" ";" one ${one})
  list(GET one 0 family)
  list(GET one 1 chip)
  flashmoe_add_operator(attention ${family} ${chip})
  flashmoe_add_fp32(${family} ${chip})
  flashmoe_add_operator(moe ${family} ${chip})
  flashmoe_add_image(${family} ${chip} cache/kernels/append.cu ${family}_cache_append -DFLASHMOE_FAMILY=${family})
endforeach()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/images/images.inc CONTENT "${images}")
set_source_files_properties(src/cuda/runtime/images.cc PROPERTIES
  COMPILE_DEFINITIONS FLASHMOE_HAS_IMAGES INCLUDE_DIRECTORIES ${PROJECT_BINARY_DIR}/images)
