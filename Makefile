# make quickstart: install, run the built-in study, show the curves.  make test: install, run the fast tests.
# make real: install, make a small real language model, distill it on generated questions, show the curves.
# Needs Python 3.11, make, git and a C++ compiler; everything else comes from the lock files in requirements/.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
LOCK := requirements/cpu.txt
SOURCES := pos2distill pipelines cluster examples benchmarks scripts tests run.py

# uv does not read pip's settings. Where pip is told of a folder of wheels that holds torch, take torch from there;
# elsewhere let uv find torch's CPU build itself.
FIND_LINKS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS))
ifneq ($(wildcard $(FIND_LINKS)/torch-*.whl),)
export UV_FIND_LINKS := $(FIND_LINKS)
else
export UV_TORCH_BACKEND ?= cpu
endif

.PHONY: quickstart real install install-gpu test test-all test-unit check format lock docs clean

quickstart: install
	$(BIN)/python run.py study quickstart
	@echo 'next        README.md, "Your own data in a few minutes"; $(BIN)/python run.py inspect runs/quickstart --documents 30 --outcome gained --limit 1'

real: install
	$(BIN)/python -m examples.smollm2.make_model
	$(BIN)/python -m examples.smollm2.facts runs/facts.jsonl.gz
	$(BIN)/python run.py study facts_smollm2

install: .venv/.installed

.venv/.installed: $(LOCK) .uv/.installed
	@test ! -e .venv/.for-gpus || { echo 'error: .venv is for GPUs and older than $(LOCK); run make install-gpu again'; exit 2; }
	@test -e $(BIN)/python || echo 'Installing the packages of $(LOCK) into .venv: 5 GB, a minute or more, without further output.'
	.uv/bin/uv venv --quiet --allow-existing --python $(PYTHON) .venv
	.uv/bin/uv pip sync --quiet --compile-bytecode --python $(BIN)/python $(LOCK)
	touch $@

# From nothing, since the CPU builds would satisfy the same versions. First torch and what else flash-attn is built with.
install-gpu: .uv/.installed
	env -u UV_TORCH_BACKEND .uv/bin/uv venv --quiet --clear --python $(PYTHON) .venv
	env -u UV_TORCH_BACKEND .uv/bin/uv pip install --python $(BIN)/python --require-hashes --requirement requirements/gpu_build.txt
	env -u UV_TORCH_BACKEND .uv/bin/uv pip install --compile-bytecode --python $(BIN)/python --require-hashes --no-build-isolation-package flash-attn --requirement requirements/gpu.txt
	touch .venv/.for-gpus .venv/.installed

.uv/.installed: requirements/uv.txt
	@command -v '$(PYTHON)' > /dev/null || { echo 'error: Python 3.11 was not found; install it, or set PYTHON=/path/to/python3.11'; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo 'error: $(PYTHON) is not Python 3.11; set PYTHON=/path/to/python3.11'; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo 'error: $(PYTHON) has no module venv or ensurepip; install it (Debian and Ubuntu: python3.11-venv)'; exit 2; }
	@command -v $(CXX) > /dev/null || { echo 'error: no C++ compiler ($(CXX)) was found; install g++, or set CXX'; exit 2; }
	$(PYTHON) -m venv .uv
	.uv/bin/python -m pip install --quiet --require-hashes --requirement $<
	touch $@

# Two processes. Tests that start Ray, vLLM or DeepSpeed are in one xdist group, so that one process runs them in turn.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

test: install
	$(PYTEST) -m "not slow"

test-all: install
	$(PYTEST)

test-unit: install
	$(BIN)/python -m pytest tests/unit

check: install
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# The GPU lock wants torch's CUDA build, so it is made without the folder of wheels. It is what images are built from, so
# it has the trackers too, and the hash of every file that may be installed. gpu_build.txt: the same versions of torch and
# of what flash-attn is built with, which are installed before it. cpu.txt has no hashes: where wheels come from a folder,
# torch's may be another build than that of PyTorch's index, with another hash. For a new uv, change uv.txt with
# printf 'uv==VERSION' | uv pip compile - --generate-hashes.
LOCK_OPTIONS := --quiet --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-header
lock: .uv/.installed
	.uv/bin/uv pip compile pyproject.toml $(LOCK_OPTIONS) --extra cpu --extra gcs --extra dev --output-file requirements/cpu.txt
	env -u UV_FIND_LINKS -u UV_TORCH_BACKEND .uv/bin/uv pip compile pyproject.toml $(LOCK_OPTIONS) --generate-hashes --extra gpu --extra s3 --extra gcs --extra trackers --output-file requirements/gpu.txt
	printf '%s\n' torch setuptools wheel packaging ninja | env -u UV_FIND_LINKS -u UV_TORCH_BACKEND .uv/bin/uv pip compile - $(LOCK_OPTIONS) --generate-hashes --no-annotate --constraint requirements/gpu.txt --output-file requirements/gpu_build.txt

# The tables of docs/recipes.md, docs/cluster_spec.md and docs/models.md, and the manifests of the cluster's examples.
docs: install
	$(BIN)/python -m scripts.reference_tables
	$(BIN)/python -m scripts.model_families
	$(BIN)/python -m scripts.render_presets

# What is installed. Not `runs`, which holds samples, checkpoints and reports.
clean:
	rm -rf .venv .uv
