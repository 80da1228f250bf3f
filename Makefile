# make tables/table1.tex   set up and build the headline table
# make test                set up and run the tests
# make test-slow           further cases of the same tests: whole texts, other GPU architectures
# make soak                kill the build at ten random moments; it must end as if nothing had happened
PYTHON ?= python3
CORES ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count())")
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
export PYTHONHASHSEED := 0
export TOKENIZERS_PARALLELISM := false
unexport PYTHONDONTWRITEBYTECODE  # compiling all tests anew takes each worker ten seconds

.PHONY: all test test-slow soak lint env FORCE
.NOTPARALLEL:
all: $(READY)
	@$(BIN)/python -m repro make all --cores $(CORES)

tables/%.tex tables/%.csv tables/%.md figures/%.svg figures/%.pdf docs/%.md: $(READY) FORCE
	@$(BIN)/python -m repro make $@ --cores $(CORES)

test: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/snakefmt --check Snakefile
	$(BIN)/python -m pytest -n $(CORES) --dist loadfile --no-loadscope-reorder

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(CORES) --dist loadfile -m slow

soak: $(READY)
	SOAK=10 $(BIN)/python -m pytest tests/test_interrupt.py

env: $(READY)

# Exact versions; torch decides by itself whether this platform's build brings CUDA along.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(v < (3, 11) and f'error: Python 3.11 or newer is needed, {sys.executable} is {v[0]}.{v[1]}; set PYTHON=')"
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/requirements.lock $(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@touch $@

FORCE:
