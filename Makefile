# Every task of the project. `make` alone lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done

SEEDS  ?= 2000
KILLS  ?= 200
BUDGET ?= 120

.DEFAULT_GOAL := help
.PHONY: help setup demo test check sim chaos bench docs sizes lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) system  ## create .venv from the lock (needs only Python 3.11+ and pip)

# Prompts are typed into tmux panes, workers in shell use curl, a pooler stands before a server, and the tests
# do it for real. Without them, and without the right to install them, everything else works; the tests that
# need them say how.
PROGRAMS := tmux curl jq
# A server of its own, and namespaces of the network: only where tests are run.
TEST_PROGRAMS := $(PROGRAMS) pgbouncer iproute2 libpostgresql-jdbc-java

.PHONY: system test-system
test-system: PROGRAMS := $(TEST_PROGRAMS)
system test-system:
	@( PATH="$$PATH:/usr/sbin"; for one in $(PROGRAMS:iproute2=ip); do \
	    [ $$one = libpostgresql-jdbc-java ] && one=/usr/share/java/postgresql.jar; \
	    command -v $$one || [ -f $$one ] || exit 1; done ) >/dev/null 2>&1 || { \
	    sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
	    $$sudo apt-get install -y -qq $(PROGRAMS) >/dev/null 2>&1 || \
	    { $$sudo apt-get update -qq && $$sudo apt-get install -y -qq $(PROGRAMS); } >/dev/null 2>&1 || \
	    echo "these could not be installed: apt-get install -y $(PROGRAMS)"; }

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Holdfast needs Python 3.11 or newer; $(PYTHON) is %d.%d. Try: make setup PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup  ## see it work, in one command
	$(BIN)/python -m holdfast.cli demo

test: setup test-system  ## run every suite, with the time of each
	$(BIN)/python tools/suites.py

check: setup  ## format, lint, types, layers, generated docs: what CI runs first
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --durations=0 tests/test_tidy.py
	$(BIN)/python tools/traceability.py --check
	$(BIN)/python tools/states.py --check
	$(BIN)/python tools/odd_inputs.py --check

sim: setup  ## simulate SEEDS seeds (2000)
	$(BIN)/python -m pytest -q -m deep tests/sim
	$(BIN)/holdfast sim --seeds $(SEEDS)

# Unless BUDGET is given: ten minutes.
CHAOS_BUDGET = $(if $(filter file,$(origin BUDGET)),600,$(BUDGET))

chaos: setup  ## kill real processes KILLS times (200), then break servers and links for BUDGET seconds (600)
	$(BIN)/python -m tests.process.chaos --kills $(KILLS)
	$(BIN)/python -m pytest -q tests/chaos
	$(BIN)/python -m tests.chaos.run --seconds $(CHAOS_BUDGET)
	$(BIN)/python -m pytest -q -m deep tests --ignore=tests/sim

bench: setup  ## measure within BUDGET seconds (120)
	$(BIN)/python -m pytest -q -m bench tests/test_bench.py
	$(BIN)/python -m bench --budget-s $(BUDGET)

.PHONY: bench-peers
bench-peers: setup  ## measure worlds beside Restate and DBOS (downloads them into build/peers)
	$(BIN)/python -m bench.peers

.PHONY: bench-effects
bench-effects: setup  ## measure effects and timers beside Restate and DBOS
	$(BIN)/python -m bench.peers --suite effects --runs 3 --budget-s 1200

.PHONY: bench-tasks
bench-tasks: setup  ## measure tasks beside pgqueuer, huey, RabbitMQ and Restate
	$(BIN)/python -m bench.peers --suite tasks --budget-s 3000

.PHONY: bench-postgres
bench-postgres: setup  ## measure all of it on PostgreSQL beside DBOS, pgqueuer and procrastinate
	$(BIN)/python -m bench.peers --suite postgres --runs 3 --budget-s 3000

.PHONY: bench-churn
bench-churn: setup  ## a PostgreSQL under churn with a backlog of a thousand and of a million, MINUTES (30)
	$(BIN)/python -m bench churn --minutes $(or $(MINUTES),30)

# Unless BUDGET is given: both parts need longer than `make bench`.
SPARK_BUDGET = $(if $(filter file,$(origin BUDGET)),1500,$(BUDGET))

# GB of random keys, and bytes of a result and rows of each run into a spool. They take 40 minutes and 70 GB of disk
# together; `make bench-spark UNSORTED_GB=1,2 SPOOL_SIZES=8:1000000,8:100000,4096:100000` takes a few minutes.
UNSORTED_GB = 8,16
SPOOL_SIZES = 8:100000000,8:4000000,4096:4000000

.PHONY: bench-spark
bench-spark: setup  ## measure stages under faults and their speed beside naive Spark (BUDGET seconds, 1500)
	$(BIN)/python -m bench.spark --budget-s $(SPARK_BUDGET)
	$(BIN)/python -m bench.spark.unsorted --gb $(UNSORTED_GB) --spool --save
	$(BIN)/python -m bench.spark.spool --sizes $(SPOOL_SIZES) --save

docs: setup  ## regenerate docs/traceability.md, docs/states.md and docs/spark-odd-inputs.md
	$(BIN)/python tools/traceability.py
	$(BIN)/python tools/states.py
	$(BIN)/python tools/odd_inputs.py

sizes: setup  ## lines per module, the biggest last
	$(BIN)/python tools/sizes.py

lock:  ## regenerate requirements.lock (needs uv)
	uv pip compile pyproject.toml --quiet --upgrade --extra dev --extra spark --universal --python-version 3.11 \
	    --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" --output-file requirements.lock

clean:  ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .reports
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
