"""Cooperative scheduler: one thread runs at a time, chosen by the choice tape.

An actor is ordinary synchronous code in its own thread. Exactly one thread holds the baton. It
passes the baton at yield points: every store call, every sleep, every explicit `yield_`. The
product's own code runs unchanged, and a run is a function of its tape.

    spawn      add a thread; it starts when the tape first picks it. Threads with the same `beside` form
               one process: the first that ends, for any reason, ends all of them
    yield_     let the tape pick the next thread, and advance the clock a little
    sleep      do not run before the given time; when all threads sleep, the clock jumps to the first
    kill       the thread dies at its yield point: `ProcessKilled` unwinds its stack, and every store or
               scheduler call of its cleanup code raises `ProcessKilled` again

The thread that has waited longest is choice 0, so an exhausted tape is a fair round robin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.clock import MS, SimClock
from holdfast.sim.choice_tape import ChoiceTape

# Clock advance per step: usually small, at times large enough to bring a lease near its end.
STEP_NS = tuple(ms * MS for ms in (1, 1, 2, 3, 5, 10, 20, 60))


class ProcessKilled(BaseException):
    """Raised in a killed process. It is not an Exception, so that no product handler can catch
    it."""


class SimThread:
    __slots__ = (
        "body",
        "error",
        "has_ended",
        "killed",
        "name",
        "pool_thread",
        "process_threads",
        "wake_ns",
    )

    def __init__(self, name: str, body: Callable[[], None], wake_ns: int) -> None:
        self.name = name
        self.body = body
        self.wake_ns = wake_ns
        self.killed = False
        self.has_ended = False
        self.error: BaseException | None = None
        self.pool_thread: _PoolThread | None = None
        # All threads of its process, including itself.
        self.process_threads: list[SimThread] = [self]

    def kill_process(self) -> None:
        for thread in self.process_threads:
            if not thread.has_ended:
                thread.killed = True
                thread.wake_ns = 0


class Scheduler:
    def __init__(self, tape: ChoiceTape, clock: SimClock, threads: SimThreadPool) -> None:
        self.tape = tape
        self.clock = clock
        self.steps = 0
        self.current: SimThread | None = None
        # Called with the baton when a thread has ended. Restarts the actor.
        self.on_exit: Callable[[SimThread], None] = lambda task: None
        self._threads = threads
        self._waiting: list[SimThread] = []  # least recently run first
        self._main = threading.Lock()
        self._main.acquire()
        self._stop: Callable[[], bool] = lambda: False
        self._failure: BaseException | None = None

    # -- from outside ----------------------------------------------------------------------------

    def run(self, stop: Callable[[], bool]) -> None:
        """Run until `stop()` is true, checked at each step, or until no thread is left."""
        self._stop = stop
        thread = self._pick_next()
        if thread is not None:
            self._resume(thread)
            self._main.acquire()
        self.current = None
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Kill and unwind every thread, so that no stack of this run survives."""
        self.on_exit = lambda thread: None
        self._stop = lambda: True
        while self._waiting:
            thread = self._waiting.pop()
            thread.killed = True
            self._resume(thread)
            self._main.acquire()

    # -- from the thread with the baton
    # --------------------------------------------------------------

    def spawn(
        self,
        name: str,
        body: Callable[[], None],
        *,
        delay_ns: int = 0,
        same_process_as: SimThread | None = None,
    ) -> SimThread:
        thread = SimThread(name, body, self.clock.boot_ns() + delay_ns)
        if same_process_as is not None:
            same_process_as.process_threads.append(thread)
            thread.process_threads = same_process_as.process_threads
        self._waiting.append(thread)
        return thread

    def yield_(self) -> None:
        thread = self._current_thread()
        thread.wake_ns = 0
        self._switch(thread)

    def sleep(self, ns: int) -> None:
        thread = self._current_thread()
        thread.wake_ns = self.clock.boot_ns() + ns
        self._switch(thread)

    def kill(self, thread: SimThread) -> None:
        thread.kill_process()
        if self.current in thread.process_threads:
            raise ProcessKilled

    def shift_wakeups(self, lost_ns: int) -> None:
        """Shift wake-up times after the boot clock was set back, so that sleepers wake at the same
        moment."""
        for thread in self._waiting:
            thread.wake_ns = max(0, thread.wake_ns - lost_ns)

    # -- the baton -------------------------------------------------------------------------------

    def _current_thread(self) -> SimThread:
        me = self.current
        assert me is not None, "only an actor yields"
        if me.killed:
            raise ProcessKilled
        return me

    def _switch(self, thread: SimThread) -> None:
        self._waiting.append(thread)
        next_thread = self._pick_next()
        if next_thread is not thread:
            assert thread.pool_thread is not None
            if next_thread is None:
                self._main.release()
            else:
                self._resume(next_thread)
            thread.pool_thread.baton.acquire()
        if thread.killed:
            raise ProcessKilled

    def _pick_next(self) -> SimThread | None:
        try:
            if self._failure is not None or self._stop() or not self._waiting:
                return None
        except BaseException as failure:
            # `run` raises it. The thread that evaluated `stop` is not its cause.
            self._failure = failure
            return None
        waiting = self._waiting
        now = self.clock.boot_ns()
        ready = [thread for thread in waiting if thread.wake_ns <= now]
        if not ready:
            first = min(thread.wake_ns for thread in waiting)
            self.clock.advance(first - now)
            ready = [thread for thread in waiting if thread.wake_ns <= first]
        choice = self.tape.draw(len(ready) * len(STEP_NS))
        self.clock.advance(STEP_NS[choice % len(STEP_NS)])
        self.steps += 1
        thread = ready[choice // len(STEP_NS)]
        waiting.remove(thread)
        self.current = thread
        return thread

    def _resume(self, thread: SimThread) -> None:
        self.current = thread
        if thread.pool_thread is None:
            thread.pool_thread = self._threads.acquire()
            thread.pool_thread.job = lambda: self._run_thread(thread)
        thread.pool_thread.baton.release()

    def _run_thread(self, thread: SimThread) -> _PassBaton:
        """Run a thread's body. Return the function that passes the baton on."""
        try:
            if not thread.killed:
                thread.body()
        except ProcessKilled:
            pass
        except BaseException as error:
            thread.error = error
        thread.has_ended = True
        thread.kill_process()
        try:
            self.on_exit(thread)
        except BaseException as failure:
            self._failure = failure
        next_thread = self._pick_next()
        if next_thread is None:
            return self._main.release
        return lambda: self._resume(next_thread)


class SimThreadPool:
    """Pool of OS threads that are reused, so that an incarnation costs no thread start."""

    def __init__(self) -> None:
        self._idle: list[_PoolThread] = []
        self._all: list[_PoolThread] = []

    def acquire(self) -> _PoolThread:
        if self._idle:
            return self._idle.pop()
        worker = _PoolThread(self._idle)
        self._all.append(worker)
        return worker

    def close(self) -> None:
        assert len(self._idle) == len(self._all), "a task is still alive"
        for worker in self._all:
            worker.job = None
            worker.baton.release()
        for worker in self._all:
            worker.join()

    def __enter__(self) -> SimThreadPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_PassBaton = Callable[[], None]


class _PoolThread(threading.Thread):
    def __init__(self, idle: list[_PoolThread]) -> None:
        super().__init__(daemon=True)
        self.baton = threading.Lock()
        self.baton.acquire()
        self.job: Callable[[], _PassBaton] | None = None
        self._idle = idle
        self.start()

    def run(self) -> None:
        while True:
            self.baton.acquire()
            if self.job is None:
                return
            pass_baton = self.job()
            # Return to the pool before passing the baton: the next thread may need this OS thread.
            self._idle.append(self)
            pass_baton()
