# Each target sets up its own virtual environment on a fresh machine. PYTHON names the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .bench-venv
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench clean

demo: $(VENV)/.ready  ## the founding study: seven arms, one of which wins by reading the future and is caught
	@rm -rf runs/demo
	@$(BIN)/keyhole study recipes/studies/founding.toml --out runs/demo

test: $(VENV)/.ready-dev  ## all tests: in parallel first, then those that want both cores to themselves
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not alone"
	$(BIN)/python -m pytest -m alone

lint: $(VENV)/.ready-dev  ## what ruff says of style and of mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(BENCH_VENV)/.ready  ## side by side with Hugging Face GPT-2 and x-transformers; wants a quiet machine
	$(BENCH_VENV)/bin/python -m bench all

clean:  ## remove what these targets made
	rm -rf $(VENV) $(BENCH_VENV) build dist *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Keyhole needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) -e '.[study]'
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.ready

$(BENCH_VENV)/.ready: pyproject.toml constraints.txt bench/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python $(PIP_INSTALL) -e '.[study]' -r bench/requirements.txt
	@touch $@
