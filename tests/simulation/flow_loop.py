"""An asyncio event loop under the scheduler: its time is the simulated time, and its waits are simulated sleeps.

A killed process leaves the loop by `ProcessKilled`. The loop drops its coroutines.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from holdfast.clock import MS, S
from holdfast.errors import CommitUnknown, HoldfastError, StoreReplaced
from holdfast.sim.actor import Incarnation

RETRY_NS = 50 * MS
# The longest wait of a loop without timers.
IDLE_S = 1.0


class SimulatedSelector(selectors.SelectSelector):
    """Waits by a simulated sleep. No file descriptor ever becomes ready meanwhile."""

    def __init__(self, incarnation: Incarnation) -> None:
        super().__init__()
        self._incarnation = incarnation

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            self._incarnation.sleep(int((IDLE_S if timeout is None else timeout) * S) + 1)
        return super().select(0)


class SimulatedEventLoop(asyncio.SelectorEventLoop):
    def __init__(self, incarnation: Incarnation) -> None:
        super().__init__(SimulatedSelector(incarnation))
        self._incarnation = incarnation
        # A killed process leaves tasks whose end is read by no code.
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._incarnation.clock.boot_ns() / S

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end. Coroutines that it leaves behind are dropped."""
        task = self.create_task(main)
        try:
            return self.run_until_complete(task)
        finally:
            for left in asyncio.all_tasks(self):
                # The process is gone: its code sees neither an end nor a cancellation.
                left._log_destroy_pending = False  # type: ignore[attr-defined]
                left.get_coro().close()  # type: ignore[union-attr]


class FlowStore:
    """The store of a flow worker, with the coroutines that an activation awaits."""

    reads_block = False

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._store = incarnation.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def submit(self, fn: Any, *args: Any) -> Any:
        return _Submitted(self._transact, fn, args)

    def _transact(self, fn: Any, *args: Any) -> Any:
        while True:
            try:
                return self._store.transact(fn, *args)
            except (CommitUnknown, StoreReplaced):
                raise
            except HoldfastError as error:
                if not error.retryable:
                    raise
                self._incarnation.sleep(RETRY_NS)

    def subscribe(self, topic: str) -> PolledTopic:
        return PolledTopic()


class _Submitted:
    """A commit that is sent when a coroutine awaits it. A killed process drops it unsent."""

    def __init__(self, transact: Callable[..., Any], fn: Any, args: tuple[Any, ...]) -> None:
        self._transact = transact
        self._fn = fn
        self._args = args

    def __await__(self) -> Generator[Any, None, Any]:
        return self._transact(self._fn, *self._args)
        yield  # makes this function a generator


class PolledTopic:
    """A subscription that ends each wait after a short time."""

    def __enter__(self) -> PolledTopic:
        return self

    def __exit__(self, *exc: object) -> None:
        return

    async def wait_async(self, timeout: float) -> None:
        await asyncio.sleep(0.1)
