"""Boot checks of a runner, and its lifecycle states.

    1  the key spaces of this code are numbered from 0 without gaps, with `app_state` at 0
    2  the store's schema marker matches; a missing marker is written if `bootstrap` is set
    3  then STOPPED → RUNNING

A failing step raises, leaves the runner stopped and writes nothing. The marker is the only row that
booting writes, in the transaction that reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import Enum

from holdfast.errors import HoldfastError, Invalid
from holdfast.store import schema
from holdfast.store.api import Txn
from holdfast.store.engine import check_schema
from holdfast.transitions import Transitions


class NotRunning(HoldfastError):
    code = "not_running"
    hint = "boot the runner first"


class RunnerState(Enum):
    STOPPED = "stopped"
    RUNNING = "running"
    STOPPING = "stopping"


class RunnerEvent(Enum):
    BOOT = "boot"
    STOP = "stop"
    HALT = "halt"


RUNNER_TRANSITIONS = Transitions(
    "runner",
    RunnerState.STOPPED,
    {
        (RunnerState.STOPPED, RunnerEvent.BOOT): RunnerState.RUNNING,
        (RunnerState.RUNNING, RunnerEvent.STOP): RunnerState.STOPPING,
        (RunnerState.STOPPING, RunnerEvent.HALT): RunnerState.STOPPED,
    },
)


class RunnerLifecycle:
    """The lifecycle state of a runner. Any thread may change it."""

    def __init__(self, worker: str) -> None:
        self.state = RUNNER_TRANSITIONS.initial
        self._worker = worker
        self._lock = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self.state is RunnerState.RUNNING

    def boot(self, prepare: Callable[[], None]) -> None:
        """Go from STOPPED to RUNNING after `prepare`. On an error the runner stays stopped."""
        with self._lock:
            new_state = RUNNER_TRANSITIONS.next(self.state, RunnerEvent.BOOT, worker=self._worker)
            prepare()
            self.state = new_state

    def request_stop(self) -> None:
        with self._lock:
            if RUNNER_TRANSITIONS.allows(self.state, RunnerEvent.STOP):
                self.state = RUNNER_TRANSITIONS.next(self.state, RunnerEvent.STOP)

    def halt(self, close: Callable[[], None]) -> None:
        """Go from STOPPING to STOPPED and call `close`."""
        with self._lock:
            if RUNNER_TRANSITIONS.allows(self.state, RunnerEvent.HALT):
                self.state = RUNNER_TRANSITIONS.next(self.state, RunnerEvent.HALT)
                close()


def key_spaces() -> dict[str, int]:
    return {space.name.lower(): int(space) for space in schema.Space}


def check_key_spaces(numbers: Mapping[str, int]) -> None:
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
    """Check the schema marker, or write a missing one with `bootstrap`, as document 001 requires."""
    found = txn.get(schema.MARKER_KEY)
    check_schema(found, expected, bootstrap=bootstrap)
    if found is None:
        txn.put(schema.MARKER_KEY, schema.encode_marker(*expected))
