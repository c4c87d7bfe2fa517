"""Request body schemas of the task routes. Unknown fields are rejected.

A single task or report is the body itself; several are a list in one field.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType, field

from holdfast.errors import Invalid
from holdfast.ops.http.json_values import RequestBody

WAIT_S_MAX = 60.0


class TaskOptionsBody(RequestBody):
    queue: str | None = None
    priority: int | None = None
    key: str = ""
    limit_key: str = ""
    tag: str = ""
    delay_s: float = 0.0
    # Ids of tasks that must complete first; in a batch also positions of earlier tasks, from 0.
    after: list[str | int] = field(default_factory=list)
    lease_s: float | None = None
    attempts: int | None = None
    expiries_max: int | None = None
    execution_window_s: float | None = None
    retain_s: float | None = None


class SessionBody(RequestBody):
    token: str = ""


class NewTaskBody(RequestBody):
    name: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: TaskOptionsBody = field(default_factory=TaskOptionsBody)


class SubmissionBody(RequestBody):
    """A single task, or several in `tasks`."""

    name: str | UnsetType = UNSET
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: TaskOptionsBody = field(default_factory=TaskOptionsBody)
    tasks: list[NewTaskBody] | UnsetType = UNSET

    def new_tasks(self) -> list[NewTaskBody]:
        """Return the new tasks. Refuse a body that has neither one task nor several, or both."""
        if self.tasks is UNSET:
            if self.name is UNSET:
                raise Invalid(what="body", why="needs name for one task, or tasks for several")
            return [NewTaskBody(self.name, self.args, self.kwargs, self.options)]
        if self != SubmissionBody(tasks=self.tasks):
            # Arguments or options next to `tasks` would be ignored.
            raise Invalid(
                what="body", why="name for one task and tasks for several exclude each other"
            )
        return self.tasks


class LeaseBody(RequestBody):
    worker: str
    queues: list[str] = field(default_factory=lambda: ["default"])
    # Lease only tasks with these names; empty for all.
    names: list[str] = field(default_factory=list)
    limit: int = 1
    wait_s: float = 0.0
    # Accept a quarantined task, which is leased alone because it may have killed its workers.
    alone: bool = True


class LeaseHeartbeatBody(RequestBody):
    lease: str
    progress: Any = None
    progressed: bool = False


class HeartbeatBody(RequestBody):
    leases: list[LeaseHeartbeatBody]


class CompletionReportBody(RequestBody):
    lease: str
    result: Any = None


class CompletionBody(RequestBody):
    """A single report, or several in `reports`."""

    worker: str
    lease: str | UnsetType = UNSET
    result: Any = None
    reports: list[CompletionReportBody] | UnsetType = UNSET


class FailureReportBody(RequestBody):
    lease: str
    reason: str = ""
    error: str = ""
    end: str = "failed"


class FailureBody(RequestBody):
    """A single report, or several in `reports`."""

    worker: str
    lease: str | UnsetType = UNSET
    reason: str = ""
    error: str = ""
    end: str = "failed"
    reports: list[FailureReportBody] | UnsetType = UNSET


class CancelBody(RequestBody):
    reason: str = "cancelled"


class EmptyBody(RequestBody):
    pass


def check_wait(wait_s: float) -> None:
    if not 0 <= wait_s <= WAIT_S_MAX:
        raise Invalid(what="wait_s", found=wait_s, min=0, max=WAIT_S_MAX)
