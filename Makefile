# `make train`, `make test` and `make test-all` need Python >= 3.11 and nothing else: each makes .venv once and installs into it.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-nightly matrix coverage lint separable wheel docs bench gpu faults clean

help: ## say what there is
	@echo 'make [PYTHON=python3.12] [ARGS="..."] <target>'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile

train: $(VENV)/installed ## train on real data; ARGS="model=toy_mp trainer.max_epochs=5" adds overrides
	$(BIN)/python train.py $(ARGS)

# Several files at a time: some tests compute while others wait. Bytecode is kept, also where the environment says
# otherwise: tests start hundreds of processes, and each one would compile this package again.
WORKERS := --numprocesses 4 --dist loadfile --no-loadscope-reorder
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest $(WORKERS)

test: $(VENV)/installed-test ## run the quick tests, some of every kind; ARGS="tests/unit" adds options of pytest
	$(PYTEST) -m "not slow and not nightly" $(ARGS)

test-all: $(VENV)/installed-dev ## run all tests but the nightly ones, before a change goes in
	$(PYTEST) -m "not nightly" $(ARGS)

test-nightly: $(VENV)/installed-dev ## run campaigns, all sizes and what else takes long; ARGS="--hourglass 120" takes a sample
	$(PYTEST) -m nightly $(ARGS)

matrix: ## quick tests and a run on each set of Python, torch and Hydra, minutes each; ARGS="--python 3.12 --torch oldest"
	$(PYTHON) .ci/matrix.py $(ARGS)

# A few tests look at how processes end, which tracing changes: `make test` judges them, not this.
coverage: $(VENV)/installed-dev ## say which part of the package's lines the quick tests run; ARGS="tests/unit" takes some
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest $(WORKERS) -m "not slow and not nightly" $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover

wheel: $(VENV)/installed-dev ## build dist/, and check what a package index would show of it
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

lint: $(VENV)/installed-dev ## check style, types and who imports whom; long lines and functions are named
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python .ci/lines.py
	$(BIN)/python .ci/words.py

# What draws the site's diagrams comes by npm; without npm the reader's browser fetches it.
MERMAID := $(VENV)/mermaid/package/dist/mermaid.min.js

docs: $(VENV)/installed-docs ## build the site in build/site; fails on a broken link or a page that no shelf has
	@test -f $(MERMAID) || ! command -v npm >/dev/null || { mkdir -p $(VENV)/mermaid && cd $(VENV)/mermaid && \
		npm pack --silent mermaid@11.6 && tar -xzf mermaid-*.tgz package/dist/mermaid.min.js && rm mermaid-*.tgz; }
	MERMAID=$(abspath $(MERMAID)) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "Read it with: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

separable: $(VENV)/installed-dev ## take each extra away, and see that all else works; ARGS="fsdp" only that one
	$(BIN)/python -m benchmarks.separable $(ARGS)

bench: $(VENV)/installed-bench ## measure this package beside its peers, for an hour or two; ARGS="--quick" takes two minutes
	$(BIN)/python benchmarks/run.py $(ARGS)

gpu: $(VENV)/installed-dev ## test and measure all that needs a GPU, in less than ten minutes; says so where there is none
	$(BIN)/python benchmarks/gpu.py $(ARGS)

faults: $(VENV)/installed-dev ## disturb runs at random and see that all finish; ARGS="--runs 200 --seed 0" takes hours
	$(BIN)/python benchmarks/faults.py $(ARGS)

clean: ## remove what make and the tools made; runs and data stay
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find benchmarks conf src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say that .venv holds what this pyproject.toml asks for. One call of pip resolves everything together: torch
# and torchvision only work in matching versions.
$(VENV)/installed: pyproject.toml
	$(call install,.)
	@touch $@

$(VENV)/installed-test: pyproject.toml
	$(call install,.[test])
	@touch $(VENV)/installed $@

$(VENV)/installed-dev: pyproject.toml
	$(call install,.[dev])
	@touch $(VENV)/installed $(VENV)/installed-test $(VENV)/installed-docs $@

$(VENV)/installed-docs: pyproject.toml
	$(call install,.[docs])
	@touch $(VENV)/installed $@

$(VENV)/installed-bench: pyproject.toml
	$(call install,.[bench])
	@touch $(VENV)/installed $@

define install
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)'. Install Python 3.11 or later, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is `$(PYTHON) -V 2>&1`; 3.11 or later is needed. Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make environments: its venv module is missing. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV); the first time this takes minutes, for torch is large."
	$(BIN)/python -m pip install --disable-pip-version-check --editable '$(1)'
endef
