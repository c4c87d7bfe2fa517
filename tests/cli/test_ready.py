"""`holdfast ready`: the exit code, and one line per blocker."""

from pathlib import Path

import pytest

from holdfast.clock import S
from holdfast.leadership import leader_lease, worker_registry
from holdfast.store.api import Store
from holdfast.world import catalog
from tests.cli.conftest import RunCommand
from tests.ops import http_rig
from tests.ops.account_rig import UNIVERSE, AccountRig
from tests.process.watch import until


@pytest.fixture
def rig_with_leader(rig: AccountRig) -> AccountRig:
    rig.store.transact(leader_lease.acquire, UNIVERSE, "leader", "1", 60 * S)
    rig.store.transact(worker_registry.heartbeat, UNIVERSE, "leader", "1", ("world",))
    return rig


def test_ready_exits_with_0_for_a_universe_with_a_leader(
    run: RunCommand, path: Path, rig_with_leader: AccountRig
) -> None:
    result = run("ready", "--store", path)
    assert (result.code, result.out) == (0, "bank: ready\n")


def test_ready_exits_with_1_without_a_leader(run: RunCommand, path: Path, rig: AccountRig) -> None:
    result = run("ready", "--store", path)
    assert result.code == 1
    headline, blocker, warning = result.out.splitlines()
    assert headline == "bank: not ready"
    assert blocker.startswith("  authority_missing: ")
    assert warning.startswith("  warning: no_live_worker: ")


def test_ready_prints_one_line_per_world_blocker(
    run: RunCommand, path: Path, rig_with_leader: AccountRig
) -> None:
    rig_with_leader.account("paused").create()
    rig_with_leader.account("paused").pause()
    rig_with_leader.account("parked").create()
    blocker = catalog.WorldBlocker("replay_diverged", "another reply", 7)
    rig_with_leader.store.transact(
        catalog.change_status,
        UNIVERSE,
        rig_with_leader.world_id("parked"),
        catalog.WorldEvent.PARK,
        blocker,
    )
    result = run("ready", "--store", path)
    assert result.code == 0, "one world's blocker is not the universe's"
    assert sorted(result.out.splitlines()[1:]) == [
        "  QuotedAccount/parked: world_parked replay_diverged at height 7: another reply",
        "  QuotedAccount/paused: world_paused",
    ]


def test_ready_json_lists_reasons_and_world_counts(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    result = run("ready", "--store", path, "--json")
    assert result.code == 1
    [universe] = result.document["universes"]
    assert result.document["ready"] is False
    assert universe["reasons"][0]["reason"] == "authority_missing"
    assert universe["worlds"]["active"] == 1


def test_ready_universe_option_selects_one_universe(
    run: RunCommand, path: Path, rig_with_leader: AccountRig
) -> None:
    rig_with_leader.store.transact(worker_registry.heartbeat, "elsewhere", "w", "1", ("world",))
    assert run("ready", "--store", path).code == 1
    assert run("ready", "--universe", UNIVERSE, "--store", path).code == 0


def test_ready_of_an_unused_store_is_not_found(run: RunCommand, path: Path, store: Store) -> None:
    result = run("ready", "--store", path)
    assert result.code == 1
    assert result.error.startswith("not_found: what='universe'")


@pytest.mark.parametrize("leads", [False, True])
def test_ready_agrees_with_readyz_when_all_workers_use_http(
    run: RunCommand, path: Path, store: Store, leads: bool
) -> None:
    """Also without --universe: a universe with tasks and no worlds is listed."""
    if leads:
        store.transact(leader_lease.acquire, "shop", "leader", "1", 60 * S)
    rig = http_rig.HttpRig(store)
    try:
        server = rig.serve()
        client = rig.client(server)
        client.submit("add")
        assert len(client.lease("far-away")) == 1
        until(
            lambda: store.read(worker_registry.find, "shop", "far-away"), "the worker is registered"
        )
        response = client.get("/readyz")
        result = run("ready", "--store", path, "--json")
        assert (response.status == 200, result.code == 0) == (leads, leads)
        [universe] = result.document["universes"]
        assert universe["universe"] == "shop"
        for document in (universe, response.document):
            assert [reason["reason"] for reason in document["reasons"]] == (
                [] if leads else ["authority_missing"]
            )
            assert document["warnings"] == []
        [row] = run("workers", "--store", path, "--json").document["workers"]
        assert (row["worker"], row["roles"], row["live"]) == ("far-away", ["task"], True)
    finally:
        rig.close()
