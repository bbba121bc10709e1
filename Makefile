# make setup | demo | bench | test | quality | clean. Every target makes what it needs; repeat calls reinstall nothing.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))
ARGS ?=
BENCH_OUTPUT ?= results/builtin

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: help setup demo bench test quality clean
.DELETE_ON_ERROR:

help:
	@echo "make setup     $(VENV) with the package in editable form and everything a developer needs"
	@echo "make demo      fetch SmolLM2-135M-Instruct and compare plain and speculative decoding"
	@echo "make bench     measure every strategy and the stock ones on 48 prompts of ours; results in $(BENCH_OUTPUT)"
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
	@touch $@ $(VENV)/.demo $(VENV)/.bench

# Threads that wait for each other spin only briefly. Alone on the machine this costs nothing; when another process holds
# a core, the default makes a forward pass fifty times slower.
demo: export GOMP_SPINCOUNT ?= 10000
demo: $(VENV)/.demo
	$(BIN)/hf-specdec demo $(ARGS)

$(VENV)/.bench: $(INPUTS) | $(BIN)/python
	@echo "Installing hf-specdec[bench,demo] into $(VENV) ..."
	$(INSTALL) -e ".[bench,demo]"
	@touch $@ $(VENV)/.demo

# SmolLM2 and, as a draft model, its first four layers: untrained, so it shows what a poor draft costs.
bench: export GOMP_SPINCOUNT ?= 10000
bench: $(VENV)/.bench
	$(BIN)/python -m hf_specdec.demo_model | { read -r target; read -r draft; \
	$(BIN)/hf-specdec bench --model "$$target" --task builtin --strategy suffix --strategy prompt_lookup \
		--strategy "first_layers@draft_model:model=$$draft,max_draft_tokens=4" \
		--max-new-tokens 64 --repeats 1 --output $(BENCH_OUTPUT) $(ARGS); }

# One thread a process: the models of the tests are tiny, and processes that share cores must not fight for them.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

quality: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .ci/transformers-*
	find hf_specdec eval tests -name __pycache__ -type d -prune -exec rm -rf {} +
