"""From what was sent to what is submitted: the spec of each task, its arguments, those it waits for.

A task that the app declares has what is declared there, but for what its options say otherwise. One that
it does not declare is for workers that the app knows nothing of, and has our defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from holdfast.clock import S
from holdfast.durable.bounds import check_limit
from holdfast.errors import Invalid
from holdfast.ops.http.bodies import NewTask, Options
from holdfast.ops.http.values import packed
from holdfast.store.api import Txn
from holdfast.tasks import look
from holdfast.tasks.coordinator import New
from holdfast.tasks.ids import TaskId, parse_task
from holdfast.tasks.rows import Spec

SECONDS_MAX = 1e9


class Declared(Protocol):
    """What an app says of a task."""

    spec: Spec

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        """The arguments as they are stored; what does not fit the function is refused."""


class Batch(NamedTuple):
    specs: list[Spec]
    spec_of_each: list[int]
    new: list[New]
    # Tasks of before that some of these wait for.
    awaited: set[TaskId]

    @property
    def keyed(self) -> bool:
        """Whether a task of before may be the answer."""
        return any(one.key for one in self.new)


def batch_of(wanted: Sequence[NewTask], declared: Mapping[str, Declared]) -> Batch:
    check_limit(len(wanted), "tasks")
    specs: dict[Spec, int] = {}
    spec_of_each: list[int] = []
    new: list[New] = []
    awaited: set[TaskId] = set()
    for one in wanted:
        options = one.options
        known = declared.get(one.name)
        spec = spec_of(known.spec if known else Spec(one.name), options)
        spec_of_each.append(specs.setdefault(spec, len(specs)))
        new.append(
            New(
                known.pack(one.args, one.kwargs)
                if known
                else packed("args", [one.args, one.kwargs]),
                _ns("delay_s", options.delay_s),
                options.key,
                options.limit_key,
                tuple(_after(each, awaited) for each in options.after),
            )
        )
    return Batch(list(specs), spec_of_each, new, awaited)


def require(txn: Txn, universe: str, awaited: Iterable[TaskId]) -> None:
    """They are there, and of the generation that their names say."""
    for task in sorted(awaited):
        look.find(txn, universe, task)


def spec_of(declared: Spec, options: Options) -> Spec:
    """What is declared, but for what these options say otherwise."""
    said: dict[str, Any] = {
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
            said[field] = _ns(name, value)
    return replace(declared, **said) if said else declared


def _ns(what: str, seconds: float) -> int:
    if not 0 <= seconds <= SECONDS_MAX:
        raise Invalid(what=what, found=seconds, min=0, max=SECONDS_MAX)
    return int(seconds * S)


def _after(each: str | int, awaited: set[TaskId]) -> int:
    if isinstance(each, int):
        if each < 0:
            raise Invalid(what="after", found=each, why="positions in the batch are counted from 0")
        return -each - 1
    task = parse_task(each)
    awaited.add(task)
    return task.seq
