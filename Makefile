# make help lists the commands. Everything runs in .venv, which tools/venv.sh creates and updates.

VENV := .venv
BIN := $(VENV)/bin
RUN := examples/quickstart.yaml
TESTERS := 2
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help venv train test matrix test-llamafactory test-ray lint format lock docs wheel clean

help: ## Show this
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Tests in more processes at once: make test TESTERS=8"
	@echo "Another interpreter (3.11 or newer): PYTHON=python3.12 make TARGET"

venv: ## Create .venv and install the pinned dependencies, if they are missing
	@tools/venv.sh $(VENV)

train: venv ## Train the quickstart: make train [RUN=file.yaml] [ARGS="train.steps=20"]
	@$(BIN)/hyper-parallel train $(RUN) $$($(BIN)/python tools/fit_devices.py $(RUN)) $(ARGS)

test: lint ## Linters, types, import directions, then the tests with a sample of the matrix
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -m "not matrix" -n $(TESTERS) --dist loadfile --durations=15 $(ARGS)

matrix: venv ## Every model family with every strategy
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -m matrix -n $(TESTERS) --dist loadfile --durations=15 $(ARGS)

test-llamafactory: ## Runs inside LlamaFactory 0.9.5 and TRL, in a separate environment (.venv-llamafactory)
	@tools/venv_llamafactory.sh .venv-llamafactory
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv-llamafactory/bin/python -m pytest -q tests/llamafactory tests/sft --durations=15 $(ARGS)

test-ray: ## Groups of Ray actors in a cluster that the tests start, in a separate environment (.venv-ray)
	@tools/venv_ray.sh .venv-ray
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv-ray/bin/python -m pytest -q tests/ray_cluster --durations=15 $(ARGS)

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
	rm -rf $(VENV) .venv-llamafactory .venv-ray .venv-docs site .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
