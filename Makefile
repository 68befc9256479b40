# Two commands do everything on a machine with Python 3.11 and make: `make run` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TARGET ?= auto
PROFILE ?= quick
OUT ?= out

.PHONY: run test test-full bench-emulator bench-gpu lint format lab clean

# The environment is rebuilt only when the pins change.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[notebooks,triton,link,test,lint]'
	touch $@

run: $(STAMP)  ## execute every notebook and write an index page
	$(BIN)/python -m kernellib.workbook run --target $(TARGET) --profile $(PROFILE) --out $(OUT)

test: $(STAMP)  ## the fast tests
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" tests

test-full: $(STAMP)  ## every test this machine can run
	$(BIN)/python -m pytest -n 2 -m "not gpu" tests

bench-emulator: $(STAMP)  ## how fast the emulator is on this computer
	$(BIN)/python -m kernellib.emulator bench --out $(OUT)/emulator/benchmark.json

bench-gpu: $(STAMP)  ## on a machine with a GPU: two records, their pages, the GPU tests, packed into results/
	$(BIN)/python -m kernellib.workbook.evidence run --target $(TARGET)
	$(BIN)/python -m kernellib.bench readme

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lab: $(STAMP)  ## the notebooks, alive
	$(BIN)/jupyter lab notebooks

clean:
	rm -rf $(OUT) build
