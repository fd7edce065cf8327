# make demo    install and run the quickstart from text to a registered model
# make test    install with the development tools and run the tests
# make check   lint, format, types, import rules
# make bench   time the strided step against a plain baseline and the machine's peak
# PYTHON=python3.11 chooses the interpreter; VENV=.venv the environment's folder.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt
# Tests run in two processes on two cores: more threads only fight each other.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test check bench clean

help:
	@sed -n 's/^# //p' Makefile | head -5

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

# About fifteen minutes on two cores. The file is named after the machine: OUTPUT=benchmarks/baselines/my-machine.json
OUTPUT ?= benchmarks/baselines/cpu-2core.json
bench: setup-dev
	$(BIN)/python -m benchmarks.strided --output $(OUTPUT)

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
