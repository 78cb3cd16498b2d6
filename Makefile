# autopar: `make` lists what can be made.

SHELL := /bin/sh
export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DEFAULT_GOAL := help
.PHONY: help train check test test-all lint audit bench docs docs-check clean

PYTHON ?= python3
TORCH ?= torch==2.13.0
NPROC ?=
STEPS ?=
STRATEGY ?=
JOBS ?= 3
ARGS ?= $(if $(STEPS),--steps $(STEPS)) $(if $(STRATEGY),--strategy $(STRATEGY))

VENV := .venv
BIN := $(VENV)/bin
# Jobs wait for their ranks a third of the time, so there are more of them than cores. Each keeps
# the order of files, so that what one test captured serves the next.
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal
ADVISORIES := https://pypi.org/pypi/pip/25.0/json
AUDIT := $(BIN)/pip-audit --skip-editable --progress-spinner off
AUDIT_ANSWERS := timeout 5 $(BIN)/python -c \
  'from urllib.request import urlopen; urlopen("$(ADVISORIES)")' 2>/dev/null
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST)
	@echo '  variables: NPROC=... STEPS=... STRATEGY=auto|ddp|zero1|zero2|zero3 TORCH=torch==2.13.0 JOBS=3'

train: $(INSTALLED) ## Train the example GPT on NPROC processes: one a GPU, or two
	nproc=$(NPROC); \
	: $${nproc:=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)')}; \
	$(BIN)/autopar run examples/train_gpt.py --nproc $$nproc -- $(strip $(ARGS))

check: lint ## Check style, types and imports, run the quick tests of one process
	$(PYTEST) -m "not processes and not slow"

test: lint ## The same with tests of several ranks, in 11 minutes on two cores
	$(PYTEST) -m "not slow"

test-all: test ## The same, and then the slow tests: the whole suite
	$(PYTEST) -m slow

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if $(AUDIT_ANSWERS); then $(AUDIT) || echo 'lint goes on: these are not faults of this code'; \
	else echo 'no audit of packages: $(ADVISORIES) does not answer'; fi

audit: $(INSTALLED_TEST) ## Look for known faults of installed packages, over the network
	$(AUDIT)

bench: $(INSTALLED) ## Compare with torch's own DDP, fully_shard and others
	$(BIN)/python -m benchmarks.peers $(strip $(ARGS))

docs: $(INSTALLED_TEST) ## Build the site into site/; broken links and wrong figures are errors
	$(BIN)/python -m tests.harness.figures
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-check: $(INSTALLED_TEST) ## Run every marked code block of README and docs
	$(BIN)/python -m tests.harness.docs_blocks

clean: ## Remove .venv, build outputs and caches
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first, by its exact version, so that resolving autopar finds it there.
# Debian's python3 may come without ensurepip: then pip installs itself into the venv.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install -e .
	@touch $@

$(INSTALLED_TEST): $(INSTALLED)
	$(BIN)/python -m pip install -e '.[test,docs,completion]'
	@touch $@
