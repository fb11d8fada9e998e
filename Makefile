# `make demo` and `make test` do all the set-up on a fresh machine, and only what is missing on a
# used one: a second run needs no network.
#
#   make demo            the whole loop on real vLLM, about ten minutes on two cores
#   make watch           the demo with Prometheus beside it, and the addresses to look at
#   make test            linters, type checker and tests
#   make lint            linters and type checker
#
# PYTHON chooses the interpreter (3.11 to 3.13); ARGS is passed on to the demo.

PYTHON ?= python3
LOCKS  := deploy/requirements
PROTOS := $(wildcard proto/slipstream/v1/*.proto)

# The dynamic linker splits LD_PRELOAD at spaces and colons, and torch's inductor passes library
# paths to the compiler unquoted: vLLM cannot run from an environment at such a path. For a checkout
# at a path with unusual characters the environment is made in the user's cache folder, one for each
# path, and .venv is a link to it.
ODD  := $(shell pwd | grep '[^[:alnum:]_./+@~=,-]')
VENV := $(if $(ODD),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/slipstream/venv-$(shell pwd | cksum | cut -d' ' -f1),.venv)
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps

ifneq ($(words $(VENV)),1)
$(error path: found a space in "$(VENV)", expected none in the cache folder's path. Next step: make XDG_CACHE_HOME=/a/path/without/spaces ..., or move the checkout to such a path)
endif

.PHONY: demo watch test lint setup lock clean
.DELETE_ON_ERROR:

setup: $(VENV)/.installed

# The packages, exactly as locked, without their dependencies: the lock is complete, and
# vLLM's own list names CUDA builds that do not import beside a CPU build of torch.
$(VENV)/.packages: $(wildcard $(LOCKS)/*.lock) deploy/check_env.py
	$(PYTHON) deploy/check_env.py python
	mkdir -p $(VENV)
	$(if $(ODD),ln -sfnT $(VENV) .venv)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r $(LOCKS)/cpu.lock
	$(PIP) --require-hashes -r $(LOCKS)/torch-cpu.lock || { \
		echo "torch: pip finds no CPU build here; installing the registry's CUDA build"; \
		$(PIP) --require-hashes -r $(LOCKS)/cuda.lock; }
	$(BIN)/python deploy/check_env.py torch
	touch $@

# Slipstream itself, editable; its build hook generates the gRPC code.
$(VENV)/.installed: $(VENV)/.packages pyproject.toml $(PROTOS) proto/hatch_build.py
	$(PIP) --no-build-isolation --no-index --editable .
	touch $@

demo: setup
	$(BIN)/python -m examples.arithmetic_grpo.demo $(ARGS)

watch: setup
	$(BIN)/python -m examples.arithmetic_grpo.demo --watch $(ARGS)

# Three workers, one of them for all that starts vLLM (tests/conftest.py): half of their time they
# wait for processes that start. One thread each, so that two cores are not fought over.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Writes the lock files anew (needs uv, from `pip install uv`).
lock:
	sh $(LOCKS)/lock.sh $(ARGS)

clean:
	rm -rf $(VENV) .venv runs .pytest_cache .mypy_cache .ruff_cache
