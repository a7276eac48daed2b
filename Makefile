# `make run` answers a prompt, `make test` tests; both set everything up first. PYTHON=, VENV= and PROMPT= can be given.
PYTHON ?=
VENV ?= .venv
PROMPT ?= Write a Python function that says whether a number is prime, and explain step by step how it works.

# Through the environment, so that quotes and dollar signs in it stay what they are.
export PROMPT

PY := $(VENV)/bin/python
STAMP := $(VENV)/.dspark-setup

.PHONY: help setup run test test-slow test-all check format bench docs clean

help:
	@echo "make run        set up, fetch the default model, answer a prompt (PROMPT=...)"
	@echo "make test       the tests, in some minutes"
	@echo "make test-all   with the slow ones"
	@echo "make check      ruff and the type checker"
	@echo "make format     let ruff put the code in shape"
	@echo "make bench      measure what the driver costs a round (dspark bench RECIPE measures speed against other programs)"
	@echo "make docs       make the documents that are made from code"
	@echo "make setup      only set up (PYTHON=/path/to/python3.11 or newer)"
	@echo "make clean      remove the virtual environment and caches of this folder"

setup: $(STAMP)
	@echo "setup: $(VENV) is up to date"

# Made anew when what it is made from changed, or when its Python is gone.
ifneq ($(shell $(PY) -c 'print(1)' 2>/dev/null),1)
.PHONY: $(STAMP)
endif
$(STAMP): pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh "$(VENV)" "$(PYTHON)"
	@touch $@

run: $(STAMP)
	@echo "run: dspark run smollm2-135m \"$$PROMPT\""
	@$(PY) -m dspark run smollm2-135m "$$PROMPT"

test: $(STAMP)
	@echo "test: all but the slow tests"
	@$(PY) -m pytest -m "not slow"

test-slow: $(STAMP)
	@echo "test: the slow tests"
	@$(PY) -m pytest -m slow

test-all: $(STAMP)
	@echo "test: all tests, the slow ones too"
	@$(PY) -m pytest

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP)
	@$(PY) -m benchmarks.round

docs: $(STAMP)
	@$(PY) docs/make.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
