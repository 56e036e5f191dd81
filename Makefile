# Draftmill's commands; `make help` lists them. Everything runs in .venv, built from the lock files.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
# The locks are complete, so nothing is left to resolve. Everything is compiled once, here, on all cores: every job is a
# Python process, and where Python may not keep what it compiles (PYTHONDONTWRITEBYTECODE, many nodes at once) each would
# compile every module anew, 4 s for Snakemake alone. A package may hold files that no Python can compile.
define install
  @python -m pip install -qq --disable-pip-version-check --no-deps --no-compile $(1)
  @python -m compileall -qq -j 0 $(VENV)/lib workflow/scripts || true
  @touch $@
endef
# the commands see the environment as if it were active
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
SNAKEFILES = $(wildcard Snakefile workflow/rules/*.smk)

.PHONY: help setup setup-slurm demo test test-sglang test-slurm chaos bench bench-merge status resume report lint format \
  format-check types docs lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(VENV)/run.stamp ## the environment that runs the workflow, in .venv

$(VENV)/made.stamp: # what a broken try has left is made anew
	@test -e $(VENV)/run.stamp || rm -rf $(VENV)
	@for p in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if "$$p" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    echo "make: setting up $(VENV), once"; "$$p" -m venv $(VENV); touch $@; exit; fi; done; \
	echo "make: no Python 3.11, 3.12 or 3.13 with venv was found; install one (Debian: python3 and python3-venv), or name it: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1

$(VENV)/run.stamp: requirements.lock requirements-data.lock pyproject.toml | $(VENV)/made.stamp
	$(call install,-r requirements.lock -r requirements-data.lock -e .)

$(VENV)/dev.stamp: requirements-dev.lock $(VENV)/run.stamp
	$(call install,-r requirements-dev.lock)

$(VENV)/slurm.stamp: requirements-slurm.lock $(VENV)/run.stamp
	$(call install,-r requirements-slurm.lock)

setup-slurm: $(VENV)/slurm.stamp ## setup, and what a Slurm cluster needs besides

demo: $(VENV)/run.stamp ## prompts to dataset with the shipped config: where the results are and how fast it was
	@snakemake --cores 8 --resources gpu=8
	@python -m draftmill summary

report: $(VENV)/run.stamp ## report.html anew; a run that ends writes it by itself
	@snakemake --report report.html

status: $(VENV)/run.stamp ## how the run goes, from another terminal
	@python -m draftmill status

resume: $(VENV)/run.stamp ## go on after any end of a run
	@python -m draftmill resume

test: $(VENV)/dev.stamp ## all tests that need no SGLang, no Slurm and no GPU
	@pytest -n 2 --dist worksteal --ignore=tests/sglang --ignore=tests/slurm $(ARGS)

test-sglang: $(VENV)/dev.stamp ## the engine tests and the whole workflow through the real SGLang, on the CPU
	@bash tests/sglang/setup.sh
	@pytest tests/sglang $(ARGS)

test-slurm: $(VENV)/dev.stamp $(VENV)/slurm.stamp ## the whole workflow on a real Slurm of this machine (needs root)
	@trap 'bash tests/slurm/setup.sh stop' EXIT; bash tests/slurm/setup.sh; pytest tests/slurm $(ARGS)

chaos: $(VENV)/dev.stamp ## 50 seeds of injected faults; writes chaos.json
	@python tests/faults/chaos.py --seeds 50 --out chaos.json $(ARGS)

bench: $(VENV)/dev.stamp ## the dispatch against its alternatives; writes bench.json and the table in docs/benchmarks.md
	@python tests/bench/bench.py $(ARGS)

bench-merge: $(VENV)/dev.stamp ## rows/s and peak memory of merge and export at three sizes
	@python tests/bench/bench_merge.py $(ARGS)

lint: $(VENV)/dev.stamp ## ruff, snakefmt --check and snakemake --lint
	@ruff check --quiet
	@snakefmt --check $(SNAKEFILES) 2>/dev/null || { snakefmt --diff $(SNAKEFILES); exit 1; }
	@snakemake --lint

format: $(VENV)/dev.stamp ## format Python and Snakemake files
	@ruff format --quiet
	@ruff check --quiet --fix --select I
	@snakefmt $(SNAKEFILES)

format-check: $(VENV)/dev.stamp
	@ruff format --check --quiet

types: $(VENV)/dev.stamp ## mypy --strict
	@mypy

docs: $(VENV)/dev.stamp ## config.yaml and docs/configuration.md from the schema
	@python -m draftmill.config_docs

lock: $(VENV)/made.stamp ## all lock and env files from requirements*.in
	@python -m pip install -qq --disable-pip-version-check uv
	@bash envs/lock.sh

clean: ## remove .venv and caches; results/ stays
	@rm -rf .venv .venv-sglang .models .mypy_cache .pytest_cache .ruff_cache .hypothesis workflow/scripts/draftmill.egg-info
	@find workflow tests -name __pycache__ -type d -prune -exec rm -rf {} +
