"""The hands of a task worker: a crew of threads, an event loop, a crew of processes.

Each is hired when the app has tasks for it. Tasks say which kind of hands they take when they are
submitted, so a worker leases of each kind as many as its crew will begin within moments, and nobody
waits for hands that he does not need.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence

from holdfast.clock import MS, Clock, S
from holdfast.roles.report_gate import ReportGate
from holdfast.roles.task_child import Children
from holdfast.roles.task_run import (
    Ended,
    TaskCode,
    TaskRun,
    attempt,
    attempt_async,
    ended_by,
    released,
)
from holdfast.runner.crew import Crew, Tasks, Threads
from holdfast.tasks.lease import LEASE_BATCH_MAX
from holdfast.tasks.rows import KINDS, LOOP, PROCESS, THREAD

COROUTINES = 200
# Of quick tasks the hands have a batch in line while another is reported and the next leased.
AHEAD_MAX = 2 * LEASE_BATCH_MAX
HAND_BACK_NS = 1_000 * MS
# How long coroutines that are cancelled have to clean up when their worker leaves.
WIND_UP_S = 1.0
# An event loop that has not come to anything new for this long is blocked.
LOOP_S = 30.0


class Hands:
    """The crews: threads, an event loop, processes. Each is hired when the app has tasks for it."""

    def __init__(
        self,
        codes: Mapping[str, TaskCode],
        concurrency: int,
        processes: int,
        ring: Callable[[], None],
        clock: Clock,
        tell: Callable[[Ended], bool],
    ) -> None:
        """`tell` commits one report, in the thread of the hand; whether it could."""
        each = any(code.report == "each" for code in codes.values())
        gate = ReportGate()

        def telling(do: Callable[[TaskRun], Ended]) -> Callable[[TaskRun], Ended]:
            def done(run: TaskRun) -> Ended:
                if gate.wait() and run.cancelled:
                    return released(run)
                ended = do(run)
                if run.code.report == "each":
                    with gate.committing():
                        ended.told = tell(ended)
                return ended

            return done if each else do

        async def in_loop(run: TaskRun) -> Ended:
            if each and await gate.wait_in_loop() and run.cancelled:
                return released(run)
            ended = await attempt_async(run, clock)
            if run.code.report == "each":
                with gate.committing():
                    ended.told = await asyncio.to_thread(tell, ended)
            return ended

        self._crews: dict[int, Crew] = {}
        self._clock = clock
        # Kinds whose work had to be given back unbegun.
        self._stalled: set[int] = set()
        self._beat_ns = 0
        self._closing = False
        self._children = Children()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: Threads | None = None
        self._kinds = {name: kind_of(code) for name, code in codes.items()}
        kinds = set(self._kinds.values())
        if THREAD in kinds:
            self._threads = self._crews[THREAD] = Threads(
                concurrency,
                telling(attempt),
                name="holdfast-task",
                began=None,
                done=ring,
                clock=clock,
                ahead_max=AHEAD_MAX,
            )
        if PROCESS in kinds:
            self._crews[PROCESS] = Threads(
                processes,
                telling(lambda run: self._children.attempt(run, clock)),
                name="holdfast-task-process",
                began=None,
                done=ring,
                clock=clock,
                ahead_max=AHEAD_MAX,
            )
        if LOOP in kinds:
            self._loop = asyncio.new_event_loop()
            self._looping = threading.Thread(
                target=self._loop.run_forever, name="holdfast-task-loop", daemon=True
            )
            self._looping.start()
            self._crews[LOOP] = Tasks(
                COROUTINES,
                in_loop,
                self._loop,
                began=None,
                done=ring,
                clock=clock,
                ahead_max=AHEAD_MAX,
                failed=ended_by,
            )

    @property
    def busy(self) -> bool:
        return any(crew.busy for crew in self._crews.values())

    @property
    def spent(self) -> bool:
        """Whether a crew has no hands any more: its functions never came back, or its event loop has
        not for `LOOP_S`, for something blocks it or has ended it."""
        return any(crew.spent for crew in self._crews.values()) or self._loop_lost()

    def _loop_lost(self) -> bool:
        if self._loop is None or self._closing:
            return False
        if not self._looping.is_alive():
            return True
        now_ns, asked_ns = self._clock.mono_ns(), self._beat_ns
        if asked_ns:
            return now_ns - asked_ns > LOOP_S * S
        # Asked now, and answered when the loop comes to it.
        self._beat_ns = now_ns
        self._loop.call_soon_threadsafe(self._answered)
        return False

    def _answered(self) -> None:
        self._beat_ns = 0

    @property
    def line(self) -> int:
        return sum(crew.line for crew in self._crews.values())

    @property
    def finished(self) -> bool:
        return any(crew.has_finished for crew in self._crews.values())

    @property
    def rooms(self) -> tuple[int, ...]:
        """How many more tasks of each kind may be leased."""
        found = [0] * len(KINDS)
        for kind, crew in self._crews.items():
            room = max(crew.room, 0)
            if kind in self._stalled:
                # Hands that let work wait for too long show first that they are back.
                room = 0 if crew.busy or kind == self._stuck() else min(room, 1)
            found[kind] = room
        # A task may have been submitted as of another kind than it is now: one at a time.
        other = 1 if any(found) else 0
        return tuple(found[kind] if kind in self._crews else other for kind in KINDS)

    @property
    def free(self) -> tuple[int, ...]:
        """How many of each kind would be begun at once."""
        rooms = self.rooms
        return tuple(
            min(rooms[kind], self._crews[kind].free) if kind in self._crews else rooms[kind]
            for kind in KINDS
        )

    def _stuck(self) -> int | None:
        """The kind whose hands do not answer just now."""
        return LOOP if self._loop is not None and self._beat_ns else None

    @property
    def rest_s(self) -> float:
        """How long the crews may be left to themselves."""
        if any(crew.standing for crew in self._crews.values()):
            return 0.005
        return HAND_BACK_NS / S if self.busy else float("inf")

    def give(self, runs: Sequence[TaskRun]) -> None:
        kinds = self._kinds
        for kind, crew in self._crews.items():
            if len(self._crews) == 1:
                given = runs
            else:
                given = [run for run in runs if kinds[run.grant.name] == kind]
            if kind == THREAD:
                lend = crew.lend
                for run in given:
                    run.lend = lend
            if given:
                crew.give(given)

    def enlist(self, run: TaskRun) -> Callable[[], None] | None:
        """What the caller is to do to run it in its own thread, if it is one for a thread. The hands have
        nothing else to do."""
        crew = self._threads
        if crew is None or self._kinds[run.grant.name] != THREAD:
            return None
        run.lend = crew.lend
        return crew.enlist(run)

    def collect(self) -> list[Ended]:
        found: list[Ended] = []
        for kind, crew in self._crews.items():
            ended = crew.collect()
            if ended:
                self._stalled.discard(kind)
                found += ended
        return found

    def overdue(self) -> list[TaskRun]:
        """What no hand has begun for too long: it is not ours any more."""
        found: list[TaskRun] = []
        for kind, crew in self._crews.items():
            late = crew.overdue(HAND_BACK_NS)
            if late:
                self._stalled.add(kind)
                found += late
        return found

    def waiting(self) -> list[TaskRun]:
        return [run for crew in self._crews.values() for run in crew.waiting()]

    def drop(self, run: TaskRun) -> None:
        run.dropped = True
        self._crews[kind_of(run.code)].drop(run)

    def nudge(self) -> None:
        for crew in self._crews.values():
            crew.nudge()

    def close(self) -> None:
        self._closing = True
        for crew in self._crews.values():
            crew.close()
        self._children.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(_wind_up, self._loop)
            self._looping.join(WIND_UP_S)
            if not self._looping.is_alive():
                self._loop.close()


def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    """End a loop once its coroutines had the chance to clean up."""
    left = asyncio.all_tasks(loop)
    for task in left:
        if not task.cancelling():
            task.cancel()

    async def end() -> None:
        if left:
            await asyncio.wait(left, timeout=WIND_UP_S)
        loop.stop()

    task = loop.create_task(end())
    task.add_done_callback(left.discard)  # which also keeps it from being collected


def kind_of(code: TaskCode) -> int:
    if code.asynchronous:
        return LOOP
    return PROCESS if code.isolation == "process" else THREAD
