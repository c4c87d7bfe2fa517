"""`holdfast workers [list | drain ID | undrain ID]`."""

from pathlib import Path

import pytest

from holdfast.clock import S
from holdfast.leadership import leader_lease, worker_registry
from tests.cli.conftest import RunCommand
from tests.ops.account_rig import UNIVERSE, AccountRig


@pytest.fixture
def rig_with_workers(rig: AccountRig) -> AccountRig:
    """One worker with a heartbeat under the current leader, one with a heartbeat only before it."""
    rig.store.transact(worker_registry.heartbeat, UNIVERSE, "old", "1", ("world",))
    rig.store.transact(leader_lease.acquire, UNIVERSE, "leader", "1", 60 * S)
    rig.store.transact(worker_registry.heartbeat, UNIVERSE, "new", "1", ("world",), 7)
    return rig


def test_workers_list_prints_roles_state_and_hosts(
    run: RunCommand, path: Path, rig_with_workers: AccountRig
) -> None:
    header, *rows = run("workers", "--store", path).out.splitlines()
    assert header.split() == ["worker", "universe", "roles", "is", "assigned", "hosts", "heard"]
    assert [row.split()[:6] for row in rows] == [
        ["new", UNIVERSE, "world", "live", "0", "7"],
        ["old", UNIVERSE, "world", "silent", "0", "0"],
    ]
    assert run("workers", "list", "--store", path).out.splitlines()[0] == header


def test_workers_list_as_json(run: RunCommand, path: Path, rig_with_workers: AccountRig) -> None:
    document = run("workers", "--store", path, "--json").document
    assert [
        (worker["worker"], worker["live"], worker["hosts"]) for worker in document["workers"]
    ] == [
        ("new", True, 7),
        ("old", False, 0),
    ]


def test_workers_drain_and_undrain(
    run: RunCommand, path: Path, rig_with_workers: AccountRig
) -> None:
    assert run("workers", "drain", "new", "--store", path).code == 0
    record = rig_with_workers.store.read(worker_registry.find, UNIVERSE, "new")
    assert record is not None
    assert record.draining
    assert " draining " in run("workers", "--store", path).out
    document = run("workers", "undrain", "new", "--store", path, "--json").document
    assert document == {"worker": "new", "universe": UNIVERSE, "draining": False}


def test_workers_drain_of_an_unknown_worker_is_not_found(
    run: RunCommand, path: Path, rig_with_workers: AccountRig
) -> None:
    result = run("workers", "drain", "nobody", "--store", path)
    assert result.code == 1
    assert result.error.startswith("not_found: what='worker'")


@pytest.mark.parametrize("argv", [["drain"], ["list", "new"], ["undrain"]])
def test_workers_drain_requires_a_worker_and_list_rejects_one(
    run: RunCommand, path: Path, rig_with_workers: AccountRig, argv: list[str]
) -> None:
    assert run("workers", *argv, "--store", path).error.startswith("invalid: what='worker'")


def test_workers_list_without_workers_prints_no_workers(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    assert run("workers", "--store", path).out == "no workers\n"
