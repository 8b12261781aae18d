# Device code as data: nvcc compiles each kernel file to a fatbin, and the fatbins are embedded in the library as bytes.
# The host compiler never sees CUDA, and a machine that is given the fatbins (FLASHMOE_FATBINS) needs no nvcc.
set(flashmoe_families sm75 sm80 sm90)
set(FLASHMOE_FAMILIES "auto" CACHE STRING
  "Families of CUDA kernels: auto (those that this machine's GPUs can use), all, none, or a list: sm80,sm90")
set(FLASHMOE_FATBINS "" CACHE PATH "Folder of fatbins compiled elsewhere from these sources; empty: compile them here")

# Which chips each family is compiled for. An sm_80 image runs on 8.6 and 8.9 as it is; PTX is for chips to come.
set(flashmoe_chips_sm80
  -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -gencode arch=compute_80,code=compute_80)

# Hopper's own instructions: no other chip has them, so there is no PTX.
set(flashmoe_chips_sm90 -gencode arch=compute_90a,code=sm_90a)

set(flashmoe_chips_sm75 -gencode arch=compute_75,code=sm_75 -gencode arch=compute_75,code=compute_75)
# A file that mentions FLASHMOE_HEAD_DIM is compiled once for each: small images, loaded only when needed.
set(flashmoe_head_dims_sm75 16 32 48 64 96 128 192 256)
set(flashmoe_head_dims_sm80 ${flashmoe_head_dims_sm75})
set(flashmoe_head_dims_sm90 64 96 128 192 256)

target_sources(flashmoe PRIVATE
  src/cuda/runtime/driver.cc src/cuda/runtime/launch.cc src/cuda/runtime/tensor_map.cc
  src/cuda/attention/bias_plan.cc src/cuda/attention/call.cc src/cuda/attention/catalogue.cc
  src/cuda/attention/families.cc src/cuda/attention/lay_out.cc src/cuda/attention/mma_sync.cc
  src/cuda/attention/planner.cc src/cuda/attention/sm90.cc src/cuda/attention/tile_choice.cc
  src/cuda/attention/workspace.cc)
target_link_libraries(flashmoe PRIVATE ${CMAKE_DL_LIBS})

# Writes the families to build to `result`.
function(flashmoe_choose_families result)
  string(REPLACE "," ";" families "${FLASHMOE_FAMILIES}")
  if(families STREQUAL "none")
    set(families "")
  elseif(families STREQUAL "all")
    set(families ${flashmoe_families})
  elseif(families STREQUAL "auto")
    set(families "")
    if(FLASHMOE_FATBINS)  # those that were compiled
      get_filename_component(folder ${FLASHMOE_FATBINS} ABSOLUTE BASE_DIR ${PROJECT_SOURCE_DIR})
      foreach(family IN LISTS flashmoe_families)
        file(GLOB found ${folder}/${family}_*.fatbin)
        if(found)
          list(APPEND families ${family})
        endif()
      endforeach()
    elseif(Python3_EXECUTABLE)
      execute_process(COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/gpus.py
        OUTPUT_VARIABLE gpus OUTPUT_STRIP_TRAILING_WHITESPACE)
      string(REPLACE "\n" ";" gpus "${gpus}")
      foreach(gpu IN LISTS gpus)  # "9.0"
        if(gpu VERSION_GREATER_EQUAL 8.0)
          list(APPEND families sm80)
        elseif(gpu VERSION_GREATER_EQUAL 7.5)
          list(APPEND families sm75)
        endif()
        if(gpu VERSION_EQUAL 9.0)
          list(APPEND families sm90)
        endif()
      endforeach()
      list(REMOVE_DUPLICATES families)
    endif()
  endif()
  foreach(family IN LISTS families)
    if(NOT family IN_LIST flashmoe_families)
      message(FATAL_ERROR "FLASHMOE_FAMILIES is '${FLASHMOE_FAMILIES}'; it must be auto, all, none, or a list of: "
        "${flashmoe_families}")
    endif()
  endforeach()
  set(${result} "${families}" PARENT_SCOPE)
endfunction()

if(NOT FLASHMOE_FAMILIES STREQUAL "none")
  find_package(Python3 QUIET COMPONENTS Interpreter)
endif()
flashmoe_choose_families(families)
if(families AND NOT FLASHMOE_FATBINS)
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
    set(families "")
  endif()
endif()
if(NOT families)
  message(STATUS "flashmoe: no CUDA kernels (FLASHMOE_FAMILIES=${FLASHMOE_FAMILIES}); only the CPU will compute")
  return()
endif()
list(JOIN families ", " listed)
message(STATUS "flashmoe: CUDA kernels of ${listed} (FLASHMOE_FAMILIES=${FLASHMOE_FAMILIES})")

# Fatbins and sources must belong together: the hash of all device sources goes with the fatbins.
file(GLOB_RECURSE device_sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS
  src/cuda/*.cu src/cuda/*.cuh src/cuda/attention/params.h src/cuda/attention/tiles.h src/cuda/attention/sm90/*.h
  src/cuda/tma/*.h src/cuda/attention/kernels/*.h)
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
else()
  set(fatbin_dir ${PROJECT_BINARY_DIR}/fatbins)
  file(WRITE ${fatbin_dir}/sources.sha256 "${hashes}")
endif()

enable_language(ASM)
set(images "")

# Compiles src/cuda/attention/kernels/<family>/<file> to the fatbin <image>, unless it was given, and embeds it.
function(flashmoe_add_image family file image)
  set(fatbin ${fatbin_dir}/${image}.fatbin)
  if(NOT FLASHMOE_FATBINS)
    add_custom_command(OUTPUT ${fatbin}
      COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/compile_image.py compile --root ${PROJECT_SOURCE_DIR}/src
        --source ${PROJECT_SOURCE_DIR}/src/cuda/attention/kernels/${family}/${file} --output ${fatbin} --
        ${FLASHMOE_NVCC} -fatbin -std=c++20 -O3 --Wno-deprecated-gpu-targets -Xptxas -v ${flashmoe_chips_${family}} ${ARGN}
      DEPENDS src/cuda/attention/kernels/${family}/${file} cmake/compile_image.py DEPFILE ${fatbin}.d VERBATIM
      COMMENT "nvcc ${image}")
  endif()
  set(assembly ${PROJECT_BINARY_DIR}/images/${image}.S)
  file(CONFIGURE OUTPUT ${assembly} @ONLY CONTENT
"    .section .rodata
    .balign 64
    .globl flashmoe_image_@image@
    .hidden flashmoe_image_@image@
flashmoe_image_@image@:
    .incbin \"@fatbin@\"
    .globl flashmoe_image_@image@_end
    .hidden flashmoe_image_@image@_end
flashmoe_image_@image@_end:
    .section .note.GNU-stack,\"\",%progbits
")
  set_source_files_properties(${assembly} PROPERTIES OBJECT_DEPENDS ${fatbin})
  target_sources(flashmoe PRIVATE ${assembly})
  set(images "${images}X(${image})\n" PARENT_SCOPE)
endfunction()

foreach(family IN LISTS families)
  file(GLOB kernel_files RELATIVE ${PROJECT_SOURCE_DIR}/src/cuda/attention/kernels/${family} src/cuda/attention/kernels/${family}/*.cu)
  foreach(file IN LISTS kernel_files)
    get_filename_component(stem ${file} NAME_WE)
    file(STRINGS src/cuda/attention/kernels/${family}/${file} by_head_dim REGEX FLASHMOE_HEAD_DIM)
    if(by_head_dim)
      foreach(head_dim IN LISTS flashmoe_head_dims_${family})
        flashmoe_add_image(${family} ${file} ${family}_${stem}_d${head_dim} -DFLASHMOE_HEAD_DIM=${head_dim})
      endforeach()
    else()
      flashmoe_add_image(${family} ${file} ${family}_${stem})
    endif()
  endforeach()
endforeach()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/images/images.inc CONTENT "${images}")
set_source_files_properties(src/cuda/attention/catalogue.cc PROPERTIES
  COMPILE_DEFINITIONS FLASHMOE_HAS_IMAGES INCLUDE_DIRECTORIES ${PROJECT_BINARY_DIR}/images)
