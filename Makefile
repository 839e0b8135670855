# Everything a fresh machine needs is in `make train` and `make test`; both set themselves up.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
EXTRA ?= cpu
RECIPE ?= configs/recipes/demo_cpu.toml
ARGS ?=
export PYTHON VENV EXTRA
BIN := $(VENV)/bin
STAMP := $(VENV)/.agentflow-$(EXTRA)

.PHONY: help setup train test test-fast check lock

help:
	@echo "make train   set up, run the main job, end with a report (ARGS='key=value ...' overrides the recipe)"
	@echo "make test    set up, run all tests"
	@echo "make check   lint, types and the layer rule"
	@echo "make setup   only the set-up (EXTRA=gpu on a CUDA machine); make lock renews the lock file"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements-cpu.lock .ci/setup
	@bash .ci/setup && touch $@

train: setup
	@$(BIN)/agentflow train $(RECIPE) $(ARGS)

test: setup
	@$(BIN)/python -m pytest

test-fast: setup
	@$(BIN)/python -m pytest -m "not ray and not slow"

check: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m pytest tests/test_layers.py

lock: setup
	@$(BIN)/uv pip compile pyproject.toml --extra cpu --extra dev --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-emit-find-links --no-header \
	  --upgrade -q -o requirements-cpu.lock
