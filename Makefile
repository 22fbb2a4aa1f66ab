# make demo, make test, make build: each sets up what it needs, once, and shows its progress.
#
#   PYTHON=/path/to/python   use this interpreter. If it has torch it is used as it is and nothing is installed (a GPU
#                            machine); otherwise, and by default, .venv is made from it with requirements.txt
#   BUILD="..."              options of tools/build.py, e.g. BUILD="--backend cpu" or BUILD="--capabilities 9.0"
#   DEMO="..."               options of examples/shard_rotation.py, e.g. DEMO="--random"
#   TESTS="..."              options of pytest, e.g. TESTS="-k contract -x"

SHELL := /bin/bash
BUILD ?=
DEMO ?= --plot
TESTS ?=
NEWEST := $(shell for p in $(PYTHON) python3.11 python3 python3.12 python3.13; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$$p"; break; }; done)
HAS_TORCH := $(if $(PYTHON),$(shell "$(PYTHON)" -c \
  'import importlib.util as u; print("yes" if u.find_spec("torch") else "")' 2>/dev/null))

ifeq ($(HAS_TORCH),yes)
  PY := $(PYTHON)
  SETUP :=
else
  PY := .venv/bin/python
  SETUP := .venv/ready-$(shell sha256sum requirements.txt | cut -c1-12)
endif

# $(call need,WORDS): stop, naming them, when the interpreter lacks packages. A fresh .venv has them all.
need = @$(PY) -c 'import sys, importlib.util as u; gone = [p for p in sys.argv[1:] if not u.find_spec(p)]; \
  sys.exit("$(PY) lacks: " + ", ".join(gone) + " (requirements.txt has the versions)" if gone else 0)' $(1)

.PHONY: demo test build setup clean
demo: build
	$(call need,kernels numpy)
	$(PY) examples/shard_rotation.py $(DEMO)

test: build
	$(call need,kernels numpy pytest hypothesis)
	$(PY) -m pytest -q tests $(TESTS)

build: setup
	@$(PY) tools/build.py $(BUILD)

setup: $(SETUP)

.venv/ready-%:
	@test -n "$(NEWEST)" || { echo "need Python 3.11 or newer: pass PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up .venv with $(NEWEST) and requirements.txt (a few minutes, once)"
	rm -rf .venv
	$(NEWEST) -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf build .venv .pytest_cache .hypothesis
