# make bench [TORCH=1]   measure this machine: verified results, time, share of the roof, ratio to other libraries;
#                        with an NVIDIA GPU, that too, against cuDNN
# make test              check, then the tests; of kernels that are only compiled, one in twelve, for one architecture;
#                        of emulated configs, one of each kind; of tests with long lists of cases, one case in four
# make test-kernels      the tests of those, with each of them, for every architecture
# make test-all          check, then every test with each of them
# make campaign MINUTES=20 [DEVICE=cuda] [SEED=7]   random and hostile calls for so long; exit status 1 where one fails
# make check             lint, format, types, generated tables
# make format            rewrite in the house format
# make docs              write every generated table anew
#
# Each makes .venv from nothing with PYTHON (default: python3) and brings it up to date when pyproject.toml changes.

PYTHON ?= python3
comma := ,
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH_PIN := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
# Where there is a GPU, PyTorch is needed: its memory, its graphs, and cuDNN.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
TORCH ?= $(GPU)

# Two processes of pytest take what they compile from one cache; more than eight wait for each other.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal
CUDA_SOURCES = $(shell find src -name '*.cu' -or -name '*.cuh')

.PHONY: bench test test-kernels test-all campaign check format docs clean
# Two installations into one .venv must not run at once.
.NOTPARALLEL:

bench: .venv/.bench $(if $(TORCH),.venv/.torch)
	$(BIN)/tapwise bench quick source_documents
	$(if $(GPU),$(BIN)/tapwise bench source_documents --device cuda)

test: check .venv/.test
	$(PYTEST)

test-kernels: .venv/.test
	$(PYTEST) -m kernels --all-kernels

test-all: check .venv/.test
	$(PYTEST) --all-kernels

campaign: .venv/.test
	$(BIN)/python tools/campaign.py --minutes $(or $(MINUTES),20) $(if $(DEVICE),--device $(DEVICE)) $(if $(SEED),--seed $(SEED))

check: .venv/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)
	$(BIN)/mypy
	$(BIN)/tapwise report --check

format: .venv/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA_SOURCES)

docs: .venv/.check
	$(BIN)/tapwise report

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

.venv/.made:
	$(PYTHON) -m venv .venv
	touch $@

# The pinned torch goes in by itself, before anything could ask for another.
.venv/.torch: pyproject.toml | .venv/.made
	$(PIP) "$(TORCH_PIN)"
	touch $@

.venv/.bench: pyproject.toml | .venv/.made
	$(PIP) --editable ".[peers$(if $(GPU),$(comma)cuda)]"
	touch $@

.venv/.check: pyproject.toml | .venv/.made
	$(PIP) --editable ".[check]"
	touch $@

.venv/.test: pyproject.toml .venv/.torch
	$(PIP) --editable ".[test]"
	touch $@
