# SPDX-License-Identifier: Apache-2.0
# Everything a developer or a CI job runs. Needs nothing but make and Python >= 3.10 (3.11 is preferred).

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
TEST_DIRS = $(wildcard tests integration_tests)
# Extra arguments for pytest, the demo or a benchmark: make test ARGS="-k header -x"; ARGS="-n 0" uses one process
ARGS ?=
# Worker processes. conftest.py sets their number and which tests one worker runs together.
PARALLEL := -n auto --no-loadscope-reorder

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMP) ## Create .venv with everything in it

# An environment that works is kept, and only brought up to date.
# torch goes first and alone, so that the pinned build is there before anything else asks for "torch".
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if $(BIN)/python -m pip --version >/dev/null 2>&1; then exit 0; fi; \
	for python in $(PYTHON) python3.11 python3; do \
	    if "$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	        echo "Creating $(VENV) with $$("$$python" --version)"; \
	        exec "$$python" -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "nvflare-lazy needs Python 3.10 or newer with venv; neither python3.11 nor python3 is that." >&2; \
	echo "Install one, or name it: make setup PYTHON=/path/to/python" >&2; \
	exit 1
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

.PHONY: check
check: setup ## Formatting, lint, types, import rules, English
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.english

.PHONY: format
format: setup ## Format and fix what can be fixed by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: test
test: setup ## All tests but the slow ones, the built wheel included
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(TEST_DIRS) $(ARGS)

.PHONY: test-slow
test-slow: setup ## The tests that need minutes or gigabytes
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=1740 $(TEST_DIRS) $(ARGS)

.PHONY: test-night
test-night: setup ## All tests, property tests with many random examples
	HYPOTHESIS_PROFILE=night $(BIN)/python -m pytest -o faulthandler_timeout=1740 --timeout 1800 $(TEST_DIRS) $(ARGS)

.PHONY: wheel-test
wheel-test: setup ## Only the tests of the built wheel
	$(BIN)/python -m pytest tests/test_wheel.py $(ARGS)

.PHONY: docs
docs: $(DOCS_STAMP) ## Build the site of the documents: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict $(ARGS)
	@echo "build/site/index.html; with the search: $(BIN)/python -m http.server -d build/site"

# Only what the site needs in addition to `make setup`.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

.PHONY: demo
demo: setup ## See what it does
	$(BIN)/python -m benchmarks.demo $(ARGS)

.PHONY: bench
bench: setup ## Measure a federated job beside stock NVFlare; ARGS=list names the other benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

.PHONY: clean
clean: ## Remove build results and caches (the .venv stays)
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
