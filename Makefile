# make help lists the commands. Everything runs in .venv, which tools/venv.sh creates and updates.

VENV := .venv
BIN := $(VENV)/bin
RUN := examples/quickstart.yaml
# One more than the two cores of CI: tests that start workers wait for them.
TESTERS := 3
SHARD := 1/1
SHELL := /bin/bash
# Bytecode is kept: each of thousands of test processes would otherwise compile the package anew.
export PYTHONDONTWRITEBYTECODE :=
test test-fast test-all matrix ledger test-llamafactory test-ray: export OMP_NUM_THREADS ?= 1
PYTEST = $(BIN)/python -m pytest -q

.DEFAULT_GOAL := help
.PHONY: help venv train test test-fast test-all matrix ledger test-llamafactory test-ray lint format lock docs wheel clean

help: ## Show this
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Tests in more processes at once: make test TESTERS=8"
	@echo "Another interpreter (3.11 or newer): PYTHON=python3.12 make TARGET"

venv: ## Create .venv and install the pinned dependencies, if they are missing
	@tools/venv.sh $(VENV)

train: venv ## Train the quickstart: make train [RUN=file.yaml] [ARGS="train.steps=20"]
	@$(BIN)/hyper-parallel train $(RUN) $$($(BIN)/python tools/fit_devices.py $(RUN)) $(ARGS)

test: lint ## Linters, types, import directions and the tests: what a change has to pass
	@$(PYTEST) --tier test -m "not matrix" -n $(TESTERS) --dist worksteal --durations=10 $(ARGS)

test-fast: venv ## The tests that start no process, in a few minutes: before each commit
	@$(PYTEST) --tier fast -m "not matrix" -n $(TESTERS) --dist worksteal $(ARGS)

test-all: venv ## All the rest: long tests, the matrix, documents, other versions: make test-all SHARD=1/16
	@$(BIN)/python tools/test_all.py $(SHARD)

matrix: venv ## Every model family with every strategy
	@$(PYTEST) -m matrix -n $(TESTERS) --dist worksteal --durations=10 $(ARGS)

ledger: venv ## Measure what each test costs, on a machine that does nothing else; tiers follow from it
	@$(PYTEST) -n $(TESTERS) --dist worksteal --ledger tests/ledger.json $(ARGS)
	@$(PYTEST) -n $(TESTERS) --dist worksteal --ledger tests/ledger.json --tier test -m "not matrix" $(ARGS)

test-llamafactory: ## Runs inside LlamaFactory 0.9.5 and TRL, in a separate environment (.venv-llamafactory)
	@tools/venv_llamafactory.sh .venv-llamafactory
	@.venv-llamafactory/bin/python -m pytest -q tests/llamafactory tests/sft tests/integration/test_integration_generate.py --durations=15 $(ARGS)

test-ray: ## Groups of Ray actors in a cluster that the tests start, in a separate environment (.venv-ray)
	@tools/venv_with.sh .venv-ray requirements/ray.txt
	@.venv-ray/bin/python -m pytest -q tests/ray_cluster --durations=15 $(ARGS)

lint: venv ## Style, format, types, the direction of imports, device names in one place, vocabulary
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet || { echo "not formatted; run: make format"; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/check_device_words.py
	@$(BIN)/python tools/check_vocabulary.py src/hyper_parallel docs README.md

format: venv ## Format the code and apply the linter's fixes
	@$(BIN)/ruff check --fix --quiet || true
	@$(BIN)/ruff format

lock: venv ## Rewrite requirements/lock.txt from .venv
	@$(BIN)/python tools/lock.py > requirements/lock.txt.new
	@mv requirements/lock.txt.new requirements/lock.txt

docs: ## The documentation site, in site/: built without a network, from .venv-docs; a broken link fails
	@tools/venv_docs.sh .venv-docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --clean
	@echo "site/index.html; with search: python3 -m http.server --directory site --bind 127.0.0.1"

wheel: venv ## Build the wheel into dist/ and run it from an empty environment and folder
	@tools/wheel.sh $(VENV)

clean: ## Remove .venv and all caches; runs and checkpoints stay
	rm -rf $(VENV) .venv-* site .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
