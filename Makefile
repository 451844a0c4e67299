# Two commands are enough: `make demo` runs the main job, `make test` checks everything that is quick to check.
PYTHON ?= python3
BIN := .venv/bin
THREADS ?= 2

.PHONY: setup demo check test test-all golden lint docs notebooks clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "iobs needs Python 3.11 or newer; run: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/iobs demo

check: setup
	$(BIN)/python -m pytest -q -n $(THREADS) tests/test_floors.py tests/test_words.py tests/core tests/pruning/recipe \
		tests/pruning/test_rules.py tests/pruning/test_uses.py tests/solvers/test_against_references.py tests/optimize/test_reductions.py

test: setup
	$(BIN)/python -m pytest -q -n $(THREADS)

test-all: setup
	$(BIN)/python -m pytest -q -m 'slow or not slow'

golden: setup
	$(BIN)/python -m pytest -q -n $(THREADS) -m golden tests/golden

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.docs-installed
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site
	$(BIN)/python docs/check_offline.py build/site
	@echo "The site is in build/site; open build/site/index.html"

notebooks: .venv/.docs-installed
	$(BIN)/python docs/run_notebooks.py

.venv/.docs-installed: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv iobs-demo build dist *.egg-info
