# Two commands do everything: `make demo` and `make test`. Both set up what is missing first.

VENV    := .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
# npm may come from the virtual environment (tools/setup.sh puts it there when the system has none)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE  := CMakeLists.txt $(shell find native -name '*.[ch]' -o -name '*.map' -o -name '*.cpp' -o -name CMakeLists.txt)
STRESS_SECONDS ?= 600
SOURCES := pyproject.toml $(NATIVE) $(shell find ggml_async -name '*.py')

.DEFAULT_GOAL := help
.PHONY: help setup install demo test lint unit native sanitize graphs stress mutants tsan integration hosts docs golden bench wheel clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1|/' | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: install ## profile the demo model on the GPU that is there, or on lavapipe
	$(BIN)/ggml-async profile -n 8 -r 3

test: install lint unit native sanitize graphs integration docs ## everything CI runs
	@echo "make test: all passed"

setup: $(VENV)/.setup ## system packages and the virtual environment

$(VENV)/.setup: tools/setup.sh
	PYTHON=$(PYTHON) sh tools/setup.sh
	@touch $@

install: $(VENV)/.installed ## build the plug-in and install the package into .venv

$(VENV)/.installed: $(VENV)/.setup $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation '.[test]'
	@touch $@

lint: install ## ruff and mypy (strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: install ## unit tests, under a minute, no GPU and no network
	$(BIN)/pytest tests/unit -q

native: $(VENV)/.setup ## native tests
	cmake -S . -B build/native -G Ninja -DGGML_ASYNC_TESTS=ON -DGGML_ASYNC_WERROR=ON
	cmake --build build/native
	ctest --test-dir build/native --output-on-failure

sanitize: $(VENV)/.setup ## native tests under AddressSanitizer and UBSan, then ThreadSanitizer
	cmake -S . -B build/asan -G Ninja -DGGML_ASYNC_TESTS=ON -DGGML_ASYNC_WERROR=ON -DGGML_ASYNC_SANITIZE=address,undefined
	cmake --build build/asan
	ctest --test-dir build/asan --output-on-failure
	cmake -S . -B build/tsan -G Ninja -DGGML_ASYNC_TESTS=ON -DGGML_ASYNC_WERROR=ON -DGGML_ASYNC_SANITIZE=thread
	cmake --build build/tsan
	ctest --test-dir build/tsan --output-on-failure

graphs: install ## 10,000 random graphs over the mock device, fixed seeds, each bitwise the CPU's
	$(BIN)/pytest tests/stress -q

stress: install ## the same from a fresh seed for STRESS_SECONDS (600)
	STRESS_SECONDS=$(STRESS_SECONDS) $(BIN)/pytest tests/stress -q -s -k bitwise

mutants: install ## break the plug-in on purpose, one way at a time: each must be caught
	$(BIN)/python tests/stress/mutants.py

tsan: install ## random graphs under ThreadSanitizer, with a ggml built for it from an sdist (minutes, once)
	sh tests/stress/tsan.sh

integration: install ## real llama.cpp builds on lavapipe (fetches the pinned runtime once)
	$(BIN)/pytest tests/integration -q

hosts: install ## compile llama.cpp's programs and llama-cpp-python (half an hour), run them under ggml-async run
	sh tests/hosts/build.sh
	$(BIN)/pytest tests/hosts -q

docs: install ## the docs name every option, variable, counter and exit code
	$(BIN)/python tools/check_docs.py

golden: install ## write the golden outputs again after a deliberate change; look at the diff
	$(BIN)/python tests/golden/update_profile.py
	$(BIN)/python tests/golden/update_capture.py

bench: $(VENV)/.setup ## what the hooks and records cost a CPU split, on a device that takes no time
	cmake -S . -B build/native -G Ninja -DGGML_ASYNC_TESTS=ON -DGGML_ASYNC_WERROR=ON
	cmake --build build/native
	build/native/native/tests/bench_hooks

wheel: $(VENV)/.setup ## sdist, and the wheel from that sdist, in dist/
	$(BIN)/pip install --quiet build
	$(BIN)/python -m build --no-isolation .

clean: ## remove what was built (the download cache stays)
	rm -rf build dist $(VENV)
