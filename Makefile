# Two commands: `make demo` and `make test`. Each makes .venv and installs the project at pinned versions first.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest -n auto --dist worksteal --maxfail 10 --durations 10

.PHONY: demo test check unit processes nightly bench figures clean

demo: .venv/demo.stamp
	$(BIN)/ppd demo

test: check .venv/test.stamp
	$(PYTEST) tests

check: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

unit: .venv/test.stamp
	$(PYTEST) tests/unit tests/families

processes: .venv/test.stamp
	$(PYTEST) tests/processes

nightly: .venv/test.stamp
	$(PYTEST) -m nightly --maxfail 0 tests

bench: .venv/test.stamp
	$(BIN)/python -m benchmarks

figures: .venv/test.stamp
	$(BIN)/python docs/token_clock.py docs/token_clock.svg
	$(BIN)/python docs/timeline.py docs/timeline.png

.venv/pip.stamp:
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 10) else f'Python 3.10 or newer is needed, this is {sys.version.split()[0]}; choose one with make PYTHON=...')"
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo.stamp: .venv/pip.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/test.stamp: .venv/pip.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@ .venv/demo.stamp

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .test_cache
