"""The order of a step and its compensation in a flow that is cancelled while the step runs."""

from typing import Any

import holdfast as hf
from tests.flows.test_steps import app_of, failure


def run_cancelled(make_rig: Any, *, undo_first: bool) -> list[str]:
    """Cancel a flow while its `def` step runs, and return what the outside saw."""
    seen: list[str] = []
    handles: list[Any] = []

    def charge() -> None:
        handles[0].cancel()
        seen.append("charge")

    def refund() -> None:
        seen.append("refund")

    @hf.flow
    async def order() -> None:
        if undo_first:
            hf.undo(refund)
        await hf.step(charge)
        if not undo_first:
            hf.undo(refund)
        await hf.sleep(60)

    rig = make_rig(app_of(order))
    handles.append(rig.start(order))
    assert failure(rig, handles[0]).state == "CANCELLED"
    return seen


def test_undo_before_the_step_runs_if_the_flow_is_cancelled_during_it(make_rig: Any) -> None:
    assert run_cancelled(make_rig, undo_first=True) == ["charge", "refund"]


def test_undo_behind_the_step_is_not_reached_if_the_flow_is_cancelled_during_it(
    make_rig: Any,
) -> None:
    assert run_cancelled(make_rig, undo_first=False) == ["charge"]
