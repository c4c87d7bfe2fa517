"""What may be sent to the task routes, field by field; any other field is refused.

Where one task or one report is sent most of the time, it stands in the body itself; many are a list.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType, field

from holdfast.ops.http.values import Document


class Options(Document):
    queue: str | None = None
    priority: int | None = None
    key: str = ""
    limit_key: str = ""
    delay_s: float = 0.0
    # Ids of tasks that have to complete first; in a batch also positions of earlier ones, from 0.
    after: list[str | int] = field(default_factory=list)
    lease_s: float | None = None
    attempts: int | None = None
    expiries_max: int | None = None
    execution_window_s: float | None = None
    retain_s: float | None = None


class NewTask(Document):
    name: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=Options)


class Submission(Document):
    """One task, or `tasks`."""

    name: str | UnsetType = UNSET
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    tasks: list[NewTask] | UnsetType = UNSET


class LeaseRequest(Document):
    worker: str
    queues: list[str] = field(default_factory=lambda: ["default"])
    # Only tasks of these names, if there are any.
    names: list[str] = field(default_factory=list)
    limit: int = 1
    wait_s: float = 0.0
    # Whether it may be one that is granted by itself only, because it may have killed its workers.
    alone: bool = True


class Beat(Document):
    lease: str
    progress: Any = None
    progressed: bool = False


class Heartbeat(Document):
    leases: list[Beat]


class Done(Document):
    lease: str
    result: Any = None


class Completion(Document):
    """One lease, or `reports`."""

    worker: str
    lease: str | UnsetType = UNSET
    result: Any = None
    reports: list[Done] | UnsetType = UNSET


class NotDone(Document):
    lease: str
    reason: str = ""
    error: str = ""
    end: str = "failed"


class Failure(Document):
    """One lease, or `reports`."""

    worker: str
    lease: str | UnsetType = UNSET
    reason: str = ""
    error: str = ""
    end: str = "failed"
    reports: list[NotDone] | UnsetType = UNSET


class Cancel(Document):
    reason: str = "cancelled"


class Nothing(Document):
    pass
