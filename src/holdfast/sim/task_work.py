"""Work of tasks, flows and schedules that a simulation has to finish before it is quiet.

remaining   a task that is ready or leased, a task or flow that waits for its next attempt, and
            everything that is due
quiet       a delayed task before its time, a task that waits for another one, a flow that waits
            for an event, a sleep or a child
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast.flows.model import RETRY_NAME
from holdfast.flows.model import keys_of as flow_keys_of
from holdfast.schedules import operations as schedule_operations
from holdfast.sim.row_decoder_tasks import open_tasks
from holdfast.store import tuples
from holdfast.store.api import Txn


class DueWork(NamedTuple):
    """Work that is due at a store time. `is_retry` marks another attempt, `is_occurrence` that of a schedule."""

    name: str
    due_ns: int
    is_retry: bool = False
    is_occurrence: bool = False


def task_work(tasks: dict[str, Any]) -> Iterator[DueWork]:
    """The unfinished tasks of a universe that wait only for their start time."""
    for seq in open_tasks(tasks):
        body, status = tasks["bodies"][seq], tasks["statuses"].get(seq, {})
        if status.get("waits") and status.get("state") == 0:
            continue
        due_ns = 0 if status.get("state") == 1 else status.get("not_before_ns", 0)
        due_ns = due_ns or body.get("not_before_ns", 0)
        is_retry = bool(status.get("state") == 1 or status.get("failures"))
        yield DueWork(f"task {seq}", due_ns, is_retry)


def flow_work(txn: Txn, universe: str) -> list[DueWork]:
    """The sleeps, timeouts and retries of flows."""
    prefix = flow_keys_of(universe).due
    found = []
    for key, _ in txn.scan(prefix, tuples.prefix_end(prefix)):
        due_ns, seq, name, occurrence = tuples.unpack(key)[-4:]
        assert isinstance(due_ns, int)
        step = f"{name!s}#{occurrence!s}"
        found.append(DueWork(f"flow {seq!s} {step}", due_ns, name == RETRY_NAME))
    return found


def schedule_work(txn: Txn, universe: str, ahead_ns: int) -> list[DueWork]:
    """The next occurrence of a schedule. `ahead_ns` is the wall clock minus store time."""
    due_ns = schedule_operations.next_due_ns(txn, universe)
    return [] if due_ns is None else [DueWork("schedule", due_ns - ahead_ns, is_occurrence=True)]
