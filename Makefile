# Every target sets up what it needs in .venv by itself, with pinned versions; after that everything runs offline.
# PY=python3 uses an environment that has everything already, in place of .venv.

SHELL := /bin/bash
.DELETE_ON_ERROR:
WORKERS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
LINUX := $(filter Linux,$(shell uname -s))
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')

ifdef PY
READY :=
export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
else
PY := .venv/bin/python
READY := .venv/ready
endif

.PHONY: help setup demo test test-all test-mutants test-matrix test-gpu lint format bench lock clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 13

demo: $(READY)  ## train a small language model: on the GPU if there is one, else two to three minutes of CPU
	$(PY) examples/train_lm.py

test: lint  ## what CI runs: style, types, import contracts, tests
	$(PY) -m pytest -n $(WORKERS) -p no:benchmark

test-all: lint  ## the same and what takes long
	$(PY) -m pytest -n $(WORKERS) -p no:benchmark --slow

test-mutants: $(READY)  ## named faults, each put into a copy of the library, and each of which a test must notice: a quarter of an hour
	$(PY) -m tests.mutants

test-matrix:  ## what depends on jax and triton, with the oldest and newest of both; makes environments under .venvs (7 GB)
	@JAX='$(JAX)' TRITON='$(TRITON)' WORKERS=$(WORKERS) ./scripts/test_matrix

test-gpu: $(READY)  ## what only a GPU can show; writes a record under benchmarks/results
	$(PY) -m benchmarks.gpu_tests

lint: $(READY)  ## style, types, import contracts
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

format: $(READY)  ## rewrite the sources in the project's style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY)  ## every op against XLA on this GPU: a table, and JSON and a picture under benchmarks/results
	$(PY) -m pytest --benchmark

setup: $(READY)  ## make .venv

.venv/ready: requirements/dev.lock requirements/cuda.lock requirements/lowering.lock pyproject.toml
	@python="$$(./scripts/find_python)" || exit 1; \
	echo "Setting up .venv with $$python ($$("$$python" --version)), once: a minute or two, 1.7 GB (5 GB with a GPU)."; \
	rm -rf .venv && "$$python" -m venv .venv
	@echo "Installing jax, triton, flax and the tools of requirements/dev.lock ..."
	.venv/bin/python -m pip install -q --disable-pip-version-check -r requirements/dev.lock
ifneq ($(GPU),0)
	.venv/bin/python -m pip install -q --disable-pip-version-check -r requirements/cuda.lock
else ifdef LINUX
	.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/lowering.lock
endif
	.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch .venv/ready

REFERENCE := jax==0.11.2 jaxlib==0.11.2 triton==3.6.0

lock:  ## resolve the newest versions around the reference ones into requirements/dev.lock
	@python="$$(./scripts/find_python)" && dir="$$(mktemp -d)" && "$$python" -m venv "$$dir" && \
	"$$dir/bin/python" -m pip install -q setuptools wheel $(REFERENCE) '.[dev,bench]' && \
	{ head -n 1 requirements/dev.lock; "$$dir/bin/python" -m pip freeze --all --exclude pip --exclude jtops | sort -f | \
	sed 's/^triton==.*/&; sys_platform == "linux"/'; } > requirements/dev.lock.new && \
	mv requirements/dev.lock.new requirements/dev.lock && rm -rf "$$dir"

clean:  ## remove .venv, .venvs and what tools left behind
	rm -rf .venv .venvs out build *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis .benchmarks
