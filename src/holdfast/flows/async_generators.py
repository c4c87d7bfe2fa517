"""The asynchronous generators of one flow loop: their clean-up runs as code of the flow.

Python reports the first iteration of a generator, and its last reference if it has not ended. The code dropped the
last reference, as after a `break`: a task of the loop runs the clean-up at once. A replay drops it at the same point.
The garbage collector found it, or it was dropped outside of the flow's code: that time is another one in each replay, so
the generator is kept to the end of the flow. `close_all` ends all generators there, in the order of their first iteration.

`drop_all` is for a loop that is closed: the clean-up gets no step there, as in a coroutine.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

# How often a coroutine or a generator is closed that waits again instead of ending.
CLOSES_MAX = 16
# The awaitables in which an asynchronous generator runs. They have no public classes.
GENERATOR_CALLS = frozenset({"async_generator_asend", "async_generator_athrow", "anext_awaitable"})
# Dead entries in the registry before they are removed.
DEAD_MAX = 100


class GeneratorHost(Protocol):
    """The flow loop, as far as generators need it."""

    unhandled: list[BaseException]

    def is_closed(self) -> bool: ...
    def is_current(self) -> bool: ...
    def context_of_code(self) -> contextvars.Context: ...
    def create_closer(self, coro: Any, context: contextvars.Context) -> asyncio.Task[Any]: ...


class StartedGenerator(NamedTuple):
    number: int
    # Of the task that iterated first: the generator may reset its context variables.
    context: contextvars.Context
    generator: weakref.ref[Any]


class AsyncGenerators:
    def __init__(self, loop: GeneratorHost) -> None:
        self._loop = loop
        self._numbers = count()
        # By the id of the generator. A later generator at the address of a dead one replaces it.
        self._started: dict[int, StartedGenerator] = {}
        self._clean_at = DEAD_MAX
        self._kept: list[Any] = []
        # Whether `drop_all` runs, or runs later: a clean-up cannot run inside of another one.
        self.is_dropping = False
        self._closers: dict[asyncio.Task[Any], None] = {}
        self.abandoned = 0

    # -- called by Python ------------------------------------------------------------------------

    def add(self, generator: Any) -> None:
        """Register a generator at its first iteration."""
        _watch_collections()
        if len(self._started) >= self._clean_at:
            self._forget_dead()
        self._started[id(generator)] = StartedGenerator(
            next(self._numbers), self._loop.context_of_code(), weakref.ref(generator)
        )

    def finalize(self, generator: Any) -> None:
        """Run the clean-up of a generator without references, or keep it to the end of the flow."""
        if self._loop.is_closed():
            self._kept.append(generator)
            if not self.is_dropping:
                self.drop_all()
        elif self._loop.is_current() and _collecting_thread != threading.get_ident():
            self._close(generator)
        else:
            self._kept.append(generator)

    # -- called by the loop ----------------------------------------------------------------------

    async def close_all(self) -> None:
        """Run the clean-up of all generators and wait for its end."""
        while True:
            for generator in self._take_all():
                self._close(generator)
            if not self._closers:
                return
            await asyncio.wait([next(iter(self._closers))])

    def drop_all(self) -> None:
        """Close the generators of a closed loop. Their clean-up gets no step."""
        self.is_dropping = True
        while found := self._take_all():
            for generator in found:
                self._drop(generator)
        self.is_dropping = False

    def _drop(self, generator: Any) -> None:
        context = self._started.pop(id(generator)).context
        closing = generator.aclose()
        if generator.ag_running or not end_awaitable(
            context, partial(closing.send, None), closing.throw, self._loop
        ):
            keep_forever(closing)
            self.abandoned += 1

    def _take_all(self) -> list[Any]:
        """The generators that have not ended, in the order of their first iteration. One that runs belongs to a task."""
        if not self._started:
            self._kept.clear()
            return []
        kept, self._kept = {id(one): one for one in self._kept}, []
        found = []
        for key, started in list(self._started.items()):
            generator = kept[key] if key in kept else started.generator()
            if generator is None or generator.ag_frame is None:
                del self._started[key]
            elif key in kept or self._loop.is_closed() or not generator.ag_running:
                found.append((started.number, generator))
        return [generator for _, generator in sorted(found, key=lambda one: one[0])]

    def _close(self, generator: Any) -> None:
        started = self._started.pop(id(generator))
        task = self._loop.create_closer(_aclose(generator), started.context)
        self._closers[task] = None
        task.add_done_callback(self._on_closed)

    def _on_closed(self, task: asyncio.Task[Any]) -> None:
        self._closers.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.unhandled.append(error)

    def _forget_dead(self) -> None:
        kept = {id(one) for one in self._kept}
        for key, started in list(self._started.items()):
            if key not in kept and started.generator() is None:
                del self._started[key]
        self._clean_at = 2 * len(self._started) + DEAD_MAX


async def _aclose(generator: Any) -> None:
    await generator.aclose()


def end_awaitable(
    context: contextvars.Context,
    first: Callable[[], Any],
    throw: Callable[..., Any],
    loop: GeneratorHost,
) -> bool:
    """End an awaitable of closed code. Returns False if it waits again each time. Its errors are dropped, because the code
    continues in the next activation, but an exit of the process is reported."""
    resume = first
    for _ in range(CLOSES_MAX):
        if context.run(run_to_end, resume, loop):
            return True
        resume = partial(throw, GeneratorExit)
    return False


def run_to_end(resume: Callable[[], Any], loop: GeneratorHost) -> bool:
    """Resume an awaitable of closed code. Returns whether it ended. Call it in the context of the code: the end of the
    error frees the coroutines that it holds, and Python closes them."""
    try:
        resume()
    except (SystemExit, KeyboardInterrupt) as error:
        loop.unhandled.append(error.with_traceback(None))
    except BaseException:
        return True  # the code raised in its clean-up: it continues in the next activation
    else:
        return False
    return True


def generator_call_of(awaitable: Any) -> Any:
    """The call of an asynchronous generator at the end of a chain of awaited coroutines, or None."""
    while awaitable is not None:
        if type(awaitable).__name__ in GENERATOR_CALLS:
            return awaitable
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return None


def keep_forever(awaitable: Any) -> None:
    """Never free an awaitable. Python closes it again before it frees its memory, also at exit, in any thread and outside
    of the flow. There the loop of the flow's code may have no end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(awaitable))


# -- the garbage collector -------------------------------------------------------------------------

# The thread that collects garbage now. Python runs finalizers there.
_collecting_thread = 0


def _watch_collections() -> None:
    if _on_collection not in gc.callbacks:
        gc.callbacks.append(_on_collection)


def _on_collection(phase: str, info: dict[str, int]) -> None:
    global _collecting_thread
    _collecting_thread = threading.get_ident() if phase == "start" else 0
