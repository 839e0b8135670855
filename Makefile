# Everything a fresh machine needs is in `make train` and `make test`; both set themselves up.
VENV ?= .venv
# The device whose packages the environment has.
EXTRA ?= $(or $(shell cat $(VENV)/.device 2>/dev/null),cpu)
RECIPE ?= configs/recipes/demo_cpu.toml
ARGS ?=
# PYTHON, CC, AGENTFLOW_CACHE and the package index are read from the environment or from make's arguments.
export VENV EXTRA PYTHON
# Every actor and every command of a test imports torch or vLLM: 7 s on two cores, twice that where nothing is cached.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
# Two processes share the tests; tests/conftest.py says which go to the same one, and in which order.
TWO := -n 2 --dist loadscope --no-loadscope-reorder
STAMP := $(VENV)/.agentflow-$(EXTRA)

.PHONY: help setup train test test-fast test-faults check docs pages lock

help:
	@echo "make train   set up, run the main job, end with a report (ARGS='key=value ...' overrides the recipe)"
	@echo "make test    set up, run all tests (make test-fast: those without Ray and the model)"
	@echo "make check   lint, types and the layer rule"
	@echo "make docs    build the documentation into site/ (needs no network)"
	@echo "make pages   regenerate the pages made from code (settings, recipes, commands, metrics)"
	@echo "make setup   only the set-up (EXTRA=gpu on a CUDA machine)"
	@echo "make lock    update requirements-cpu.lock after a change of pyproject.toml (EXTRA=gpu: the card's; ARGS=--upgrade: newest)"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements-$(EXTRA).lock .ci/setup
	@bash .ci/setup && touch $@

train: setup
	@$(BIN)/agentflow train $(RECIPE) $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(TWO) $(ARGS)

test-fast: setup
	@$(BIN)/python -m pytest $(TWO) -m "not ray and not slow and not faults" $(ARGS)

test-faults: setup
	@$(BIN)/python -m pytest $(TWO) -m faults $(ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_layers.py

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

pages: setup
	@$(BIN)/python docs/generated.py

lock:
	@bash .ci/setup lock $(ARGS)
