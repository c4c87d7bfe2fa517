"""Why a schedule starts nothing: it is paused or stopped, waits for its time, or for the last occurrence."""

from __future__ import annotations

from holdfast.blockers.answer import WhyAnswer, answer, blocker
from holdfast.blockers.timers import due_blocker
from holdfast.schedules.queries import get_status
from holdfast.store.api import Txn


def explain(txn: Txn, universe: str, id: str, wall_ns: int) -> WhyAnswer:
    status = get_status(txn, universe, id)
    names = {"schedule": id, "universe": universe}
    if status.state == "stopped":
        found = [blocker("schedule_stopped", f"its rule failed: {status.error}", names=names)]
    elif status.state == "paused":
        found = [blocker("schedule_paused", "paused by an operator", names=names)]
    else:
        found = []
        if status.queued:
            text = f"{status.queued:,} occurrences wait for the end of {status.kind} {status.last}"
            last = f"holdfast why {status.kind} {status.last} --universe {universe}"
            found.append(
                blocker("waits_for_last_occurrence", text, status.last_ns, names={"last": last})
            )
        if status.next_ns is not None:
            found.append(due_blocker(status.next_ns, wall_ns, "the next occurrence"))
    return answer("schedule", id, status.state, found)
