"""The interface of a store, common to all backends.

A *transaction* is a function whose first argument is `txn`. `transact` runs it on a snapshot and
commits its writes atomically and durably. After a conflict with another commit `transact` runs the
function again, so the function must have no effect except its writes.

An *operation* is a function that the store runs where commits are applied. It sees the latest state
and the exact store time, and it never conflicts. Claims, leases and other contended updates are
operations. Their arguments and results are plain data because they may be sent to another process.
A call inside a transaction is deferred to the commit and returns a `Deferred`. The store resolves it
before `transact` returns.

    @operation("queue.claim")
    def claim(txn: Txn, queue: str, limit: int) -> list[int]: ...

    store.transact(claim, "mail", 10)                    # alone
    store.transact(lambda txn: (txn.put(k, v), claim(txn, "mail", 1)))   # with other writes
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import msgspec

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.store import tuples
from holdfast.store.operation_names import FORMER_NAMES, MODULES

if TYPE_CHECKING:
    from holdfast.store.subscription import Subscription

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")

# A key is packed bytes. Public methods also accept tuples and pack them.
AnyKey = bytes | tuples.Key
Row = tuple[bytes, bytes]


class LeaseGuard(msgspec.Struct, frozen=True, array_like=True):
    """A lease check at commit (`require_live`): the fencing token is current and the lease has not expired.

    The guard includes the store generation: a fencing token restored from a backup is never valid.
    """

    resource: str
    fence_key: bytes
    fence: bytes
    expiry_key: bytes
    generation: int


class HasLeaseGuard(Protocol):
    @property
    def guard(self) -> LeaseGuard: ...


class Txn(Protocol):
    """A transaction.

    At the caller, `append`, `add` and operations take effect at the commit, in this order: puts and
    deletes, appends, adds, operations. Reads at the caller see the transaction's own puts and deletes
    but no deferred change. Inside an operation every call takes effect immediately.
    """

    @property
    def now_ns(self) -> int:
        """Store time: the time of the commit inside an operation, the current time at the caller."""

    @property
    def generation(self) -> int: ...

    def get(self, key: AnyKey) -> bytes | None: ...
    def put(self, key: AnyKey, value: bytes) -> None: ...
    def delete(self, key: AnyKey) -> None: ...

    def scan(
        self, lo: AnyKey, hi: AnyKey, limit: int | None = None, reverse: bool = False
    ) -> list[Row]:
        """Rows with lo <= key < hi, in key order."""

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Announce the rows to be read, so that a remote store fetches them in one round trip.

        Embedded stores ignore it.
        """

    def append(self, space: AnyKey, value: bytes) -> Deferred[int]:
        """Append under the next sequence number of the space. The commit assigns it and never reuses it."""

    def add(self, key: AnyKey, n: int) -> None:
        """Add to a counter without reading it, so that concurrent adds do not conflict."""

    def count(self, key: AnyKey) -> int:
        """The value of a counter."""

    def require_live(self, lease: HasLeaseGuard) -> None:
        """Abort with Fenced unless the lease is live when the commit is applied."""

    def call(self, operation: Operation[Any, T], *args: Any) -> Deferred[T]: ...

    def notify(self, topic: str) -> None:
        """Notify the waiters of the topic after the commit."""


class Settable(Protocol):
    """A `threading.Event`, or another wake-up signal."""

    def set(self) -> None: ...


class Future(Awaitable[T_co], Protocol[T_co]):
    def result(self, timeout: float | None = None) -> T_co: ...
    def done(self) -> bool: ...
    def notify_event(self, event: Settable) -> None: ...


class Store(Protocol):
    url: str

    @property
    def generation(self) -> int: ...

    def now_ns(self) -> int: ...

    def transact(
        self, fn: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """Run fn, commit durably and return its result, with a Deferred unwrapped."""

    def read(self, fn: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run fn on a snapshot. A write raises Invalid."""

    def submit(
        self, fn: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[Any]:
        """Like transact, but return an awaitable future immediately."""

    def batched(self) -> AbstractContextManager[None]:
        """Send the submissions of the block in one batch: cheaper, and more likely to share a commit."""

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        """Block until one of the topics is notified after commit `since`, or until the timeout.

        Returns the commit number to pass as `since` next time. A notification is a hint: callers must
        always read the state again.
        """

    def subscribe(self, topics: str | Sequence[str], since: int = 0) -> Subscription:
        """Subscribe to topics: like `wait`, but other threads can end the wait, and coroutines can wait too.

        Waits of a closed store raise StoreClosed.
        """

    def submit_when(
        self, topics: Sequence[str], fn: Callable[..., Any], *args: Any
    ) -> ParkedTransaction | None:
        """Like submit, but park the request while its operation raises `NothingToDo`. The store retries it in
        each commit that notifies one of the topics.

        The function may only call operations. A store without parking returns None: use wait and transact.
        """

    def backup(self, path: str) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Store: ...
    def __exit__(self, *exc: object) -> None: ...


class ParkedTransaction(Protocol):
    """A transaction parked at the commit engine. It belongs to one thread."""

    @property
    def is_answered(self) -> bool: ...

    def wait(self, topics: Sequence[str], since: int, timeout: float) -> int:
        """`Store.wait` that also returns when this transaction is answered."""

    def result(self) -> Any:
        """The result of the answered transaction."""

    def cancel(self) -> bool:
        """Cancel the parked transaction; False if it was already applied."""


class Deferred(Generic[T]):
    """A value that the commit of its transaction resolves."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: T | _Unresolved = _UNRESOLVED

    @property
    def value(self) -> T:
        if isinstance(self._value, _Unresolved):
            raise Invalid(what="pending", why="the value is known only after the commit")
        return self._value

    def resolve(self, value: T) -> Deferred[T]:
        self._value = value
        return self


def connection_url(store: Store) -> str:
    """The URL with which another process opens the same store. Unlike `url` it may contain a password: pass it to
    child processes and never display it."""
    return str(getattr(store, "address", store.url))


def read_stale(
    store: Store, fn: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """A bounded-staleness read for polling loops whose commits are validated anyway.

    A remote store answers from the local cache: own commits, notified commits, and other commits with at most
    100 ms delay. Other stores run `store.read`.
    """
    read: Callable[..., T] = getattr(store, "read_stale", store.read)
    return read(fn, *args, **kwargs)


def reads_block(store: Store) -> bool:
    """Whether a read may block on a server. An event loop must not call such a read itself: it would block all of
    its coroutines."""
    return bool(getattr(store, "reads_block", False))


def unwrap(result: Any) -> Any:
    """The result of a committed transaction, with a Deferred unwrapped."""
    return result.value if type(result) is Deferred else result


class Operation(Generic[P, T]):
    """A function that runs where commits are applied. Created by `@operation(name)`.

    Arguments are sent by position, keyword-only ones too. `by_position` calls the function with them.
    """

    def __init__(self, name: str, fn: Callable[Concatenate[Txn, P], T]) -> None:
        self.fn = fn
        self.name = name
        self.__doc__ = fn.__doc__
        self.__name__ = fn.__name__
        has_keywords = fn.__code__.co_kwonlyargcount > 0
        self.by_position: Callable[..., T] = _take_by_position(fn) if has_keywords else fn
        # With keyword-only arguments no call has all of them by position.
        self._arity = -1 if has_keywords else fn.__code__.co_argcount - 1
        self._signature: inspect.Signature | None = None
        self._args: msgspec.msgpack.Decoder[Any] | None = None
        self._result: msgspec.msgpack.Decoder[Any] | None = None

    def __call__(self, txn: Txn, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        return txn.call(self, *self.bind_positional(args, kwargs))

    def bind_positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not kwargs and len(args) == self._arity:
            return args
        if self._signature is None:
            self._signature = inspect.signature(self.fn)
        try:
            bound = self._signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise Invalid(what="operation", name=self.name, why=str(error)) from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())[1:]

    def decode_args(self, data: bytes) -> tuple[Any, ...]:
        if self._args is None:
            types = typing.get_type_hints(self.fn)
            names = list(inspect.signature(self.fn).parameters)[1:]
            args_type: Any = tuple.__class_getitem__(tuple(types[name] for name in names))
            self._args = codec.new_decoder(args_type)
        return typing.cast(tuple[Any, ...], self._args.decode(data))

    def decode_result(self, data: bytes) -> T:
        if self._result is None:
            self._result = codec.new_decoder(typing.get_type_hints(self.fn)["return"])
        return typing.cast(T, self._result.decode(data))


def _take_by_position(fn: Callable[..., T]) -> Callable[..., T]:
    """Return a function that takes the keyword-only arguments of `fn` by position."""
    signature = inspect.signature(fn)
    split = fn.__code__.co_argcount
    names = list(signature.parameters)[split:]

    def call(*args: Any) -> T:
        return fn(*args[:split], **dict(zip(names, args[split:], strict=True)))

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [one.replace(kind=positional) for one in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def operation(
    name: str,
) -> Callable[[Callable[Concatenate[Txn, P], T]], Operation[P, T]]:
    """Register a function as the operation of this name. Stored items hold the name: it never changes."""

    def register(fn: Callable[Concatenate[Txn, P], T]) -> Operation[P, T]:
        registered = Operation(name, fn)
        former = _operations.setdefault(name, registered)
        same = (fn.__module__, fn.__qualname__) == (former.fn.__module__, former.fn.__qualname__)
        assert same, f"two operations are named {name}"
        _operations[name] = registered
        return registered

    return register


def find_operation(name: str) -> Operation[Any, Any]:
    """Return the operation of this name or former name. Only modules of this package are ever imported."""
    operation = _operations.get(name)
    if operation is None:
        name_now = FORMER_NAMES.get(name, name)
        for module in MODULES.get(name_now.partition(".")[0], ()):
            importlib.import_module(module)
            if name_now in _operations:
                break
        operation = _operations.get(name_now)
        if operation is None:
            raise Invalid(what="operation", name=name, why="no such operation")
        # The next lookup by a former name finds it without the table.
        _operations[name] = operation
    return operation


class _Unresolved:
    pass


_UNRESOLVED = _Unresolved()
# By name, and by former name once it was looked up.
_operations: dict[str, Operation[Any, Any]] = {}
