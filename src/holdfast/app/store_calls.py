"""Calls of the public API as generators of store requests: one implementation for threads and coroutines.

    def ask(…) -> StoreCall[R]:
        delivered = yield Commit(ingress.deliver, …)
        yield Listen(topic)
        while (step := (yield Read(find_step, …))) is None:
            yield Sleep(left_s)
        return …

`run` answers the requests with blocking calls of the store. `run_async` answers them without blocking the event loop. A
request that fails ends the call with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from holdfast.errors import Timeout
from holdfast.store.api import Store

if TYPE_CHECKING:
    from holdfast.app.result_waiter import ResultWaiter
    from holdfast.store.subscription import Subscription

T = TypeVar("T")


class Commit(NamedTuple):
    """Commit an operation and return its result."""

    operation: Callable[..., Any]
    args: tuple[Any, ...] = ()


class Read(NamedTuple):
    """Read on a snapshot. A long read (it may run reducers) never runs in an event loop."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    is_long: bool = False


class Listen(NamedTuple):
    """Subscribe to a topic, before the first read that depends on it."""

    topic: str


class Sleep(NamedTuple):
    """Sleep until the topic is notified, at most this time."""

    seconds: float


class Cancellation:
    """Ends the wait of a call that runs in another thread."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._subscription: Subscription | None = None

    def cancel(self) -> None:
        self.is_cancelled = True
        # After the flag: `watch` uses the opposite order.
        if self._subscription is not None:
            self._subscription.cancel()

    def watch(self, subscription: Subscription) -> None:
        """Use the subscription on which the call sleeps."""
        self._subscription = subscription
        self.check()

    def check(self) -> None:
        """Raise Timeout after `cancel`."""
        if self.is_cancelled:
            raise Timeout(what="call", why="the caller has cancelled its wait")


StoreCall = Generator[Commit | Read | Listen | Sleep, Any, T]


class _TopicWait:
    """The wait of a call in its thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._topic = ""
        self._since = 0

    def listen(self, topic: str) -> None:
        self._topic = topic
        self._since = self._store.wait(topic, 0, 0.0)

    def sleep(self, seconds: float) -> None:
        self._since = self._store.wait(self._topic, self._since, seconds)

    def close(self) -> None: ...


class _CancellableWait:
    """The wait of a call that another thread may end."""

    def __init__(self, store: Store, cancellation: Cancellation) -> None:
        self._store = store
        self._cancellation = cancellation
        self._subscription: Subscription | None = None

    def listen(self, topic: str) -> None:
        self._subscription = self._store.subscribe(topic)
        self._cancellation.watch(self._subscription)

    def sleep(self, seconds: float) -> None:
        assert self._subscription is not None, "a call listens before it sleeps"
        self._subscription.wait(seconds)
        self._cancellation.check()

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.cancel()


def run(store: Store, call: StoreCall[T], cancellation: Cancellation | None = None) -> T:
    """Run a call in this thread. With `cancellation` another thread may end its wait: that raises Timeout, and no
    commit is undone."""
    wait = _TopicWait(store) if cancellation is None else _CancellableWait(store, cancellation)
    answer: Any = None
    try:
        while True:
            try:
                request = call.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = None
            if isinstance(request, Commit):
                answer = store.transact(request.operation, *request.args)
            elif isinstance(request, Read):
                answer = store.read(request.fn, *request.args)
            elif isinstance(request, Listen):
                wait.listen(request.topic)
            else:
                wait.sleep(request.seconds)
    finally:
        wait.close()


async def run_async(store: Store, reader: ResultWaiter, call: StoreCall[T]) -> T:
    """Run a call in a coroutine."""
    subscription: Subscription | None = None
    answer: Any = None
    try:
        while True:
            try:
                request = call.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = None
            if isinstance(request, Commit):
                answer = await store.submit(request.operation, *request.args)
            elif isinstance(request, Read):
                answer = await _read(reader, request)
            elif isinstance(request, Listen):
                subscription = store.subscribe(request.topic)
            else:
                assert subscription is not None, "a call listens before it sleeps"
                await subscription.wait_async(request.seconds)
    finally:
        if subscription is not None:
            subscription.cancel()


async def _read(reader: ResultWaiter, request: Read) -> Any:
    read = reader.read_alone if request.is_long else reader.read
    return await read(lambda txn: request.fn(txn, *request.args))
