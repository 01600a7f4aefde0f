PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help swarm test parts test-long test-durations proof metrics reference site dashboards chaos lint clean

help:
	@echo "make swarm   train a 3 M parameter model on a local swarm of 8 nodes (configs/tiny.yaml), about 10 minutes"
	@echo "make test    lint, types and tests"
	@echo "make test-long all examples of the fuzzers and the long runs as well"
	@echo "make test-durations says which tests take more than their budget (docs/contributing.md)"
	@echo "make chaos   real daemons under kills, a partition, a hostile peer, half an hour of deaths and frozen nodes, a stranger (an hour and a half)"
	@echo "make proof   a tokenizer, streamed shards, 8 daemons, two deaths, an export: one loss everywhere (some minutes)"
	@echo "make lint    ruff and pyright only"
	@echo "make metrics write docs/metrics.md anew"
	@echo "make reference writes docs/settings.md, docs/events.md and docs/exit-codes.md anew"
	@echo "make site    docs/ as a site in site/, with every link checked"
	@echo "make dashboards a real swarm under a real Prometheus and Alertmanager: rules, panels, an alert that fires (10 minutes)"
	@echo "make clean   remove the environment and caches; runs/ stays"
	@echo "CHAOS='kills --seed 3' chooses scenarios and the seed of make chaos; its report goes to runs/chaos-TIME"
	@echo "PYTHON=/path/to/python3.11 chooses the interpreter that the environment is made with"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

swarm: $(STAMP)
	$(BIN)/noloco-node swarm configs/tiny.yaml

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

# Parts of about the same length, four at a time. Those with daemons wait for most of their time: they come first.
SIMULATED := tests/simulator tests/virtual
DAEMONS := $(wildcard tests/daemons/test_[a-q]*.py) tests/hunt
MORE_DAEMONS := $(wildcard tests/daemons/test_[r-z]*.py) $(SIMULATED)
PROGRAM := $(wildcard tests/test_[e-z]*.py)
MORE_PROGRAM := $(wildcard tests/test_[a-d]*.py)
SWARM := $(wildcard tests/swarm/test_[q-z]*.py)
MORE_SWARM := $(wildcard tests/swarm/test_[a-d]*.py)
STILL_MORE_SWARM := $(wildcard tests/swarm/test_[e-p]*.py)
TRAINING := tests/training tests/model
THE_REST := $(addprefix --ignore=,tests/daemons tests/hunt tests/swarm $(SIMULATED) $(TRAINING)) --ignore-glob='tests/test_*.py'

# Every test process would compile the package anew where the environment says that nothing compiled is kept.
test: export PYTHONDONTWRITEBYTECODE :=
test: style
	@$(MAKE) --no-print-directory -j2 types parts

parts: $(STAMP)
	@$(BIN)/python -m tests.parts "$(DAEMONS)" "$(MORE_DAEMONS)" "$(PROGRAM)" "$(SWARM)" "$(THE_REST)" \
	  "$(TRAINING)" "$(STILL_MORE_SWARM)" "$(MORE_SWARM)" "$(MORE_PROGRAM)"

# All examples of the fuzzers, whole runs at full length, every process spawned.
test-long: export NOLOCO_TESTS_LONG := 1
test-long: export NOLOCO_TESTS_SPAWN := 1
test-long: test

# One part after the other on a machine that does nothing else: what is over its budget (tests/budgets.py).
test-durations: $(STAMP)
	@for folders in "tests/daemons tests/hunt $(SIMULATED)" tests/swarm "$(PROGRAM) $(MORE_PROGRAM)" "$(TRAINING)" "$(THE_REST)"; \
	  do $(BIN)/pytest --judge-budgets $$folders || failed=1; done; test -z "$$failed"

proof: $(STAMP)
	$(BIN)/python -m tests.proof

metrics: $(STAMP)
	cp noloco_node/telemetry/metrics.md docs/metrics.md

reference: $(STAMP)
	$(BIN)/python -m deploy.reference

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

dashboards: $(STAMP)
	$(BIN)/python -m deploy.monitoring.verify

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(CHAOS)

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
