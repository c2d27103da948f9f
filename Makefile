# `make demo` and `make test` set up everything that they need; `make help` lists all targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
# A folder of files for the demo; empty: Python's own standard library.
FOLDER ?=
# Test processes. Most tests wait for a database or for other processes, so there may be more of them than cores.
TEST_PROCESSES ?= 5
# Further arguments of the demo or of pytest, such as PYTEST_ARGS="-k publish -x".
DEMO_ARGS ?=
PYTEST_ARGS ?=
# A run under faults: its length, and the seed of a run to repeat; CHAOS_ARGS="--nemesis 'kill worker'" for one kind.
MINUTES ?= 15
SEED ?=
CHAOS_ARGS ?=
MUTANTS ?=
# A folder of the statements of another commit.
BEFORE ?=
# The benchmark to run, and further arguments: BENCH=drain BENCH_ARGS="--runs 3".
BENCH ?= all
BENCH_ARGS ?=

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode is kept in any environment: the tests start hundreds of processes, which should not compile it again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.demo-ready ## Run the demo on a real folder: make demo [FOLDER=path] [DEMO_ARGS=--keep]
	mtask demo $(DEMO_ARGS) $(if $(FOLDER),"$(FOLDER)")

.PHONY: check
check: lint ## Run linters, types, import contracts, unit and parity tests: make check [PYTEST_ARGS=...]
	pytest -n 2 --dist loadfile tests/unit tests/parity $(PYTEST_ARGS)

.PHONY: test
test: $(VENV)/.dev-ready ## Run linters, types, import contracts, tests and each fault once: make test [PYTEST_ARGS=...]
	@# Side by side, because the type checker takes one core and the faults mostly wait.
	$(MAKE) --no-print-directory --jobs lint compiled $(if $(PYTEST_ARGS),,faults-once $(shell test -x /usr/lib/wine/wine64 && echo mongodb-7-short))
	pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5 $(PYTEST_ARGS)

# The modules of the tests are compiled once here, not in each test process: collecting does it.
.PHONY: compiled
compiled: $(VENV)/.dev-ready
	@told=$$(pytest --collect-only -qq) || { echo "$$told"; exit 1; }

.PHONY: faults-once
faults-once: $(VENV)/.dev-ready
	python -m tests.chaos --once --seed 20 --rate 30 --folder build/chaos/short

.PHONY: test-all
test-all: ## The same with the long tests, which repeat what others prove with other kinds, processes and times
	$(MAKE) test PYTEST_ARGS="--long $(PYTEST_ARGS)"

.PHONY: pythons
pythons: $(VENV)/.dev-ready ## Run the short part of the tests on the lowest and highest other Python of this machine
	tools/pythons.sh $(VENV)

.PHONY: pythons-all
pythons-all: $(VENV)/.dev-ready ## The same on each other Python from 3.11 to 3.13 of this machine
	tools/pythons.sh $(VENV) all

.PHONY: mongodb-7
mongodb-7: $(VENV)/.dev-ready ## Run the tests that need one server alone on MongoDB 7: make mongodb-7 [PYTEST_ARGS=...]
	python -m tests.other_mongod 7.0.28 -n 2 --dist loadfile $(PYTEST_ARGS)

.PHONY: mongodb-6
mongodb-6: $(VENV)/.dev-ready ## The same on the last MongoDB 6.0 that is packaged
	python -m tests.other_mongod 6.0.27 -n 2 --dist loadfile $(PYTEST_ARGS)

.PHONY: mongodb-7-short
mongodb-7-short: $(VENV)/.dev-ready
	python -m tests.other_mongod 7.0.28 -qq tests/parity

.PHONY: django
django: $(VENV)/.dev-ready ## Run the tests of mtask.contrib.django on Django 6.0 and 6.1, which need Python 3.12
	tools/django.sh $(VENV)

.PHONY: chaos
chaos: $(VENV)/.dev-ready ## Run under all faults, and check that nothing is lost: make chaos [MINUTES=15] [SEED=n]
	python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(CHAOS_ARGS)

.PHONY: upgrade
upgrade: $(VENV)/.dev-ready ## Roll workers from the former version to this one and back, under load: make upgrade [MINUTES=15] [SEED=n]
	python -m tests.faults.upgrade --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: web-fuzz
web-fuzz: $(VENV)/.dev-ready ## Send hostile requests to the API and the page: make web-fuzz [MINUTES=15] [SEED=n]
	python -m tests.faults.web_fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: bench
bench: $(VENV)/.dev-ready ## Measure mtask against the bare database: make bench [BENCH=drain] [BENCH_ARGS="--runs 3"]
	python -m benchmarks $(BENCH) $(BENCH_ARGS)

.PHONY: mutants
mutants: $(VENV)/.dev-ready ## Break the engine on purpose, and check that the tests notice: make mutants [MUTANTS="name ..."]
	python -m tests.faults.mutations $(MUTANTS)

# Without a folder to write to, the command would record the statements anew.
.PHONY: statements
statements: $(VENV)/.dev-ready ## Write each statement as text, and show what differs: make statements [FOLDER=path] [BEFORE=path]
	python -m tests.unit.house.test_statements $(or $(FOLDER),build/statements) $(BEFORE)

.PHONY: lint
lint: $(VENV)/.dev-ready ## Run linters, types and import contracts
	ruff check .
	ruff format --check .
	mypy
	lint-imports

.PHONY: docs
docs: $(VENV)/.docs-ready ## Build the site of the documentation in build/site; fails on a broken link
	tools/stage_site.sh $(VENV)
	@# Not --quiet: what it hides, --strict does not count.
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

.PHONY: pictures
pictures: $(VENV)/.dev-ready ## Make the pictures of the web page in docs/pictures, from the demo's data
	python -m tools.pictures

.PHONY: format
format: $(VENV)/.dev-ready ## Format the code, and fix what the linter can fix
	ruff check --fix .
	ruff format .

.PHONY: generate
generate: $(VENV)/.dev-ready ## Generate the sync client from the asyncio client, and the table of commands and flags
	python3 tools/generate_sync.py
	python -m tools.generate_words

.PHONY: clean
clean: ## Remove the virtual environment, caches and builds
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp marks a finished setup. The setup runs again when the dependencies or the setup itself change.
$(VENV)/.demo-ready: pyproject.toml tools/setup.sh
	tools/setup.sh demo $(VENV)
	touch $@

$(VENV)/.dev-ready: pyproject.toml tools/setup.sh
	tools/setup.sh dev $(VENV)
	touch $(VENV)/.demo-ready $@

$(VENV)/.docs-ready: pyproject.toml tools/setup.sh
	tools/setup.sh docs $(VENV)
	touch $@
