"""`holdfast ready`: the exit code, and each blocker on a line."""

from pathlib import Path

import pytest

from holdfast.authority import authority, workers
from holdfast.clock import S
from holdfast.store.api import Store
from holdfast.world import catalog
from tests.cli.conftest import Run
from tests.ops import http_rig
from tests.ops.rig import UNIVERSE, Rig
from tests.process.watch import until


@pytest.fixture
def led(rig: Rig) -> Rig:
    rig.store.transact(authority.acquire, UNIVERSE, "leader", "1", 60 * S)
    rig.store.transact(workers.heartbeat, UNIVERSE, "leader", "1", ("world",))
    return rig


def test_a_universe_with_a_leader_is_ready(run: Run, path: Path, led: Rig) -> None:
    ran = run("ready", "--store", path)
    assert (ran.code, ran.out) == (0, "bank: ready\n")


def test_without_a_leader_it_is_not(run: Run, path: Path, rig: Rig) -> None:
    ran = run("ready", "--store", path)
    assert ran.code == 1
    said, blocker, warning = ran.out.splitlines()
    assert said == "bank: not ready"
    assert blocker.startswith("  authority_missing: ")
    assert warning.startswith("  warning: no_live_worker: ")


def test_every_blocker_has_its_line(run: Run, path: Path, led: Rig) -> None:
    led.account("paused").create()
    led.account("paused").pause()
    led.account("parked").create()
    blocker = catalog.Blocker("replay_diverged", "another reply", 7)
    led.store.transact(
        catalog.change, UNIVERSE, led.world_id("parked"), catalog.Event.PARK, blocker
    )
    ran = run("ready", "--store", path)
    assert ran.code == 0, "one world's blocker is not the universe's"
    assert sorted(ran.out.splitlines()[1:]) == [
        "  Account/parked: world_parked replay_diverged at height 7: another reply",
        "  Account/paused: world_paused",
    ]


def test_readiness_as_json(run: Run, path: Path, rig: Rig) -> None:
    ran = run("ready", "--store", path, "--json")
    assert ran.code == 1
    [universe] = ran.document["universes"]
    assert ran.document["ready"] is False
    assert universe["reasons"][0]["reason"] == "authority_missing"
    assert universe["worlds"]["active"] == 1


def test_one_universe_of_several(run: Run, path: Path, led: Rig) -> None:
    led.store.transact(workers.heartbeat, "elsewhere", "w", "1", ("world",))
    assert run("ready", "--store", path).code == 1
    assert run("ready", "--universe", UNIVERSE, "--store", path).code == 0


def test_a_store_that_nobody_used_is_not_ready(run: Run, path: Path, store: Store) -> None:
    ran = run("ready", "--store", path)
    assert ran.code == 1
    assert ran.error.startswith("not_found: what='universe'")


@pytest.mark.parametrize("leads", [False, True])
def test_it_agrees_with_readyz_where_all_workers_are_http_clients(
    run: Run, path: Path, store: Store, leads: bool
) -> None:
    """Without --universe, too: a universe of tasks alone is one."""
    if leads:
        store.transact(authority.acquire, "shop", "leader", "1", 60 * S)
    rig = http_rig.Rig(store)
    try:
        server = rig.serve()
        client = rig.client(server)
        client.submit("add")
        assert len(client.lease("far-away")) == 1
        until(lambda: store.read(workers.find, "shop", "far-away"), "the worker is registered")
        told = client.get("/readyz")
        ran = run("ready", "--store", path, "--json")
        assert (told.status == 200, ran.code == 0) == (leads, leads)
        [universe] = ran.document["universes"]
        assert universe["universe"] == "shop"
        for document in (universe, told.document):
            assert [one["reason"] for one in document["reasons"]] == (
                [] if leads else ["authority_missing"]
            )
            assert document["warnings"] == []
        [row] = run("workers", "--store", path, "--json").document["workers"]
        assert (row["worker"], row["roles"], row["live"]) == ("far-away", ["task"], True)
    finally:
        rig.close()
