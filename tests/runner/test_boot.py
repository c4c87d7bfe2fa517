from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.durable import queue
from holdfast.errors import IllegalTransition, Invalid
from holdfast.runner.boot import (
    RUNNER_TRANSITIONS,
    RunnerEvent,
    RunnerState,
    check_key_spaces,
    key_spaces,
)
from tests.runner.rig import QUEUE, RunnerRig

MODULES = ("holdfast.runner.boot", "holdfast.runner.runner")

LEGAL = {
    (RunnerState.STOPPED, RunnerEvent.BOOT): RunnerState.RUNNING,
    (RunnerState.RUNNING, RunnerEvent.STOP): RunnerState.STOPPING,
    (RunnerState.STOPPING, RunnerEvent.HALT): RunnerState.STOPPED,
}


def test_runner_transitions_are_exactly_boot_stop_and_halt() -> None:
    for state, event, after in RUNNER_TRANSITIONS.pairs():
        assert after is LEGAL.get((state, event))
    assert not RUNNER_TRANSITIONS.unreachable()


def test_check_key_spaces_accepts_the_schema() -> None:
    check_key_spaces(key_spaces())


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
def test_check_key_spaces_rejects_gaps_duplicates_and_a_wrong_first_space(
    numbers: dict[str, int],
) -> None:
    with pytest.raises(Invalid) as caught:
        check_key_spaces(numbers)
    assert caught.value.what == "key spaces"


def test_second_boot_raises_illegal_transition_and_changes_nothing(rig: RunnerRig) -> None:
    runner = rig.runner()
    with pytest.raises(IllegalTransition):
        runner.boot()
    assert runner.state is RunnerState.RUNNING


def test_boot_after_shutdown_has_a_new_owner(rig: RunnerRig) -> None:
    runner = rig.runner()
    first = runner.owner
    runner.shutdown()
    runner.boot()
    assert runner.state is RunnerState.RUNNING
    assert runner.owner != first


def test_rebooted_runner_does_not_settle_claims_of_its_former_owner(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner()
    rig.store.transact(queue.claim, QUEUE, runner.owner, 1, S, budget=queue.RetryBudget())
    runner.shutdown()
    runner.boot()
    assert runner.tick().claimed == 0
    rig.clock.advance(2 * S)
    assert runner.tick().done == 1
    assert rig.handled[0].attempt == 2
