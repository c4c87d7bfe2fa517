"""A hundred reducers with planted nondeterminism: their process is killed, and another takes over."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.handle import WorldHandle
from holdfast.durable import inbox, journal
from holdfast.errors import ReplayDiverged
from holdfast.ops import verify
from holdfast.store.api import Store, Txn
from holdfast.world import catalog
from holdfast.world.catalog import Status, subject_of
from tests.process.conftest import LIMITS
from tests.process.watch import until
from tests.processes import Proc
from tests.world.unsteady import DIR, LOOKS, UNSTEADY, Poked, Steady, app

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.world.unsteady:app", "--lease-s", "2"]
EVENTS = 6
PATIENCE_S = 90


def processes(home: Path, files: Path, hash_seed: str, looks: str) -> Proc:
    """A worker that has hosted other worlds before, in a process with hashes of its own."""
    files.mkdir(exist_ok=True)
    env = {"PYTHONHASHSEED": hash_seed, LOOKS: looks, DIR: str(files)}
    return Proc.spawn([*UP, "--store", str(home)], env=env)


def heads(txn: Txn, ids: dict[str, str]) -> dict[str, int]:
    return {
        name: journal.head(txn, subject_of(app.universe, world_id)).height
        for name, world_id in ids.items()
    }


def parked(store: Store) -> dict[str, tuple[str, int]]:
    """World type → why it is parked, and at which height."""
    found = store.read(catalog.worlds, app.universe, "", 1000)
    return {
        one.type: (one.blocker.code, one.blocker.height)
        for one in found
        if one.status is Status.PARKED and one.blocker is not None
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_failover_verify_and_every_read_find_each_of_them(home: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    with contextlib.ExitStack() as running:
        store = running.enter_context(stores.open(home, limits=LIMITS))
        runtime = running.enter_context(app.open(store, roles=()))
        kinds = {"Steady": Steady, **{name: kind for name, (_, kind) in UNSTEADY.items()}}
        worlds: dict[str, WorldHandle] = {
            name: runtime.world(kind, "w") for name, kind in kinds.items()
        }
        ids = {name: world.create() for name, world in worlds.items()}
        with processes(home, files, "11", "7") as first:
            for n in range(EVENTS):
                runtime.send_many([(world, Poked(n)) for world in worlds.values()])
            until(
                lambda: set(store.read(heads, ids).values()) == {EVENTS},
                "all are handled",
                PATIENCE_S,
            )
            assert first.kill() == -signal.SIGKILL

        targets = [verify.Target(app.universe, world_id) for world_id in ids.values()]
        findings = verify.verify(store, targets, app="tests.world.unsteady:app")
        assert {one.world for one in findings if one.code != "replay_diverged"} == {"Steady/w"}
        assert [one.compared for one in findings if not one.code] == [EVENTS]

        for name, world in worlds.items():
            if name != "Steady":
                with pytest.raises(ReplayDiverged):
                    world.state()

        with processes(home, files, "22", "3"):
            runtime.send_many([(world, Poked(EVENTS)) for world in worlds.values()])
            until(lambda: parked(store).keys() == UNSTEADY.keys(), "all are parked", PATIENCE_S)
            until(
                lambda: worlds["Steady"].height() == EVENTS + 1, "the sound one goes on", PATIENCE_S
            )
        assert {code for code, _ in parked(store).values()} == {"replay_diverged"}
        assert all(1 <= height <= EVENTS for _, height in parked(store).values())
        now = store.read(heads, ids)
        assert now.pop("Steady") == EVENTS + 1
        assert set(now.values()) == {EVENTS}, "nothing was handled after the divergence"
        for name in UNSTEADY:
            assert store.read(inbox.depth, subject_of(app.universe, ids[name])) == 1
