"""`holdfast workers [list | drain ID | undrain ID]`."""

from pathlib import Path

import pytest

from holdfast.authority import authority, workers
from holdfast.clock import S
from tests.cli.conftest import Run
from tests.ops.rig import UNIVERSE, Rig


@pytest.fixture
def crew(rig: Rig) -> Rig:
    """One worker that speaks under the present authority, one that spoke before it."""
    rig.store.transact(workers.heartbeat, UNIVERSE, "old", "1", ("world",))
    rig.store.transact(authority.acquire, UNIVERSE, "leader", "1", 60 * S)
    rig.store.transact(workers.heartbeat, UNIVERSE, "new", "1", ("world",), 7)
    return rig


def test_workers_are_listed_with_what_they_do(run: Run, path: Path, crew: Rig) -> None:
    header, *rows = run("workers", "--store", path).out.splitlines()
    assert header.split() == ["worker", "universe", "roles", "is", "assigned", "hosts", "heard"]
    assert [row.split()[:6] for row in rows] == [
        ["new", UNIVERSE, "world", "live", "0", "7"],
        ["old", UNIVERSE, "world", "silent", "0", "0"],
    ]
    assert run("workers", "list", "--store", path).out.splitlines()[0] == header


def test_workers_as_json(run: Run, path: Path, crew: Rig) -> None:
    told = run("workers", "--store", path, "--json").document
    assert [(one["worker"], one["live"], one["hosts"]) for one in told["workers"]] == [
        ("new", True, 7),
        ("old", False, 0),
    ]


def test_drain_and_undrain(run: Run, path: Path, crew: Rig) -> None:
    assert run("workers", "drain", "new", "--store", path).code == 0
    record = crew.store.read(workers.find, UNIVERSE, "new")
    assert record is not None
    assert record.draining
    assert " draining " in run("workers", "--store", path).out
    told = run("workers", "undrain", "new", "--store", path, "--json").document
    assert told == {"worker": "new", "universe": UNIVERSE, "draining": False}


def test_a_worker_that_is_not_there(run: Run, path: Path, crew: Rig) -> None:
    ran = run("workers", "drain", "nobody", "--store", path)
    assert ran.code == 1
    assert ran.error.startswith("not_found: what='worker'")


@pytest.mark.parametrize("argv", [["drain"], ["list", "new"], ["undrain"]])
def test_drain_takes_a_worker_and_list_takes_none(
    run: Run, path: Path, crew: Rig, argv: list[str]
) -> None:
    assert run("workers", *argv, "--store", path).error.startswith("invalid: what='worker'")


def test_nobody_works(run: Run, path: Path, rig: Rig) -> None:
    assert run("workers", "--store", path).out == "no workers\n"
