# Everything a person does with the repository. The virtual environment in .venv is made on first use and
# remade when its inputs change.

PYTHON ?= python3
TEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := .demo

.PHONY: help venv demo test coverage torture lint format docs bench clean

help:
	@echo "make demo     train the digits example to 97 % accuracy and show its record and learning curves"
	@echo "make test     check style and types, then run the tests"
	@echo "make coverage run the tests and show which lines they reach"
	@echo "make torture  kill trainings hundreds of times and check that they end with the same bits; start 100 jobs (minutes)"
	@echo "make lint     check style and types only"
	@echo "make format   rewrite the sources in the project's style"
	@echo "make docs     build the documentation into site/"
	@echo "make bench    measure the overhead of the training loop"
	@echo "make clean    remove everything that make made"

venv: $(INSTALLED)

# The build runs in this environment (no isolation), so that constraints.txt governs setuptools as well.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# A fresh home folder each time, so that the trial shown is always number 1.
demo: export DET_HOME := $(DEMO)
demo: $(INSTALLED)
	rm -rf $(DEMO)
	$(BIN)/python examples/digits/train.py
	$(BIN)/det experiment list
	$(BIN)/det trial describe 1
	$(BIN)/det trial plot 1 --output $(DEMO)/learning-curves.png
	@echo "The learning curves are in $(DEMO)/learning-curves.png, everything else of the run in $(DEMO)/."

test: lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS)

coverage: $(INSTALLED)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --cov --cov-report=term

# Sweeps over every system call too where there is strace, and cuts the power where it may mount a disk (77: it may not).
torture: export DET_PROGRESS := 0
torture: $(INSTALLED)
	$(BIN)/python tests/torture/sweep.py
	$(BIN)/python tests/torture/power.py --cuts 100 || test $$? -eq 77
	$(BIN)/python tests/torture/torture.py --kills 200 --jobs $(TEST_WORKERS)
	$(BIN)/python tests/torture/starts.py --jobs 100
	for ranks in 2 4; do $(BIN)/python tests/torture/rank_kills.py --kills 40 --ranks $$ranks || exit 1; done

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	@set -e; for script in benchmarks/[!_]*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf $(VENV) $(DEMO) site build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
