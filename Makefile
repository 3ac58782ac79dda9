# Everything a person does with the repository. The virtual environment in .venv is made on first use and
# remade when its inputs change.

PYTHON ?= python3
# More than the cores of a small machine: many tests wait for processes.
TEST_WORKERS ?= 4

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal
DEMO := .demo

# Compile each module once, not in every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test test-rest test-all coverage torture lint format docs bench clean

help:
	@echo "make demo     search good hyperparameters for the digits example, live, and draw the curves of all trials"
	@echo "make test     check style and types, then run the tests: every promise at least once (minutes)"
	@echo "make test-all run all tests: also the further cases and the short torture campaigns"
	@echo "make coverage run the tests and show which lines they reach"
	@echo "make torture  kill trainings hundreds of times and check that they end with the same bits; start 100 jobs (minutes)"
	@echo "make lint     check style and types only"
	@echo "make format   rewrite the sources in the project's style"
	@echo "make docs     build the documentation into site/"
	@echo "make bench    measure loops, checkpoints and starts against plain PyTorch and other libraries (a quarter of an hour)"
	@echo "make clean    remove everything that make made"

venv: $(INSTALLED)

# The build runs in this environment (no isolation), so that constraints.txt governs setuptools as well.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# A fresh home folder each time, so that the experiment shown is always number 1.
demo: export DET_HOME := $(DEMO)
demo: $(INSTALLED)
	rm -rf $(DEMO)
	$(BIN)/det experiment create examples/digits/adaptive.yaml examples/digits --slots 2 --follow
	$(BIN)/det experiment plot 1 --output $(DEMO)/curves.png
	@echo "The curves of all trials are in $(DEMO)/curves.png, everything else in $(DEMO)/ (DET_HOME=$(DEMO) for det)."
	@echo "To open the page: DET_HOME=$(DEMO) $(BIN)/det ui"

test: lint
	$(PYTEST) -m "not campaign and not thorough"

# What `make test` leaves out, and the property tests again with more examples.
test-rest: $(INSTALLED)
	$(PYTEST) -m "(campaign or thorough or hypothesis) and not cluster" --hypothesis-profile=thorough
	$(BIN)/python -m pytest -m "cluster and (campaign or thorough) and not torture"

test-all: test test-rest

coverage: $(INSTALLED)
	$(PYTEST) --cov --cov-report=term

# Sweeps over every system call too where there is strace, and cuts the power where it may mount a disk (77: it may not).
torture: export DET_PROGRESS := 0
torture: $(INSTALLED)
	$(BIN)/python tests/torture/sweep.py
	$(BIN)/python tests/torture/power.py --cuts 100 || test $$? -eq 77
	$(BIN)/python tests/torture/torture.py --kills 200 --jobs $(TEST_WORKERS)
	$(BIN)/python tests/torture/starts.py --jobs 100
	for ranks in 2 4; do $(BIN)/python tests/torture/rank_kills.py --kills 40 --ranks $$ranks || exit 1; done
	$(BIN)/python tests/torture/experiment_kills.py --kills 50
	$(BIN)/python tests/torture/many_trials.py
	$(BIN)/python tests/torture/writers.py
	$(BIN)/python tests/torture/writers.py --server --writers 50
	DET_NODE_KILLS=10 $(BIN)/python -m pytest -m cluster
	$(PYTEST) --hypothesis-profile=torture tests/experiment/config/test_config_fuzz.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

# Other libraries get environments of their own in .bench/, where figures and a plot are left too.
bench: $(INSTALLED)
	@set -e; for script in benchmarks/[!_]*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf $(VENV) $(DEMO) .bench site build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
