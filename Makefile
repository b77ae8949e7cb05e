# Two commands: `make demo` and `make test`. Each makes .venv and installs the project at pinned versions first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check unit processes nightly bench docs figures clean

demo: .venv/demo.stamp
	$(BIN)/ppd demo

test: check unit processes

check: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

unit: .venv/test.stamp
	$(BIN)/pytest -n auto tests/unit tests/families

processes: .venv/test.stamp
	$(BIN)/pytest -n auto --dist loadfile --maxfail 5 tests/processes

nightly: .venv/test.stamp
	$(BIN)/pytest -m nightly -n auto tests

bench: .venv/test.stamp
	$(BIN)/python -m benchmarks

docs: .venv/test.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

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
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
