"""Checkers of the start and end of a run: B1 at boot, T2 and R3 at rest, and A2 for rates."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.sim.history import History, HistoryEvent
from tests.simulation.check_queue import CALENDAR_TIMERS
from tests.simulation.violation import Violation

SECOND_NS = 1_000_000_000


def check_b1(history: History) -> Iterator[Violation]:
    """A wrong schema marker is refused and nothing is written. A missing marker requires
    bootstrap."""
    for event in history:
        if event.op != "boot":
            continue
        marker, args, value = event.args["marker"], event.args, event.value
        if marker == args["expected"]:
            expected = "opened"
        elif marker is None:
            expected = "opened" if args["bootstrap"] else "not_found"
        else:
            expected = "schema_mismatch"
        if value["outcome"] != expected:
            yield Violation("B1", f"marker {marker!r}: {value['outcome']}, not {expected}", event)
        elif value["changed"] and expected != "opened":
            yield Violation("B1", f"marker {marker!r}: refused, but rows were changed", event)


def check_t2(history: History) -> Iterator[Violation]:
    """After faults have stopped and the run is at rest, no timer is overdue."""
    for audit in _final_audits(history):
        wall_ns = audit.args.get("wall_ns", audit.at_ns)
        for queue, rows in audit.value["queues"].items():
            now_ns = wall_ns if queue.endswith(CALENDAR_TIMERS) else audit.at_ns
            for seq, row in rows["items"].items():
                if 0 < row["not_before_ns"] <= now_ns - history.config("rest_ns", 0):
                    yield Violation("T2", f"{queue}/{seq}: due, and never fired", audit)


def check_a2(history: History) -> Iterator[Violation]:
    """Token blocks of a rate do not overlap, so no second holds more tokens than the rate
    allows."""
    for life in history.store_lives():
        ends: dict[str, int] = {}
        for event in life:
            if event.op != "rate.grant" or not event.applied:
                continue
            queue, block = event.args["queue"], event.value
            if block["from_ns"] < max(ends.get(queue, 0), event.at_ns):
                yield Violation("A2", f"{queue}: tokens that another has, or had", event)
            if block["slot_ns"] * event.args["rate_per_s"] < SECOND_NS:
                yield Violation("A2", f"{queue}: more tokens in a second than the rate", event)
            ends[queue] = block["from_ns"] + block["tokens"] * block["slot_ns"]


def check_r3(history: History) -> Iterator[Violation]:
    """After faults have stopped, no runnable work waits beyond the limit."""
    for event in history:
        if event.op == "quiet" and not event.value:
            yield Violation("R3", f"still waiting: {event.args['waiting']}", event)


def _final_audits(history: History) -> list[HistoryEvent]:
    audits = [event for event in history if event.op == "audit"]
    return audits[-1:] if any(event.op == "quiet" for event in history) else []
