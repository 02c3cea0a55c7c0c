# A fresh machine needs a Python (3.11 or newer) and nothing else:
#
#   make train    creates the environment .venv, then trains the small model (ARGS="--steps 10")
#   make test     creates it too; lint, types, all tests (ARGS="--long": many more random programs)
#   make quick    only the tests that take no more than a few seconds
#   make site     the documentation as a site, in build/site
#   make clean    removes the environment and what tools left behind; trained models in runs/ stay

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := $(VENV)/oldest
NEWEST := $(VENV)/newest

.PHONY: help train test quick lint site clean

help:
	@sed -n '3,7s/^# *//p' Makefile

train: $(STAMP)
	$(BIN)/cadenza train $(ARGS)

# Two workers: the tests are bound by one core each, and two are what the time limits are meant for.
test: lint $(OLDEST)/.installed $(NEWEST)/.installed
	$(BIN)/python -m pytest -n 2 $(ARGS)
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -n 2 $(ARGS) tests/test_hf_*.py
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -n 2 $(ARGS) tests/test_triton_*.py

quick: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict cadenza/core

site: $(STAMP)
	$(BIN)/mkdocs build --strict

# The stamp goes with the old environment and is written last, so that an installation which
# failed half-way is never taken for a finished one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "cadenza needs Python 3.11 or newer with its venv module, and '$(PYTHON)' is not that" \
	    "($$($(PYTHON) --version 2>&1 | head -n 1)); name another: make PYTHON=python3.12" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Each in a folder of its own, and without what the environment has already.
$(OLDEST)/.installed $(NEWEST)/.installed: $(VENV)/%/.installed: tests/%.txt | $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install --no-deps --target $(@D) --requirement $<
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
