"""Stages on two hosts without a shared disk, connected only by their network."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ledger_service.test_service_tls import TlsFiles
from tests.process.watch import until
from tests.spark import hosts as hosts_module
from tests.spark.clusters import cluster
from tests.spark.conftest import INTERPRETED, WARM
from tests.spark.host_driver import DriverError, HostDriver, driver_on
from tests.spark.hosts import NEEDS_ROOT, NamespaceHost, assert_isolated, hosts

pytestmark = pytest.mark.xdist_group("hosts")

SHARED = "/mnt/shared"
LEDGER_NAME = "ledger.example"
IDLE_S = 120.0


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    directory = tmp_path_factory.mktemp("hosts")
    shared = directory / "shared"
    shared.mkdir()
    with hosts(directory, shared={SHARED: shared}, names={LEDGER_NAME: 0}) as created:
        assert_isolated(*created)
        yield created
        assert_isolated(*created)


@pytest.fixture(scope="module")
def driver(
    two_hosts: list[NamespaceHost], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostDriver]:
    """A driver on the first host, with an executor on each host."""
    directory = tmp_path_factory.mktemp("cluster")
    with (
        cluster(directory, on=two_hosts) as spark_cluster,
        driver_on(
            two_hosts[0], spark_cluster.url, {**spark_cluster.config, **INTERPRETED, **WARM}
        ) as host_driver,
    ):
        yield host_driver


@pytest.fixture
def idle_driver(driver: HostDriver) -> HostDriver:
    """The driver, with a free slot on each host: the probe before a run sees the executors with a free slot only, and
    the tasks of the last run may still be ending."""

    def is_idle() -> bool:
        locations = driver.call("places_of_tasks", tasks=2)
        return {location["host"] for location in locations} == {"host-0", "host-1"}

    until(is_idle, "a free slot on each host", IDLE_S)
    return driver


def test_spark_job_runs_on_both_hosts_with_different_pythons(driver: HostDriver) -> None:
    locations = driver.call("places_of_tasks", tasks=2)
    assert {location["host"] for location in locations} == {"host-0", "host-1"}
    assert len({location["python"] for location in locations}) == 2
    assert all(location["directory"].startswith("/var/work/") for location in locations)


def test_stage_without_an_output_runs_on_both_hosts(driver: HostDriver) -> None:
    result = driver.call("run_stage", name="plain", meet=f"{SHARED}/meet-plain")
    assert result["hosts"] == ["host-0", "host-1"]
    assert result["ids"] == list(range(20))


@pytest.mark.deep
def test_output_on_a_shared_mount_is_read_by_both_hosts(driver: HostDriver) -> None:
    result = driver.call("run_stage", name="shared", output=f"{SHARED}/labels")
    assert result["ids"] == list(range(20))


def test_output_on_the_driver_disk_is_refused_before_the_first_call(
    idle_driver: HostDriver, two_hosts: list[NamespaceHost]
) -> None:
    with pytest.raises(DriverError) as refused:
        idle_driver.call("run_stage", name="local", output="/var/work/labels/here")
    assert refused.value.code == "output_not_shared"
    assert "/var/work/labels/here" in refused.value.text
    assert "host-1" in refused.value.text
    assert "object store" in refused.value.text
    assert idle_driver.call("status_of", name="local") == ["ingesting", 0]
    assert not two_hosts[0].machine_path("/var/work/labels").exists()
    # The same name resumes with an output that both hosts can read.
    assert idle_driver.call("run_stage", name="local", output=f"{SHARED}/local")["ids"] == list(
        range(20)
    )


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param(False, id="of the function"),
        pytest.param(True, id="in its body", marks=pytest.mark.deep),
    ],
)
def test_module_missing_on_an_executor_is_reported_before_the_first_call(
    idle_driver: HostDriver, inside: bool
) -> None:
    with pytest.raises(DriverError) as refused:
        idle_driver.call("run_missing_module", name=f"missing-{inside}", inside=inside)
    assert refused.value.code == "not_loadable"
    module = "module_that_is_nowhere" if inside else "module_of_the_driver"
    assert f"module={module}" in refused.value.text.replace("'", "").replace('"', "")
    assert idle_driver.call("status_of", name=f"missing-{inside}") == ["ingesting", 0]


def test_ledger_unreachable_from_an_executor_is_reported_before_the_first_call(
    idle_driver: HostDriver,
) -> None:
    with pytest.raises(DriverError) as refused:
        idle_driver.call("run_stage", name="unreachable", ledger_host="127.0.0.1")
    assert refused.value.code == "ledger_unreachable"
    assert "host-1" in refused.value.text
    assert "ledger_host=" in refused.value.text
    assert idle_driver.call("status_of", name="unreachable") == ["ingesting", 0]


def test_executors_reach_the_ledger_by_its_advertised_name_over_tls(
    driver: HostDriver, two_hosts: list[NamespaceHost]
) -> None:
    directory = "/var/work/tls"
    TlsFiles.issue(two_hosts[0].machine_path(directory), LEDGER_NAME)
    address_options = {"ledger_host": LEDGER_NAME, "ledger_port": 7070, "bind": "0.0.0.0"}
    meet = f"{SHARED}/meet-tls"
    result = driver.call("run_stage", name="tls", tls=directory, meet=meet, **address_options)
    assert result["hosts"] == ["host-0", "host-1"]
    assert not two_hosts[1].machine_path(directory).exists()


@pytest.mark.parametrize("path", ["/data", "/elsewhere/data", "/tmp/data"])
def test_assert_isolated_finds_an_undeclared_shared_directory(tmp_path: Path, path: str) -> None:
    mistake = tmp_path / "mistake"
    mistake.mkdir()
    mounts = {0: {"/data": mistake}, 1: {path: mistake}}
    expected_error = pytest.raises(AssertionError, match=f"host-0:/data is host-1:{path}")
    with hosts(tmp_path, undeclared=mounts) as (first, second), expected_error:
        assert_isolated(first, second)


def test_hosts_without_root_fail_with_needs_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module.os, "geteuid", lambda: 1000)
    with pytest.raises(AssertionError) as failure, hosts(tmp_path):
        pass
    assert str(failure.value).splitlines()[0] == NEEDS_ROOT
