"""The links of the OpenAPI document: how a value of a request or answer names the subject of a following request.

    POST /v1/worlds  →  {type}/{name} of its answer  →  every route under /v1/worlds/{type}/{name}
    POST /v1/tasks   →  {id} of its answer           →  every route under /v1/tasks/{id}

A source is an operation whose answer names a subject. Each source has a link to each operation of the subject. A
sequence is a pair of operations on one subject that belong together, such as a pause and a resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class LinkedSubject(NamedTuple):
    """`paths` begin the paths of its operations. `sources` have the pointer in the answer for each path parameter."""

    paths: tuple[str, ...]
    sources: Mapping[str, Mapping[str, str]]


class LinkedRoute(NamedTuple):
    operation_id: str
    path: str

    @property
    def parameters(self) -> list[str]:
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


_WORLD = {"type": "/type", "name": "/name"}
_ID = {"id": "/id"}
SUBJECTS = (
    LinkedSubject(
        ("/v1/worlds/{type}/{name}", "/v1/why/world/{type}/{name}"),
        {
            "create_world": _WORLD,
            "fork_world": _WORLD,
            "world_fork": _WORLD,
            "world_create_from_seed": _WORLD,
            "list_worlds": {"type": "/items/0/type", "name": "/items/0/name"},
        },
    ),
    LinkedSubject(
        ("/v1/tasks/{id}",),
        {"submit_tasks": _ID, "redrive_task": _ID, "list_tasks": {"id": "/tasks/0/id"}},
    ),
    LinkedSubject(
        ("/v1/flows/{id}",),
        {
            "start_flow": _ID,
            "fork_flow": _ID,
            "redrive_flow": {"id": "/flow"},
            "list_flows": {"id": "/items/0/id"},
        },
    ),
    LinkedSubject(
        ("/v1/schedules/{name}",),
        {"create_schedule": {"name": "/name"}, "list_schedules": {"name": "/items/0/name"}},
    ),
    LinkedSubject(("/v1/jobs/{id}",), {"create_job": _ID, "list_jobs": {"id": "/items/0/id"}}),
    LinkedSubject(("/v1/queues/{queue}",), {"list_queues": {"queue": "/queues/0/queue"}}),
    LinkedSubject(("/v1/effects/{intent}",), {"list_effects": {"intent": "/items/0/intent"}}),
    LinkedSubject(("/v1/dead/{queue}",), {"list_dead_queues": {"queue": "/items/0/queue"}}),
    LinkedSubject(
        ("/v1/dead/{queue}/{seq}",),
        {"list_dead_letters": {"queue": "/items/0/queue", "seq": "/items/0/seq"}},
    ),
    LinkedSubject(
        ("/v1/errors/{kind}/{group}",),
        {"list_error_groups": {"kind": "/items/0/kind", "group": "/items/0/group"}},
    ),
    LinkedSubject(("/v1/runs/{run}",), {"list_runs": {"run": "/items/0/run_id"}}),
    LinkedSubject(("/v1/workers/{worker}",), {"list_workers": {"worker": "/items/0/worker"}}),
    LinkedSubject(
        ("/v1/dispatches/{request}",), {"list_dispatches": {"request": "/items/0/request_id"}}
    ),
)
# Both operations have the same path parameters.
SEQUENCES = (
    ("send_world_event", "fork_world"),
    ("send_world_event", "show_world_state"),
    ("pause_world", "resume_world"),
    ("pin_world", "unpin_world"),
    ("delete_world", "purge_world"),
    ("purge_world", "show_world"),
    ("show_task", "cancel_task"),
    ("cancel_task", "redrive_task"),
    ("send_flow_event", "show_flow"),
    ("cancel_flow", "redrive_flow"),
    ("pause_schedule", "resume_schedule"),
    ("run_schedule_now", "delete_schedule"),
    ("pause_queue", "resume_queue"),
    ("drain_worker", "undrain_worker"),
    ("cancel_job", "show_job"),
)
# A worker reports the task that it has leased.
_LEASED = {
    "worker": "$request.body#/worker",
    "lease": "$response.body#/tasks/0/lease",
}
BODIES = (("lease_tasks", "complete_tasks", _LEASED), ("lease_tasks", "fail_tasks", _LEASED))


def links_by_operation(routes: Iterable[LinkedRoute]) -> dict[str, dict[str, Any]]:
    """Return the OpenAPI links of each operation that has some."""
    by_id = {route.operation_id: route for route in routes}
    links: dict[str, dict[str, Any]] = {}
    for subject in SUBJECTS:
        for route in by_id.values():
            if not _is_of(subject, route):
                continue
            for source, pointers in subject.sources.items():
                if source in by_id:
                    values = {name: f"$response.body#{at}" for name, at in pointers.items()}
                    _add(links, source, route.operation_id, {"parameters": values})
    for source, target in SEQUENCES:
        if source in by_id and target in by_id:
            values = {name: f"$request.path.{name}" for name in by_id[source].parameters}
            _add(links, source, target, {"parameters": values})
    for source, target, body in BODIES:
        if source in by_id and target in by_id:
            _add(links, source, target, {"requestBody": body})
    return links


def _is_of(subject: LinkedSubject, route: LinkedRoute) -> bool:
    pointers = next(iter(subject.sources.values()))
    return route.path.startswith(subject.paths) and set(route.parameters) == set(pointers)


def _add(links: dict[str, dict[str, Any]], source: str, target: str, link: dict[str, Any]) -> None:
    links.setdefault(source, {})[target] = {"operationId": target, **link}
