"""Boot: what must hold before a runner does anything, and the states it lives through.

    1  the key spaces of this code are numbered without a gap from 0, with `app_state` at 0
    2  the store's schema marker is ours; a missing one is written, if the caller allows it
    3  only then STOPPED → RUNNING

A step that fails raises, leaves the runner stopped and has written nothing: the marker is read and
written in one transaction, and it is the only thing that booting writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from holdfast.errors import HoldfastError, Invalid
from holdfast.store import schema
from holdfast.store.api import Txn
from holdfast.store.engine import guard_schema
from holdfast.transitions import Transitions

SCHEMA = (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR)


class NotRunning(HoldfastError):
    code = "not_running"
    hint = "boot the runner first"


class State(Enum):
    STOPPED = "stopped"
    RUNNING = "running"
    STOPPING = "stopping"


class Event(Enum):
    BOOT = "boot"
    STOP = "stop"
    HALT = "halt"


LIFE = Transitions(
    "runner",
    State.STOPPED,
    {
        (State.STOPPED, Event.BOOT): State.RUNNING,
        (State.RUNNING, Event.STOP): State.STOPPING,
        (State.STOPPING, Event.HALT): State.STOPPED,
    },
)


def spaces() -> dict[str, int]:
    return {space.name.lower(): int(space) for space in schema.Space}


def check_spaces(numbers: Mapping[str, int]) -> None:
    """Refuse a layout with a gap, a duplicate, or anything but `app_state` at 0."""
    if numbers.get("app_state") != 0:
        raise Invalid(
            what="key spaces", space="app_state", found=numbers.get("app_state"), expected=0
        )
    by_number = sorted(numbers.items(), key=lambda space: space[1])
    for expected, (name, found) in enumerate(by_number):
        if found != expected:
            raise Invalid(what="key spaces", space=name, found=found, expected=expected)


def ensure_marker(txn: Txn, expected: tuple[int, int], *, bootstrap: bool) -> None:
    """Document 001's guard, as one transaction: the store is ours, or becomes ours, or refuses."""
    found = txn.get(schema.MARKER_KEY)
    guard_schema(found, expected, bootstrap=bootstrap)
    if found is None:
        txn.put(schema.MARKER_KEY, schema.marker(*expected))
