"""Checker of schedules: X3, on committed operations and on the rows of each audit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.sim.history import History, HistoryEvent
from holdfast.sim.row_decoder_flows import UNIVERSE
from holdfast.sim.row_decoder_schedules import QUEUED, SKIPPED, STARTED
from holdfast.sim.row_decoder_tasks import open_tasks
from tests.simulation.violation import Violation

Plain = dict[str, Any]

# No operation asks for a transition that the state table of occurrences does not have.
ILLEGAL = "illegal_transition"
BACKFILL, DUE = "backfill", "due"
COMPLETED_FLOW = 4


class _ScheduleReplay:
    """Replays the schedule operations of one life of the store."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        # The task or flow of each started occurrence, by (schedule, occurrence).
        self.started: dict[tuple[str, int], tuple[int, bool]] = {}
        # The pauses of each schedule, as (from, until) in store time.
        self.pauses: dict[str, list[list[int]]] = {}

    def step(self, event: HistoryEvent) -> None:
        if event.op == "schedules.set_paused" and event.applied and event.value:
            pauses = self.pauses.setdefault(event.args["name"], [])
            if event.args["paused"]:
                pauses.append([event.at_ns, 1 << 63])
            elif pauses:
                pauses[-1][1] = event.at_ns
        elif event.op.startswith("schedules.") and event.code == ILLEGAL:
            what = f"the state table refuses {event.op}: {event.value}"
            self.found.append(Violation("X3", what, event))
        elif event.op == "audit":
            rows = event.value.get("schedules", {}).get(UNIVERSE)
            if rows is not None:
                self.found += [
                    Violation("X3", what, event) for what in self._check_audit(rows, event.value)
                ]

    def _check_audit(self, rows: Plain, audit: Plain) -> Iterator[str]:
        tasks = audit.get("tasks", {}).get(UNIVERSE, {"bodies": {}, "statuses": {}})
        flows = audit.get("flows", {}).get(UNIVERSE, {"bodies": {}, "heads": {}})
        running = {(seq, False) for seq in open_tasks(tasks)} | {
            (seq, True) for seq, head in flows["heads"].items() if head["state"] < COMPLETED_FLOW
        }
        for name, occurrences in rows["occurrences"].items():
            schedule = rows["schedules"].get(name)
            if schedule is None:
                continue
            yield from self._check_uses(name, occurrences, schedule["definition"]["overlap"])
            yield from _check_queue(name, schedule, occurrences, rows["queue"].get(name, []))
            targets = [
                (row["seq"], row["is_flow"])
                for row in occurrences.values()
                if row["state"] == STARTED
            ]
            if len(targets) != len(set(targets)):
                yield f"two occurrences of {name} have one task: {targets}"
            is_open = [target for target in targets if target in running]
            if schedule["definition"]["overlap"] != "allow" and len(is_open) > 1:
                yield f"the occurrences {is_open} of {name} overlap"
            queued = any(row["state"] == QUEUED for row in occurrences.values())
            if queued and not is_open:
                yield f"the queued occurrences of {name} wait for nothing"
        yield from _check_targets(rows, tasks, flows)

    def _check_uses(self, name: str, occurrences: dict[int, Plain], overlap: str) -> Iterator[str]:
        for at_ns, row in occurrences.items():
            if row["state"] == STARTED:
                target = (row["seq"], row["is_flow"])
                if self.started.setdefault((name, at_ns), target) != target:
                    yield f"the occurrence {at_ns} of {name} started again"
            elif (name, at_ns) in self.started:
                yield f"the started occurrence {at_ns} of {name} is in state {row['state']}"
            if row["cause"] == BACKFILL and row["state"] == SKIPPED:
                yield f"the backfilled occurrence {at_ns} of {name} was skipped"
            if row["state"] == SKIPPED and not row["reason"]:
                yield f"the occurrence {at_ns} of {name} was skipped without a reason"
            # An occurrence that was queued starts later, also in a pause.
            waited = row["state"] == STARTED and overlap == "queue"
            if row["cause"] == DUE and not waited:
                paused = self.pauses.get(name, [])
                if any(start < row["decided_ns"] < end for start, end in paused):
                    yield f"the occurrence {at_ns} of the paused schedule {name} was used"


def _check_queue(
    name: str, schedule: Plain, occurrences: dict[int, Plain], queue: list[int]
) -> Iterator[str]:
    queued = sorted(at_ns for at_ns, row in occurrences.items() if row["state"] == QUEUED)
    if sorted(queue) != queued or schedule["queued"] != len(queued):
        yield f"{name} has the queue {sorted(queue)}, and the queued occurrences {queued}"


def _check_targets(rows: Plain, tasks: Plain, flows: Plain) -> Iterator[str]:
    """Each task or flow with the key of an occurrence is the one of that occurrence, and the only one."""
    expected: dict[tuple[int, bool], str] = {}
    for name, occurrences in rows["occurrences"].items():
        for row in occurrences.values():
            if row["state"] == STARTED:
                expected[row["seq"], row["is_flow"]] = name
    found = {
        (seq, is_flow): body["key"]
        for is_flow, bodies in ((False, tasks["bodies"]), (True, flows["bodies"]))
        for seq, body in bodies.items()
        if "@" in (body.get("key") or "")
    }
    for target, key in found.items():
        if expected.get(target) != key.partition("@")[0]:
            yield f"the task or flow {target} with the key {key} belongs to no occurrence"
    if len(set(found.values())) != len(found):
        yield f"two tasks or flows have the key of one occurrence: {sorted(found.values())}"


def findings(history: History) -> list[Violation]:
    """Return all violations that the replay of each life finds, in order."""
    found: list[Violation] = []
    for life in history.store_lives():
        if any(event.op.startswith("schedules.") for event in life):
            replay = _ScheduleReplay()
            for event in life:
                replay.step(event)
            found += replay.found
    return found
