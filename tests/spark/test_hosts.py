"""Stages on two hosts that share no disk and reach each other only over their network."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark import hosts as hosts_module
from tests.spark.clusters import cluster
from tests.spark.host_driver import Driver, Refused, driver_on
from tests.spark.hosts import NEEDS_ROOT, Host, assert_apart, hosts
from tests.spark.test_service_tls import Files

SHARED = "/mnt/shared"
LEDGER = "ledger.example"


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    directory = tmp_path_factory.mktemp("hosts")
    shared = directory / "shared"
    shared.mkdir()
    with hosts(directory, shared={SHARED: shared}, names={LEDGER: 0}) as made:
        assert_apart(*made)
        yield made
        assert_apart(*made)


@pytest.fixture(scope="module")
def driver(two_hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A driver on the first host, and an executor on each."""
    directory = tmp_path_factory.mktemp("cluster")
    with (
        cluster(directory, on=two_hosts) as spark_cluster,
        driver_on(two_hosts[0], spark_cluster.url, spark_cluster.config) as made,
    ):
        yield made


def test_a_plain_job_runs_on_both_hosts_each_with_its_own_python(driver: Driver) -> None:
    places = driver.call("places_of_tasks", tasks=2)
    assert {one["host"] for one in places} == {"host-0", "host-1"}
    assert len({one["python"] for one in places}) == 2
    assert all(one["directory"].startswith("/var/work/") for one in places)


def test_a_stage_without_an_output_runs_on_both_hosts(driver: Driver) -> None:
    found = driver.call("run_stage", name="plain", meet=f"{SHARED}/meet-plain")
    assert found["hosts"] == ["host-0", "host-1"]
    assert found["ids"] == list(range(20))


def test_an_output_on_a_shared_mount_is_read_by_both_hosts(driver: Driver) -> None:
    found = driver.call("run_stage", name="shared", output=f"{SHARED}/labels")
    assert found["ids"] == list(range(20))


def test_an_output_on_the_disk_of_the_driver_is_refused_before_the_first_call(
    driver: Driver, two_hosts: list[Host]
) -> None:
    with pytest.raises(Refused) as refused:
        driver.call("run_stage", name="local", output="/var/work/labels/here")
    assert refused.value.code == "output_not_shared"
    assert "/var/work/labels/here" in refused.value.text
    assert "host-1" in refused.value.text
    assert "object store" in refused.value.text
    assert driver.call("status_of", name="local") == ["ingesting", 0]
    assert not two_hosts[0].seen("/var/work/labels").exists()
    # The same name goes on, with an output that both see.
    assert driver.call("run_stage", name="local", output=f"{SHARED}/local")["ids"] == list(
        range(20)
    )


@pytest.mark.parametrize("inside", [False, True], ids=["of the function", "in its body"])
def test_a_module_that_an_executor_lacks_is_named_before_the_first_call(
    driver: Driver, inside: bool
) -> None:
    with pytest.raises(Refused) as refused:
        driver.call("run_missing_module", name=f"missing-{inside}", inside=inside)
    assert refused.value.code == "not_loadable"
    module = "module_that_is_nowhere" if inside else "module_of_the_driver"
    assert f"module={module}" in refused.value.text.replace("'", "").replace('"', "")
    assert driver.call("status_of", name=f"missing-{inside}") == ["ingesting", 0]


def test_a_ledger_that_an_executor_cannot_reach_is_named_before_the_first_call(
    driver: Driver,
) -> None:
    with pytest.raises(Refused) as refused:
        driver.call("run_stage", name="unreachable", ledger_host="127.0.0.1")
    assert refused.value.code == "ledger_unreachable"
    assert "host-1" in refused.value.text
    assert "ledger_host=" in refused.value.text
    assert driver.call("status_of", name="unreachable") == ["ingesting", 0]


def test_executors_reach_the_ledger_under_its_advertised_name_over_tls(
    driver: Driver, two_hosts: list[Host]
) -> None:
    directory = "/var/work/tls"
    Files.of(two_hosts[0].seen(directory), LEDGER)
    where = {"ledger_host": LEDGER, "ledger_port": 7070, "bind": "0.0.0.0"}
    meet = f"{SHARED}/meet-tls"
    found = driver.call("run_stage", name="tls", tls=directory, meet=meet, **where)
    assert found["hosts"] == ["host-0", "host-1"]
    assert not two_hosts[1].seen(directory).exists()


@pytest.mark.parametrize("path", ["/data", "/elsewhere/data", "/tmp/data"])
def test_a_directory_that_is_on_both_hosts_and_not_declared_is_found(
    tmp_path: Path, path: str
) -> None:
    mistake = tmp_path / "mistake"
    mistake.mkdir()
    mounts = {0: {"/data": mistake}, 1: {path: mistake}}
    found = pytest.raises(AssertionError, match=f"host-0:/data is host-1:{path}")
    with hosts(tmp_path, undeclared=mounts) as (first, second), found:
        assert_apart(first, second)


def test_without_root_the_first_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module.os, "geteuid", lambda: 1000)
    with pytest.raises(AssertionError) as failure, hosts(tmp_path):
        pass
    assert str(failure.value).splitlines()[0] == NEEDS_ROOT
