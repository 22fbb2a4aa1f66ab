# make demo, make demo-distributed, make test, make build: each sets up what it needs, once, and shows its progress.
#
#   PYTHON=/path/to/python   use this interpreter. If it has torch it is used as it is and nothing is installed (a GPU
#                            machine); otherwise, and by default, .venv is made from it with requirements.txt
#   BUILD="..."              options of tools/build.py, e.g. BUILD="--backend cpu" or BUILD="--capabilities 9.0"
#   DEMO="..."               options of examples/shard_rotation.py, e.g. DEMO="--random"; DEMO="--plot" redraws the
#                            README's picture instead of leaving one in build/
#   DISTRIBUTED="..."        options of examples/context_parallel.py, e.g. DISTRIBUTED="--method gather"
#   TESTS="..."              options of pytest, e.g. TESTS="-k contract -x"
#   PUBLISH="..."            options of tools/package.py --upload, e.g. PUBLISH="--repo-id you/det-attn"
#
# make package assembles the Hub repository in build/hub from the variants built here; make publish uploads it too
# (docs/releasing.md).

SHELL := /bin/bash
BUILD ?=
DEMO ?= --plot build/shard_rotation.png
TESTS ?=
PUBLISH ?=

# What PYTHON is: torch (used as it is), bare (.venv is made from it), old, or nothing that runs.
KIND := $(if $(PYTHON),$(shell "$(PYTHON)" -c 'import sys, importlib.util as u; \
  print("old" if sys.version_info < (3, 11) else "torch" if u.find_spec("torch") else "bare")' 2>/dev/null),bare)
ifeq ($(filter torch bare,$(KIND)),)
  $(error PYTHON=$(PYTHON) is not Python 3.11 or newer)
endif

ifeq ($(KIND),torch)
  PY := $(PYTHON)
  SETUP :=
else
  PY := .venv/bin/python
  SETUP := .venv/ready-$(shell sha256sum requirements.txt | cut -c1-12)
  BASE := $(shell for p in $(PYTHON) python3.11 python3 python3.12 python3.13; do \
    "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$$p"; break; }; done)
endif

# $(call need,WORDS): stop, naming them, when the interpreter lacks packages. A fresh .venv has them all.
need = @$(PY) -c 'import sys, importlib.util as u; gone = [p for p in sys.argv[1:] if not u.find_spec(p)]; \
  sys.exit("$(PY) lacks: " + ", ".join(gone) + " (requirements.txt has the versions)" if gone else 0)' $(1)

.PHONY: demo demo-distributed test build package publish setup clean
# Kernels that another nvcc makes spill are slower, with the same bytes: the tests refuse them, a first look does not.
demo: override BUILD += --allow-spills
demo: build
	$(call need,kernels numpy)
	$(PY) examples/shard_rotation.py $(DEMO)

# The same attention on 1, 2 and 4 processes: --check compares det-attn's hashes with those of the first run.
demo-distributed: override BUILD += --allow-spills
demo-distributed: build
	$(call need,kernels numpy)
	@rm -f build/context_parallel.sha256
	@for n in 1 2 4; do OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node $$n \
	  examples/context_parallel.py --check build/context_parallel.sha256 $(DISTRIBUTED) || exit 1; done

test: build
	$(call need,kernels numpy pytest hypothesis)
	$(PY) -m pytest -q tests $(TESTS)

build: setup
	@$(PY) tools/build.py $(BUILD)

package: build
	$(call need,kernels)
	@$(PY) tools/package.py

publish: build
	$(call need,kernels huggingface_hub)
	@$(PY) tools/package.py --upload $(PUBLISH)

setup: $(SETUP)

.venv/ready-%:
	@test -n "$(BASE)" || { echo "need Python 3.11 or newer: pass PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up .venv with $(BASE) and requirements.txt (a few minutes, once)"
	rm -rf .venv
	$(BASE) -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf build .pytest_cache .hypothesis
