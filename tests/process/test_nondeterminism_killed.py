"""A hundred reducers with planted nondeterminism: their process is killed and another process takes over."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.world_handle import WorldHandle
from holdfast.durable import inbox, journal
from holdfast.errors import ReplayDiverged
from holdfast.ops import world_replay
from holdfast.store.api import Store, Txn
from holdfast.world import catalog
from holdfast.world.catalog import WorldStatus, subject_of
from tests.process.conftest import LIMITS
from tests.process.watch import until
from tests.processes import Proc
from tests.world.nondeterminism import (
    DIR_VARIABLE,
    LOOKS_VARIABLE,
    NONDETERMINISTIC_WORLDS,
    Poked,
    Steady,
    app,
)

UP = [
    sys.executable,
    "-m",
    "holdfast.cli",
    "up",
    "tests.world.nondeterminism:app",
    "--lease-s",
    "2",
]
EVENTS = 6
WAIT_S = 90


def start_worker(home: Path, files: Path, hash_seed: str, looks: str) -> Proc:
    """A worker process with its own hash seed and its own count of hosted worlds."""
    files.mkdir(exist_ok=True)
    env = {"PYTHONHASHSEED": hash_seed, LOOKS_VARIABLE: looks, DIR_VARIABLE: str(files)}
    return Proc.spawn([*UP, "--store", str(home)], env=env)


def heads(txn: Txn, ids: dict[str, str]) -> dict[str, int]:
    return {
        name: journal.head(txn, subject_of(app.universe, world_id)).height
        for name, world_id in ids.items()
    }


def parked(store: Store) -> dict[str, tuple[str, int]]:
    """The parked worlds: type → code and height of the blocker."""
    found = store.read(catalog.list_worlds, app.universe, "", 1000)
    return {
        one.type: (one.blocker.code, one.blocker.height)
        for one in found
        if one.status is WorldStatus.PARKED and one.blocker is not None
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_failover_verify_and_reads_detect_nondeterministic_reducers(
    home: Path, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    with contextlib.ExitStack() as running:
        store = running.enter_context(stores.open(home, limits=LIMITS))
        runtime = running.enter_context(app.open(store, roles=()))
        kinds = {
            "Steady": Steady,
            **{name: kind for name, (_, kind) in NONDETERMINISTIC_WORLDS.items()},
        }
        worlds: dict[str, WorldHandle] = {
            name: runtime.world(kind, "w") for name, kind in kinds.items()
        }
        ids = {name: world.create() for name, world in worlds.items()}
        with start_worker(home, files, "11", "7") as first:
            for n in range(EVENTS):
                runtime.send_many([(world, Poked(n)) for world in worlds.values()])
            until(
                lambda: set(store.read(heads, ids).values()) == {EVENTS},
                "all are handled",
                WAIT_S,
            )
            assert first.kill() == -signal.SIGKILL

        targets = [world_replay.WorldTarget(app.universe, world_id) for world_id in ids.values()]
        findings = world_replay.verify_worlds(store, targets, app="tests.world.nondeterminism:app")
        assert {one.world for one in findings if one.code != "replay_diverged"} == {"Steady/w"}
        assert [one.compared for one in findings if not one.code] == [EVENTS]

        for name, world in worlds.items():
            if name != "Steady":
                with pytest.raises(ReplayDiverged):
                    world.state()

        with start_worker(home, files, "22", "3"):
            runtime.send_many([(world, Poked(EVENTS)) for world in worlds.values()])
            until(
                lambda: parked(store).keys() == NONDETERMINISTIC_WORLDS.keys(),
                "all are parked",
                WAIT_S,
            )
            until(lambda: worlds["Steady"].height() == EVENTS + 1, "the sound one goes on", WAIT_S)
        assert {code for code, _ in parked(store).values()} == {"replay_diverged"}
        assert all(1 <= height <= EVENTS for _, height in parked(store).values())
        now = store.read(heads, ids)
        assert now.pop("Steady") == EVENTS + 1
        assert set(now.values()) == {EVENTS}, "nothing was handled after the divergence"
        for name in NONDETERMINISTIC_WORLDS:
            assert store.read(inbox.depth, subject_of(app.universe, ids[name])) == 1
