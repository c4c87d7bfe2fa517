"""Two hosts without a shared disk: the ledger is on PostgreSQL, the spool in a bucket, the driver on either host."""

from __future__ import annotations

import os
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.postgres import NEWEST, fresh_url, server
from tests.process.watch import until
from tests.spark.clusters import SparkCluster, cluster
from tests.spark.host_driver import DriverError, driver_on
from tests.spark.hosts import PYTHON, NamespaceHost, assert_isolated, hosts

# Two hosts, a cluster and two drivers take over a minute: `make chaos`.
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.deep,
    pytest.mark.postgresql,
    pytest.mark.xdist_group("hosts"),
]

SOCKET = "/mnt/postgresql"
SECRET = "wJalrXUtnFEMI-bPxRfiCYEXAMPLEKEY"
ROWS = 400
FLUSH_ROWS = 5
TASKS = 2
# The maximum of calls that are begun and not reported when the driver dies.
REPEATED_MAX = TASKS * (FLUSH_ROWS + 1)


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    """Two hosts that share only the socket of the database server."""
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(server(NEWEST)).query)
    shared = {SOCKET: Path(query["host"][0])}
    with hosts(tmp_path_factory.mktemp("hosts"), shared=shared) as created:
        assert_isolated(*created)
        yield created
        assert_isolated(*created)


@pytest.fixture(scope="module")
def two_workers(
    two_hosts: list[NamespaceHost], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkCluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), on=two_hosts) as spark_cluster:
        yield spark_cluster


@pytest.fixture(scope="module")
def endpoint(two_hosts: list[NamespaceHost]) -> Iterator[str]:
    """An S3 server on the first host."""
    host = two_hosts[0]
    command = [PYTHON, "-m", "moto.server", "-H", host.address, "-p", "5000"]
    with host.spawn(*command, ready=None) as served:
        served.expect("Running on", 60.0)
        yield f"http://{host.address}:5000"


def storage_options(endpoint: str) -> dict[str, str]:
    return {
        "aws_endpoint": endpoint,
        "aws_access_key_id": "AKIAEXAMPLE",
        "aws_secret_access_key": SECRET,
        "aws_region": "us-east-1",
        "aws_virtual_hosted_style_request": "false",
        "allow_http": "true",
    }


def calls_by_host(two_hosts: list[NamespaceHost]) -> list[list[int]]:
    """The called rows of each host."""
    calls = []
    for host in two_hosts:
        path = host.machine_path("/var/work/calls")
        calls.append([int(line) for line in path.read_text().split()] if path.exists() else [])
    return calls


def check_output(driver: Any, endpoint: str, rows: int) -> None:
    """Check that executors of both hosts read the output completely and in order."""
    read = driver.call(
        "rows_by_host",
        url="s3://data/spool-output",
        tasks=8,
        storage_options=storage_options(endpoint),
    )
    assert {host for host, *_ in read} == {"host-0", "host-1"}
    for _, ids, results in read:
        assert ids == list(range(rows))
        assert results == [f"result of {n}" for n in range(rows)]


def test_driver_on_another_host_resumes_the_run(
    two_hosts: list[NamespaceHost], two_workers: SparkCluster, endpoint: str
) -> None:
    first, second = two_hosts
    address = urllib.parse.urlsplit(fresh_url())
    store = f"postgresql://postgres:@{address.path}?host={urllib.parse.quote(SOCKET, safe='')}"
    args = {
        "name": "labels",
        "store": store,
        "spool": "s3://data/spool",
        "rows": ROWS,
        "storage_options": storage_options(endpoint),
        "flush_rows": FLUSH_ROWS,
    }
    with driver_on(first, two_workers.url, two_workers.config) as driver:
        driver.call("make_bucket", endpoint=endpoint, bucket="data")
        driver.start_call("run_spooled", **args)
        until(
            lambda: all(len(host_calls) > ROWS // 8 for host_calls in calls_by_host(two_hosts)),
            "calls",
            120,
        )
        driver.proc.kill()
    with driver_on(second, two_workers.url, two_workers.config) as driver:
        with pytest.raises(DriverError) as refused:
            driver.call("run_spooled", **{**args, "spool": "s3://data/other"})
        assert refused.value.code == "run_changed"
        result = driver.call("run_spooled", **args)
        check_output(driver, endpoint, ROWS)
        driver_output = "\n".join(driver.proc.lines)
    assert result["counts"]["COMMITTED"] == ROWS
    assert result["complete"]
    assert result["rows"] == [ROWS, ROWS]
    assert result["written_again"] == result["written"], (
        "the same bytes, whichever executor wrote them"
    )
    calls_before = Counter(seq for host_calls in calls_by_host(two_hosts) for seq in host_calls)
    assert set(calls_before) == set(range(ROWS))
    assert sum(calls_before.values()) - ROWS <= REPEATED_MAX
    # The input has more rows, and the driver is on the first host again.
    with driver_on(first, two_workers.url, two_workers.config) as driver:
        grown = driver.call("run_spooled", **{**args, "rows": ROWS + 20})
        check_output(driver, endpoint, ROWS + 20)
        driver_output += "\n".join(driver.proc.lines)
    assert grown["reused"] == ROWS
    assert grown["rows"] == [ROWS + 20, ROWS + 20]
    calls_after = Counter(seq for host_calls in calls_by_host(two_hosts) for seq in host_calls)
    assert calls_after - calls_before == Counter(range(ROWS, ROWS + 20))
    # Spark removes other directories meanwhile; `os.walk` skips them.
    logs = [
        Path(directory, name).read_text()
        for host in two_hosts
        for directory, _, names in os.walk(host.machine_path("/var/work"))
        for name in names
        if name.startswith("std")
    ]
    assert len(logs) >= 4
    assert SECRET not in driver_output + "".join(logs)


def test_spool_on_the_driver_disk_is_refused_before_the_first_call(
    two_hosts: list[NamespaceHost], two_workers: SparkCluster
) -> None:
    before = calls_by_host(two_hosts)
    with (
        driver_on(two_hosts[0], two_workers.url, two_workers.config) as driver,
        pytest.raises(DriverError) as refused,
    ):
        driver.call(
            "run_spooled", name="local", store="/var/work/store", spool="/var/work/spool",
            rows=10, storage_options={},
        )  # fmt: skip
    assert refused.value.code == "spool_unreachable"
    assert "host-1" in refused.value.text
    assert calls_by_host(two_hosts) == before
