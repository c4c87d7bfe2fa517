"""The event loop of one flow: deterministic, without I/O.

The body of a flow runs on a `FlowLoop`, its steps run elsewhere. The loop runs callbacks in the order in which they
were scheduled. When no callback is left, the flow is quiescent: each of its coroutines waits for an outcome. Outcomes
are delivered only then, so a replay interleaves the branches of a flow in the same way as the first run.

Timers and executor calls of the flow's own code (`asyncio.sleep`, `asyncio.to_thread`) go to the host loop and are
counted as foreign waits. Sockets are refused: a step does I/O.

asyncio iterates sets of futures and tasks, and Python orders a set by the hashes of its members. So the hash of a task or
a future of this loop is a number that a replay finds again, not an address.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterable, KeysView, Sequence, ValuesView
from functools import partial
from itertools import count
from types import CoroutineType, GeneratorType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from holdfast.errors import Invalid
from holdfast.flows.async_generators import (
    CLOSES_MAX,
    AsyncGenerators,
    end_awaitable,
    generator_call_of,
    keep_forever,
    run_to_end,
)

# Callbacks that run before the worker's loop gets the thread back.
CALLBACKS_MAX = 10_000
# The low bits of the hash of a task are its number in the loop.
TASK_NUMBER_BITS = 40
# Where asyncio makes tasks of the set of its arguments, up to Python 3.12 and from 3.13 on.
AS_COMPLETED = ("as_completed", "_AsCompletedIterator.__init__")


class LoopHost(Protocol):
    """The event loop of the worker, as far as a flow needs it."""

    def time(self) -> float: ...
    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Any: ...
    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> Any: ...
    def run_in_executor(self, executor: Any, fn: Callable[..., Any], *args: Any) -> Any: ...


class FlowFuture(asyncio.Future[Any]):
    def __init__(self, number: int, *, loop: Any) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class FlowTask(asyncio.Task[Any]):
    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        # Before the call: asyncio puts the new task into a set.
        self.number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


# The typed interface has 50 methods; `_refuse` defines the ones for I/O.
_Base: Any = asyncio.AbstractEventLoop


class FlowLoop(_Base):  # type: ignore[misc]
    def __init__(self, host: LoopHost, on_ready: Callable[[], None], hash_base: int = 0) -> None:
        """`on_ready` is called when a callback is scheduled from outside of `run_ready`. `hash_base` differs between the
        flows of a process: asyncio has one set of all tasks, and equal hashes would make it slow."""
        self._host = host
        self._on_ready = on_ready
        self._ready: deque[asyncio.Handle] = deque()
        self._running = False
        self._closed = False
        self.foreign_waits = 0
        # The ids of the timers that have neither fired nor been cancelled.
        self._timers: set[int] = set()
        # Errors that reach no code of the flow, such as those of a generator's clean-up.
        self.unhandled: list[BaseException] = []
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], contextvars.Context] = WeakKeyDictionary()
        self._hash_base = (hash_base & 0xFFFFF) << TASK_NUMBER_BITS
        self._future_numbers, self._task_numbers = count(1), count(1)
        # Tasks of `as_completed` that it has not asked for yet, by the id of their coroutine.
        self._early_tasks: dict[int, FlowTask] = {}
        self._generators = AsyncGenerators(self)

    def make_next(self) -> FlowLoop:
        """Return an empty loop of the same flow."""
        loop = FlowLoop(self._host, self._on_ready, self._hash_base >> TASK_NUMBER_BITS)
        loop.unhandled = self.unhandled
        return loop

    def run_ready(self) -> bool:
        """Run callbacks until none is left. Returns False if the bound was reached first."""
        ready = self._ready
        if not ready:
            return True
        former = events._get_running_loop()
        former_hooks = sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(self._generators.add, self._generators.finalize)
        self._running = True
        try:
            for _ in range(CALLBACKS_MAX):
                if not ready:
                    return True
                handle: Any = ready.popleft()
                if handle._cancelled:
                    continue
                try:
                    # `Handle._run` without its error handler, which is `call_exception_handler`.
                    handle._context.run(handle._callback, *handle._args)
                except BaseException:
                    # A task raises SystemExit and KeyboardInterrupt although they are its outcome, too. The worker must
                    # not end by them.
                    continue
            return not ready
        finally:
            self._running = False
            sys.set_asyncgen_hooks(*former_hooks)
            events._set_running_loop(former)

    def is_current(self) -> bool:
        """Whether this loop runs the calling code."""
        return events._get_running_loop() is self

    # -- the part of the interface that flows use ------------------------------------------------

    def call_soon(
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._running and not self._closed:
            self._on_ready()
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._host.call_soon_threadsafe(self._append, handle)
        return handle

    def _append(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)
        if not self._closed:
            self._on_ready()

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.foreign_waits += 1
        self._timers.add(id(handle))
        self._host.call_later(max(when - self.time(), 0.0), self._fire, handle)
        return handle

    def _fire(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._end_timer(handle)
            self._append(handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        # Also called for a timer that has fired: `asyncio.sleep` cancels its timer at its end.
        self._end_timer(handle)

    def _end_timer(self, handle: asyncio.TimerHandle) -> None:
        if id(handle) in self._timers:
            self._timers.remove(id(handle))
            self.foreign_waits -= 1

    def run_in_executor(self, executor: Any, fn: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a thread of the worker. Not recorded: a replay runs it again."""
        future = self.create_future()
        self.foreign_waits += 1
        started = self._host.run_in_executor(executor, _call, fn, *args)

        def on_done(done: Any) -> None:
            self.foreign_waits -= 1
            if not future.done():
                error = done.exception()
                if error is None:
                    future.set_result(done.result())
                else:
                    future.set_exception(error)

        started.add_done_callback(on_done)
        return future

    def time(self) -> float:
        return self._host.time()

    def create_future(self, number: int | None = None) -> asyncio.Future[Any]:
        return FlowFuture(next(self._future_numbers) if number is None else number, loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        awaitables = _arguments_of_as_completed()
        if awaitables is None:
            return self._create_task(coro, name, context)
        if id(coro) not in self._early_tasks:
            self._create_early_tasks(coro, awaitables)
        return self._early_tasks.pop(id(coro))

    def _create_task(self, coro: Any, name: Any = None, context: Any = None) -> FlowTask:
        context = contextvars.copy_context() if context is None else context
        number = next(self._task_numbers)
        name = f"Task-{number}" if name is None else name
        task = FlowTask(self._hash_base | number, coro, loop=self, name=name, context=context)
        self._tasks[task] = context
        return task

    def _create_early_tasks(self, coro: Any, awaitables: Iterable[Any]) -> None:
        """Start the coroutines in the order of the call: asyncio has put them into a set, in the order of addresses."""
        ordered = isinstance(awaitables, Sequence | KeysView | ValuesView)
        coroutines = {id(c): c for c in awaitables if asyncio.iscoroutine(c)} if ordered else {}
        if id(coro) not in coroutines:
            coro.close()
            raise Invalid(
                what="flow",
                why="a replay cannot find the order of these coroutines again; give as_completed a list of coroutines or tasks",
                call="as_completed",
            )
        for key, coroutine in coroutines.items():
            self._early_tasks[key] = self._create_task(coroutine)

    # -- asynchronous generators -----------------------------------------------------------------

    async def close_generators(self) -> None:
        """Run the `finally` blocks of the asynchronous generators that the code has not ended, and wait for their end."""
        await self._generators.close_all()

    def context_of_code(self) -> contextvars.Context:
        """The context of the task that runs now."""
        task = asyncio.current_task(self)
        return contextvars.copy_context() if task is None else self._tasks[task]

    def create_closer(self, coro: Any, context: contextvars.Context) -> asyncio.Task[Any]:
        return self._create_task(coro, context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> int:
        """Close the coroutines and the asynchronous generators that still wait. Python runs their `finally` blocks at this
        point. Returns the number of them that did not end: they catch GeneratorExit and wait again."""
        self._closed = self._generators.is_dropping = True
        self._ready.clear()
        abandoned = 0
        for task, context in list(self._tasks.items()):
            if not task.done():
                abandoned += not self._close_coroutine(task, context)
        self._generators.drop_all()
        self._ready.clear()
        return abandoned + self._generators.abandoned

    def _close_coroutine(self, task: asyncio.Task[Any], context: contextvars.Context) -> bool:
        """Close the coroutine of a task. Returns False if it is abandoned."""
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine: Any = task.get_coro()
        call = generator_call_of(coroutine)
        # Up to Python 3.12 the close of a coroutine does not reach the asynchronous generator that it iterates.
        ended = call is None or end_awaitable(
            context, partial(call.throw, GeneratorExit), call.throw, self
        )
        unfinished = _chain_of(coroutine) or [coroutine]
        for _ in range(CLOSES_MAX):
            context.run(run_to_end, unfinished[0].close, self)
            # A coroutine that waits again has lost its caller. It is closed again, with the coroutines that it awaits now.
            chains = [_chain_of(awaitable) for awaitable in unfinished]
            unfinished = list({id(one): one for chain in chains for one in chain}.values())
            if not unfinished:
                break
        for awaitable in unfinished if ended else [call, *unfinished]:
            keep_forever(awaitable)
        return ended and not unfinished

    def dispose(self) -> None:
        """Drop the references of a closed loop that are part of cycles."""
        self._ready.clear()
        # A generator keeps these hooks itself.
        del self._generators

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignore the error of a task that is dropped before the code has read it: a later activation may read it."""

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def get_task_factory(self) -> Any:
        return None


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(*args)
    except StopIteration as error:
        # Up to Python 3.11 a future with this error never ends.
        raise RuntimeError("the function raised StopIteration") from error


def _arguments_of_as_completed() -> Iterable[Any] | None:
    """Return the arguments of `asyncio.as_completed` if it creates the task."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals is vars(asyncio.tasks):
        if frame.f_code.co_qualname in AS_COMPLETED:
            variables = frame.f_locals
            found: Iterable[Any] = variables["fs"] if "fs" in variables else variables["aws"]
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _chain_of(awaitable: Any) -> list[Any]:
    """The coroutine or generator and the chain of its awaited coroutines, without finished ones."""
    chain = []
    while awaitable is not None:
        prefix = {CoroutineType: "cr", GeneratorType: "gi"}.get(type(awaitable))
        if prefix is None:
            break
        if getattr(awaitable, f"{prefix}_frame") is not None:
            chain.append(awaitable)
        awaitable = getattr(awaitable, "cr_await" if prefix == "cr" else "gi_yieldfrom")
    return chain


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(self: FlowLoop, *args: Any, **kwargs: Any) -> Any:
        raise Invalid(
            what="flow",
            why="its code does I/O outside a step; call the function with hf.step",
            call=name,
        )

    return refuse


for _name in (
    "create_connection",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "create_datagram_endpoint",
    "connect_accepted_socket",
    "sock_recv",
    "sock_sendall",
    "sock_connect",
    "sock_accept",
    "getaddrinfo",
    "getnameinfo",
    "subprocess_exec",
    "subprocess_shell",
    "connect_read_pipe",
    "connect_write_pipe",
    "add_reader",
    "add_writer",
    "start_tls",
    "sendfile",
):
    setattr(FlowLoop, _name, _refuse(_name))
