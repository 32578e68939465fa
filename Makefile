# make demo   one command from a fresh clone to gradients compared with float64 (no GPU needed)
# make test   everything a change must pass
# make docs   the documentation as a site, in build/docs
#
# All make their own .venv if it is missing or older than the requirements.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 2
# One worker a core: torch need not start threads of its own beside them. Each has tests in their order, so that it
# compiles and decodes a kernel once, until it has none left and takes half of another's.
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo test style types size docs proofs fast clean
.NOTPARALLEL:

demo: $(VENV)/.installed
	$(VENV)/bin/undertow verify

test: style types size docs proofs

style: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .

types: $(VENV)/.installed-dev
	$(VENV)/bin/pyright

size: $(VENV)/.installed-dev
	$(VENV)/bin/python tools/size.py

docs: $(VENV)/.installed-dev
	$(VENV)/bin/sphinx-build -b html -E -W --keep-going -q -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

proofs: $(VENV)/.installed-dev
	$(PYTEST) -m "not gpu"

fast: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not gpu"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; set PYTHON=/path/to/python")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing undertow into $(VENV)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing undertow[dev] into $(VENV)"
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache *.egg-info build dist
