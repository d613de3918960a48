# Two commands do everything on a new machine with Python >= 3.10: `make demo` and `make test`.

PYTHON       ?= python3
TRANSFORMERS ?= 5.17.0
VENV         := .venv
LATEST       := .venv-latest
BIN          := $(VENV)/bin
LATEST_TESTS := $(wildcard tests/generate tests/test_registration.py tests/quant)

# With an NVIDIA GPU any recent torch will do: pip's default is the CUDA build. Without one the version is pinned, and
# pip's default on Linux still carries gigabytes of CUDA libraries; to leave them out, point at PyTorch's CPU index:
#     make TORCH_INDEX=https://download.pytorch.org/whl/cpu demo
ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c GPU),0)
TORCH   ?= torch==2.13.0
WORKERS ?= -n auto --maxprocesses 4
else
TORCH   ?= torch>=2.11
WORKERS ?= -n 0
endif
TORCH_INDEX ?=

.PHONY: help demo test test-without-numba test-latest lint format clean
.DEFAULT_GOAL := help

help:  ## Print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

demo: $(VENV)/.installed  ## Fetch SmolLM2-135M-Instruct and run a ragged batch through the paged INT8 engine
	@model=$$($(BIN)/python tools/fetch_demo_model.py) && $(BIN)/python tools/demo.py "$$model"

test: $(VENV)/.installed  ## The test suite (GPU tests run where a GPU is)
	$(BIN)/python -m pytest $(WORKERS)

test-without-numba: $(VENV)/.installed  ## What runs on a CPU as it does without the extra that compiles its kernels
	$(BIN)/python -c "import sys; sys.modules['numba'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))" \
		-p no:xdist -p no:cacheprovider tests/kernels/test_cpu_linear.py tests/test_cpu_engine.py tests/test_fusion.py

test-latest: $(LATEST)/.installed  ## Registration, generate and loader tests on the newest Transformers 5.x
	@$(LATEST)/bin/python -c "import transformers; print('transformers', transformers.__version__)"
	$(LATEST)/bin/python -m pytest -p no:cacheprovider $(WORKERS) $(LATEST_TESTS)

lint: $(VENV)/.installed  ## Lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tools

format: $(VENV)/.installed  ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove environments, caches and builds (the fetched model too)
	rm -rf $(VENV) $(LATEST) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml setup.cfg
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Python 3.10 or newer is needed: make PYTHON=python3.x')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/pip install --quiet "setuptools>=77"
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[dev]" "transformers==$(TRANSFORMERS)"
	@touch $@

# Everything of the first environment is seen through a .pth file; only what the newest Transformers needs is added.
$(LATEST)/.installed: $(VENV)/.installed
	test -x $(LATEST)/bin/python || $(BIN)/python -m venv --without-pip $(LATEST)
	@site='import sysconfig; print(sysconfig.get_paths()["purelib"])'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" > "$$($(LATEST)/bin/python -c "$$site")/base.pth"
	$(BIN)/pip --python $(LATEST)/bin/python install --quiet --upgrade "transformers>=5.17,<6"
	@touch $@
