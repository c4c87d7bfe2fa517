"""The callbacks of flows in task operations: the end of a child task, the death of an activation task.

`tasks.owner_callbacks` imports this module by the owner's name when a task of a flow ends.
"""

from __future__ import annotations

from holdfast.flows import children
from holdfast.flows.operations import finish
from holdfast.tasks.model import TaskStatusRow
from holdfast.tasks.unit_of_work import UnitOfWork


def on_end(unit: UnitOfWork, listener: bytes, status: TaskStatusRow) -> None:
    """Record the outcome of a child task in the flow that waits for it."""
    children.on_task_end(unit, listener, status)


def on_dead(unit: UnitOfWork, args: bytes, seq: int, reason: str) -> None:
    """End the flow of an activation task as DEAD, because the task is DEAD."""
    children.on_activation_dead(unit, args, seq, reason, finish)
