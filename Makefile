# The README's two commands. PYTHON is any Python from 3.10 on.
PYTHON ?= python3
BIN := .venv/bin
OLDEST := .venv-oldest

.PHONY: demo test check oldest

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# A small trained Qwen3-VL answers questions about images, in full and pruned.
demo: .venv/installed
	$(BIN)/popvlm demo

test: check oldest
	$(BIN)/python -m pytest -n 2 tests
	$(OLDEST)/bin/python -m pytest -n 2 -m "not slow" tests

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# The oldest supported transformers over the same torch and everything else.
oldest: .venv/installed-dev
	test -x $(OLDEST)/bin/python || $(BIN)/python -m venv $(OLDEST)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/newest.pth
	$(OLDEST)/bin/python -m pip install --quiet --no-deps \
	  'transformers==4.57.1' 'huggingface-hub==0.36.0' 'tokenizers==0.22.1'
