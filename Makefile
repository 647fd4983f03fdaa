# Two commands matter: `make lab` opens the workbench, `make test` proves that it works. Both need nothing first.
#
#   TORCH=torch==2.13.0   which torch to install (any requirement pip understands)
#   PYTHON=python3        which Python makes the environment (3.11 or newer)

TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: env lab app test test-full soak bench lint clean

env: $(READY)

# torch first and pinned: asked for through another package, pip would choose a build of several gigabytes.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvscope needs Python 3.11 or newer, not $$($(PYTHON) --version 2>&1). Say which: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "No virtual environment could be made. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV), once: some minutes, most of them for $(TORCH)."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	@touch $@

lab: env
	$(BIN)/kvscope lab

app: env
	$(BIN)/kvscope app

test: env
	$(BIN)/python -m pytest -m "not full"

test-full: env
	$(BIN)/python -m pytest --timeout 3600 --hypothesis-profile=default

soak: env
	$(BIN)/python -m pytest --timeout 3600 -s tests/soak

bench: env
	$(BIN)/kvscope bench latency
	$(BIN)/kvscope bench throughput

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info
