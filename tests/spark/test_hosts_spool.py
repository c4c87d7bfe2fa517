"""Two hosts without a common disk: the ledger is on PostgreSQL, data in a bucket, and the driver may be anywhere."""

from __future__ import annotations

import urllib.parse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.postgres import NEWEST, fresh_url, server
from tests.process.watch import until
from tests.spark.clusters import Cluster, cluster
from tests.spark.host_driver import Refused, driver_on
from tests.spark.hosts import PYTHON, Host, assert_apart, hosts

# Two hosts, a cluster and two drivers take over a minute: `make chaos`.
pytestmark = [pytest.mark.timeout(400), pytest.mark.deep, pytest.mark.postgresql]

SOCKET = "/mnt/postgresql"
SECRET = "wJalrXUtnFEMI-bPxRfiCYEXAMPLEKEY"
ROWS = 400
FLUSH_ROWS = 5
TASKS = 2
# Begun and not reported, in each task, when its driver died.
BOUND = TASKS * (FLUSH_ROWS + 1)


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """They reach the database server by its socket, and share nothing else."""
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(server(NEWEST)).query)
    shared = {SOCKET: Path(query["host"][0])}
    with hosts(tmp_path_factory.mktemp("hosts"), shared=shared) as made:
        assert_apart(*made)
        yield made
        assert_apart(*made)


@pytest.fixture(scope="module")
def two_workers(
    two_hosts: list[Host], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), on=two_hosts) as made:
        yield made


@pytest.fixture(scope="module")
def endpoint(two_hosts: list[Host]) -> Iterator[str]:
    """An S3 server on the first host."""
    host = two_hosts[0]
    command = [PYTHON, "-m", "moto.server", "-H", host.address, "-p", "5000"]
    with host.spawn(*command, ready=None) as served:
        served.expect("Running on", 60.0)
        yield f"http://{host.address}:5000"


def storage(endpoint: str) -> dict[str, str]:
    return {
        "aws_endpoint": endpoint,
        "aws_access_key_id": "AKIAEXAMPLE",
        "aws_secret_access_key": SECRET,
        "aws_region": "us-east-1",
        "aws_virtual_hosted_style_request": "false",
        "allow_http": "true",
    }


def calls(two_hosts: list[Host]) -> list[list[int]]:
    """The rows that each host made calls for."""
    found = []
    for host in two_hosts:
        path = host.seen("/var/work/calls")
        found.append([int(line) for line in path.read_text().split()] if path.exists() else [])
    return found


def check_output(driver: Any, endpoint: str, rows: int) -> None:
    """Executors of both hosts read the output, complete and in order."""
    read = driver.call(
        "rows_by_host", url="s3://data/spool-output", tasks=8, storage_options=storage(endpoint)
    )
    assert {host for host, *_ in read} == {"host-0", "host-1"}
    for _, ids, results in read:
        assert ids == list(range(rows))
        assert results == [f"result of {n}" for n in range(rows)]


def test_a_driver_on_the_other_host_goes_on_with_the_run(
    two_hosts: list[Host], two_workers: Cluster, endpoint: str
) -> None:
    first, second = two_hosts
    address = urllib.parse.urlsplit(fresh_url())
    store = f"postgresql://postgres:@{address.path}?host={urllib.parse.quote(SOCKET, safe='')}"
    args = {
        "name": "labels",
        "store": store,
        "spool": "s3://data/spool",
        "rows": ROWS,
        "storage_options": storage(endpoint),
        "flush_rows": FLUSH_ROWS,
    }
    with driver_on(first, two_workers.url, two_workers.config) as driver:
        driver.call("make_bucket", endpoint=endpoint, bucket="data")
        driver.begin("run_spooled", **args)
        until(lambda: all(len(one) > ROWS // 8 for one in calls(two_hosts)), "calls", 120)
        driver.proc.kill()
    with driver_on(second, two_workers.url, two_workers.config) as driver:
        with pytest.raises(Refused) as refused:
            driver.call("run_spooled", **{**args, "spool": "s3://data/other"})
        assert refused.value.code == "run_changed"
        found = driver.call("run_spooled", **args)
        check_output(driver, endpoint, ROWS)
        told = "\n".join(driver.proc.lines)
    assert found["counts"]["COMMITTED"] == ROWS
    assert found["complete"]
    assert found["rows"] == [ROWS, ROWS]
    assert found["written_again"] == found["written"], (
        "the same bytes, whichever executor wrote them"
    )
    made = Counter(seq for one in calls(two_hosts) for seq in one)
    assert set(made) == set(range(ROWS))
    assert sum(made.values()) - ROWS <= BOUND
    # The input grows, and the driver is on the first host again.
    with driver_on(first, two_workers.url, two_workers.config) as driver:
        grown = driver.call("run_spooled", **{**args, "rows": ROWS + 20})
        check_output(driver, endpoint, ROWS + 20)
        told += "\n".join(driver.proc.lines)
    assert grown["reused"] == ROWS
    assert grown["rows"] == [ROWS + 20, ROWS + 20]
    after = Counter(seq for one in calls(two_hosts) for seq in one)
    assert after - made == Counter(range(ROWS, ROWS + 20))
    logs = [path.read_text() for host in two_hosts for path in host.seen("/var/work").rglob("std*")]
    assert len(logs) >= 4
    assert SECRET not in told + "".join(logs)


def test_a_spool_on_the_disk_of_the_driver_is_refused_before_the_first_call(
    two_hosts: list[Host], two_workers: Cluster
) -> None:
    before = calls(two_hosts)
    with (
        driver_on(two_hosts[0], two_workers.url, two_workers.config) as driver,
        pytest.raises(Refused) as refused,
    ):
        driver.call(
            "run_spooled", name="local", store="/var/work/store", spool="/var/work/spool",
            rows=10, storage_options={},
        )  # fmt: skip
    assert refused.value.code == "spool_unreachable"
    assert "host-1" in refused.value.text
    assert calls(two_hosts) == before
