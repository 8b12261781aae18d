# make bench   build, then our attention next to PyTorch's: table, JSON and plot in build/bench
# make test    build, then every test: C++, sanitizers, Python, and GPU tests where there is a GPU
#
# Both find or make a Python environment first (tools/environment.py) and can be repeated at no cost.
# On a first run where nothing is installed, bench and test each take a few minutes.

PYTHON3 ?= python3
BUILD := build/release
ASAN := build/asan
ENV := build/environment.mk
GOALS_WITHOUT_ENV := clean help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "make build | format | lint | docs | kernels | wheel | clean"

ifneq ($(filter-out $(GOALS_WITHOUT_ENV),$(MAKECMDGOALS)),)
-include $(ENV)
endif
$(ENV): requirements-dev.txt tools/environment.py
	@FLASHMOE_CUDA=$(FLASHMOE_CUDA) FLASHMOE_FATBINS=$(FLASHMOE_FATBINS) $(PYTHON3) tools/environment.py $@

export PYTHONPATH := $(CURDIR)/python

# FLASHMOE_CUDA=OFF builds without CUDA kernels; FLASHMOE_FATBINS=DIR takes kernels compiled elsewhere.
CUDA_OPTIONS := $(if $(FLASHMOE_CUDA),-DFLASHMOE_CUDA=$(FLASHMOE_CUDA)) $(if $(FLASHMOE_FATBINS),-DFLASHMOE_FATBINS=$(FLASHMOE_FATBINS))

$(BUILD)/build.ninja: $(ENV) CMakeLists.txt $(wildcard cmake/*.cmake)
	@cmake -S . -B $(BUILD) -G Ninja -DPython3_EXECUTABLE=$(PYTHON) -DFLASHMOE_TORCH=ON -DFLASHMOE_TESTS=ON -DFLASHMOE_INPLACE=ON $(CUDA_OPTIONS)

$(ASAN)/build.ninja: $(ENV) CMakeLists.txt $(wildcard cmake/*.cmake)
	@cmake -S . -B $(ASAN) -G Ninja -DFLASHMOE_TESTS=ON -DFLASHMOE_CUDA=OFF -DFLASHMOE_SANITIZE=address,undefined

# What the kernels were compiled from goes with them, for measurements on a machine without the repository.
build: $(BUILD)/build.ninja
	@cmake --build $(BUILD)
	@[ -n "$(FLASHMOE_FATBINS)" ] || [ ! -d $(BUILD)/fatbins ] || git describe --always --abbrev=40 --dirty \
	  > $(BUILD)/fatbins/commit 2>/dev/null || rm -f $(BUILD)/fatbins/commit

bench: build
	@$(PYTHON) -m flashmoe_science bench $(ARGS)

test: build $(ASAN)/build.ninja
	@cmake --build $(ASAN)
	@ctest --test-dir $(BUILD) --output-on-failure
	@ctest --test-dir $(ASAN) --output-on-failure
	@$(PYTHON) -m pytest $(ARGS)

format: $(ENV)
	@git ls-files '*.h' '*.cc' '*.c' '*.cuh' '*.cu' | xargs clang-format -i
	@ruff format . && ruff check --fix .

lint: $(ENV)
	@$(PYTHON) -m pytest -q tests/python/test_house.py

docs: build
	@$(PYTHON) tools/generate_docs.py

kernels: build
	@$(PYTHON) tools/kernel_report.py

wheel: $(ENV)
	@$(PYTHON) -m pip wheel --no-build-isolation --no-deps -w dist .

clean:
	rm -rf build dist python/flashmoe_science/lib

.PHONY: help build bench test format lint docs kernels wheel clean
