# The development tasks of the project. `make` without a target lists them.

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

# The dispatcher types prompts into tmux panes, and shell workers use curl and jq. If these programs are missing
# and cannot be installed, everything else works. The tests that need them print the install command.
PROGRAMS := tmux curl jq
# The tests also need a browser, a connection pooler, network namespaces, a JDBC driver, promtool and systemd-analyze.
TEST_PROGRAMS := $(PROGRAMS) chromium pgbouncer iproute2 libpostgresql-jdbc-java prometheus systemd

.PHONY: system test-system
test-system: PROGRAMS := $(TEST_PROGRAMS)
system test-system:
	@( PATH="$$PATH:/usr/sbin"; for one in $(patsubst systemd,systemd-analyze,$(patsubst prometheus,promtool,$(PROGRAMS:iproute2=ip))); do \
	    [ $$one = libpostgresql-jdbc-java ] && one=/usr/share/java/postgresql.jar; \
	    command -v $$one || [ -f $$one ] || exit 1; done ) >/dev/null 2>&1 || { \
	    sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
	    $$sudo apt-get install -y -qq $(PROGRAMS) >/dev/null 2>&1 || \
	    { $$sudo apt-get update -qq && $$sudo apt-get install -y -qq $(PROGRAMS); } >/dev/null 2>&1 || \
	    echo "some programs could not be installed. Run: apt-get install -y $(PROGRAMS)"; }

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Holdfast needs Python 3.11 or newer; $(PYTHON) is %d.%d. Try: make setup PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup  ## run the demo
	$(BIN)/python -m holdfast.cli demo

test: setup test-system  ## run every test on four worker processes, with the time of each part
	$(BIN)/python tools/suites.py

check: setup  ## format, lint, types, layers, generated docs (first step of CI)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/plain_words.py --check
	$(BIN)/python tools/commit_subjects.py
	$(BIN)/python -m pytest -q --durations=0 tests/test_tidy.py
	$(BIN)/python tools/traceability.py --check
	$(BIN)/python tools/states.py --check
	$(BIN)/python tools/odd_inputs.py --check

sim: setup  ## simulate SEEDS seeds (2000)
	$(BIN)/python -m pytest -q -m deep tests/sim
	$(BIN)/holdfast sim --seeds $(SEEDS)

.PHONY: killers
killers: setup  ## search seeds that kill the planted bugs, and store them for `make test` (within SEEDS seeds)
	$(BIN)/python -m tests.simulation.killers --seeds $(SEEDS)

# Ten minutes, unless BUDGET is given.
CHAOS_BUDGET = $(if $(filter file,$(origin BUDGET)),600,$(BUDGET))

# Their kills are counted by HOLDFAST_TEST_KILLS.
KILL_LOOPS = $(shell grep -l "import KILLS" tests/process/test_*.py)

# Each process starts in a new interpreter, as for users (tests/fork_server.py).
chaos: export HOLDFAST_TEST_FRESH = 1
chaos: setup  ## kill real processes KILLS times (200), then break servers and links for BUDGET seconds (600)
	$(BIN)/python -m tests.process.chaos --kills $(KILLS)
	HOLDFAST_TEST_KILLS=12 $(BIN)/python -m pytest -q -m "not deep" $(KILL_LOOPS)
	$(BIN)/python -m pytest -q tests/chaos
	$(BIN)/python -m tests.chaos.run --seconds $(CHAOS_BUDGET)
	$(BIN)/python tools/suites.py --deep

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

.PHONY: bench-flows
bench-flows: setup  ## measure a million sleeping flows and flows beside Restate and DBOS, and write docs/benchmarks-flows.md
	$(BIN)/python -m bench flows --sleepers 1000000 --waking 10000 --steps 10000 --save
	$(BIN)/python -m bench loop_lag --save
	$(BIN)/python -m bench.peers --suite flows --runs 3 --budget-s 460 --save

.PHONY: bench-postgres
bench-postgres: setup  ## measure worlds, effects and tasks on PostgreSQL beside DBOS, pgqueuer and procrastinate
	$(BIN)/python -m bench.peers --suite postgres --runs 3 --budget-s 3000

.PHONY: bench-churn
bench-churn: setup  ## measure PostgreSQL under churn with backlogs of 1,000 and 1,000,000, MINUTES (30)
	$(BIN)/python -m bench churn --minutes $(or $(MINUTES),30)

# Both parts need more time than `make bench`, unless BUDGET is given.
SPARK_BUDGET = $(if $(filter file,$(origin BUDGET)),1500,$(BUDGET))

# Input sizes in GB with random keys, and BYTES:ROWS of the results of each spool run. Together they take 40 minutes
# and 70 GB of disk. `make bench-spark UNSORTED_GB=1,2 SPOOL_SIZES=8:1000000,8:100000,4096:100000` takes a few minutes.
UNSORTED_GB = 8,16
SPOOL_SIZES = 8:100000000,8:4000000,4096:4000000

.PHONY: bench-spark
bench-spark: setup  ## measure stages under faults and their speed beside naive Spark (BUDGET seconds, 1500)
	$(BIN)/python -m bench.spark --budget-s $(SPARK_BUDGET)
	$(BIN)/python -m bench.spark.unsorted --gb $(UNSORTED_GB) --spool --save
	$(BIN)/python -m bench.spark.spool --sizes $(SPOOL_SIZES) --save

.PHONY: screenshots
screenshots: setup test-system  ## write pictures of every page of the console to docs/images
	$(BIN)/python -m tests.console.screenshots

docs: setup  ## regenerate docs/traceability.md, docs/states.md and docs/spark-odd-inputs.md
	$(BIN)/python tools/traceability.py
	$(BIN)/python tools/states.py
	$(BIN)/python tools/odd_inputs.py

.PHONY: site
site: setup  ## build the site of docs/ in build/site, with a check of its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

sizes: setup  ## lines per module, the largest last
	$(BIN)/python tools/sizes.py

lock:  ## regenerate requirements.lock (needs uv)
	uv pip compile pyproject.toml --quiet --upgrade --extra dev --extra spark --extra ops --extra otel --universal --python-version 3.11 \
	    --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" --output-file requirements.lock

clean:  ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .reports
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
