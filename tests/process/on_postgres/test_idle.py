"""An idle `holdfast up` asks its server little: what a NOTIFY tells, or the process knows, is not asked for."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.pgcluster import DATABASE, USER, Cluster
from tests.process.on_postgres import whole
from tests.process.watch import until
from tests.processes import Proc

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(120)]

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.on_postgres.whole:app"]
# Short leases: what depends on them is asked the most often.
LEASE_S = 2
MEASURED_S = 5.0
# It is 25; it was 70, with transactions of five statements for a look at the workers.
STATEMENTS_PER_S_MAX = 45
_STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]*):\s+(\S[^\n]{0,60})")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(standby=False) as made:
        yield made


@pytest.fixture
def worker(cluster: Cluster) -> Iterator[Proc]:
    server = cluster.primary
    url = f"postgresql://{USER}@{server.host}:{server.port}/{DATABASE}"
    env = {"HOLDFAST_STORE": url, whole.LOG: "/dev/null"}
    with Proc.spawn([*UP, "--lease-s", str(LEASE_S)], env=env) as proc:
        yield proc


def test_an_idle_worker_asks_its_server_little(cluster: Cluster, worker: Proc) -> None:
    server = cluster.primary
    server.settle(log_statement="all")
    until(lambda: "SELECT holdfast_apply" in server.log.read_text(), "statements in the log")
    start, began = server.log.stat().st_size, time.monotonic()
    until(lambda: time.monotonic() - began >= MEASURED_S, "the measured time")
    passed_s = time.monotonic() - began
    asked = Counter(_STATEMENT.findall(server.log.read_bytes()[start:].decode(errors="replace")))
    print(f"{sum(asked.values()) / passed_s:.1f} statements a second: {asked.most_common(8)}")
    assert asked, "a worker that says nothing at all is not idle but dead"
    assert sum(asked.values()) < STATEMENTS_PER_S_MAX * passed_s
    assert worker.running
