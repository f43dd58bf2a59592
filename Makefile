# make run and make test set up all that they need in .venv, then do it.
#
#   PYTHON=...   the interpreter to use; default: the first that fits
#   ARGS=...     more flags for `stepmark run` or pytest, e.g. ARGS="--budget 10s"

VENV := .venv
BIN := $(VENV)/bin
TORCH := torch>=2.11,<2.14
PIP := PIP_CONSTRAINT= $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
# On all cores, what pip would compile on one. Some packages have files of another Python.
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true

# Compiled modules are kept whatever the environment says: to compile takes longer than to load.
export PYTHONDONTWRITEBYTECODE :=

CAN_MAKE_VENV := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
HAS_TORCH := import sys, torch; \
  sys.exit(not (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14))

.PHONY: run setup test test-cluster mutations soak outputs docs check lint format types imports clean

run: $(VENV)/.installed
	$(BIN)/stepmark run $(ARGS)

setup: $(VENV)/.installed-dev

# In two processes, one of which begins with the tests that measure on ranks (tests/conftest.py).
# Slow tests are `make soak`'s.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup \
	  --no-loadscope-reorder -m "not slow and not cluster" $(ARGS)

# Two hosts in network namespaces and a Slurm of two nodes: needs root. On Debian and Ubuntu it
# installs what is missing (iproute2, slurm-wlm, munge).
test-cluster: $(VENV)/.installed-dev
	@PATH="$$PATH:/usr/sbin"; \
	if ! { command -v ip && command -v slurmctld && command -v munged; } >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	    --no-install-recommends iproute2 slurm-wlm munge >/dev/null; \
	fi
	$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

# Puts known faults into a copy of the package: each must be found by a test.
mutations: $(VENV)/.installed-dev
	$(BIN)/python tests/mutate.py $(ARGS)

# The slow tests; laws with more examples; then tests of kills, hangs, interrupts and lost ranks, TURNS times over.
TURNS := 20
soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow $(ARGS)
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile thorough $(ARGS)
	@for turn in $$(seq $(TURNS)); do \
	  echo "turn $$turn of $(TURNS)"; \
	  $(BIN)/python -m pytest -x tests/measuring tests/cli \
	    -k "fault or kill or hang or interrupt or die or lost" $(ARGS) || exit 1; \
	done

# Writes anew what commands print and write (tests/data/outputs), for a diff to review.
outputs: $(VENV)/.installed-dev
	$(BIN)/python tests/outputs.py $(ARGS)

# Builds the documents into site/, which is read from disk. Commands of its pages are executed.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# Every step, also after one that failed; the tests last.
check: $(VENV)/.installed-dev
	@status=0; \
	$(MAKE) --no-print-directory -k -j 2 --output-sync lint format types imports || status=1; \
	$(MAKE) --no-print-directory test || status=1; \
	exit $$status

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy --strict

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A torch that the interpreter already has (a container's, a module system's) is kept. An active
# $(VENV) is no such interpreter.
$(VENV)/.installed: pyproject.toml requirements.lock
	@set -eu; \
	PATH="$${PATH#$(CURDIR)/$(BIN):}"; \
	for python in $(if $(PYTHON),"$(PYTHON)",python3.13 python3.12 python3.11 python3); do \
	  if "$$python" -c '$(CAN_MAKE_VENV)' >/dev/null 2>&1; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "make: no Python >= 3.11 that can create a venv$(if $(PYTHON),: PYTHON=$(PYTHON));" \
	    "install one (Debian and Ubuntu: also python3-venv) or name it: make PYTHON=..." >&2; \
	  exit 2; \
	fi; \
	site=; torch='$(TORCH)'; \
	if "$$found" -c '$(HAS_TORCH)' >/dev/null 2>&1; then site=--system-site-packages; fi; \
	echo "setting up $(VENV) with $$("$$found" --version)$${site:+ and the torch it has}"; \
	"$$found" -m venv $(if $(PYTHON),--clear) $$site $(VENV); \
	if $(BIN)/python -c '$(HAS_TORCH)' >/dev/null 2>&1; then torch=; fi; \
	mkdir -p results; \
	$(PIP) -r requirements.lock $${torch:+"$$torch"}; \
	$(PIP) --no-deps --no-build-isolation --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	$(PIP) -r requirements-dev.lock
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed requirements-docs.lock
	$(PIP) -r requirements-docs.lock
	@$(COMPILE)
	@touch $@
