"""One actor runs at a time, and the tape says which.

An actor is ordinary synchronous code in a thread of its own. Exactly one thread holds the baton;
it hands it over at *yield points*: every store call, every sleep, every explicit `yield_`. So the
product's own code runs unchanged, and a run is a function of its tape.

    spawn      a new task; it starts when it is first picked. Those spawned beside one another are
               the threads of one process: the first that ends, however it does, ends them all
    yield_     let the tape pick who goes on, and let a little time pass
    sleep      not to be picked before the time; when all sleep, time leaps to the first
    kill       the task dies at its yield point: `Killed` unwinds its stack, and whatever its
               clean-up code asks of the store or the scheduler raises `Killed` again

The task that waited longest is choice 0, so a worn-out tape is a fair round robin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.clock import MS, SimClock
from holdfast.sim.tape import Tape

# How much time a step takes: usually little, at times enough to bring a lease near its end.
STEP_NS = tuple(ms * MS for ms in (1, 1, 2, 3, 5, 10, 20, 60))


class Killed(BaseException):
    """This incarnation is dead. Not an Exception: no handler of the product may survive it."""


class Task:
    __slots__ = ("body", "dead", "error", "killed", "name", "process", "thread", "wake_ns")

    def __init__(self, name: str, body: Callable[[], None], wake_ns: int) -> None:
        self.name = name
        self.body = body
        self.wake_ns = wake_ns
        self.killed = False
        self.dead = False
        self.error: BaseException | None = None
        self.thread: _Worker | None = None
        # All threads of the process that it is in, itself among them.
        self.process: list[Task] = [self]

    def end_process(self) -> None:
        for one in self.process:
            if not one.dead:
                one.killed = True
                one.wake_ns = 0


class Scheduler:
    def __init__(self, tape: Tape, clock: SimClock, threads: Threads) -> None:
        self.tape = tape
        self.clock = clock
        self.steps = 0
        self.current: Task | None = None
        # Called, with the baton, when a task has ended: the place to restart it.
        self.on_exit: Callable[[Task], None] = lambda task: None
        self._threads = threads
        self._waiting: list[Task] = []  # least recently run first
        self._main = threading.Lock()
        self._main.acquire()
        self._stop: Callable[[], bool] = lambda: False
        self._failure: BaseException | None = None

    # -- from outside ----------------------------------------------------------------------------

    def run(self, stop: Callable[[], bool]) -> None:
        """Run until `stop()` (asked at each step) or until no task is left."""
        self._stop = stop
        task = self._next()
        if task is not None:
            self._resume(task)
            self._main.acquire()
        self.current = None
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Kill every task and see it unwound, so that no thread keeps a stack of ours."""
        self.on_exit = lambda task: None
        self._stop = lambda: True
        while self._waiting:
            task = self._waiting.pop()
            task.killed = True
            self._resume(task)
            self._main.acquire()

    # -- from anywhere with the baton ------------------------------------------------------------

    def spawn(
        self,
        name: str,
        body: Callable[[], None],
        *,
        delay_ns: int = 0,
        beside: Task | None = None,
    ) -> Task:
        task = Task(name, body, self.clock.boot_ns() + delay_ns)
        if beside is not None:
            beside.process.append(task)
            task.process = beside.process
        self._waiting.append(task)
        return task

    def yield_(self) -> None:
        me = self._me()
        me.wake_ns = 0
        self._switch(me)

    def sleep(self, ns: int) -> None:
        me = self._me()
        me.wake_ns = self.clock.boot_ns() + ns
        self._switch(me)

    def kill(self, task: Task) -> None:
        task.end_process()
        if self.current in task.process:
            raise Killed

    def rebase(self, lost_ns: int) -> None:
        """The boot clock was set back by this much: whoever sleeps wakes at the same moment."""
        for task in self._waiting:
            task.wake_ns = max(0, task.wake_ns - lost_ns)

    # -- the baton -------------------------------------------------------------------------------

    def _me(self) -> Task:
        me = self.current
        assert me is not None, "only an actor yields"
        if me.killed:
            raise Killed
        return me

    def _switch(self, me: Task) -> None:
        self._waiting.append(me)
        task = self._next()
        if task is not me:
            assert me.thread is not None
            if task is None:
                self._main.release()
            else:
                self._resume(task)
            me.thread.gate.acquire()
        if me.killed:
            raise Killed

    def _next(self) -> Task | None:
        try:
            if self._failure is not None or self._stop() or not self._waiting:
                return None
        except BaseException as failure:
            # It is the caller's of `run`, not of whichever task happened to ask.
            self._failure = failure
            return None
        waiting = self._waiting
        now = self.clock.boot_ns()
        ready = [task for task in waiting if task.wake_ns <= now]
        if not ready:
            first = min(task.wake_ns for task in waiting)
            self.clock.advance(first - now)
            ready = [task for task in waiting if task.wake_ns <= first]
        choice = self.tape.draw(len(ready) * len(STEP_NS))
        self.clock.advance(STEP_NS[choice % len(STEP_NS)])
        self.steps += 1
        task = ready[choice // len(STEP_NS)]
        waiting.remove(task)
        self.current = task
        return task

    def _resume(self, task: Task) -> None:
        self.current = task
        if task.thread is None:
            task.thread = self._threads.take()
            task.thread.job = lambda: self._live(task)
        task.thread.gate.release()

    def _live(self, task: Task) -> _Handover:
        """The life of a task, on its thread. Answers who is next."""
        try:
            if not task.killed:
                task.body()
        except Killed:
            pass
        except BaseException as error:
            task.error = error
        task.dead = True
        task.end_process()
        try:
            self.on_exit(task)
        except BaseException as failure:
            self._failure = failure
        following = self._next()
        if following is None:
            return self._main.release
        return lambda: self._resume(following)


class Threads:
    """Threads that outlive the tasks they run, so that an incarnation costs no thread start."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._all: list[_Worker] = []

    def take(self) -> _Worker:
        if self._idle:
            return self._idle.pop()
        worker = _Worker(self._idle)
        self._all.append(worker)
        return worker

    def close(self) -> None:
        assert len(self._idle) == len(self._all), "a task is still alive"
        for worker in self._all:
            worker.job = None
            worker.gate.release()
        for worker in self._all:
            worker.join()

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_Handover = Callable[[], None]


class _Worker(threading.Thread):
    def __init__(self, idle: list[_Worker]) -> None:
        super().__init__(daemon=True)
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: Callable[[], _Handover] | None = None
        self._idle = idle
        self.start()

    def run(self) -> None:
        while True:
            self.gate.acquire()
            if self.job is None:
                return
            hand_over = self.job()
            # Idle before the baton goes: whoever gets it may need this very thread.
            self._idle.append(self)
            hand_over()
