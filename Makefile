# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes its own .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help demo test test-slow test-peers lint format clean

help:
	@echo "make demo        train a tiny model on Shakespeare and let it write (about 4 minutes on 2 CPU cores)"
	@echo "make test        lint, types and the whole test suite"
	@echo "make test-slow   the long tests too"
	@echo "make test-peers  build llama-cpp-python (some minutes) and compare with it"
	@echo "make lint        ruff and mypy"
	@echo "make clean       remove .venv and caches; runs/ is left alone"

demo: $(VENV)/demo.done
	$(BIN)/clockhand demo

test: lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-slow: $(VENV)/dev.done
	$(BIN)/python -m pytest -m slow

test-peers: $(VENV)/peers.done
	$(BIN)/python -m pytest -m peers

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps remember what is installed; a changed pyproject.toml or constraints.txt installs again.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "clockhand needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.done: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/dev.done: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/peers.done: $(VENV)/dev.done
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[peers]'
	@touch $@
