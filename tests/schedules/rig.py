"""A schedule rig: a store with simulated time, the timer worker, and a worker of tasks and flows.

Timer workers are those of the product. Each one can die at a chosen commit: before it, after it, or with an unknown
outcome. A new worker takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import holdfast as hf
from holdfast.app import schedules
from holdfast.clock import S, SimClock
from holdfast.errors import CommitUnknown
from holdfast.schedules import operations, queries
from holdfast.schedules.queries import Occurrence, ScheduleStatus
from holdfast.schedules.states import OccurrenceState
from holdfast.store.api import Store
from holdfast.tasks.ids import TaskId
from holdfast.tasks.queries import get_task
from holdfast.workers.timers.worker import TimerWorker
from tests.flows.rig import Crashed, CrashingStore, FlowRig

MINUTE = 60 * S
TICKS_MAX = 1_000


class ScheduleRig:
    def __init__(self, store: Store, clock: SimClock, app: hf.App, universe: str = "flows") -> None:
        self.store = store
        self.clock = clock
        self.universe = universe
        self.plan: dict[int, str] = {}
        self.timer_store = CrashingStore(store, self.plan)
        self.flows = FlowRig(store, clock, app)
        # The plan of `flows` is for its worker. The client of schedules does not die.
        self.flows.runtime.store = store
        self.timer = self._new_timer()
        self.set_wall("2026-11-13T09:00:30")

    # -- time --------------------------------------------------------------------------------------

    def set_wall(self, text: str) -> None:
        """Set the wall clock. Store time does not change."""
        self.clock.step_wall(at(text) - self.clock.wall_ns())

    def pass_until(self, text: str, each: Callable[[], None] | None = None) -> None:
        """Let the time pass, in steps of ten seconds, with a tick of the timer worker in each."""
        while self.clock.wall_ns() < at(text):
            self.clock.advance(10 * S)
            self.tick()
            if each is not None:
                each()

    def tick(self) -> None:
        for _ in range(TICKS_MAX):
            try:
                if not self.timer.tick():
                    return
            except (Crashed, CommitUnknown):
                self.timer = self._new_timer()
        raise AssertionError("the timer worker did not come to rest")

    def _new_timer(self) -> TimerWorker:
        return TimerWorker(self.timer_store, universe=self.universe, clock=self.clock)  # type: ignore[arg-type]

    # -- schedules ---------------------------------------------------------------------------------

    def declare(self, app: hf.App | None = None) -> None:
        runtime = self.flows.runtime
        runtime.app = app or runtime.app
        schedules.declare(runtime)

    def create(self, name: str, target: Any, every: str = "*/10 * * * *", **options: Any) -> Any:
        key = options.pop("key", None)
        chosen = {"zone": "UTC", "missed": "one", "overlap": "skip", "args": ()} | options
        return schedules.create(
            self.flows.runtime,
            name,
            target,
            schedules.ScheduleOptions(every, **chosen),
            key,
        )

    def fire(self) -> int:
        """Fire the due occurrences, as a second timer worker would at the same time."""
        fired: int = self.store.transact(
            operations.fire_due, self.universe, self.clock.wall_ns(), 100
        )
        return fired

    def run_tasks(self) -> None:
        """Run all tasks and flows that are ready."""
        while self.flows.run_one():
            pass

    def status(self, name: str) -> ScheduleStatus:
        return self.store.read(queries.get_status, self.universe, name)

    def uses(self, name: str) -> list[str]:
        """The occurrences, oldest first, as `09:10 started`."""
        found: list[Occurrence] = self.store.read(
            queries.last_occurrences, self.universe, name, 1_000
        )
        return [
            " ".join(
                filter(
                    None, (_clock_time(at_ns), OccurrenceState(row.state).name.lower(), row.reason)
                )
            )
            for at_ns, row in reversed(found)
        ]

    def started(self, name: str) -> list[str]:
        """The ids of the tasks and flows that the schedule started, oldest occurrence first."""
        found = self.store.read(queries.last_occurrences, self.universe, name, 1_000)
        return [row.target_id for _, row in reversed(found) if row.target_id]

    def changes(self, name: str) -> list[tuple[str, str]]:
        rows = self.store.read(queries.list_changes, self.universe, name)
        return [(row.action, row.detail) for row in rows]

    def task_key(self, id: str) -> str:
        generation, seq = map(int, id.split("-"))
        return self.store.read(get_task, self.universe, TaskId(generation, seq)).body.key


def at(text: str) -> int:
    """The wall clock time in nanoseconds, in UTC."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * S


def _clock_time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // S, UTC).strftime("%H:%M")
