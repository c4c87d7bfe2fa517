"""An idle `holdfast up` sends few statements: it uses NOTIFY and its local state instead of polling."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.pgcluster import DATABASE, USER, PostgresCluster
from tests.process.on_postgres import full_app
from tests.process.watch import until
from tests.processes import Proc

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(120)]

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.on_postgres.full_app:app"]
# Short leases cause the most frequent statements.
LEASE_S = 2
MEASURED_S = 5.0
# The measured rate is 25. It was 70 when a read of the worker registry took five statements.
STATEMENTS_PER_S_MAX = 45
_STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]*):\s+(\S[^\n]{0,60})")


@pytest.fixture
def cluster() -> Iterator[PostgresCluster]:
    with PostgresCluster(standby=False) as made:
        yield made


@pytest.fixture
def worker(cluster: PostgresCluster) -> Iterator[Proc]:
    server = cluster.primary
    url = f"postgresql://{USER}@{server.host}:{server.port}/{DATABASE}"
    env = {"HOLDFAST_STORE": url, full_app.LOG: "/dev/null"}
    with Proc.spawn([*UP, "--lease-s", str(LEASE_S)], env=env) as proc:
        yield proc


def test_idle_up_sends_few_statements_to_postgres(cluster: PostgresCluster, worker: Proc) -> None:
    server = cluster.primary
    server.change_settings(log_statement="all")
    until(lambda: "SELECT holdfast_apply" in server.log.read_text(), "statements in the log")
    start, began = server.log.stat().st_size, time.monotonic()
    until(lambda: time.monotonic() - began >= MEASURED_S, "the measured time")
    passed_s = time.monotonic() - began
    statements = Counter(
        _STATEMENT.findall(server.log.read_bytes()[start:].decode(errors="replace"))
    )
    print(
        f"{sum(statements.values()) / passed_s:.1f} statements a second: {statements.most_common(8)}"
    )
    assert statements, "a worker that says nothing at all is not idle but dead"
    assert sum(statements.values()) < STATEMENTS_PER_S_MAX * passed_s
    assert worker.running
