# make setup | demo | test | quality | clean. Every target makes what it needs; repeat calls reinstall nothing.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))
ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: help setup demo test quality clean
.DELETE_ON_ERROR:

help:
	@echo "make setup     $(VENV) with the package in editable form and everything a developer needs"
	@echo "make demo      fetch SmolLM2-135M-Instruct and compare plain and speculative decoding"
	@echo "make test      the test suite, on $(JOBS) processes (JOBS=1 for one; ARGS='-k name' for a part)"
	@echo "make quality   ruff and mypy"
	@echo "make clean     remove $(VENV) and caches"

setup: $(VENV)/.dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(INPUTS) | $(BIN)/python
	@echo "Installing hf-specdec[demo] into $(VENV) ..."
	$(INSTALL) -e ".[demo]"
	@touch $@

$(VENV)/.dev: $(INPUTS) | $(BIN)/python
	@echo "Installing hf-specdec[dev] into $(VENV) ..."
	$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.demo

# Threads that wait for each other spin only briefly. Alone on the machine this costs nothing; when another process holds
# a core, the default makes a forward pass fifty times slower.
demo: export GOMP_SPINCOUNT ?= 10000
demo: $(VENV)/.demo
	$(BIN)/hf-specdec demo $(ARGS)

# One thread a process: the models of the tests are tiny, and processes that share cores must not fight for them.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

quality: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .ci/transformers-*
	find hf_specdec tests -name __pycache__ -type d -prune -exec rm -rf {} +
