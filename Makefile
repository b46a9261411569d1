# Everything runs in .venv, which the first call of any target creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TEST_WORKERS ?= 2
FUZZ_SEED ?= 1
# One OpenMP thread: threads that share a core with other work only wait for one another.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# The frameworks that write the formats are large, so they have an environment of their own.
FRAMEWORK_VENV := .venv-formats
FRAMEWORKS := $(FRAMEWORK_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-formats test-stories test-browser test-crash fuzz lint format bench results docs clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(FRAMEWORKS): pyproject.toml constraints.txt tests/formats.txt
	@test -x $(FRAMEWORK_VENV)/bin/python || $(PYTHON) -m venv $(FRAMEWORK_VENV)
	$(FRAMEWORK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --requirement tests/formats.txt
	$(FRAMEWORK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps timm bergson
	@touch $@

install: $(INSTALLED) ## create .venv and install the package with what the tests need

demo: $(INSTALLED) ## the main job and the paper's six settings in small: a table, a figure, a report
	$(TEST_ENV) $(BIN)/python -m experiments.demo

test: lint ## linters, types and tests: what CI runs
	$(TEST_ENV) $(BIN)/python -m pytest -n $(TEST_WORKERS)

test-slow: $(INSTALLED) ## the tests that take minutes or gigabytes
	$(BIN)/python -m pytest -m slow

test-formats: $(FRAMEWORKS) ## read checkpoints that the real frameworks write here and now
	$(TEST_ENV) $(FRAMEWORK_VENV)/bin/python -m pytest -m formats

test-stories: $(FRAMEWORKS) ## walk what people do (Trainer, TRL, PEFT, Lightning, mergekit, a browser) on models of real size
	@$(FRAMEWORK_VENV)/bin/python -m tests.browser.chromium
	$(TEST_ENV) $(FRAMEWORK_VENV)/bin/python -m pytest -m 'stories or not stories' tests/stories

test-browser: $(INSTALLED) ## look at the report in a system Chromium (CHROMIUM= names it)
	@$(BIN)/python -m tests.browser.chromium
	$(TEST_ENV) $(BIN)/python -m pytest -m browser tests/browser

test-crash: $(INSTALLED) ## every command that writes: killed, without room, two at a time
	$(TEST_ENV) $(BIN)/python -m tests.crash --rounds 30

fuzz: $(INSTALLED) ## 200,000 damaged checkpoints against every reader, 10,000 random networks against the loop
	$(TEST_ENV) $(BIN)/python -m tests.fuzz_fisher --count 10000
	$(TEST_ENV) $(BIN)/python -m tests.fuzz_pickles --count 100000 --seed $(FUZZ_SEED) --counts tests/fuzz_counts.json tests/fixtures/pickles/*
	$(TEST_ENV) $(BIN)/python -m tests.fuzz_readers --count 100000 --first $(FUZZ_SEED)00000 --counts tests/fuzz_counts.json $(filter-out %.py,$(wildcard tests/fixtures/*/*))

lint: $(INSTALLED) ## ruff (rules, format, docstrings) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## side-by-side runs; results go to benchmarks/results
	$(BIN)/python -m benchmarks

results: $(INSTALLED) ## every table, figure and verdict in docs/ that comes from the committed runs of the experiments
	$(BIN)/python -m experiments.pages

docs: $(INSTALLED) ## run every tutorial and build the site into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(TEST_ENV) $(BIN)/python -m mkdocs build --strict

clean: ## remove .venv and caches
	rm -rf $(VENV) $(FRAMEWORK_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
