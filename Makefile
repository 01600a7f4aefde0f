PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help swarm test test-daemons test-the-rest proof metrics reference site monitoring dashboards chaos lint clean

help:
	@echo "make swarm   train a 3 M parameter model on a local swarm of 8 nodes (configs/tiny.yaml), about 10 minutes"
	@echo "make test    lint, types and tests"
	@echo "make chaos   real daemons under kills, frozen nodes, bad links, a partition, a hostile peer, half an hour of faults, a stranger (an hour and a half)"
	@echo "make proof   a tokenizer, streamed shards, 8 daemons, two deaths, an export: one loss everywhere (some minutes)"
	@echo "make lint    ruff and pyright only"
	@echo "make metrics write docs/metrics.md anew"
	@echo "make reference writes docs/settings.md, docs/events.md and docs/exit-codes.md anew"
	@echo "make site    docs/ as a site in site/, with every link checked"
	@echo "make monitoring writes what Prometheus and Grafana are given in deploy/ anew"
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

# Daemons mostly wait for each other, so they run beside the tests that compute, and so do the types.
test: style
	@$(MAKE) --no-print-directory -j3 types test-daemons test-the-rest

test-daemons: $(STAMP)
	$(BIN)/pytest tests/chaos tests/daemons

test-the-rest: $(STAMP)
	$(BIN)/pytest --ignore=tests/chaos --ignore=tests/daemons

proof: $(STAMP)
	$(BIN)/python -m tests.proof

metrics: $(STAMP)
	$(BIN)/python -m tests.telemetry.test_metric_table > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md

reference: $(STAMP)
	$(BIN)/python -m deploy.reference

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

monitoring: $(STAMP)
	$(BIN)/python -m deploy.monitoring.files

dashboards: $(STAMP)
	$(BIN)/python -m deploy.monitoring.verify

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(CHAOS)

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
