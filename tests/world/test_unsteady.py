"""Reducers with planted nondeterminism, restored in the process that ran them. `tests/process` has all
of them in processes that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ReplayDiverged
from holdfast.world import restore
from holdfast.world.host import Budgets, SnapshotPolicy
from tests.world import unsteady
from tests.world.rig import Rig
from tests.world.unsteady import UNSTEADY, Poked, Steady

MODULES = ("holdfast.world.restore", "holdfast.world.kernel")

MOVING = [name for name, (source, _) in UNSTEADY.items() if source.moves]
TWO = Budgets(max_inbox_batch=2)


def test_there_are_a_hundred() -> None:
    assert len(UNSTEADY) == 100
    assert len(MOVING) >= 70


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setenv(unsteady.DIR, str(tmp_path))
    return Rig(unsteady.app)


@pytest.mark.parametrize("name", MOVING)
def test_a_restore_parks_it_and_no_read_answers(rig: Rig, name: str) -> None:
    world = rig.world(UNSTEADY[name][1], "w")
    for n in range(6):
        world.send(Poked(n))
    rig.run(rig.worker(budgets=TWO, snapshots=SnapshotPolicy(4)))
    assert (rig.head(world).height, rig.baseline(world)) == (6, 4)
    # On top of the snapshot, and from the beginning.
    for read, height in ((world.state, 6), (lambda: world.state(at=1), 2)):
        with pytest.raises(ReplayDiverged) as error:
            read()
        assert (error.value.fields["what"], error.value.fields["height"]) == ("state", height)
    with pytest.raises(ReplayDiverged):
        rig.read(restore.check, rig.kernel(world))
    # At the snapshot nothing is repeated, and nothing is in doubt.
    assert world.state(at=4) is not None
    rig.expire()
    world.send(Poked(7))
    rig.run(rig.worker("A", "2"))
    blocker = rig.record(world).blocker
    assert blocker is not None
    assert (blocker.code, blocker.height) == ("replay_diverged", 6)
    assert (rig.head(world).height, rig.depth(world)) == (6, 1)


def test_the_same_world_without_a_source_goes_on(rig: Rig) -> None:
    world = rig.world(Steady, "w")
    for n in range(6):
        world.send(Poked(n))
    rig.run(rig.worker(budgets=TWO, snapshots=SnapshotPolicy(4)))
    rig.expire()
    world.send(Poked(7))
    rig.run(rig.worker("A", "2"))
    assert rig.blocker(world) == ""
    assert rig.read(restore.check, rig.kernel(world)).compared == 7
