# The only door: every target here is what a person types, and what CI calls.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEPLOY := $(VENV)/.deploy

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all attack integration sim chaos chaos-short mutants check lint fmt types imports size protos protos-check rooms references docs bench bench-full bench-gpu clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv and install what is pinned

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || { echo "swarm needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 3; }
	$(PYTHON) -m venv $(VENV)
	# torch first and pinned: a looser request fetches gigabytes of CUDA packages
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 numpy
	# Python compiles the others when they are first imported: most never are
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[model,data,postgres,otel,ray,bench,dev]'
	@touch $(STAMP)

$(DEPLOY): $(STAMP)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[deploy]'
	@touch $(DEPLOY)

demo: setup ## train a small model through 2 stages x 2 replicas on this machine, then sample from it
	@exec $(BIN)/swarm up --demo

# One process per core and one more, as some tests wait; one that has no tests left takes them from another. WORKERS=0
# runs one test after the other.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(1 + os.cpu_count())')
SLOWEST := --durations=50 --durations-min=1
# Tests start many processes: without bytecode on disk each of them compiles the code anew.
test test-all attack integration: export PYTHONDONTWRITEBYTECODE :=
test: setup ## all tests but those of attack and integration: each claim with the seeds and shapes that tell most
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(SLOWEST) --ignore tests/security --ignore tests/real --ignore tests/browser

test-all: export SWARM_TEST_ALL := 1
test-all: test ## the same, with all seeds, shapes and examples of each claim

attack: setup ## strangers, thieves and liars against a swarm of real processes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(SLOWEST) tests/security

# One after the other, as each starts a fleet, and programs of others beside it; with cores to spare FLEETS=2 runs two at
# a time.
FLEETS ?= 0
integration: setup $(DEPLOY) ## a fleet with PostgreSQL, Mosquitto, Prometheus, Chromium; fails and names the package if one is missing
	$(BIN)/python -m pytest -n $(FLEETS) --dist worksteal $(SLOWEST) tests/real tests/browser

# With SEED (and SCENARIO) one run again, as a failing seed says; with SEEDS so many, the same every time.
MINUTES ?= 30
PLAYED = $(if $(SEED),--seed $(SEED),$(if $(SEEDS),--seeds $(SEEDS),--minutes $(MINUTES)))
sim: setup ## the simulated system under random faults for MINUTES (30); prints seeds, faults, failpoints, replay commands
	$(BIN)/python -u -m tests.simulation.run $(PLAYED) $(if $(SCENARIO),--scenario '$(SCENARIO)')

# NETWORK=no leaves out what needs network namespaces, and with them root; the run says so.
CHAOS_FLAGS ?= $(if $(filter no,$(NETWORK)),--no-network)

chaos: setup ## kill, freeze and cut off real processes for about an hour; all bits as of one process after each
	$(BIN)/python -m tests.chaos $(CHAOS_FLAGS)

chaos-short: setup ## three minutes of that
	$(BIN)/python -m tests.chaos --short $(CHAOS_FLAGS)

mutants: setup ## switch safety mechanisms off one at a time: the tests must notice each (MUTANTS="NAME ..." for some)
	$(BIN)/python -m tests.mutations $(MUTANTS)

bench: setup ## tokens/s beside one process and torch.distributed.pipelining
	$(BIN)/python -m benchmarks.measured.throughput

# ROWS="P1,P3" for some; QUICK=1 for the short form, minutes for each row. Rows with emulated links need root.
bench-full: setup ## every figure that has an aim; writes the table and plots of docs/benchmarks.md; hours, with QUICK=1 half an hour
	$(BIN)/python -m benchmarks.full $(if $(ROWS),--rows $(ROWS)) $(if $(QUICK),--quick)

bench-gpu: setup ## on a CUDA GPU: the bits of one process, tokens/s and utilisation beside torch
	$(BIN)/python -m benchmarks.measured.gpu

check: lint types imports size protos-check docs ## lint, types, import contracts, size, generated code, links of the documents

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

size: setup ## print the size of the source, the tests and ARCHITECTURE.md; more than [tool.size] allows is an error
	$(BIN)/python -m tools.size

protos: setup ## generate swarm/wire from protos/
	$(BIN)/python protos/generate.py .

protos-check: setup ## prove that swarm/wire is what protos/ generates
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	$(BIN)/python protos/generate.py "$$out" && \
	diff -r -x __init__.py -x __pycache__ "$$out/swarm/wire" swarm/wire && echo "generated code is fresh"

rooms: ## what each file of the source is: the first line of its docstring
	@grep -m1 '^"""' $$(git ls-files 'client/**.py' 'scheduler/**.py' 'stage_server/**.py' 'swarm/**.py') | sed 's/"""//g'

references: setup ## write docs/reference from the code
	$(BIN)/python -m tests.support.references

# The site has the repository's layout, so that links hold in both.
docs: setup ## build the documents as a site in build/site; a dead link is an error
	rm -rf build/pages && mkdir -p build/pages
	cp -r *.md docs $(wildcard examples deploy) build/pages/
	$(BIN)/mkdocs build --strict --quiet --config-file docs/mkdocs.yml

clean: ## remove what was made here
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
