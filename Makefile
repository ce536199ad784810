# Every target sets up what it needs; a second run starts at once. `make help` lists them.

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint test-peers test-legacy docs check-pages clean base check-python
SHELL := /bin/bash
VLLM_COUNT := .vllm-tests-run
PYTEST_ARGS ?=
# Processes that share the tests; where PYTEST_ARGS names some tests, they run in this one (-n in PYTEST_ARGS wins).
WORKERS ?= $(if $(findstring tests/,$(PYTEST_ARGS)),0,2)
# The TransformerLens of `make test-legacy`; scripts/setup.py lists the versions.
LEGACY ?= 3.9.0

# The first Python that is new enough and can make virtual environments.
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v $$p; break; }; \
	done)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

check-python:
	@test -n "$(PYTHON)" || { echo "steerlab needs Python 3.11 or newer with its venv and ensurepip modules." \
	"Looked for python3, python3.13, python3.12 and python3.11 and found none that fits" \
	"(on Debian and Ubuntu: apt install python3 python3-venv)." >&2; exit 1; }

base: check-python
	@"$(PYTHON)" scripts/setup.py base

setup: base ## set up everything for development: .venv with test tools and vLLM, and the model
	@"$(PYTHON)" scripts/setup.py test

demo: base ## run a real steering experiment on a small model and write its report
	@.venv/bin/steerlab demo

test: setup ## run the whole test suite on two cores, vLLM tests included where vLLM can be installed
	@rm -f $(VLLM_COUNT)
	@STEERLAB_VLLM_COUNT_FILE=$(VLLM_COUNT) PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -n $(WORKERS) --durations=40 $(PYTEST_ARGS); status=$$?; \
	echo "vLLM tests run: $$(cat $(VLLM_COUNT) 2>/dev/null || echo 0)"; exit $$status

lint: setup ## ruff, pyright, import-linter
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports

test-peers: check-python ## compare scores and vectors with independent packages, in environments of their own
	@"$(PYTHON)" scripts/setup.py peers
	STEERLAB_REQUIRE_PEERS=1 .venv-peers/bin/python -m pytest tests/peers -m peers -W default -n 2

test-legacy: base ## run hooked_generate on HookedTransformer, and SAELens, in an environment with TransformerLens 3.9
	@"$(PYTHON)" scripts/setup.py legacy-$(LEGACY)
	STEERLAB_REQUIRE_LEGACY=1 .venv-legacy-$(LEGACY)/bin/python -m pytest tests/legacy -m legacy -W default

docs: check-python ## run the notebooks and the pages' code, and build the documentation into site/
	@"$(PYTHON)" scripts/setup.py docs
	@.venv/bin/python scripts/run_notebooks.py
	STEERLAB_RUN_DOCS=1 .venv/bin/python -m pytest -q tests/docs/test_docs_code.py
	.venv/bin/mkdocs build --strict

check-pages: docs ## look at the documentation and a report in Chromium: nothing clipped, legible, nothing fetched
	@"$(PYTHON)" scripts/setup.py browser
	@if command -v chromium chromium-browser google-chrome >/dev/null; then \
	STEERLAB_CHECK_PAGES=1 .venv/bin/python -m pytest -q tests/pages; else \
	echo "THE PAGES WERE NOT CHECKED: Chromium is not installed (on Debian: apt-get install chromium)." >&2; fi

clean: ## remove environments, builds and caches (not the prepared model)
	rm -rf .venv .venv-peers .venv-repeng .venv-legacy-* build dist site
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache $(VLLM_COUNT)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
