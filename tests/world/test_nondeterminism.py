"""Restore of worlds with nondeterministic reducers in the process that ran them. `tests/process`
runs all of them in processes that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ReplayDiverged
from holdfast.world import restore
from holdfast.world.host import Budgets, SnapshotPolicy
from tests.world import nondeterminism
from tests.world.nondeterminism import NONDETERMINISTIC_WORLDS, Poked, Steady
from tests.world.rig import WorldRig

MODULES = ("holdfast.world.restore", "holdfast.world.reducer")

CHANGING_PER_CALL = [
    name for name, (source, _) in NONDETERMINISTIC_WORLDS.items() if source.changes_per_call
]
TWO_PER_CYCLE = Budgets(max_inbox_batch=2)


def test_there_are_a_hundred_nondeterministic_worlds() -> None:
    assert len(NONDETERMINISTIC_WORLDS) == 100
    assert len(CHANGING_PER_CALL) >= 70


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorldRig:
    monkeypatch.setenv(nondeterminism.DIR_VARIABLE, str(tmp_path))
    return WorldRig(nondeterminism.app)


@pytest.mark.parametrize("name", CHANGING_PER_CALL)
def test_restore_of_a_nondeterministic_world_parks_it(rig: WorldRig, name: str) -> None:
    world = rig.world(NONDETERMINISTIC_WORLDS[name][1], "w")
    for n in range(6):
        world.send(Poked(n))
    rig.run(rig.worker(budgets=TWO_PER_CYCLE, snapshots=SnapshotPolicy(4)))
    assert (rig.head(world).height, rig.baseline(world)) == (6, 4)
    # Replay from the snapshot, and from the first entry.
    for read, height in ((world.state, 6), (lambda: world.state(at=1), 2)):
        with pytest.raises(ReplayDiverged) as error:
            read()
        assert (error.value.fields["what"], error.value.fields["height"]) == ("state", height)
    with pytest.raises(ReplayDiverged):
        rig.read(restore.replay_and_check, rig.world_spec(world))
    # A read at the snapshot replays no entry and does not diverge.
    assert world.state(at=4) is not None
    rig.advance_clock()
    world.send(Poked(7))
    rig.run(rig.worker("A", "2"))
    blocker = rig.record(world).blocker
    assert blocker is not None
    assert (blocker.code, blocker.height) == ("replay_diverged", 6)
    assert (rig.head(world).height, rig.inbox_depth(world)) == (6, 1)


def test_deterministic_world_replays_after_restore(rig: WorldRig) -> None:
    world = rig.world(Steady, "w")
    for n in range(6):
        world.send(Poked(n))
    rig.run(rig.worker(budgets=TWO_PER_CYCLE, snapshots=SnapshotPolicy(4)))
    rig.advance_clock()
    world.send(Poked(7))
    rig.run(rig.worker("A", "2"))
    assert rig.blocker_code(world) == ""
    assert rig.read(restore.replay_and_check, rig.world_spec(world)).compared == 7
