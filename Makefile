# `make demo` and `make test` work on a fresh machine with Python 3.11+; the set-up is done once and again when
# pyproject.toml or the constraints change.

PYTHON ?= python3
# In the files' order, so that files of few but long tests do not come last.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
ARGS ?=

VENV := .venv
COMPAT := .venv-compat
BENCH := benchmarks/results/bench
# One torch thread for each of the test workers; override with `make test OMP_NUM_THREADS=4`.
TEST_ENV = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-thorough check format docs bench lab test-compat clean

help:
	@echo 'make demo         embedded model, sample documents, three questions (sets everything up first)'
	@echo 'make test         all tests; ARGS="-k store" for some'
	@echo 'make check        format, lint, types, import contracts, sizes, docs'
	@echo 'make test-thorough  more layouts and ranks of the same'
	@echo 'make test-compat  model and invariant tests with the oldest supported transformers'
	@echo 'make bench        measures this machine, into benchmarks/results/bench; `make docs` makes the page of it'
	@echo 'make lab          the runs behind docs/results.md: hours, resumable; needs INFOFLOW_DATA'
	@echo 'make format       let ruff format and fix'
	@echo 'make docs         write the generated pages of docs/'
	@echo 'make setup        only the set-up;  make clean  removes what make made'

setup: $(VENV)/.ready

# $(call make_venv,FOLDER,CONSTRAINTS): a venv with this package in it. torch goes in first and alone, pinned: asked for
# as a mere range it may bring a newer version with gigabytes of GPU libraries. Some systems lack ensurepip.
define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, and $(PYTHON) is `$(PYTHON) --version`; try make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(1)/bin/pip || $(PYTHON) -m venv --clear $(1) 2>/dev/null || \
	  { $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install --quiet pip; }
	@echo "setting up $(1) (once, some minutes)"
	$(1)/bin/python -m pip install --quiet --no-input --disable-pip-version-check -c $(2) torch
	$(1)/bin/python -m pip install --quiet --no-input --disable-pip-version-check -c $(2) -e '.[dev]'
	@touch $(1)/.ready
endef

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call make_venv,$(VENV),constraints.txt)

$(COMPAT)/.ready: pyproject.toml constraints-compat.txt
	$(call make_venv,$(COMPAT),constraints-compat.txt)

demo: setup
	$(VENV)/bin/infoflow-kv demo $(ARGS)

test: setup
	$(TEST_ENV) $(VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(ARGS)

test-thorough: setup
	$(TEST_ENV) $(VENV)/bin/python -m pytest $(PYTEST_FLAGS) -m thorough $(ARGS)

test-compat: $(COMPAT)/.ready
	$(TEST_ENV) $(COMPAT)/bin/python -m pytest $(PYTEST_FLAGS) tests/models tests/invariants $(ARGS)

check: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/python tools/check_sizes.py
	$(VENV)/bin/python tools/check_docs.py
	$(VENV)/bin/python tools/write_methods.py --check
	$(VENV)/bin/python tools/write_models.py --check
	$(VENV)/bin/python tools/write_results.py --check
	$(VENV)/bin/python tools/write_numbers.py --check
	$(VENV)/bin/python tools/write_benchmarks.py --check
	$(VENV)/bin/python tools/write_vision.py --check
	$(VENV)/bin/python tools/write_parallel.py --check

format: setup
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: setup
	$(VENV)/bin/python tools/check_docs.py --write
	$(VENV)/bin/python tools/write_methods.py
	$(VENV)/bin/python tools/write_models.py
	$(VENV)/bin/python tools/write_results.py
	$(VENV)/bin/python tools/write_numbers.py
	$(VENV)/bin/python tools/write_benchmarks.py
	$(VENV)/bin/python tools/write_vision.py
	$(VENV)/bin/python tools/write_parallel.py

bench: setup
	for verb in ttft attention ingest decode memory; do \
	  $(VENV)/bin/infoflow-kv bench $$verb --out $(BENCH)/$$verb.jsonl $(ARGS) || exit; \
	done

lab: setup
	$(VENV)/bin/python benchmarks/lab.py $(ARGS)

clean:
	rm -rf $(VENV) $(COMPAT) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
