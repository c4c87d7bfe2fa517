"""The callbacks of schedules: the end of a task or flow starts the next queued occurrence, in the same commit.

`tasks.owner_callbacks` imports this module when such a task or flow ends.
"""

from __future__ import annotations

from holdfast.flows.unit_of_work import FlowUnit
from holdfast.schedules.unit_of_work import ScheduleUnit
from holdfast.tasks.model import TaskStatusRow
from holdfast.tasks.unit_of_work import UnitOfWork


def on_end(unit: UnitOfWork, listener: bytes, status: TaskStatusRow) -> None:
    """Start the next queued occurrence of the schedule `listener`, because the task of an earlier one has ended."""
    flows = FlowUnit(unit.txn, unit.keys.universe, unit)
    on_flow_end(flows, listener.decode())
    flows.close()


def on_flow_end(unit: FlowUnit, name: str) -> None:
    """Start the next queued occurrence of the schedule `name`, because its running flow has ended."""
    schedules = ScheduleUnit(unit.txn, unit.universe, unit)
    schedules.start_queued(name)
    schedules.close()
