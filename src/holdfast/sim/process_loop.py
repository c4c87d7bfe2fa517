"""Event loop of a simulated process: coroutines in simulated time, on one thread of the scheduler.

    sleep       the loop waits as an actor waits: other actors run, and the clock jumps if none can
    topics      `wait_for_topics` ends with a commit that notifies one of the topics
    threads     functions for an executor run in the loop, one at a time
    death       after the process was killed, no callback runs

Callbacks run in the order in which they were scheduled, so a run is a function of the tape.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.clock import Clock, S
from holdfast.sim.inline_effects import SimSelector
from holdfast.sim.scheduler import ProcessKilled, Scheduler

if TYPE_CHECKING:
    from holdfast.sim.faulting_client import FaultingClient


class TopicWait(NamedTuple):
    topics: list[str]
    since: int
    notified: asyncio.Future[None]


class ProcessLoop(asyncio.SelectorEventLoop):
    def __init__(self, store: FaultingClient, scheduler: Scheduler, clock: Clock) -> None:
        self._store = store
        self._simulated = clock
        self._topic_waits: list[TopicWait] = []
        # Unfinished tasks in the order of their creation.
        self._unfinished: dict[asyncio.Task[Any], None] = {}
        super().__init__(SimSelector(self._sleep))
        self._ready: deque[asyncio.Handle] = _ReadyQueue(scheduler)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it ends or the process is killed."""
        try:
            self.run_until_complete(main)
        finally:
            self._drop_unfinished()
            self.close()

    def time(self) -> float:
        return self._simulated.mono_ns() / S

    def last_notified(self, topics: Sequence[str]) -> int:
        return self._store.wait(topics, 0, 0.0)

    async def wait_for_topics(self, topics: Sequence[str], since: int, timeout_s: float) -> bool:
        """Wait for a commit after `since` that notifies a topic. Returns whether there is one."""
        wait = TopicWait(list(topics), since, self.create_future())
        self._topic_waits.append(wait)
        try:
            async with asyncio.timeout(timeout_s):
                await wait.notified
        except TimeoutError:
            return False
        finally:
            self._topic_waits.remove(wait)
        return True

    def _sleep(self, seconds: float) -> None:
        """Wait until a coroutine can continue: a topic is notified, or the time is over."""
        waits = [wait for wait in self._topic_waits if not wait.notified.done()]
        topics = [topic for wait in waits for topic in wait.topics]
        if not self._notify(waits):
            self._store.wait(topics, self.last_notified(topics), seconds)
            self._notify(waits)

    def _notify(self, waits: list[TopicWait]) -> bool:
        due = [wait for wait in waits if self.last_notified(wait.topics) > wait.since]
        for wait in due:
            wait.notified.set_result(None)
        return bool(due)

    # -- without threads -------------------------------------------------------------------------

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function in the loop, after the callbacks that are ready now."""
        future = self.create_future()

        def run() -> None:
            if not future.done():
                _complete(future, func, args)

        self.call_soon(run)
        return future

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, name=name, context=context)
        self._unfinished[task] = None
        task.add_done_callback(lambda done: self._unfinished.pop(done, None))
        return task

    def _drop_unfinished(self) -> None:
        """Unwind the coroutines of a dead process now, so that no later moment depends on the garbage collector."""
        while self._unfinished:
            task = next(iter(self._unfinished))
            del self._unfinished[task]
            setattr(task, "_log_destroy_pending", False)  # noqa: B010
            coroutine = task.get_coro()
            if isinstance(coroutine, Coroutine):
                with contextlib.suppress(BaseException):
                    coroutine.close()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), ProcessKilled):
            super().call_exception_handler(context)


class InlineThreads(Executor):
    """Executor that runs each function in the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        _complete(future, lambda: fn(*args, **kwargs), ())
        return future


class LoopSubscription:
    """Subscription of a coroutine of a simulated process."""

    def __init__(self, store: FaultingClient, topics: Sequence[str], since: int) -> None:
        self._store = store
        self._topics = list(topics)
        self.since = since

    async def wait_async(self, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        notified = await loop.wait_for_topics(self._topics, self.since, timeout)
        self.since = max(self.since, loop.last_notified(self._topics))
        return notified

    def wait(self, timeout: float) -> bool:
        former, self.since = self.since, self._store.wait(self._topics, self.since, timeout)
        return self.since > former

    def wake(self) -> None: ...
    def cancel(self) -> None: ...

    def __enter__(self) -> LoopSubscription:
        return self

    def __exit__(self, *exc: object) -> None: ...


class _ReadyQueue(deque[asyncio.Handle]):
    """The ready callbacks of a loop. A killed process takes none of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def popleft(self) -> asyncio.Handle:
        thread = self._scheduler.current
        if thread is not None and thread.killed:
            raise ProcessKilled
        return super().popleft()


def _complete(future: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call a function and set its result or error on the future. ProcessKilled, the simulated crash, is raised instead."""
    try:
        result = fn(*args)
    except ProcessKilled:
        raise
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
