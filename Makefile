# make help lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
READY := $(VENV)/.installed
WORKERS ?= 3# processes that share the tests: one more than cores, since many wait for another process
SOAK_MINUTES ?= 15# that make soak takes

# What a processor decides: native kernels and PyTorch's products, and words that a model says by them. Kernels
# themselves are tested for each instruction set on every processor.
OF_THE_PROCESSOR := tests/parity tests/unit/test_torch_ops.py tests/engine/test_sampling_reference.py \
	tests/engine/test_logprobs_reference.py \
	$(addprefix tests/lab/test_,$(addsuffix .py,planned_bytes int8 answers profile rates paths)) \
	$(addprefix features/test_,$(addsuffix .py,models text formats windows attention_on_pages capacity server))
AVX2_ALONE := KVLAB_CPU_ARCH=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

unexport PYTHONDONTWRITEBYTECODE # set in many containers: every start would compile all that it imports, half of its time

.DEFAULT_GOAL := help
.PHONY: help setup run model test test-avx2 test-fast wheel soak sanitize browser features requirements lint format docs docs-serve ui gpu clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv and install everything (again only when the pins change)

# uv is twice as fast as pip. It does not read pip's configuration, which may name an index or wheels of its own.
define install
{ command -v uv > /dev/null && ! $(BIN)/python -m pip config list | grep -qv ^:env: && \
	uv pip install --python $(BIN)/python --quiet --constraint constraints.txt --editable '$(1)' 2> /dev/null; } || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '$(1)'
endef

# What a run imports, compiled as it is imported: a shell that forbids starts to keep bytecode lets them read it.
define compile
$(BIN)/python -c "import kvlab.cli.run, kvlab.lab.run.execute, kvlab.engine.executors.torch, kvlab.lab.figures; \
from kvlab.lab.tracking.access import import_client; import_client(1); import mlflow.store.tracking.sqlalchemy_store"
endef

# What runs need takes a quarter of the time that all of it takes.
$(RUNS): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv --upgrade-deps $(VENV) # older pips resolve for minutes
	$(call install,.[silicon])
	$(compile)
	touch $@

$(READY): $(RUNS)
	$(call install,.[dev])
	touch $@

run: $(RUNS) ## Compare contiguous slots, pages and shared pages: on a real model, then simulated on an H100
	$(BIN)/kvlab run experiment=contiguous_vs_paged
	@echo
	@echo "The same on one simulated H100: the engine's decisions are real, the time of each step is computed."
	$(BIN)/kvlab run experiment=contiguous_vs_paged_h100

model: $(RUNS) ## Bring the published model SmolLM2 to this machine, once (98 MB)
	$(BIN)/kvlab fetch smollm2

test: $(READY) ## Run every requirement and every test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=25

test-avx2: $(READY) ## Run the tests that depend on the processor, as on one with AVX2 alone
	$(AVX2_ALONE) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 -k "not triton" $(OF_THE_PROCESSOR)

test-fast: $(READY) ## Run the tests of memory, engine and models that are not slow: a minute on two cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 -m "not slow" tests/unit tests/engine tests/property

soak: $(READY) ## Attack pools, engine and commands at random for SOAK_MINUTES=15, and print what broke
	$(BIN)/python -m experiments.soak.run --minutes $(SOAK_MINUTES)

wheel: $(READY) ## Build the wheel and try it in an empty environment and folder
	.ci/wheel

sanitize: $(READY) ## Run the native kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer
	KVLAB_SANITIZE=all $(BIN)/python -m pytest tests/kernels/test_sanitizers.py

browser: $(READY) ## Install a headless Chromium, which the tests of the live page use
	.ci/install chromium-headless-shell || $(BIN)/playwright install --with-deps --only-shell chromium

features: $(READY) ## Run the requirements alone
	$(BIN)/python -m pytest features

requirements: $(READY) ## Run the requirements, and write docs/requirements.md
	$(BIN)/python -m features.requirements

lint: $(READY) ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## Bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## Build the documentation into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY) ## Show the documentation at http://127.0.0.1:8000, rebuilt when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

ui: $(RUNS) ## Open the tracked runs at http://127.0.0.1:5000 (of MLFLOW_TRACKING_URI, if set)
	@$(BIN)/kvlab ui

gpu: ## Try kernels, attention, parity and serving on a GPU, in at most nine minutes; needs no setup
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m experiments.gpu.run

clean: ## Remove the environment and caches; results and tracked runs stay
	rm -rf $(VENV) .cache dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
