# Every target sets up what it needs by itself: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOBS   ?= 2
PYTEST := $(BIN)/python -m pytest
# A test that hangs fails with its worker, and the others go on (faulthandler_timeout in pyproject.toml).
ENDED  := -o faulthandler_exit_on_timeout=true
# Bytecode is kept, even where an environment says otherwise: without it every process compiles PyTorch's sources.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-slow test-gpu test-versions bench results docs release-check lint format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 17

setup: $(READY)  ## make .venv with the pinned dependencies

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "altup needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## train dense, AltUp and Recycled-AltUp side by side on this machine (a few minutes, CPU)
	$(BIN)/altup demo

# mypy and the kernels in Triton's interpreter run beside the other tests, and are told after them. A shell's background
# processes do not hear Ctrl-C, so they are ended with all that `make test` has started.
test: $(READY)  ## lint, type check and the default test suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@trap 'kill 0' INT; (failed=0; $(BIN)/mypy || failed=1; \
	TRITON_INTERPRET=1 $(PYTEST) $(ENDED) -n 0 -m interpreter tests/kernels || failed=1; \
	exit $$failed) >$(VENV)/beside.log 2>&1 & beside=$$!; failed=0; \
	$(PYTEST) $(ENDED) -n $(JOBS) --dist worksteal || failed=1; \
	wait $$beside || failed=1; echo "mypy, and kernels in the interpreter"; cat $(VENV)/beside.log; exit $$failed

test-slow: $(READY)  ## the checks that take minutes: kills, fuzzed input, over-fitting, full disks
	$(PYTEST) -m slow

test-gpu: $(READY)  ## the checks that need a CUDA GPU
	$(PYTEST) -m gpu

OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
test-versions: $(READY)  ## the tests of widen and Gemma 3n with the oldest transformers that pyproject.toml allows, and the newest
	JOBS=$(JOBS) .ci/with-transformers "transformers==$(OLDEST)" transformers

bench: $(READY)  ## speed beside peers, at toy sizes that a CPU can do; `altup bench` on a GPU
	$(BIN)/altup bench --quick

results: $(READY)  ## the tables and figures of docs/results.md and experiments/, from the stored runs
	$(BIN)/python -m experiments.tables

docs: $(VENV)/.ready-docs  ## build the docs site into site/, offline and strictly (dead links fail)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# Everything that a release needs. The wheel goes into an empty environment, where the README's commands are run.
release-check: $(VENV)/.ready-docs docs  ## wheel, sdist and docs; the README's commands with the wheel alone
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[release]'
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTEST) -n 0 -m slow tests/test_release.py tests/docs

$(VENV)/.ready-docs: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	@touch $@

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache
