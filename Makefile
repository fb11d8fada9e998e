# The two commands of the README. Each does all the set-up on a fresh machine and
# only what is missing on a used one: a second run needs no network.
#
#   make demo            the whole loop on real vLLM, about ten minutes on two cores
#   make watch           the demo with Prometheus beside it, and the addresses to look at
#   make test            linters, type checker and tests
#
# PYTHON chooses the interpreter (3.11 to 3.13); ARGS is passed on to the demo.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := deploy/requirements/cpu.lock
PROTOS := $(wildcard proto/slipstream/v1/*.proto)

.PHONY: demo watch test lint setup lock clean
.DELETE_ON_ERROR:

setup: $(VENV)/.installed

# The packages, exactly as locked, without their dependencies: the lock is complete, and
# vLLM's own list names CUDA builds that do not import beside a CPU build of torch.
$(VENV)/.packages: $(LOCK) deploy/check_env.py
	$(PYTHON) deploy/check_env.py python
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(LOCK)
	$(BIN)/python deploy/check_env.py torch || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' $(LOCK))"
	$(BIN)/python deploy/check_env.py torch
	touch $@

# Slipstream itself, editable; its build hook generates the gRPC code.
$(VENV)/.installed: $(VENV)/.packages pyproject.toml $(PROTOS) proto/hatch_build.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation --no-index --editable .
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

# Writes the lock file anew (needs uv, from `pip install uv`).
lock:
	sh deploy/requirements/lock.sh

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
