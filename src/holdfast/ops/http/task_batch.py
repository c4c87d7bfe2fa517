"""Conversion of submitted bodies to a task batch: specs, encoded arguments, dependencies.

A task that the app declares uses its declared spec, with the options of the request as overrides. A task
that the app does not declare is for external workers and uses the default spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from holdfast.app.call_arguments import DeclaredFunction
from holdfast.clock import S
from holdfast.durable.validation import check_limit
from holdfast.errors import Invalid
from holdfast.ops.http.json_values import pack_json
from holdfast.ops.http.request_schemas import NewTaskBody, TaskOptionsBody
from holdfast.store.api import Txn
from holdfast.tasks import queries
from holdfast.tasks.ids import TaskId, parse_task_id
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.operations import TaskToSubmit

SECONDS_MAX = 1e9


class DeclaredTask(DeclaredFunction, Protocol):
    """The declaration of a task in the app."""

    spec: TaskSpec

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        """Encode the arguments. Raise Invalid if they do not match the function's signature."""


class TaskBatch(NamedTuple):
    specs: list[TaskSpec]
    spec_indexes: list[int]
    new: list[TaskToSubmit]
    # Existing tasks that tasks of the batch depend on.
    dependencies: set[TaskId]

    @property
    def has_keys(self) -> bool:
        """Whether a key may resolve to an existing task."""
        return any(task.key for task in self.new)

    @property
    def first_queue(self) -> str:
        return self.specs[0].queue if self.specs else ""


def build_batch(tasks: Sequence[NewTaskBody], declared: Mapping[str, DeclaredTask]) -> TaskBatch:
    check_limit(len(tasks), "tasks")
    specs: dict[TaskSpec, int] = {}
    spec_indexes: list[int] = []
    new: list[TaskToSubmit] = []
    dependencies: set[TaskId] = set()
    for task in tasks:
        options = task.options
        declaration = declared.get(task.name)
        spec = apply_options(declaration.spec if declaration else TaskSpec(task.name), options)
        spec_indexes.append(specs.setdefault(spec, len(specs)))
        new.append(
            TaskToSubmit(
                declaration.pack(task.args, task.kwargs)
                if declaration
                else pack_json("args", [task.args, task.kwargs]),
                _ns("delay_s", options.delay_s),
                options.key,
                options.limit_key,
                tuple(_dependency_seq(dependency, dependencies) for dependency in options.after),
                tag=options.tag,
            )
        )
    return TaskBatch(list(specs), spec_indexes, new, dependencies)


def require_tasks(txn: Txn, universe: str, dependencies: Iterable[TaskId]) -> None:
    """Raise NotFound unless all tasks exist in the generation of their ids."""
    for task in sorted(dependencies):
        queries.get_task(txn, universe, task)


def apply_options(declared: TaskSpec, options: TaskOptionsBody) -> TaskSpec:
    """Return the declared spec with the overrides of the options."""
    overrides: dict[str, Any] = {
        name: value
        for name in ("queue", "priority", "attempts", "expiries_max")
        if (value := getattr(options, name)) is not None
    }
    for name, field in (
        ("lease_s", "lease_ns"),
        ("execution_window_s", "window_ns"),
        ("retain_s", "retain_ns"),
    ):
        value = getattr(options, name)
        if value is not None:
            overrides[field] = _ns(name, value)
    return replace(declared, **overrides) if overrides else declared


def _ns(what: str, seconds: float) -> int:
    if not 0 <= seconds <= SECONDS_MAX:
        raise Invalid(what=what, found=seconds, min=0, max=SECONDS_MAX)
    return int(seconds * S)


def _dependency_seq(dependency: str | int, dependencies: set[TaskId]) -> int:
    if isinstance(dependency, int):
        if dependency < 0:
            raise Invalid(
                what="after", found=dependency, why="positions in the batch are counted from 0"
            )
        return -dependency - 1
    task = parse_task_id(dependency)
    dependencies.add(task)
    return task.seq
