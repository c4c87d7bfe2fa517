"""`rt.why(…)`: why a subject does not move, as a store call that threads and coroutines run.

rt.why("world", "Account/ada")
rt.why(handle)                 # of a world, a task, a flow or a schedule
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.app.flow_handle import FlowHandle
from holdfast.app.schedules import ScheduleHandle
from holdfast.app.store_calls import Read, StoreCall
from holdfast.app.task_handle import TaskHandle
from holdfast.app.world_handle import WorldHandle
from holdfast.blockers.answer import WhyAnswer
from holdfast.blockers.explain import explain
from holdfast.errors import Invalid

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime


class Subject(NamedTuple):
    """The runtime, the kind and the id of a subject."""

    runtime: Runtime
    kind: str
    id: str


def subject_of(runtime: Runtime, of: Any, id: str | None) -> Subject:
    """Return the subject of a handle, or of a kind and an id."""
    if isinstance(of, str):
        if not isinstance(id, str):
            raise Invalid(what="id", found=repr(id)[:64], why="a kind needs the id of its subject")
        return Subject(runtime, of, id)
    if id is not None:
        raise Invalid(
            what="id",
            found=repr(id)[:64],
            why="the handle names the subject; give an id only with a kind",
        )
    if isinstance(of, WorldHandle):
        # The handle of a world in another universe has its own runtime.
        return Subject(of.runtime, "world", f"{of.type}/{of.name}")
    if isinstance(of, TaskHandle):
        return Subject(runtime, "task", of.id)
    if isinstance(of, FlowHandle):
        return Subject(runtime, "flow", of.id)
    if isinstance(of, ScheduleHandle):
        return Subject(runtime, "schedule", of.name)
    raise Invalid(what="subject", found=repr(of)[:64], expected="a kind and an id, or a handle")


def why_call(subject: Subject) -> StoreCall[WhyAnswer]:
    runtime, kind, id = subject
    args = (runtime.universe, kind, id, runtime.clock.wall_ns())
    found: WhyAnswer = yield Read(explain, args)
    return found
