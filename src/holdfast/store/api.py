"""What a store offers, whatever is below it.

A *transaction* is a function whose first argument is `txn`. `transact` runs it on a snapshot and
commits what it wrote, durably, or not at all; it may run it again when somebody else committed
first, so the function must have no effect but its writes.

An *operation* is a function that the store runs where commits are applied: it sees the latest
state and the exact store time, and never conflicts. Claims, leases and everything that many
processes contend for are operations. Their arguments and results are plain data, for they may
travel to another process. Calling one inside a transaction defers it to the commit: its answer is
a `Pending` that is filled when `transact` returns.

    @operation
    def claim(txn: Txn, queue: str, limit: int) -> list[int]: ...

    store.transact(claim, "mail", 10)                    # alone
    store.transact(lambda txn: (txn.put(k, v), claim(txn, "mail", 1)))   # with other writes
"""

from __future__ import annotations

import importlib
import inspect
import threading
import typing
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import msgspec

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.store import tuples

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")

# A key is packed bytes; tuples are accepted everywhere and packed at the door.
AnyKey = bytes | tuples.Key
Row = tuple[bytes, bytes]


class Guard(msgspec.Struct, frozen=True, array_like=True):
    """What `require_live` checks at commit: this fence stands, and its expiry has not come.

    The generation counts too: a fence that was restored from a backup holds for nobody.
    """

    resource: str
    fence_key: bytes
    fence: bytes
    expiry_key: bytes
    generation: int


class Guarded(Protocol):
    @property
    def guard(self) -> Guard: ...


class Txn(Protocol):
    """What a transaction can do.

    At the caller, `append`, `add` and operations take effect at the commit, in this order: puts and
    deletes, appends, adds, operations. Reads there see the transaction's own puts and deletes, and
    nothing of what is deferred. Inside an operation everything happens at once.
    """

    @property
    def now_ns(self) -> int:
        """Store time. Inside an operation it is the time of the commit; else of the snapshot."""

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
        """Say which rows will be read, so that a store behind a network fetches them in one go.

        It changes nothing else: embedded stores do nothing.
        """

    def append(self, space: AnyKey, value: bytes) -> Pending[int]:
        """Put under the next number of the space, given at commit, never given twice."""

    def add(self, key: AnyKey, n: int) -> None:
        """Add to a counter, without reading it here, so that adders do not conflict."""

    def count(self, key: AnyKey) -> int:
        """A counter's value."""

    def require_live(self, lease: Guarded) -> None:
        """Abort with Fenced unless the lease is live where and when the commit is applied."""

    def call(self, operation: Operation[Any, T], *args: Any) -> Pending[T]: ...

    def notify(self, topic: str) -> None:
        """Wake whoever waits for the topic, once this is committed."""


class Future(Awaitable[T_co], Protocol[T_co]):
    def result(self, timeout: float | None = None) -> T_co: ...
    def done(self) -> bool: ...
    def tell(self, event: threading.Event) -> None: ...


class Store(Protocol):
    url: str

    @property
    def generation(self) -> int: ...

    def now_ns(self) -> int: ...

    def transact(
        self, fn: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """Run and commit; return what fn returned (a Pending's value), durable."""

    def read(self, fn: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run on a snapshot; writing there is Invalid."""

    def submit(
        self, fn: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[Any]:
        """Like transact, but answers at once with a future that can be awaited."""

    def together(self) -> AbstractContextManager[None]:
        """Send what is submitted inside together: cheaper, and more likely to share a commit."""

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        """Sleep until the topic, or one of them, was notified after commit `since`, or time is up.

        Returns the commit number to wait from next time. It is a hint: look again, always.
        """

    def stand(self, topics: Sequence[str], fn: Callable[..., Any], *args: Any) -> Standing | None:
        """Like submit, but applied when there is something to do: at once, or with the first commit that
        notifies one of the topics and for which its operation does not raise `NotYet`.

        The function calls operations and nothing else. None: this store cannot; wait, and transact.
        """

    def backup(self, path: str) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Store: ...
    def __exit__(self, *exc: object) -> None: ...


class Standing(Protocol):
    """A transaction that waits where commits are made. It belongs to one thread."""

    @property
    def answered(self) -> bool: ...

    def wait(self, topics: Sequence[str], since: int, timeout: float) -> int:
        """`Store.wait`, that also ends when this is answered."""

    def result(self) -> Any:
        """What it returned, once it is answered."""

    def withdraw(self) -> bool:
        """Call it back; False if it was applied before."""


class Pending(Generic[T]):
    """A value that exists once the transaction is committed."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: T | _Unset = _UNSET

    @property
    def value(self) -> T:
        if isinstance(self._value, _Unset):
            raise Invalid(what="pending", why="known only after the commit")
        return self._value

    def fill(self, value: T) -> Pending[T]:
        self._value = value
        return self


def address_of(store: Store) -> str:
    """The URL by which another process opens the same store. Unlike `url` it may hold a password: it is
    handed on, and never shown."""
    return str(getattr(store, "address", store.url))


def glance(
    store: Store, fn: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """`store.read`, for loops that look for work and whose commits are judged anyway.

    Where a read has to ask a server, this shows what the process knows without asking: all that it has
    committed itself, all that has rung for it, and the rest with a small delay.
    """
    look: Callable[..., T] = getattr(store, "glance", store.read)
    return look(fn, *args, **kwargs)


def reads_block(store: Store) -> bool:
    """Whether a read may wait for a server. Then no event loop makes one itself: all its coroutines would
    stand still as long as the server does."""
    return bool(getattr(store, "reads_block", False))


def settled(result: Any) -> Any:
    """What a committed transaction's caller gets."""
    return result.value if type(result) is Pending else result


class Operation(Generic[P, T]):
    """A function that runs where commits are applied. Made by `@operation`."""

    def __init__(self, fn: Callable[Concatenate[Txn, P], T]) -> None:
        self.fn = fn
        self.name = f"{fn.__module__}:{fn.__qualname__}"
        self.__doc__ = fn.__doc__
        self.__name__ = fn.__name__
        assert not fn.__code__.co_kwonlyargcount, "an operation's arguments travel by position"
        self._arity = fn.__code__.co_argcount - 1
        self._signature: inspect.Signature | None = None
        self._args: msgspec.msgpack.Decoder[Any] | None = None
        self._result: msgspec.msgpack.Decoder[Any] | None = None

    def __call__(self, txn: Txn, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return txn.call(self, *self.positional(args, kwargs))

    def positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not kwargs and len(args) == self._arity:
            return args
        if self._signature is None:
            self._signature = inspect.signature(self.fn)
        try:
            bound = self._signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise Invalid(what="operation", name=self.name, why=str(error)) from None
        bound.apply_defaults()
        return bound.args[1:]

    def decode_args(self, data: bytes) -> tuple[Any, ...]:
        if self._args is None:
            kinds = typing.get_type_hints(self.fn)
            names = list(inspect.signature(self.fn).parameters)[1:]
            shape: Any = tuple.__class_getitem__(tuple(kinds[name] for name in names))
            self._args = codec.new_decoder(shape)
        return typing.cast(tuple[Any, ...], self._args.decode(data))

    def decode_result(self, data: bytes) -> T:
        if self._result is None:
            self._result = codec.new_decoder(typing.get_type_hints(self.fn)["return"])
        return typing.cast(T, self._result.decode(data))


def operation(fn: Callable[Concatenate[Txn, P], T]) -> Operation[P, T]:
    return Operation(fn)


def resolve(name: str) -> Operation[Any, Any]:
    """The operation of this name. Only ours: no module outside this package is ever loaded."""
    found = _resolved.get(name)
    if found is None:
        module, _, attribute = name.partition(":")
        if not module.startswith("holdfast."):
            raise Invalid(what="operation", name=name, why="not an operation of holdfast")
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ImportError:
            found = None
        if not isinstance(found, Operation):
            raise Invalid(what="operation", name=name, why="no such operation")
        _resolved[name] = found
    return found


class _Unset:
    pass


_UNSET = _Unset()
_resolved: dict[str, Operation[Any, Any]] = {}
