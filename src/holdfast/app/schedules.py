"""Schedules of tasks and flows: declared by the app, or created at run time, and their handles."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from holdfast.app import flow_start, submission
from holdfast.app.flow_definition import Flow, FlowCall
from holdfast.app.schedule_options import ScheduleOptions
from holdfast.app.tasks import TaskCall
from holdfast.errors import Invalid
from holdfast.schedules import backfills, operations, queries
from holdfast.schedules.model import ScheduleDefinition
from holdfast.schedules.operations import UsedOccurrence
from holdfast.schedules.queries import ScheduleStatus
from holdfast.world.catalog import check_text

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime


class ScheduleHandle:
    """A schedule. The same actions as `holdfast schedules`."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self.name = name

    def __repr__(self) -> str:
        return f"<schedule {self.name}>"

    def status(self) -> ScheduleStatus:
        return self._runtime.store.read(queries.get_status, self._runtime.universe, self.name)

    def pause(self) -> bool:
        """Pause the schedule. Occurrences during the pause do not run. Returns whether it was active."""
        return self._set_paused(True)

    def resume(self) -> bool:
        return self._set_paused(False)

    def run_now(self) -> str | None:
        """Start an extra occurrence. Returns the id of its task or flow, None if it is queued or skipped."""
        runtime = self._runtime
        used: UsedOccurrence = runtime.store.transact(
            operations.run_now, runtime.universe, self.name, runtime.clock.wall_ns()
        )
        return used.row.target_id or None

    def backfill(
        self, start: datetime, end: datetime, *, dry_run: bool = False
    ) -> list[backfills.Backfilled]:
        """Start the occurrences from `start` on and before `end` that have not run."""
        runtime = self._runtime
        backfill = backfills.dry_run if dry_run else backfills.run
        wall_ns = runtime.clock.wall_ns()
        return backfill(runtime.store, runtime.universe, self.name, start, end, wall_ns=wall_ns)

    def delete(self) -> None:
        """Delete the schedule. Its tasks and flows continue."""
        backfills.delete(self._runtime.store, self._runtime.universe, self.name)

    def _set_paused(self, paused: bool) -> bool:
        runtime = self._runtime
        changed: bool = runtime.store.transact(
            operations.set_paused, runtime.universe, self.name, paused, runtime.clock.wall_ns()
        )
        return changed


def create(
    runtime: Runtime, name: str, target: Any, options: ScheduleOptions, key: str | None
) -> ScheduleHandle:
    if key is not None:
        check_text("key", key)
    definition = define(runtime, name, target, options)
    wall_ns = runtime.clock.wall_ns()
    runtime.store.transact(operations.create, runtime.universe, definition, key or "", wall_ns)
    return ScheduleHandle(runtime, name)


def find(runtime: Runtime, name: str) -> ScheduleHandle:
    """Return the handle of a schedule. Raise NotFound if there is none."""
    check_text("schedule", name)
    handle = ScheduleHandle(runtime, name)
    handle.status()
    return handle


def declare(runtime: Runtime) -> None:
    """Store the schedules that the app declares, if they changed."""
    definitions = [
        define(runtime, name, target, target.schedule)
        for name, target in runtime.app.schedules.items()
    ]
    if not runtime.store.read(queries.is_declared, runtime.universe, definitions):
        wall_ns = runtime.clock.wall_ns()
        runtime.store.transact(operations.declare, runtime.universe, definitions, wall_ns)


def define(
    runtime: Runtime, name: str, target: Any, options: ScheduleOptions
) -> ScheduleDefinition:
    """Build the definition of a schedule from a task or flow of the app."""
    check_text("schedule", name)
    every, zone, missed, overlap, args = options
    if isinstance(target, Flow | FlowCall):
        flow_call = flow_start.to_call(runtime, target)
        _refuse_options(name, {"key": flow_call.key, "tag": flow_call.tag})
        packed = flow_call.flow.pack(args, {})
        return ScheduleDefinition(name, every, zone, missed, overlap, packed, flow=flow_call.spec)
    call: TaskCall[Any, Any] = submission.to_call(runtime, target)
    _refuse_options(name, call.options)
    packed = call.task.pack(args, {})
    return ScheduleDefinition(name, every, zone, missed, overlap, packed, task=call.spec)


def _refuse_options(name: str, options: dict[str, Any]) -> None:
    """Raise Invalid for options that belong to a single submission, such as a key or a delay."""
    for option in ("key", "delay_s", "after", "limit_key", "tag"):
        if options.get(option):
            raise Invalid(
                what="schedule", name=name, option=option, why="a schedule takes no such option"
            )
