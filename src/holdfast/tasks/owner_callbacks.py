"""Callbacks from task operations to the component that owns a task.

A component in a higher layer owns tasks (`TaskSpec.owner`) or listens to their end (`dependents.listen`). The table
names its module, so that the operation imports it only for such a task, in the process that applies commits. The
callbacks run inside the open unit of work.

    on_end(unit, listener, status)     a task with a listener ended
    on_dead(unit, args, seq, reason)   a task of this owner is DEAD
    on_flow_end(unit, name)            a flow that a schedule started ended; the unit is that of the flow operation
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    "flows": "holdfast.flows.task_callbacks",
    "schedules": "holdfast.schedules.end_callbacks",
}


def callbacks_of(owner: str) -> Any:
    """Return the module with the callbacks of an owner."""
    return importlib.import_module(MODULES[owner])
