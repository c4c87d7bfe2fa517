from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.durable import queue
from holdfast.errors import IllegalTransition, Invalid
from holdfast.runner.boot import LIFE, Event, State, check_spaces, spaces
from tests.runner.rig import QUEUE, Rig

MODULES = ("holdfast.runner.boot", "holdfast.runner.runner")

LEGAL = {
    (State.STOPPED, Event.BOOT): State.RUNNING,
    (State.RUNNING, Event.STOP): State.STOPPING,
    (State.STOPPING, Event.HALT): State.STOPPED,
}


def test_the_life_of_a_runner_is_a_circle_and_nothing_else_is_legal() -> None:
    for state, event, after in LIFE.pairs():
        assert after is LEGAL.get((state, event))
    assert not LIFE.unreachable()


def test_our_own_key_spaces_are_accepted() -> None:
    check_spaces(spaces())


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"app_state": 1, "outcome": 0},
        {"app_state": 0, "outcome": 2},
        {"app_state": 0, "outcome": 1, "blob": 1},
        {"app_state": 0, "outcome": -1},
        {"outcome": 0, "blob": 1},
    ],
)
def test_a_layout_with_a_gap_a_duplicate_or_another_first_is_refused(
    numbers: dict[str, int],
) -> None:
    with pytest.raises(Invalid) as refusal:
        check_spaces(numbers)
    assert refusal.value.what == "key spaces"


def test_booting_twice_is_illegal_and_changes_nothing(rig: Rig) -> None:
    runner = rig.runner()
    with pytest.raises(IllegalTransition):
        runner.boot()
    assert runner.state is State.RUNNING


def test_a_runner_can_be_booted_again_and_is_another_owner_then(rig: Rig) -> None:
    runner = rig.runner()
    first = runner.owner
    runner.shutdown()
    runner.boot()
    assert runner.state is State.RUNNING
    assert runner.owner != first


def test_what_a_former_self_claimed_is_not_settled_by_its_successor(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.store.transact(queue.claim, QUEUE, runner.owner, 1, S, budget=queue.Budget())
    runner.shutdown()
    runner.boot()
    assert runner.tick().claimed == 0
    rig.clock.advance(2 * S)
    assert runner.tick().done == 1
    assert rig.handled[0].attempt == 2
